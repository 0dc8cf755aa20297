"""The invariants of the design: what must hold whatever the method, the batch or the budget."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from networks import (
    TINY,
    answers,
    engine,
    make_model,
    plain_pass,
    prompts,
    tiny_model,
    unless_variant,
)
from reference_decoder import decode
from sessions import advance

import host_kernels
from herald_jax import Engine, EngineConfig, GenerationConfig
from herald_jax.engine import main_stream
from herald_jax.engine.request import Request
from herald_jax.selection import SELECTORS

BLOCK = TINY.block_size
# Prompt lengths mod B of 0, 1 and B - 1, shorter than B, of one block, and longer than a chunk.
LENGTHS = (64, 65, 71, 3, 8, 9, 130, 1)
RULES = {
    "dynamic": GenerationConfig(max_new_tokens=28, threshold=0.3),
    "static": GenerationConfig(max_new_tokens=28, steps=3),
}


def prefix_kv(tokens: list[int]) -> list[tuple[np.ndarray, ...]]:
    """K and V [S, H_kv, D] of every layer, recomputed from final tokens in one full pass."""
    return [layer[1:] for layer in plain_pass(tokens)]


def start_session(method: str, requests, generation, budget: float = 1.0, **options):
    """An engine's session with its slots filled, to be driven block by block."""
    made = engine(method, budget, max_batch=len(requests), **options)
    session = made._prepare(requests, generation)
    for index, request in enumerate(requests):
        session.admit(index, request)
    return session


def requests_of(lengths, new: int) -> list[Request]:
    return [Request(str(n), np.array(p, np.int32), new) for n, p in enumerate(prompts(lengths))]


# -- 1: at 100% budget every method gives the dense output ---------------------------------------


@pytest.fixture(scope="module")
def dense() -> dict[str, dict[str, list[int]]]:
    """Dense answers, checked against a decoder that has no cache."""
    given = prompts(LENGTHS)
    made = {}
    for name, rule in RULES.items():
        made[name] = answers(engine("dense"), given, rule)
        for index, prompt in enumerate(given):
            assert made[name][str(index)] == decode(tiny_model(), TINY, prompt, rule)
    return made


@pytest.mark.parametrize(
    ("method", "rule"),
    [
        (method, rule) if rule == "dynamic" else unless_variant(method, rule)
        for method, rule in itertools.product(SELECTORS, RULES)
    ],
)
def test_full_budget_equals_dense(method, rule, dense):
    """Also NVIDIA-NeMo/Megatron-Bridge PR#4760 and ByteDance-Seed/ShadowKV#13: mixed lengths in
    one batch with more requests than slots, and KV on the host or on the device, change nothing.
    """
    assert answers(engine(method), prompts(LENGTHS), RULES[rule]) == dense[rule]


@pytest.mark.parametrize("exact", [0, pytest.param(1, marks=pytest.mark.slow), 3])
def test_full_budget_equals_dense_for_any_exact_layers(exact, dense):
    made = engine("herald-draft", exact_layers=exact)
    assert answers(made, prompts(LENGTHS), RULES["dynamic"]) == dense["dynamic"]


# -- 2: cached KV of a committed block equals KV recomputed from its final tokens -----------------


@pytest.mark.parametrize(
    "method",
    [
        *("dense", "herald-draft", "herald-merged", "mage", "oracle", "mage-offload-cpu"),
        pytest.param("infinigen", marks=pytest.mark.slow),
    ],
)
def test_committed_kv_equals_recomputed(method):
    """InternLM/lmdeploy#4082: the pass that stores a finished block's KV is not skipped."""
    session = start_session(method, requests_of((19, 40), 48), RULES["dynamic"])
    for _ in range(4):
        advance(session)
    for index, slot in session.batch.active():
        whole = slot.start
        ids = [*slot.request.prompt_ids.tolist(), *slot.generated][:whole]
        exact = session.shape.exact_layers
        for layer, (k, v) in enumerate(prefix_kv(ids)):
            if layer < exact:
                got_k, got_v = (np.asarray(b)[index, :whole] for b in session.cache.exact[layer])
            else:
                # The newest block reaches the host when the next retrieval begins, if any.
                whole = slot.start - (BLOCK if session.retrieval else 0)
                extent = slot.booking.extents[layer - exact][:, :, :whole]
                got_k, got_v = extent[:, 0].swapaxes(0, 1), extent[:, 1].swapaxes(0, 1)
            np.testing.assert_allclose(got_k, k[:whole], atol=2e-5)
            np.testing.assert_allclose(got_v, v[:whole], atol=2e-5)
    session.close()


