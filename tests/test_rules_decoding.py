"""Whole answers by every kind of rule: against a decoder without a cache, alone and in company."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx
from networks import TINY, answers, engine, make_model, prompts, tiny_model
from reference_decoder import decode
from sessions import advance
from test_invariants import prefix_kv, requests_of, start_session

from herald_jax import Engine, EngineConfig, GenerationConfig
from herald_jax.diffusion.reference import block_reference
from herald_jax.diffusion.rules import RULES

BLOCK = TINY.block_size
LENGTHS = (64, 71, 3, 9)
EDITING = GenerationConfig(max_new_tokens=20, threshold=0.3, edit_threshold=0.1, max_post_steps=3)
KINDS = {
    "editing": EDITING,
    "edits and steps": dataclasses.replace(EDITING, steps=3, strategy="dynamic"),
    "entropy": GenerationConfig(max_new_tokens=20, rule="sdar-entropy", entropy_bound=2.0),
    "sequential": GenerationConfig(max_new_tokens=20, strategy="sequential", steps=3),
    "small blocks": GenerationConfig(max_new_tokens=20, threshold=0.3, small_block=4),
    "leftmost": GenerationConfig(max_new_tokens=20, rule="jetengine", temperature=0.0),
    "mask allowed": GenerationConfig(max_new_tokens=20, threshold=0.3, ban_mask=False),
}
SHIFTED = dataclasses.replace(TINY, shifts_logits=True)


def expected(given, generation, config=TINY, model=None):
    model = model or tiny_model(config)
    return {str(n): decode(model, config, prompt, generation) for n, prompt in enumerate(given)}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_rule_equals_the_decoder_without_a_cache(kind):
    given, generation = prompts(LENGTHS), KINDS[kind]
    want = expected(given, generation)
    assert answers(engine("dense"), given, generation) == want
    assert want != expected(given, GenerationConfig(max_new_tokens=20)), "the rule has no effect"


@pytest.mark.parametrize(
    ("method", "kind"),
    [("herald-draft", "editing"), ("oracle", "editing"), ("herald-draft", "small blocks")],
)
def test_the_method_changes_nothing_at_full_budget(method, kind):
    given = prompts(LENGTHS)
    assert answers(engine(method), given, KINDS[kind]) == expected(given, KINDS[kind])


# -- editing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["dense", "herald-draft"])
def test_an_edited_blocks_kv_is_that_of_its_final_tokens(method):
    session = start_session(method, requests_of((19, 40), 48), EDITING)
    for _ in range(3):
        advance(session)
    for index, slot in session.batch.active():
        ids = [*slot.request.prompt_ids.tolist(), *slot.generated][: slot.start]
        exact = session.shape.exact_layers
        for layer, (k, v) in enumerate(prefix_kv(ids)):
            whole = slot.start
            if layer < exact:
                got_k, got_v = (np.asarray(b)[index, :whole] for b in session.cache.exact[layer])
            else:
                whole -= BLOCK  # The newest block is in the pool's tail, see below.
                extent = slot.booking.extents[layer - exact][:, :, :whole]
                got_k, got_v = extent[:, 0].swapaxes(0, 1), extent[:, 1].swapaxes(0, 1)
                for pool, own in zip(session.cache.pool[layer - exact], (k, v), strict=True):
                    tail = np.asarray(pool)[index, BLOCK : 2 * BLOCK]
                    np.testing.assert_allclose(tail, own[whole : whole + BLOCK], atol=2e-5)
            np.testing.assert_allclose(got_k, k[:whole], atol=2e-5)
            np.testing.assert_allclose(got_v, v[:whole], atol=2e-5)
    session.close()


def test_editing_wastes_no_forward(monkeypatch):
    """A block takes the steps of the plain loop, and a commit only if its last one changed it."""
    import reference_decoder

    counted = []

    def counting(tokens, masked, propose, rule, mask_id):
        calls = []

        def spied(step, current):
            calls.append(current.copy())
            return propose(step, current)

        made = block_reference(tokens, masked, spied, rule, mask_id)
        changed = (calls[-1] != made[0]).any()
        counted.append(max(2, len(calls) + int(changed)))
        return made

    monkeypatch.setattr(reference_decoder, "block_reference", counting)
    for rule in (EDITING, dataclasses.replace(EDITING, max_post_steps=0)):
        for prompt in prompts((17, 40)):
            counted.clear()
            decode(tiny_model(), TINY, prompt, rule)
            (result,) = engine("dense").generate([prompt], rule)
            assert result.steps == sum(counted)
            assert result.blocks == len(counted)


@pytest.mark.parametrize(
    ("method", "temperature"),
    [("herald-draft", 0.0), pytest.param("herald-draft", 0.8, marks=pytest.mark.slow)],
)
def test_batch_mates_do_not_matter_to_edits(method, temperature):
    """A settled block stays as it is while others go on, also where draws would differ."""
    rule = dataclasses.replace(EDITING, temperature=temperature, seed=3)
    given = prompts((90, 33, 7))
    together = answers(engine(method, 0.2), given, rule)
    for index, prompt in enumerate(given):
        alone = answers(
            engine(method, 0.2, max_batch=1), [{"id": index, "prompt_ids": prompt}], rule
        )
        assert alone[str(index)] == together[str(index)]


def test_nothing_compiles_after_warm_up_with_edits_and_own_options():
    compiled = []

    def listen(name, seconds, **details):
        if name.endswith("backend_compile_duration"):
            compiled.append(details.get("fun_name"))

    made = engine("herald-draft", 0.1, warm_up=True)
    rule = dataclasses.replace(EDITING, temperature=0.5)
    answers(made, prompts((40, 100, 150, 3)), rule)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        other = dataclasses.replace(rule, threshold=0.6, edit_threshold=0.0, max_post_steps=5)
        given = [
            {"prompt_ids": prompt, "seed": n, "temperature": n / 3, "threshold": 0.2}
            for n, prompt in enumerate(prompts((61, 140, 18, 100), seed=1))
        ]
        answers(made, given, other)
    finally:
        jax.monitoring.clear_event_listeners()
    assert not compiled


# -- [MASK] proposals -----------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "edit"), [("dense", None), ("herald-draft", 0.0)])
def test_a_network_that_loves_the_mask_token_ends_like_the_plain_loop(method, edit):
    model = make_model(TINY, seed=0)
    head = model.lm_head.kernel
    # At about half of the positions [MASK] leads.
    head[...] = head[...].at[:, TINY.mask_token_id].multiply(-2.5)
    editing = {} if edit is None else {"edit_threshold": edit, "max_post_steps": 4}
    rule = GenerationConfig(max_new_tokens=16, threshold=0.3, ban_mask=False, **editing)
    given = prompts((20, 16))
    settings = EngineConfig(method=method, max_batch=3, prefill_chunk=64, max_context=192)
    with Engine(TINY, model, None, dataclasses.replace(settings, warm_up=False)) as made:
        got = answers(made, given, rule)
    assert got == expected(given, rule, model=model)
    found = [token for ids in got.values() for token in ids]
    assert TINY.mask_token_id in found
    assert set(found) != {TINY.mask_token_id}


# -- shifted logits -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ("dense", "small blocks"),
        ("herald-draft", "dynamic"),
        ("herald-draft", "editing"),
        ("herald-merged", "dynamic"),
    ],
)
def test_shifted_logits_equal_the_decoder_without_a_cache(method, kind):
    """Prompts of P % B in 0, 1, B - 1 and of less than a block, and one longer than a chunk."""
    rules = {"dynamic": GenerationConfig(max_new_tokens=20, threshold=0.3)} | KINDS
    given = prompts((64, 65, 71, 3, 8, 128))
    want = expected(given, rules[kind], SHIFTED)
    assert answers(engine(method, config=SHIFTED), given, rules[kind]) == want
    assert want != expected(given, rules[kind])


def test_the_token_after_the_prompt_leads_the_first_block():
    """It is the network's next token, it is counted, and selection sees it."""
    (prompt,) = prompts((64,))
    model = tiny_model(SHIFTED)
    logits = np.array(nnx.jit(type(model).__call__)(model, np.array([prompt]))[0, -1])
    logits[SHIFTED.mask_token_id] = -np.inf
    session = start_session_shifted(prompt)
    slot = session.batch.slots[0]
    tokens, masked = slot.block(BLOCK, SHIFTED.mask_token_id)
    assert slot.lead == tokens[0] == logits.argmax()
    assert masked.tolist() == [False] + [True] * (BLOCK - 1)
    advance(session)
    assert slot.generated[0] == tokens[0]
    assert len(slot.generated) == BLOCK
    session.close()


