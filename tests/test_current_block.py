"""What mage (streamed or not) and oracle choose, against the definition over random inputs."""

from __future__ import annotations

import gc
import math
import weakref

import jax.numpy as jnp
import numpy as np
import pytest
from networks import TINY, answers, engine, prompts
from sessions import RULE, advance, start

from herald_jax import GenerationConfig
from herald_jax.engine import current_block
from herald_jax.selection import SELECTORS, CurrentBlockSelector, make_selector

BLOCK, HEADS, GROUP = TINY.block_size, TINY.num_kv_heads, TINY.num_heads // TINY.num_kv_heads
CURRENT = [name for name, made in SELECTORS.items() if issubclass(made, CurrentBlockSelector)]


def project(layers, x, positions):
    return layers[0].pre(x, positions)


def finish(layers, x, out):
    return layers[0].post(x, out)


def exact_choice(q, keys, voters, select_len, count, sinks):
    """Rows of one slot by the definition, in float64: q [B, H_q, D], keys [R, H_kv, D].

    Returns the chosen rows of every KV head, a set each.
    """
    q, keys = np.asarray(q, np.float64), np.asarray(keys, np.float64)
    chosen = []
    for head in range(HEADS):
        mass = np.zeros(len(keys))
        for position in np.flatnonzero(voters):
            for member in range(GROUP):
                logits = keys[:, head] @ q[position, head * GROUP + member] / math.sqrt(q.shape[-1])
                weights = np.exp(logits - logits.max())
                mass += weights / weights.sum()
        ranked = np.where(np.arange(len(keys)) < sinks, np.inf, mass)[:select_len]
        order = np.argsort(-ranked, kind="stable").tolist()
        chosen.append(set(order[:count]))
    return chosen


