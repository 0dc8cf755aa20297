"""What infinigen keeps of keys, what it chooses by them, and that those rows are attended."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from networks import TINY, engine, prompts, tiny_model
from sessions import RULE, advance, start

from herald_jax.engine.speculation_programs import partial_importance
from herald_jax.kv.partial_keys import project
from herald_jax.selection import make_selector
from herald_jax.selection.infinigen import partial_importance as by_definition
from host_kernels import reference

BLOCK, HEADS, DIM = TINY.block_size, TINY.num_kv_heads, TINY.head_dim


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("lengths", [(0, 1, 8, 40), (39, 40, 7, 33)])
def test_scores_equal_the_definition(lengths, dtype):
    rng = np.random.default_rng(lengths[0])
    keys = rng.normal(size=(4, 40, HEADS, DIM)).astype(dtype)
    q = rng.normal(size=(4, 2 * HEADS, DIM)).astype(np.float32)
    turn = rng.normal(size=(4, HEADS, DIM, 8)).astype(np.float32) / 2
    got = partial_importance(
        jnp.asarray(q), project(jnp.asarray(keys), jnp.asarray(turn)), jnp.asarray(turn),
        jnp.asarray(lengths),
    )  # fmt: skip
    for slot, length in enumerate(lengths):
        want = by_definition(q[slot], keys[slot], turn[slot], length)
        loose = dtype is not np.float32
        np.testing.assert_allclose(got[slot], want, atol=0.08 if loose else 1e-5)
        assert not np.asarray(got)[slot, :, length:].any()


@pytest.mark.parametrize("positions", [3, 200])
def test_the_skew_keeps_scores_and_gathers_them_in_few_channels(positions):
    """With all channels scores stay as they are; some then hold most of them."""
    rng = np.random.default_rng(positions)
    spread = rng.normal(size=(DIM, DIM)) * 2.0 ** -np.arange(DIM)
    q = rng.normal(size=(positions, 2 * HEADS, DIM)) @ spread.T
    k = rng.normal(size=(positions, HEADS, DIM))
    selector = make_selector("infinigen")
    few = selector.projection(q, k)
    assert few.shape == (HEADS, DIM, selector.channels(DIM)) == (HEADS, DIM, 8)
    selector.kept_share = 1.0
    whole = selector.projection(q, k)
    for head in range(HEADS):
        np.testing.assert_allclose(whole[head].T @ whole[head], np.eye(DIM), atol=1e-6)
        np.testing.assert_array_equal(few[head], whole[head][:, :8])
        mine, theirs = q[:, 2 * head], k[:, head]
        scores = mine @ theirs.T
        error = np.abs(mine @ few[head] @ (theirs @ few[head]).T - scores).mean()
        plain = np.abs(mine[:, :8] @ theirs[:, :8].T - scores).mean()
        assert error < 0.1 * plain


def test_channels_are_whole_eights_of_a_third():
    channels = make_selector("infinigen").channels
    assert [channels(dim) for dim in (16, 64, 80, 96, 128, 4)] == [8, 24, 24, 32, 40, 4]


@pytest.mark.parametrize("exact", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_rows_of_a_layer_are_chosen_by_the_input_of_the_layer_before(exact, monkeypatch):
    """Every choice of three blocks against the definition, and the rows that are then attended."""
    session = start("infinigen", exact_layers=exact)
    model, current, seen = tiny_model(), session.current, []
    look, fetch, take = current._look, current.fetch.start, current.fetch.take

    def watch_look(layer, x, state):
        seen.append([layer, np.asarray(x), np.asarray(state.masked), None, None])
        look(layer, x, state)

    def watch_fetch(layer, bookings, rows, counts):
        seen[-1][3] = np.asarray(rows), counts.copy()
        fetch(layer, bookings, rows, counts)

    def watch_take(layer):
        pool = take(layer)
        seen[layer][4] = [np.asarray(part).copy() for part in pool]
        return pool

    monkeypatch.setattr(current, "_look", watch_look)
    monkeypatch.setattr(current.fetch, "start", watch_fetch)
    monkeypatch.setattr(current.fetch, "take", watch_take)
    for _ in range(3):
        seen.clear()
        slots = [slot for _, slot in session.batch.active()]
        begin, extents = [s.start for s in slots], [s.booking.extents for s in slots]
        turns = [np.asarray(part) for part in current.partial.projections]
        advance(session)
        assert [each[0] for each in seen] == list(range(TINY.num_layers - exact))
        for layer, x, masked, (rows, counts), pool in seen:
            target = model.layers[exact + layer]
            source = model.layers[max(0, exact + layer - 1)]
            for slot, first in enumerate(begin):
                positions = jnp.arange(first, first + BLOCK)[None]
                normed = source.input_norm(jnp.asarray(x[slot : slot + 1]))
                q = np.asarray(target.attention.qkv(normed, positions)[0][0], np.float64)
                keys = extents[slot][layer][:, 0, :first].swapaxes(0, 1)
                mean = q[masked[slot]].mean(0)
                mass = by_definition(mean, keys, turns[layer][slot], first)
                kept = session.config.budget.entries(first - BLOCK)
                assert counts[slot] == BLOCK + kept < first
                for head in range(HEADS):
                    chosen = reference.top_rows(
                        mass[head, : first - BLOCK], kept, session.config.sinks
                    )
                    want = [*range(first - BLOCK, first), *sorted(chosen)]
                    assert rows[slot, head, : counts[slot]].tolist() == want
                    for which, held in enumerate(pool):
                        np.testing.assert_array_equal(
                            held[slot, BLOCK : BLOCK + counts[slot], head],
                            extents[slot][layer][head, which, want],
                        )
        for layer, partial in enumerate(current.partial.keys):
            for slot in range(2):
                done = begin[slot] + BLOCK
                keys = extents[slot][layer][:, 0, :done]
                want = np.einsum("hrd,hdp->hrp", keys, turns[layer][slot])
                np.testing.assert_allclose(partial[slot, :, :done], want, atol=1e-4)
    session.close()


def test_calibration_is_the_requests_own():
    """Neither batch-mates nor the size of a prefill chunk change what a prompt's keys become."""
    made = {}
    for name, lengths, options in (
        ("together", (112, 90), {}),
        ("alone", (112,), {}),
        ("chunked", (112, 90), {"prefill_chunk": 16}),
    ):
        session = start("infinigen", lengths, **options)
        made[name] = [np.asarray(part)[0] for part in session.current.partial.projections]
        session.close()
    for name in ("alone", "chunked"):
        for mine, theirs in zip(made[name], made["together"], strict=True):
            # Singular vectors and their opposites serve alike.
            np.testing.assert_allclose(np.abs(mine), np.abs(theirs), atol=1e-3)


def test_a_broken_prefix_fails_its_request_alone():
    """KV that is not finite ends one request; its slot serves the next one as if it was new."""
    given = prompts((60, 50, 6))
    made, results = engine("infinigen", 0.25, max_batch=2), {}
    good = {r.id: r.token_ids for r in made.generate(given, RULE)}
    for item in made.generate(given, RULE, stream=True):
        if hasattr(item, "finish_reason"):
            results[item.id] = item
        elif item.id == "0" and (slot := made.session.batch.slots[0]) is not None:
            for extent in slot.booking.extents:
                extent[:, :, slot.start - 2 * BLOCK :] = np.nan
    assert "not finite" in results["0"].error
    assert {name: results[name].token_ids for name in "12"} == {name: good[name] for name in "12"}
    assert made.session.full_pool.used == 0
