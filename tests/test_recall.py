"""The study of recall: estimators against plain loops, trajectories against the engine."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from networks import TINY, answers, engine, plain_pass, prompts, tiny_model

from benchmarks import estimators, lookahead, recall
from benchmarks.drafted import drafted
from benchmarks.speculated import speculated
from benchmarks.trajectories import Network, decode, look_ahead
from herald_jax import GenerationConfig
from herald_jax.diffusion.draft import equal_parts
from herald_jax.selection import HeraldDraft, HeraldMerged, Merged
from host_kernels import reference

BLOCK, HEADS, GROUP = TINY.block_size, TINY.num_kv_heads, TINY.group_size
SPARSE = range(TINY.exact_layers, TINY.num_layers)
FORCED = GenerationConfig(max_new_tokens=40, threshold=0.3, stop_token_ids=())
BLOCKS = 5


@pytest.fixture(scope="module")
def network() -> Network:
    return Network(TINY, tiny_model())


@pytest.fixture(scope="module")
def trajectory(network):
    return decode(network, prompts([90])[0], FORCED, BLOCKS)


@pytest.fixture
def draw() -> np.random.Generator:
    return np.random.default_rng(7)


def arrays(draw, *shapes):
    return [draw.normal(size=shape).astype(np.float32) for shape in shapes]


def softmax_rows(q, keys, length):
    """[S, H_q, R] by loops over positions and query heads."""
    result = np.zeros((len(q), q.shape[1], len(keys)))
    for s, h in np.ndindex(q.shape[:2]):
        scores = [
            float(q[s, h].astype(float) @ keys[r, h // GROUP].astype(float)) * q.shape[2] ** -0.5
            for r in range(length)
        ]
        weights = np.exp(np.array(scores) - max(scores))
        result[s, h, :length] = weights / weights.sum()
    return result


def naive_sets(scores, counts, sinks=4):
    """Per budget and head: a Python set of rows."""
    found = []
    for count in counts:
        found.append([])
        for row in scores:
            order = sorted(range(len(row)), key=lambda r: (r >= sinks, -row[r], r))
            forced = list(range(min(sinks, count)))
            found[-1].append(set((forced + [r for r in order if r not in forced])[:count]))
    return found


def as_sets(chosen):
    return [[set(np.flatnonzero(row).tolist()) for row in budget] for budget in chosen]


@pytest.mark.parametrize("length", [1, 9, 32])
def test_importance_and_probabilities_equal_loops(draw, length):
    q, keys = arrays(draw, (6, HEADS * GROUP, 16), (32, HEADS, 16))
    voters = np.array([True, False, True, True, False, False])
    wanted = softmax_rows(q, keys, length)
    grouped = wanted.reshape(6, HEADS, GROUP, 32)
    np.testing.assert_allclose(
        estimators.importance(q, keys, length, voters),
        grouped[voters].mean(axis=0).sum(axis=1),
        atol=1e-5,
    )
    flat = grouped.transpose(1, 0, 2, 3).reshape(HEADS, 6 * GROUP, 32)
    np.testing.assert_allclose(estimators.probabilities(q, keys, length), flat, atol=1e-5)


def test_merge_is_the_mean_over_voters(draw):
    (q,) = arrays(draw, (5, 4, 16))
    voters = np.array([False, True, True, False, True])
    wanted = sum(q[i] for i in range(5) if voters[i]) / 3
    np.testing.assert_allclose(estimators.merge(q, voters)[0], wanted, atol=1e-6)


def test_advancing_a_query_equals_computing_it_there(network):
    """One [MASK] in the first layer, where only RoPE knows the position."""
    model = tiny_model()
    x = model.embed(jnp.array([[TINY.mask_token_id]]))
    here, there = (model.layers[0].pre(x, jnp.array([[at]]))[0][0] for at in (37, 37 + BLOCK))
    moved = estimators.advance(here, BLOCK, TINY)
    np.testing.assert_allclose(moved, there, atol=2e-5)
    assert np.abs(np.asarray(here) - np.asarray(there)).max() > 0.1
    back = estimators.advance(moved, -BLOCK, TINY)
    np.testing.assert_allclose(back, here, atol=2e-5)


def test_top_rerank_and_judge_equal_sets(draw):
    scores, exact = draw.integers(0, 6, (2, HEADS, 40)).astype(np.float32)  # many ties
    counts, more = np.array([2, 7, 20, 40]), np.array([4, 14, 40, 40])
    chosen = estimators.top(scores, counts)
    assert as_sets(chosen) == naive_sets(scores, counts)
    candidates = estimators.top(scores, more)
    again = as_sets(estimators.rerank(exact, candidates, counts))
    for k, head in np.ndindex(len(counts), HEADS):
        allowed = np.where(candidates[k, head], exact[head], -np.inf)
        assert again[k][head] == naive_sets([allowed], [counts[k]])[0][0]
    mass = draw.random((3, HEADS, 40)).astype(np.float32)
    wanted = np.stack([estimators.top(one, counts) for one in mass])
    found, captured = estimators.judge(chosen[None], wanted, mass)
    for t, k, head in np.ndindex(3, len(counts), HEADS):
        a, r = as_sets(chosen)[k][head], as_sets(wanted[t])[k][head]
        assert found[0, t, k, head] == pytest.approx(len(a & r) / len(r))
        share = sum(mass[t, head, i] for i in a) / sum(mass[t, head, i] for i in r)
        assert captured[0, t, k, head] == pytest.approx(share, rel=1e-5)


def test_refinement_equals_attention_over_the_gathered_rows(draw):
    """As the engine does it: a softmax over candidates, tail and own block alone."""
    rows, length, voters = 24, 40, 3
    q, keys = arrays(draw, (voters, HEADS * GROUP, 16), (length, HEADS, 16))
    counts = np.array([6, 10])
    candidates = estimators.top(draw.random((HEADS, rows)), 2 * counts)
    attended = np.asarray(estimators.probabilities(q, keys, length))
    refined = as_sets(estimators.refine(attended, candidates, counts))
    for k, head in np.ndindex(len(counts), HEADS):
        kept = [*np.flatnonzero(candidates[k, head]), *range(rows, length)]
        heads = slice(head * GROUP, (head + 1) * GROUP)
        own = np.repeat(keys[kept, head : head + 1], HEADS, axis=1)
        weights = softmax_rows(q, own, len(kept))[:, heads].sum(axis=(0, 1))
        scores = np.full(rows, -np.inf)
        scores[kept[: -(length - rows)]] = weights[: -(length - rows)]
        assert refined[k][head] == naive_sets([scores], [counts[k]])[0][0]


@pytest.mark.parametrize("length", [8, 64, 90, 113])
@pytest.mark.parametrize(
    "rule", [{"threshold": 0.3}, {"threshold": 0.95}, {"steps": 3}], ids=lambda rule: str(rule)
)
def test_tokens_equal_the_engines_dense_method(network, length, rule):
    prompt = prompts([length])[0]
    generation = GenerationConfig(max_new_tokens=24, **rule)
    (wanted,) = answers(engine("dense"), [prompt], generation).values()
    made = decode(network, prompt, generation, 4).generated[:24]
    stops = [at for at, token in enumerate(made) if token in TINY.stop_token_ids]
    assert (made[: stops[0]] if stops else made) == wanted


def test_the_cache_is_that_of_a_whole_pass(network, trajectory):
    """Final tokens in one uncached pass give the committed keys, and the commit's queries."""
    tokens = [*prompts([90])[0], *trajectory.generated]
    for index, (q, k, _) in enumerate(plain_pass(tokens)):
        cached = trajectory.cache[index][0][0, : len(tokens)]
        np.testing.assert_allclose(cached, k, atol=2e-4)
        for block in trajectory.blocks:
            rows = slice(block.start, block.start + BLOCK)
            np.testing.assert_allclose(block.queries[-1][index], q[rows], atol=2e-4)
            np.testing.assert_allclose(block.keys[-1][index], k[rows], atol=2e-4)


