"""What the merged query's variants choose, and the ratio of candidates to kept rows."""

from __future__ import annotations

import functools
import json
import math

import jax.numpy as jnp
import numpy as np
import pytest
from networks import TINY, answers, engine, prompts, tiny_model
from sessions import RULE, advance, choose_by_definition, start

from herald_jax import EngineConfig, GenerationConfig
from herald_jax.cli import main
from herald_jax.engine.step_programs import StepPrograms
from herald_jax.models import attention_parts
from herald_jax.models.attention import attend
from herald_jax.selection import SELECTORS
from host_kernels import reference

BLOCK = TINY.block_size
MERGED = [name for name, made in SELECTORS.items() if made.refines]


def plain_layer(layers, x, positions, keys, values, lengths):
    """One sparse layer over a pool: the hidden state and the queries [N, B, H_q, D]."""
    q, k, v = layers[0].pre(x, positions)
    keys, values = keys.at[:, :BLOCK].set(k), values.at[:, :BLOCK].set(v)
    return layers[0].post(x, attend(q, keys, values, lengths)), q


@functools.cache
def turned(positions: int) -> np.ndarray:
    """The rotation by ``positions`` as a complex factor per channel pair, in float64."""
    half = TINY.head_dim // 2
    return np.exp(1j * positions * TINY.rope_theta ** (-np.arange(half) / half))


def rotated(q: np.ndarray, positions: int) -> np.ndarray:
    half = TINY.head_dim // 2
    z = (q[..., :half] + 1j * q[..., half:]) * turned(positions)
    return np.concatenate([z.real, z.imag], axis=-1)


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("method", [name for name in MERGED if not SELECTORS[name].drafted])
def test_merged_queries_and_their_choice(method, blocks, monkeypatch):
    """Per sparse layer: mean over voters at the right step, the rotation, keys-only top-k."""
    session, seen = start(method), {"inputs": []}
    begin, decide = session.retrieval.begin, session.main._decide

    def watch_begin(job, rows, **rest):
        seen.update(rest, job=job, steps=len(seen["inputs"]))
        begin(job, rows, **rest)

    def watch_decide(x, state, decoding, step):
        # Before the decision: what this step saw, and the pool it saw it with.
        seen["inputs"].append((state, seen.pop("before")))
        return decide(x, state, decoding, step)

    embed = session.main._exact

    def watch_exact(x, state):
        out = embed(x, state)
        seen["before"] = (
            np.asarray(out),
            [tuple(np.asarray(part).copy() for part in pair) for pair in session.cache.pool],
        )
        return out

    monkeypatch.setattr(session.retrieval, "begin", watch_begin)
    monkeypatch.setattr(session.main, "_decide", watch_decide)
    monkeypatch.setattr(session.main, "_exact", watch_exact)
    for _ in range(blocks):
        seen["inputs"].clear()
        used, kept = session.batch.pool_rows(), session.batch.kept_rows()
        advance(session)
    selector, job = session.selector, seen["job"]
    assert seen["steps"] == selector.merge_step + 1, "retrieval began at another step"
    state, (x, pools) = seen["inputs"][selector.merge_step]
    lengths = kept if selector.merge_step else used
    masked = np.asarray(state.masked)
    voters = np.where(masked.any(1, keepdims=True), masked, True)
    if selector.merge_step:
        assert not masked.all(), "step 0 accepted nothing"
    stack, exact = session.main.stack, session.shape.exact_layers
    for index, group in enumerate(stack.groups(exact, len(stack), 1)):
        x, q = stack.on_layers(plain_layer, group)(x, state.positions, *pools[index], lengths)
        q = np.asarray(q)
        want = np.stack([q[n][voters[n]].astype(np.float64).mean(0) for n in range(2)])
        want = rotated(want, BLOCK) if method != "merged-unrotated" else want
        got, elsewhere = seen["queries"][index].result()
        assert elsewhere is None
        got = np.asarray(got)
        np.testing.assert_allclose(got, want, atol=1e-4)
        np.testing.assert_array_equal(job.indices[index], choose_by_definition(job, index, got))
    np.testing.assert_array_equal(job.candidates, np.minimum(job.select_len, job.budget))
    session.close()


def test_variants_choose_differently_at_a_small_budget():
    """Each attribute reaches the selection: no variant is another by accident."""
    chosen = {}
    for method in MERGED:
        session, begin = start(method, (150,)), None
        begin = session.retrieval.begin

        def watch(job, rows, begin=begin, method=method, **rest):
            chosen[method] = job
            begin(job, rows, **rest)

        session.retrieval.begin = watch
        advance(session)
        session.close()
    rows = {name: job.indices[..., : job.budget[0]] for name, job in chosen.items()}
    assert not np.array_equal(rows["merged"], rows["merged-unrotated"])
    assert not np.array_equal(rows["merged"], rows["merged-late"])
    assert chosen["herald-merged"].candidates[0] == 1.5 * chosen["merged"].candidates[0]


