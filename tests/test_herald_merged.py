"""herald-merged: the next block's masked queries, against a plain pass over tokens alone."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from networks import TINY, answers, make_model, plain_pass, prompts, tiny_model
from precision import product_precisions
from sessions import RULE, advance, choose_by_definition, start

from herald_jax import Budget, Engine, EngineConfig
from herald_jax.diffusion.draft import mask_places
from herald_jax.engine import main_stream
from herald_jax.engine.lookahead_programs import LookaheadPrograms
from herald_jax.selection import SELECTORS

BLOCK, HEADS = TINY.block_size, TINY.num_kv_heads
OWN = SELECTORS["herald-merged"]
PLACES = mask_places(BLOCK, BLOCK // OWN.spacing)
PARTS, MASKS = OWN.segments, len(PLACES)


def observed(monkeypatch, budget, blocks):
    """A session after some blocks, with step 1's tokens and what retrieval began with."""
    seen = {}
    pair = main_stream._pair_inputs

    def watch_pair(*arguments):
        seen["tokens"], seen["positions"] = map(np.asarray, made := pair(*arguments))
        return made

    monkeypatch.setattr(main_stream, "_pair_inputs", watch_pair)
    session = start("herald-merged", budget=budget)
    begin = session.retrieval.begin

    def watch_begin(job, rows, **rest):
        seen.update(rest, job=job)
        begin(job, rows, **rest)

    monkeypatch.setattr(session.retrieval, "begin", watch_begin)
    for _ in range(blocks):
        advance(session)
    return session, seen


@pytest.mark.parametrize("blocks", [3])
def test_queries_and_their_mass_equal_a_plain_pass(monkeypatch, blocks):
    """At a budget of 1 the pool holds the prefix: committed tokens, draft, half of the masks."""
    session, seen = observed(monkeypatch, 1.0, blocks)
    exact = session.shape.exact_layers
    for n, slot in session.batch.active():
        begun = slot.start - BLOCK
        assert begun == seen["job"].start[n]
        text = [*slot.request.prompt_ids.tolist(), *slot.generated][:begun]
        drafted, masks = seen["tokens"][n, BLOCK : 2 * BLOCK], seen["tokens"][n, 2 * BLOCK :]
        assert list(masks) == [TINY.mask_token_id] * MASKS
        places = seen["positions"][n, 2 * BLOCK :]
        assert list(places) == [slot.start + place for place in PLACES]
        tokens = [*text, *drafted.tolist(), *masks.tolist()]
        layers = plain_pass(tokens, places=[*range(slot.start), *places.tolist()])
        for index, (q, k, _) in enumerate(layers[exact:]):
            got, mass = (np.asarray(part)[n] for part in seen["queries"][index].result())
            merged = q[-MASKS:].reshape(PARTS, MASKS // PARTS, *q.shape[1:]).mean(1)
            merged = merged.reshape(PARTS, HEADS, -1, TINY.head_dim)
            local = k[-BLOCK - MASKS :]
            place = 0
            for head in range(HEADS):
                for part in range(PARTS):
                    for query in merged[part, head]:
                        np.testing.assert_allclose(got[place], query, atol=2e-4)
                        scores = local[:, head] @ query * TINY.head_dim**-0.5
                        np.testing.assert_allclose(
                            mass[place], np.logaddexp.reduce(scores), atol=2e-4
                        )
                        place += 1
            assert place == len(got)
    session.close()


def test_single_precision_never_drops_to_tf32():
    programs = LookaheadPrograms(TINY, sinks=4, selected=BLOCK, segments=PARTS)
    layers = tiny_model().layers[TINY.exact_layers :]
    buffer = (jnp.zeros((1, 3 * BLOCK, HEADS, TINY.head_dim)),) * 2
    x = jnp.zeros((1, 3 * BLOCK, TINY.hidden_size))
    asked = product_precisions(
        lambda *arguments: programs.pool_ahead(layers, [buffer] * len(layers), *arguments),
        *(x, jnp.arange(3 * BLOCK)[None], jnp.array([BLOCK])),
    )
    assert len(asked) == len(layers) * (7 + 3 * 2 + 1)
    assert set(asked) == {(jax.lax.Precision.HIGHEST,) * 2}


@pytest.mark.parametrize("blocks", [1, 2])
def test_the_choice_weighs_every_query_by_its_mass(monkeypatch, blocks):
    """Keys-only top-k over committed rows with the mass on draft and masks in the normaliser."""
    session, seen = observed(monkeypatch, 0.25, blocks)
    job = seen["job"]
    assert (job.candidates < job.select_len).any(), "this budget selects everything"
    differs = False
    for index, promised in enumerate(seen["queries"]):
        q, mass = map(np.asarray, promised.result())
        wanted = choose_by_definition(job, index, q, mass)
        without = choose_by_definition(job, index, q)
        np.testing.assert_array_equal(job.indices[index], wanted)
        differs |= not np.array_equal(wanted, without)
    assert differs, "the mass outside changes nothing here"
    session.close()


@pytest.mark.parametrize("size", [3, pytest.param(6, marks=pytest.mark.slow)])
def test_blocks_that_do_not_fall_into_two_parts(size):
    """They are one: at a budget of 1 the tokens are those of dense."""
    config = replace(TINY, block_size=size)
    base = Engine(config, make_model(config, seed=0))
    given, made = prompts((50, 7)), {}
    for method in ("dense", "herald-merged"):
        setting = EngineConfig(
            method=method, budget=Budget(1.0), max_batch=2, max_context=96, warm_up=False
        )
        with base.with_config(setting) as run:
            made[method] = answers(run, given, RULE)
    assert made["dense"] == made["herald-merged"]


def test_the_pass_ahead_changes_no_token(monkeypatch):
    """The denoising group neither sees the draft nor the masks beside it."""
    session, seen = observed(monkeypatch, 1.0, 1)
    tokens = {n: list(slot.generated) for n, slot in session.batch.active()}
    session.close()
    plain = start("merged", budget=1.0)
    advance(plain)
    assert tokens == {n: list(slot.generated) for n, slot in plain.batch.active()}
    plain.close()
    assert all(promised.done() for promised in seen["queries"])