@pytest.fixture
def captured(monkeypatch):
    """What a selector of the engine was asked, when everything is selected: as dense decodes."""

    def run(method, selector, name, prompt):
        seen = []
        original = getattr(selector, name)

        def watch(self, layer, *rest):
            job = rest[-1]
            if job.active[0]:
                parts = [p for given in rest[:-1] for p in (given if name == "choose" else [given])]
                queries = [None if part is None else np.array(part[0]) for part in parts]
                keys = np.array(job.extents[layer][0], np.float32)
                seen.append((layer, int(job.start[0]), queries, keys, int(job.attend_len[0])))
            return original(self, layer, *rest)

        monkeypatch.setattr(selector, name, watch)
        answers(engine(method, 1.0, max_batch=1), [prompt], FORCED)
        return seen

    return run


def test_the_drafts_representative_equals_the_engines(network, trajectory, captured):
    seen = captured("herald-draft", HeraldDraft, "attend", prompts([90])[0])
    blocks = {block.start: block for block in trajectory.blocks}
    assert any((block.draft != block.tokens).any() for block in blocks.values())
    compared = 0
    for layer, start, (q, self_k, _), extent, length in seen:
        made, rows = look_ahead(network, trajectory, blocks[start], "drafted", 1)
        at = layer + TINY.exact_layers
        np.testing.assert_allclose(made.queries[at, 0], q, atol=5e-4)
        scores = estimators.importance(
            made.queries[at], made.cache[at][0][0], rows, np.ones(1, bool)
        )
        wanted = reference.importance(q, extent, length, self_k=self_k)
        np.testing.assert_allclose(scores[:, :length], wanted, atol=5e-4)
        compared += 1
    assert compared >= 2 * len(SPARSE)