@pytest.mark.parametrize("sinks", [0, 3])
def test_refinement_keeps_what_the_blocks_own_masks_attend_most(sinks):
    """After step 0 the pool is its own rows, the tail, and the K_r best candidates of each head."""
    rng = np.random.default_rng(sinks)
    selected, candidates, slots = 6, 14, 3
    heads, dim, fixed = TINY.num_kv_heads, TINY.head_dim, 2 * BLOCK
    programs = StepPrograms(TINY, sinks=sinks, selected=selected)
    layer = tiny_model().layers[-1]
    shape = (slots, fixed + candidates, heads, dim)
    keys, values = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))
    keys[:, fixed:] *= 4
    x = rng.standard_normal((slots, BLOCK, TINY.hidden_size)).astype(np.float32)
    positions = 100 + np.tile(np.arange(BLOCK), (slots, 1))
    masked = rng.random((slots, BLOCK)) < 0.5
    masked[2] = False
    lengths, budget = np.array([fixed + 14, fixed + 9, fixed + 5]), np.array([6, 5, 2])
    buffer = (jnp.asarray(keys), jnp.asarray(values))
    _, (kept,), _, _ = programs.query_step(
        [layer], [buffer], jnp.asarray(x), jnp.asarray(positions), jnp.asarray(lengths),
        jnp.asarray(masked), jnp.asarray(budget),
    )  # fmt: skip
    q, k, v = map(np.asarray, layer.pre(jnp.asarray(x), jnp.asarray(positions)))
    for n in range(slots):
        own_k, own_v = keys[n].copy(), values[n].copy()
        own_k[:BLOCK], own_v[:BLOCK] = k[n], v[n]
        voters = masked[n] if masked[n].any() else np.ones(BLOCK, bool)
        for head in range(heads):
            mass = np.zeros(lengths[n])
            for place in np.flatnonzero(voters):
                for query in q[n, place].reshape(heads, -1, dim)[head]:
                    s = own_k[: lengths[n], head].astype(np.float64) @ query * dim**-0.5
                    mass += np.exp(s - s.max()) / np.exp(s - s.max()).sum()
            wanted = reference.top_rows(mass[fixed:], int(budget[n]), sinks)
            for got, before in zip(kept, (own_k, own_v), strict=True):
                got = np.asarray(got)[n, :, head]
                np.testing.assert_allclose(got[:fixed], before[:fixed, head], rtol=1e-6)
                rows = got[fixed : fixed + budget[n]]
                found = [int(np.argmin(np.abs(before[fixed:, head] - r).sum(1))) for r in rows]
                assert sorted(found) == list(wanted)
                np.testing.assert_array_equal(before[fixed:, head][found], rows)


# -- C / K ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "own", "other"), [("merged", 1, 2), ("herald-merged", 1.5, 1)])
def test_a_ratio_is_the_methods_own_unless_given(method, own, other):
    given = prompts((150, 33, 90, 7))
    made = {
        ratio: answers(engine(method, 0.25, max_batch=2, candidates_ratio=ratio), given, RULE)
        for ratio in (None, own, other)
    }
    assert made[None] == made[own]
    assert made[None] != made[other]


@pytest.mark.parametrize(
    ("method", "ratio"),
    [("herald-merged", 1), ("herald-merged", 1.25), ("merged-late", 1.5), ("merged", 50)],
)
def test_a_ratio_sizes_candidates_and_plan(method, ratio):
    """Fetched: ceil(C/K * K_r) rows of what there is; held: what was planned."""
    given = prompts((150, 40))
    made = engine(method, 0.25, max_batch=2, candidates_ratio=ratio)
    answers(made, given, RULE)
    session, shape = made.session, made.sizing.shape(method, 192)
    assert session.shape == shape
    assert shape.candidates == min(192 - 2 * BLOCK, math.ceil(ratio * shape.selected))
    assert shape.pool_rows == 2 * BLOCK + shape.candidates
    assert session.cache.pool[0][0].shape[1] == shape.pool_rows
    summary = made.summary(1.0)
    assert summary["candidates_ratio"] == ratio


@pytest.mark.parametrize("transfer", ["changes", "full"])
def test_a_budget_of_almost_everything_is_still_refined(transfer, monkeypatch):
    """Pools are rounded up so that attention can cut them; K must not reach C by that."""
    given, rule = prompts((150, 90)), GenerationConfig(max_new_tokens=30, threshold=0.3)
    found = []
    for least in (attention_parts.LEAST_ROWS, 4):
        monkeypatch.setattr(attention_parts, "LEAST_ROWS", least)
        made = engine("herald-merged", 0.97, max_batch=2, transfer=transfer)
        found.append(answers(made, given, rule))
        assert made.session.shape.refines
    assert found[0] == found[1]


def test_plan_takes_a_ratio_where_it_applies(capsys):
    reports = {}
    for ratio in (None, "3"):
        options = [] if ratio is None else ["--candidates-ratio", ratio]
        assert main(["plan", "--max-context", "1024", *options, "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)["methods"]
        reports[ratio] = {row["method"]: row for row in rows}
    for method, row in reports["3"].items():
        larger = row["pools"] > reports[None][method]["pools"]
        assert larger == (method in MERGED), method
    assert reports[None]["herald-merged"]["pools"] > reports[None]["merged"]["pools"]


@pytest.mark.parametrize(
    "method", ["auto", "dense", *(name for name in SELECTORS if name not in MERGED)]
)
def test_a_ratio_for_what_does_not_refine_is_refused(method, capsys):
    with pytest.raises(
        ValueError, match=f"--candidates-ratio 2 .*--method {method}.*herald-merged"
    ):
        engine(method, candidates_ratio=2)
    options = ["--prompt", "a", "--method", method, "--candidates-ratio", "2"]
    assert main(["generate", *options]) == 2
    said = capsys.readouterr().err
    assert "--candidates-ratio 2 does not go with" in said
    assert len(said.strip().splitlines()) == 1


@pytest.mark.parametrize("ratio", [0.99, 0, -2, math.nan, math.inf])
def test_a_ratio_below_one_is_refused(ratio):
    with pytest.raises(ValueError, match=r"--candidates-ratio .* give 1 "):
        EngineConfig(method="herald-merged", candidates_ratio=ratio)