def start_session_shifted(prompt):
    from herald_jax.engine.request import Request

    made = engine("herald-draft", 0.2, config=SHIFTED, max_batch=1)
    request = Request("0", np.array(prompt, np.int32), 40)
    session = made._prepare([request], GenerationConfig(threshold=0.3))
    session.admit(0, request)
    return session


# -- options of single requests -------------------------------------------------------------------


def test_requests_have_their_own_seeds_temperatures_and_thresholds():
    call = GenerationConfig(max_new_tokens=20, threshold=0.3)
    (prompt,) = prompts((40,))
    options = [
        {},
        {"temperature": 0.9, "seed": 1},
        {"temperature": 0.9, "seed": 2},
        {"temperature": 0.9, "seed": 1, "top_k": 3, "top_p": 0.9},
        {"threshold": 1.0},
    ]
    given = [{"id": n, "prompt_ids": prompt, **own} for n, own in enumerate(options)]
    together = answers(engine("herald-draft", 0.2), given, call)
    for n, own in enumerate(options):
        wanted = dataclasses.replace(call, **own)
        assert answers(engine("herald-draft", 0.2), [prompt], wanted)["0"] == together[str(n)]
    assert len({tuple(ids) for ids in together.values()}) >= 4
    # What the call says otherwise still holds where a request says nothing, or null.
    null = [{"prompt_ids": prompt, "temperature": None}]
    assert answers(engine("herald-draft", 0.2), null, call)["0"] == together["0"]


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"temperature": "hot"}, "request a: temperature 'hot' cannot be used: give 0 (greedy)"),
        ({"temperature": float("nan")}, "temperature nan"),
        ({"seed": -1}, "seed -1 cannot be used: give a number from 0 to 2**32 - 1"),
        ({"seed": 1.5}, "seed 1.5"),
        ({"top_k": True}, "top_k True"),
        ({"top_p": 0}, "top_p 0"),
        ({"threshold": [0.5]}, "threshold [0.5]"),
        ({"steps": 4}, "field 'steps' is unknown"),
    ],
)
def test_a_request_with_bad_options_fails_alone(own, words):
    given = [{"id": "a", "prompt_ids": [7], **own}, {"id": "b", "prompt_ids": [7]}]
    results = {r.id: r for r in engine("dense").generate(given, GenerationConfig(max_new_tokens=4))}
    assert words in results["a"].error
    assert results["b"].error is None


# -- where rules come from ------------------------------------------------------------------------


def test_the_models_rule_is_the_default_and_is_reported():
    config = dataclasses.replace(TINY, rule="sdar-sequential")
    made = engine("dense", config=config)
    given = prompts((20,))
    plain = answers(made, given, GenerationConfig(max_new_tokens=16))
    assert made.summary(1.0)["rule"] == "sdar-sequential"
    named = answers(made, given, GenerationConfig(max_new_tokens=16, rule="sdar-entropy"))
    assert made.summary(1.0)["rule"] == "sdar-entropy"
    assert plain == expected(given, GenerationConfig(max_new_tokens=16, rule="sdar-sequential"))
    assert named != plain
    unknown = Engine(dataclasses.replace(TINY, rule="gone"), made.stack)
    with pytest.raises(ValueError, match="the model's rule 'gone' is unknown"):
        list(unknown.generate(given))


def test_every_named_rule_generates():
    """All of them end and keep to the limit, whatever their defaults."""
    made, given = engine("dense"), prompts((12,))
    for name in RULES:
        (ids,) = answers(made, given, GenerationConfig(max_new_tokens=12, rule=name)).values()
        assert 0 < len(ids) <= 12, name
        assert TINY.mask_token_id not in ids, name