@pytest.mark.parametrize("every_step", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_the_layer_program_equals_the_definition(every_step, seed):
    """Random hidden states, KV, masks and lengths: chosen rows, pool and output of one layer."""
    rng = np.random.default_rng(seed)
    slots, rows, selected, sinks = 5, 96, 24, 4
    programs = current_block.CurrentBlockPrograms(TINY, sinks, selected, every_step)
    stack = engine("mage").stack
    group = stack.groups(seed, seed + 1, 1)[0]
    # No prefix, a tail alone, and anything up to the last block.
    begin = np.array([0, BLOCK, 2 * BLOCK, 88, BLOCK * rng.integers(3, 11)], np.int32)
    select_len = np.maximum(begin - BLOCK, 0)
    counts = np.minimum(select_len, rng.integers(1, selected + 1, slots))
    full = [
        rng.normal(size=(slots, rows, HEADS, TINY.head_dim)).astype(np.float32) for _ in range(2)
    ]
    masked = rng.random((slots, BLOCK)) < 0.5
    masked[1], masked[3] = False, True
    x = jnp.asarray(rng.normal(size=(slots, BLOCK, TINY.hidden_size)), jnp.float32)
    positions = jnp.asarray(begin[:, None] + np.arange(BLOCK), jnp.int32)
    state = current_block.BlockState(
        positions, jnp.asarray(masked), positions, jnp.asarray(begin), jnp.zeros(slots, bool)
    )
    lengths = np.where(begin > 0, 2 * BLOCK + counts, BLOCK).astype(np.int32)
    out, pool, _ = stack.on_layers(programs.step, group)(
        tuple(jnp.asarray(part) for part in full),
        x,
        state,
        jnp.asarray(select_len),
        jnp.asarray(lengths),
    )
    q, *fresh = (np.asarray(part) for part in stack.on_layers(project, group)(x, positions))
    mixed = np.zeros_like(q)
    for slot in range(slots):
        first, end = begin[slot], begin[slot] + BLOCK
        for whole, own in zip(full, fresh, strict=True):
            whole[slot, first:end] = own[slot]
        voters = masked[slot] if masked[slot].any() else np.ones(BLOCK, bool)
        chosen = exact_choice(
            q[slot], full[0][slot, :end], voters, select_len[slot], counts[slot], sinks
        )
        for head in range(HEADS):
            want = [*range(max(0, first - BLOCK), first), *chosen[head]] if first else []
            for held, whole in zip(pool, full, strict=True):
                mine = np.asarray(held)[slot, : lengths[slot], head]
                theirs = whole[slot, [*range(first, end), *want], head]
                mine, theirs = mine[np.argsort(mine[:, 0])], theirs[np.argsort(theirs[:, 0])]
                np.testing.assert_allclose(mine, theirs, atol=1e-5)
        attended = np.zeros((HEADS, end), bool)
        for head in range(HEADS):
            attended[head, [*chosen[head], *range(max(0, first - BLOCK), end)]] = True
        attended |= not every_step
        for head in range(TINY.num_heads):
            rows_of = np.flatnonzero(attended[head // GROUP])
            keys, values = (whole[slot, rows_of, head // GROUP] for whole in full)
            logits = q[slot, :, head] @ keys.T / math.sqrt(TINY.head_dim)
            weights = np.exp(logits - logits.max(-1, keepdims=True))
            mixed[slot, :, head] = weights / weights.sum(-1, keepdims=True) @ values
    answer = stack.on_layers(finish, group)(x, mixed)
    np.testing.assert_allclose(np.asarray(out), np.asarray(answer), atol=2e-4)


@pytest.mark.parametrize("method", CURRENT)
def test_every_layer_sees_the_whole_committed_prefix(method, monkeypatch):
    """Before each selecting step a layer's rows are those of all committed blocks, tail included.

    Selected are the blocks before the tail, K_r of them with the sinks, at the steps that select.
    """
    session = start(method)
    seen = []
    step, load = session.current.step, session.current.layers.take

    def watch_load(layer):
        pair = load(layer)
        seen[-1][2].append([np.asarray(part).copy() for part in pair])
        return pair

    def watch_step(x, state, lengths):
        pools = []
        seen.append((np.asarray(state.masked), np.asarray(lengths), [], pools))
        out = step(x, state, lengths)
        pools += [np.asarray(keys) for keys, _ in session.cache.pool]
        return out

    monkeypatch.setattr(session.current, "step", watch_step)
    monkeypatch.setattr(session.current.layers, "take", watch_load)
    for _ in range(3):
        seen.clear()
        steps = session.timeline.steps
        begin = [slot.start for _, slot in session.batch.active()]
        extents = [slot.booking.extents for _, slot in session.batch.active()]
        advance(session)
        assert len(seen) == (session.timeline.steps - steps if method == "oracle" else 1)
        assert seen[0][0].any(axis=1).all()
        if method == "oracle":
            assert not seen[-1][0].any(), "the commit is a selecting step too"
        for _, lengths, layers, pools in seen:
            for slot, first in enumerate(begin):
                kept = session.config.budget.entries(first - BLOCK)
                assert lengths[slot] == 2 * BLOCK + kept
                assert kept < first - BLOCK, "this budget selects everything"
                for layer, pair in enumerate(layers):
                    for which, held in enumerate(pair):
                        want = extents[slot][layer][:, which, :first].swapaxes(0, 1)
                        np.testing.assert_array_equal(held[slot, :first], want)
                        assert not held[slot, first:].any()
                    for head in range(HEADS):
                        rows = {row.tobytes(): n for n, row in enumerate(pair[0][slot, :, head])}
                        chosen = pools[layer][slot, 2 * BLOCK : lengths[slot], head]
                        places = {rows[row.tobytes()] for row in chosen}
                        assert len(places) == kept
                        assert {*range(session.config.sinks)} <= places
                        assert max(places) < first - BLOCK, "the tail was selected too"
    # The block that was just committed is on the host already.
    for _, slot in session.batch.active():
        for extent in slot.booking.extents:
            assert np.abs(extent[:, :, slot.start - BLOCK : slot.start]).min(axis=-1).max() > 0
    session.close()


def test_mage_reuses_step_0s_selection_and_oracle_does_not():
    """After a block, mage's pool still holds what step 0 chose; oracle's what its commit chose."""
    pools = {}
    for method in CURRENT:
        session = start(method, (150,))
        first, step = [], session.current.step

        def keep(x, state, lengths, step=step, session=session, first=first):
            out = step(x, state, lengths)
            first.append([np.asarray(k)[:, BLOCK:].copy() for k, _ in session.cache.pool])
            return out

        session.current.step = keep
        advance(session)
        last = [np.asarray(k)[:, BLOCK:] for k, _ in session.cache.pool]
        pools[method] = all(
            np.array_equal(mine, theirs) for mine, theirs in zip(first[0], last, strict=True)
        )
        session.close()
    assert pools == {"mage": True, "mage-offload": True, "oracle": False}


@pytest.mark.parametrize("method", CURRENT)
def test_a_broken_prefix_fails_its_request_alone(method):
    """KV that is not finite ends one request with a sentence; its slot serves the next one."""
    given = prompts((60, 50, 6))
    good = answers(engine(method, 0.2, max_batch=2), given, RULE)
    made, results = engine(method, 0.2, max_batch=2), {}
    for item in made.generate(given, RULE, stream=True):
        if hasattr(item, "finish_reason"):
            results[item.id] = item
        elif item.id == "0" and (slot := made.session.batch.slots[0]) is not None:
            for extent in slot.booking.extents:
                extent[:, :, 40] = np.nan
    assert "not finite" in results["0"].error
    assert {name: results[name].token_ids for name in "12"} == {name: good[name] for name in "12"}
    assert made.session.full_pool.used == 0


def test_all_ways_of_mage_decode_alike():
    """Streamed, on the device layer by layer, or on the CPU: one selection, one answer."""
    given = prompts((150, 60, 50, 6, 1))
    made = {
        method: answers(engine(method, 0.2, max_batch=2), given, RULE)
        for method in ("mage", "mage-offload", "mage-offload-cpu")
    }
    assert made["mage"] == made["mage-offload"] == made["mage-offload-cpu"]


def test_an_unknown_selector_names_the_known_ones():
    with pytest.raises(ValueError, match="mage, mage-offload, mage-offload-cpu, infinigen, oracle"):
        make_selector("quest")


@pytest.mark.parametrize("method", [*CURRENT, "merged-late"])
def test_nothing_leaks_after_finish_abort_and_error(method):
    made = engine(method, 0.2, max_batch=2)
    rng = np.random.default_rng(0)
    given = [
        {"id": str(n), "prompt_ids": p} for n, p in enumerate(prompts(rng.integers(1, 120, 6)))
    ]
    given.insert(3, {"id": "bad", "prompt_ids": [TINY.mask_token_id]})
    done = {}
    for result in made.generate(given, GenerationConfig(max_new_tokens=20, threshold=0.3)):
        done[result.id] = result
        if len(done) == 2:
            made.abort("3")
            made.abort("5")
    assert set(done) == {item["id"] for item in given}
    assert "aborted" in done["5"].error
    stream = made.generate(prompts((40, 50, 60)), RULE, stream=True)
    next(stream)
    stream.close()
    pool = made.session.full_pool
    pool.check_integrity()
    assert pool.used == 0
    assert pool.free == pool.nbytes
    assert answers(made, prompts((40,)), RULE)
    streams = weakref.ref(made.session.current or made.session.retrieval)
    made.close()
    gc.collect()
    assert streams() is None