def test_committed_kv_at_a_small_budget_is_that_of_the_final_tokens():
    """Recomputed over the same attended rows, the committed block's KV is what is kept."""
    generation = RULES["dynamic"]
    session = start_session("herald-draft", requests_of((112,), 64), generation, budget=0.05)
    for _ in range(3):
        advance(session)
        pool = [tuple(jnp.array(b) for b in pair) for pair in session.cache.pool]
        exact = [tuple(jnp.array(b) for b in pair) for pair in session.cache.exact]
        rows = session.batch.pool_rows()
        tokens = advance(session)
        stack, shape = engine("dense").stack, session.shape
        slot = session.batch.slots[0]
        start = slot.start - BLOCK
        positions = jnp.arange(start, start + BLOCK)[None]
        x = stack.embed(jnp.asarray(tokens))
        programs = session.main.programs
        (first,) = stack.groups(0, shape.exact_layers, None)
        (others,) = stack.groups(shape.exact_layers, TINY.num_layers, None)
        exact_step = stack.on_layers(programs.exact_step, first)
        x, _ = exact_step(exact, x, positions, jnp.array([start]))
        pool_step = stack.on_layers(programs.pool_step, others)
        _, after = pool_step(pool, x, positions, jnp.asarray(rows))
        for (k, v), (tail_k, tail_v) in zip(after, session.cache.pool, strict=True):
            np.testing.assert_allclose(k[:, :BLOCK], tail_k[:, BLOCK : 2 * BLOCK], atol=2e-5)
            np.testing.assert_allclose(v[:, :BLOCK], tail_v[:, BLOCK : 2 * BLOCK], atol=2e-5)
    session.close()


# -- bookkeeping: every past block is attended or selectable exactly once -------------------------


@pytest.mark.parametrize("method", ["herald-draft", "herald-merged", "merged-late", "window"])
@pytest.mark.parametrize("length", [3, 8, 17, 40])
def test_every_past_position_is_in_the_pool_exactly_once(method, length):
    """At 100% the pool of block n holds 0..n-2 as selected rows and n-1 as its tail."""
    session = start_session(method, requests_of((length,), 48), RULES["dynamic"])
    for _ in range(5):
        slot = session.batch.slots[0]
        used = int(session.batch.pool_rows()[0])
        assert used == (BLOCK + slot.start if slot.start else BLOCK)
        ids = [*slot.request.prompt_ids.tolist(), *slot.generated][: slot.start]
        if slot.start:
            for layer, (k, v) in enumerate(prefix_kv(ids)[session.shape.exact_layers :]):
                for got, want in zip(session.cache.pool[layer], (k, v), strict=True):
                    held = np.asarray(got)[0, BLOCK:used]
                    for head in range(TINY.num_kv_heads):
                        mine = held[:, head][np.lexsort(held[:, head].T)]
                        theirs = want[:, head][np.lexsort(want[:, head].T)]
                        np.testing.assert_allclose(mine, theirs, atol=2e-5)
        advance(session)
    session.close()