def test_the_merged_query_equals_the_engines(network, trajectory, captured):
    seen = captured("merged", Merged, "choose", prompts([90])[0])
    blocks = {block.start: block for block in trajectory.blocks}
    assert len(seen) >= 2 * len(SPARSE)
    for layer, start, (q, elsewhere), _, _ in seen:
        assert elsewhere is None
        block = blocks[start]
        moved = estimators.advance(block.queries[0][layer + TINY.exact_layers], BLOCK, TINY)
        np.testing.assert_allclose(estimators.merge(moved, block.masked[0])[0], q, atol=5e-4)


def test_drafted_queries_and_their_mass_equal_the_engines(network, trajectory, captured):
    """Scored offline as the native kernel is told to score: queries by part, mass outside."""
    seen = captured("herald-merged", HeraldMerged, "choose", prompts([90])[0])
    numbers = {block.start: number for number, block in enumerate(trajectory.blocks)}
    parts = equal_parts(BLOCK // HeraldMerged.spacing, HeraldMerged.segments)
    assert len(seen) >= 2 * len(SPARSE)
    for layer, start, (q, elsewhere), extent, _ in seen:
        made = drafted(network, trajectory, numbers[start], None)
        at = layer + TINY.exact_layers
        merged = estimators.merge_parts(made.queries[at], parts)
        keys = jnp.concatenate([trajectory.cache[at][0][0][:start], made.keys[at]])
        scores = estimators.importance(merged, keys, len(keys), np.ones(parts, bool))
        wanted = reference.importance(q, extent, start, elsewhere=elsewhere)
        np.testing.assert_allclose(parts * scores[:, :start], wanted, atol=1e-3)


def test_speculated_queries_are_those_of_the_layer_before(network, trajectory):
    """Layer 1's own projection of what layer 0 attends with, at the masked rows of step 0."""
    block, model = trajectory.blocks[2], tiny_model()
    made = speculated(network, trajectory, block)
    tokens = np.where(block.masked[0], TINY.mask_token_id, block.tokens)
    normed = model.layers[0].input_norm(model.embed(jnp.asarray(tokens)[None]))
    positions = jnp.arange(block.start, block.start + BLOCK)[None]
    for layer in (0, 1):
        q = model.layers[layer].attention.qkv(normed, positions)[0][0]
        np.testing.assert_allclose(
            made.queries[layer], np.asarray(q)[block.masked[0]].mean(0), atol=1e-4
        )


@pytest.mark.slow
def test_speculation_is_calibrated_as_the_engine_is(network, trajectory):
    made = engine("infinigen", max_batch=1)
    answers(made, prompts([90])[:1], FORCED)
    wanted = speculated(network, trajectory, trajectory.blocks[1]).projections
    for layer, part in zip(SPARSE, made.session.current.partial.projections, strict=True):
        # Singular vectors and their opposites serve alike.
        np.testing.assert_allclose(np.abs(part[0]), np.abs(wanted[layer]), atol=2e-3)


CASE = lookahead.Case((0.4, 0.6, 1.0), (1.5, 2.0))


@pytest.fixture(scope="module")
def measured(network, trajectory):
    return lookahead.measure(network, trajectory, 1, CASE, seed=0)


@pytest.mark.slow
def test_everything_is_found_at_a_budget_of_one(measured):
    for name, unit in measured.items():
        np.testing.assert_allclose(unit[..., -1, :2], 1.0, atol=1e-4, err_msg=name)
    partial = measured[lookahead.label("random", "first step")][..., 0, 0]
    assert partial.max() < 1


def test_oracles_agree_with_themselves(network, trajectory, measured):
    """mage is the step-0 oracle, and with every other step it agrees as plain loops say."""
    itself = measured[lookahead.label("mage", "first step")][..., :2]
    np.testing.assert_allclose(itself, 1.0, atol=1e-5)
    now, following = trajectory.blocks[1:3]
    assert following.steps > 1
    counts = lookahead.entries(CASE, now.start)
    for at, layer in enumerate(SPARSE):
        keys = np.array(trajectory.cache[layer][0][0])
        sets, shares = [], []
        for step in range(following.steps):
            keys[following.start : following.start + BLOCK] = following.keys[step][layer]
            weights = softmax_rows(
                np.asarray(following.queries[step][layer]), keys, following.start + BLOCK
            )
            votes = weights[following.masked[step]].mean(axis=0)
            scores = votes.reshape(HEADS, GROUP, -1).sum(axis=1)[:, : now.start]
            sets.append(naive_sets(scores, counts))
            prefix = weights[following.masked[step], :, : now.start].sum(axis=2).mean(axis=0)
            shares.append(prefix.reshape(HEADS, GROUP).mean(axis=1))
        for name, wanted in (("first step", shares[0]), ("every step", np.mean(shares, axis=0))):
            found = measured[lookahead.label("window", name)][at, :, :, 2]
            np.testing.assert_allclose(found, wanted[:, None] * np.ones(len(counts)), atol=1e-5)
        assert 0 < shares[0].min() < shares[0].max() < 1
        for k, head in np.ndindex(len(counts), HEADS):
            first = sets[0][k][head]
            wanted = np.mean([len(first & one[k][head]) / counts[k] for one in sets])
            found = measured[lookahead.label("mage", "every step")][at, head, k, 0]
            assert found == pytest.approx(wanted, abs=1e-5)


def test_more_candidates_never_find_less(measured):
    def at(ratio, refined):
        more = {"candidates_ratio": ratio, "refined": refined}
        return measured[lookahead.label("merged", "first step", **more)][..., 0]

    plain = {"step": "first", "rotation": True, "mean_of": "queries"}
    base = measured[lookahead.label("merged", "first step", **plain)][..., 0]
    assert (base <= at(1.5, False)).all()
    assert (at(1.5, False) <= at(2.0, False)).all()
    assert (at(2.0, True) <= at(2.0, False) + 1e-6).all()


def test_measuring_again_gives_the_same(network, trajectory, measured):
    again = lookahead.measure(network, trajectory, 1, CASE, seed=0)
    assert measured.keys() == again.keys()
    for name, unit in measured.items():
        np.testing.assert_array_equal(unit, again[name], err_msg=name)


def test_rows_are_statistics_of_units():
    values = np.linspace(0, 1, 4 * 2 * 3, dtype=np.float32).reshape(4, 2, 3)
    share = np.linspace(1, 0, values.size, dtype=np.float32).reshape(values.shape) ** 3
    unit = np.stack([values, values**2, share], axis=-1)[..., None, :]
    names = [
        lookahead.label(selector, step)
        for selector in {name for names in recall.BUCKETED.values() for name in names}
        for step in ("first step", "every step")
    ]
    case = lookahead.Case((0.05,), ())
    rows = list(recall.rows_of(dict.fromkeys(names, unit), 1, case, 0.05))
    pooled = next(row for row in rows if "layer" not in row and not row["bucketed_by"])
    assert pooled["n"] == 24
    assert pooled["recall"] == pytest.approx(values.mean(), abs=1e-4)
    assert pooled["p10"] == pytest.approx(np.percentile(values, 10), abs=1e-4)
    assert pooled["share"] == pytest.approx(share.mean(), abs=1e-4)
    weighted = sum(a * b for a, b in zip(values.ravel(), share.ravel(), strict=True)) / share.sum()
    assert pooled["weighted"] == pytest.approx(weighted, abs=1e-4)
    assert pooled["weighted_mass"] < pooled["weighted"] < pooled["recall"]
    head = next(row for row in rows if row.get("layer") == 2 and row.get("head") == 1)
    assert head["recall"] == pytest.approx(values[:, 1, 1].mean(), abs=1e-4)
    assert head["mass"] == pytest.approx((values[:, 1, 1] ** 2).mean(), abs=1e-4)
    blind = next(recall.rows_of({names[0]: unit * np.float32([1, 1, 0])}, 1, case, 0.0))
    assert blind["weighted"] == pytest.approx(values.mean(), abs=1e-4)
    inside = [row for row in rows if row["bucketed_by"] and row["selector"] == "centre"]
    assert sum(row["n"] for row in inside if row["reference"] == "every step") == 24
    assert all(row["bucket"][0] <= row["recall"] <= row["bucket"][1] for row in inside)


def test_wrong_options_are_refused_in_one_sentence():
    good = recall.parser().parse_args([])
    recall.check(good)
    for name, value in (("detail", 0.04), ("items", 0), ("blocks", 1), ("contexts", [8])):
        bad = recall.parser().parse_args([])
        setattr(bad, name, value)
        with pytest.raises(ValueError, match=f"--{name} "):
            recall.check(bad)


@pytest.mark.slow
def test_an_interrupted_run_goes_on_and_ends_equal(monkeypatch, tmp_path, capsys):
    """The command itself over the tiny network; half a line is dropped, whole ones are reused."""
    config = replace(TINY, stop_token_ids=())
    monkeypatch.setattr(recall.checkpoint, "load", lambda path, dtype: (config, tiny_model()))
    monkeypatch.setattr(recall.Tokenizer, "from_directory", lambda path, config: None)

    def prompt_ids(_, task, tokens, index):
        return prompts([tokens - 6], seed=index + 9 * (task == "several"))[0]

    monkeypatch.setattr(recall, "prompt_ids", prompt_ids)
    out, picture = tmp_path / "recall.json", tmp_path / "recall.png"
    options = ["--contexts", "256", "--items", "1", "--blocks", "3", "--threshold", "0.3"]
    options += ["--tasks", "passage", "several"]
    pytest.importorskip("matplotlib")

    def run(*more):
        monkeypatch.setattr(sys, "argv", ["recall", "--json", str(out), *options, *more])
        recall.main()
        return json.loads(out.read_text()), capsys.readouterr()

    first, _ = run()
    kept = tmp_path / "recall.items.jsonl"
    whole = kept.read_text()
    kept.write_text(whole[: whole.index("\n") + 100])
    second, printed = run("--plot", str(picture))
    assert first["rows"] == second["rows"]
    assert kept.read_text() == whole
    assert printed.out.startswith("| task | context | reference | selection |")
    assert picture.stat().st_size > 10_000
    row = first["rows"][0]
    named = {"model", "selector", "reference", "layer", "context", "budget"}
    assert named | {"task", "recall", "mass", "p10", "share", "weighted"} <= row.keys()
    assert {row["task"] for row in first["rows"]} == {"passage", "several", "all"}
    assert jax.tree.all(jax.tree.map(np.isfinite, [r["recall"] for r in first["rows"]]))