def test_small_budgets_are_kept():
    """K_r = min(prefix, max(32, ceil(fraction * prefix))) rows per request, whatever its mates."""
    session = start_session("herald-draft", requests_of((150, 20), 40), RULES["dynamic"], 0.25)
    advance(session)
    long, short = session.batch.slots
    assert long.selected == max(32, -(-(long.start - BLOCK) // 4))
    assert short.selected == short.start - BLOCK
    session.close()


# -- 3: a request's output does not depend on what it shares the engine with ----------------------


@pytest.mark.parametrize("method", map(unless_variant, ["dense", *SELECTORS]))
def test_output_does_not_depend_on_the_batch(method):
    given = prompts((150, 33, 90, 7))
    rule = RULES["dynamic"]
    alone = {}
    for index, prompt in enumerate(given):
        alone |= answers(
            engine(method, 0.05, max_batch=1), [{"id": index, "prompt_ids": prompt}], rule
        )
    assert answers(engine(method, 0.05, max_batch=3), given, rule) == alone
    shuffled = [{"id": i, "prompt_ids": given[i]} for i in (2, 0, 3, 1)]
    assert answers(engine(method, 0.05, max_batch=3), shuffled, rule) == alone


@pytest.mark.parametrize(
    "options",
    [
        {"prefill_chunk": 16, "layer_group": 1, "retrieval_streams": 2, "threads": 3},
        {"prefill_chunk": 192, "retrieval_streams": 3, "max_context": 512, "max_batch": 4}
        | {"threads": 1},
        # One by one, to tell which.
        *(
            pytest.param(one, marks=pytest.mark.slow)
            for one in (
                {"prefill_chunk": 16},
                {"prefill_chunk": 192},
                {"layer_group": 1},
                {"retrieval_streams": 2},
                {"retrieval_streams": 3},
                {"max_context": 512},
                {"max_batch": 4},
                {"threads": 1},
                {"threads": 3},
            )
        ),
    ],
    ids=str,
)
def test_output_does_not_depend_on_how_it_is_run(options):
    given, rule = prompts((150, 33, 90, 7)), RULES["static"]
    plain = answers(engine("herald-draft", 0.05), given, rule)
    before = host_kernels.thread_count()
    try:
        assert answers(engine("herald-draft", 0.05, **options), given, rule) == plain
    finally:
        host_kernels.set_thread_count(before)


def test_sampled_output_does_not_depend_on_the_batch():
    rule = GenerationConfig(max_new_tokens=24, threshold=0.5, temperature=0.8, top_k=20, seed=5)
    given = prompts((30, 61))
    together = answers(engine("herald-draft", 0.2), given, rule)
    for index, prompt in enumerate(given):
        alone = answers(engine("herald-draft", 0.2), [{"id": index, "prompt_ids": prompt}], rule)
        assert alone[str(index)] == together[str(index)]
    other = answers(engine("herald-draft", 0.2), given, dataclasses.replace(rule, seed=6))
    assert other != together


# -- 4: stop tokens count at generated positions only ---------------------------------------------


def test_stop_tokens_in_the_prompt_end_nothing():
    stop = TINY.stop_token_ids[0]
    given = [[7, stop, 9, 11, stop], [*prompts((63,))[0], stop]]
    rule = RULES["dynamic"]
    made = answers(engine("herald-draft"), given, rule)
    for index, prompt in enumerate(given):
        assert made[str(index)] == decode(tiny_model(), TINY, prompt, rule)
        assert len(made[str(index)]) > 0


def test_answer_is_cut_at_the_first_stop_token():
    prompt = prompts((64,))[0]
    free = GenerationConfig(max_new_tokens=28, threshold=0.3, stop_token_ids=())
    whole = answers(engine("dense"), [prompt], free)["0"]
    stop = whole[13]
    rule = dataclasses.replace(free, stop_token_ids=(stop,))
    (result,) = engine("dense").generate([prompt], rule)
    assert result.token_ids == whole[: whole.index(stop)]
    assert result.finish_reason == "stop"
    assert result.blocks == whole.index(stop) // BLOCK + 1, "decoding went on after the stop"


# -- 5: "is masked" is an array, never a comparison with the mask id ------------------------------


def test_mask_token_in_a_prompt_is_refused():
    """sglang PR#35998: reserved ids in raw prompts are refused, not rewritten by the model."""
    given = [[7, TINY.mask_token_id, 9], [7, 8, 9]]
    bad, good = engine("dense").generate(given, RULES["dynamic"])
    assert bad.finish_reason == "error"
    assert "mask" in bad.error
    assert good.finish_reason == "length"


def test_a_model_that_predicts_the_mask_token_still_ends():
    model = make_model(TINY, seed=0)
    head = model.lm_head.kernel
    head[...] = head[...].at[:, TINY.mask_token_id].set(head[...].max() * 10)
    rule = GenerationConfig(max_new_tokens=16, threshold=0.3, ban_mask=False)
    settings = EngineConfig(method="herald-draft", prefill_chunk=64, max_context=192, warm_up=False)
    with Engine(TINY, model, None, dataclasses.replace(settings, max_batch=3)) as made:
        (result,) = made.generate(prompts((20,)), rule)
    assert result.finish_reason == "length"
    assert TINY.mask_token_id in result.token_ids
    assert len(result.token_ids) == 16


# -- 6: the draft and merged queries change selection only ----------------------------------------


def test_draft_rows_are_never_selected_and_never_kept(monkeypatch):
    """A wrong draft may change which rows are fetched, not what is fetched or committed."""
    seen = []
    select = host_kernels.attend_select

    def spy(q, kv, attend_len, select_len, budget, indices, **rest):
        answer = select(q, kv, attend_len, select_len, budget, indices, **rest)
        assert (attend_len[select_len > 0] == select_len[select_len > 0] + BLOCK).all()
        assert (indices < select_len[:, None, None]).all()
        seen.append(len(kv))
        return answer

    monkeypatch.setattr(host_kernels, "attend_select", spy)
    rule, given = RULES["dynamic"], prompts((40, 19))
    plain = answers(engine("herald-draft"), given, rule)
    assert seen
    right = answers(engine("herald-draft", 0.05), prompts((112, 90)), rule)
    monkeypatch.setattr(
        main_stream, "draft", lambda tokens, masked, argmax: jnp.full_like(tokens, 11)
    )
    main_stream._pair_inputs.clear_cache()
    try:
        assert answers(engine("herald-draft"), given, rule) == plain
        other = answers(engine("herald-draft", 0.05), prompts((112, 90)), rule)
    finally:
        main_stream._pair_inputs.clear_cache()
    assert other != right, "the draft does not reach the selection"


# -- 7: host and device selection agree at equal scores -------------------------------------------


@pytest.mark.parametrize("budget", [1, 5, 32, 60])
def test_host_and_device_break_ties_alike(budget):
    from herald_jax.engine.choice import best_rows
    from herald_jax.models.attention import importance

    rng = np.random.default_rng(3)
    rows, heads, dim, sinks = 64, TINY.num_kv_heads, TINY.head_dim, 4
    # Few distinct keys: most scores are equal, so ties decide.
    keys = rng.normal(size=(6, dim)).astype(np.float32)[rng.integers(0, 6, (rows, heads))]
    q = rng.normal(size=(1, TINY.num_heads, dim)).astype(np.float32)
    extent = np.zeros((heads, 2, rows, dim), np.float32)
    extent[:, 0] = keys.swapaxes(0, 1)
    indices = np.full((1, heads, budget), -1, np.int32)
    full, count = np.array([rows], np.int32), np.array([budget], np.int32)
    host_kernels.select(q, [extent], full, full, count, indices, sinks=sinks)
    score = importance(
        jnp.asarray(q)[:, None], jnp.asarray(keys)[None], jnp.array([rows]), jnp.array([[True]])
    )
    best = best_rows(score[0], jnp.int32(rows), budget, sinks=sinks)
    # Equal keys give equal scores only up to rounding: compare the scores that were chosen.
    for head in range(heads):
        mine = np.sort(np.asarray(score[0, head])[indices[0, head]])
        theirs = np.sort(np.asarray(score[0, head])[np.asarray(best[head])])
        np.testing.assert_allclose(mine, theirs, rtol=1e-5)
        assert set(range(min(sinks, budget))) <= set(indices[0, head].tolist())
    # With all scores equal the rule is visible: sinks and everything else by index.
    flat = np.zeros_like(extent)
    host_kernels.select(q, [flat], full, full, count, indices, sinks=sinks)
    flat_scores = jnp.full((heads, rows), 1 / rows)
    even = best_rows(flat_scores, jnp.int32(rows), budget, sinks=sinks)
    np.testing.assert_array_equal(np.sort(indices[0]), np.sort(np.asarray(even)))


# -- 8: after any mix of finish, abort and error, free + used = total -----------------------------


def test_nothing_leaks_after_finish_abort_and_error():
    """sglang PR#32992 and Labman42/JetEngine#4: no leak, no hang, no lost request."""
    made = engine("herald-draft", 0.2, max_batch=2)
    rng = np.random.default_rng(0)
    for round_ in range(3):
        given = [
            {"id": f"{round_}-{n}", "prompt_ids": p}
            for n, p in enumerate(prompts(rng.integers(1, 120, 6), seed=round_))
        ]
        given.insert(3, {"id": f"{round_}-bad", "prompt_ids": [TINY.mask_token_id]})
        done = {}
        stream = made.generate(given, GenerationConfig(max_new_tokens=20, threshold=0.3))
        for result in stream:
            done[result.id] = result
            if len(done) == 2:
                made.abort(f"{round_}-3")
                made.abort(f"{round_}-5")
        assert set(done) == {item["id"] for item in given}
        assert done[f"{round_}-bad"].finish_reason == "error"
        assert "aborted" in done[f"{round_}-5"].error
        pool = made.session.full_pool
        pool.check_integrity()
        assert pool.used == 0
        assert pool.free == pool.nbytes


def test_a_consumer_that_leaves_early_leaks_nothing():
    made = engine("herald-draft", 0.2)
    stream = made.generate(prompts((40, 50, 60)), GenerationConfig(max_new_tokens=64), stream=True)
    next(stream)
    with contextlib.closing(stream):
        pass
    made.session.full_pool.check_integrity()
    assert made.session.full_pool.used == 0
    assert answers(made, prompts((40,)), RULES["static"])


# -- 10: nothing compiles after warm-up -----------------------------------------------------------

SHALLOW = dataclasses.replace(TINY, num_layers=2, exact_layers=1, vocab_size=99)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("herald-draft", {"retrieval_streams": 2, "layer_group": 1}),
        ("herald-merged", {"transfer": "changes"}),
        pytest.param("merged-late", {}, marks=pytest.mark.slow),
        ("merged", {}),
        ("mage", {}),
        pytest.param("oracle", {}, marks=pytest.mark.slow),
        pytest.param("mage-offload-cpu", {}, marks=pytest.mark.slow),
        ("infinigen", {}),
    ],
)
def test_no_compilation_after_warm_up(method, options):
    """From the first request of a session on; the network is that of no other test or method."""
    compiled = []
    network = dataclasses.replace(SHALLOW, vocab_size=211 + list(SELECTORS).index(method))

    def listen(name, seconds, **details):
        if name.endswith("backend_compile_duration"):
            compiled.append(details.get("fun_name"))

    made = engine(method, 0.1, network, max_batch=2, max_context=96, warm_up=True, **options)
    rule = dataclasses.replace(RULES["dynamic"], max_new_tokens=17)
    ids = prompts((40, 3, 18))
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        made._prepare([Request(str(n), np.array(p, np.int32), 17) for n, p in enumerate(ids)], rule)
        assert compiled, "the warm-up had nothing to do, so this test shows nothing"
        compiled.clear()
        answers(made, prompts((18, 50, 6, 33), seed=1), rule)
    finally:
        jax.monitoring.clear_event_listeners()
    assert not compiled
