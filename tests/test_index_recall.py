"""Key indexes: what they find, by plain loops, and on real keys of the embedded model."""

from __future__ import annotations

import json
import sys

import ml_dtypes
import numpy as np
import pytest

from benchmarks import index_recall, key_indexes
from benchmarks.prompts import prompt_ids
from benchmarks.trajectories import Network, decode
from herald_jax import GenerationConfig, checkpoint
from herald_jax.engine.engine import EMBEDDED
from herald_jax.tokenizer import Tokenizer
from host_kernels import reference

HEADS, GROUP, DIM = 2, 3, 16


@pytest.fixture
def draw() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.mark.parametrize("rows", [1, 31, 32, 70])
def test_rounded_keys_equal_loops(draw, rows):
    keys = draw.normal(size=(rows, HEADS, DIM)).astype(np.float32)
    q = draw.normal(size=(HEADS * GROUP, DIM)).astype(np.float32)
    stored, asked = key_indexes.rounded("int4 token", keys, q)
    for r, h in np.ndindex(rows, HEADS):
        scale = max(abs(keys[r, h])) / 7
        wanted = [round(float(value / scale)) * scale for value in keys[r, h]]
        np.testing.assert_allclose(stored[r, h], wanted, atol=1e-5)
    for one, exact in zip(asked, q, strict=True):
        scale = max(abs(exact)) / 127
        wanted = [round(float(value / scale)) * scale for value in exact]
        np.testing.assert_allclose(one, wanted, atol=1e-5)
    stored, _ = key_indexes.rounded("int4 channel", keys, q)
    for at in range(0, rows, 32):
        for h, c in np.ndindex(HEADS, DIM):
            group = keys[at : at + 32, h, c]
            if len(group) > 1:
                step = (group.max() - group.min()) / 15
                wanted = np.round((group - group.min()) / step) * step + group.min()
                np.testing.assert_allclose(stored[at : at + 32, h, c], wanted, atol=1e-5)
    stored, _ = key_indexes.rounded("bf16", keys, q)
    np.testing.assert_array_equal(stored, keys.astype(ml_dtypes.bfloat16).astype(np.float32))
    stored, asked = key_indexes.rounded("exact", keys, q)
    np.testing.assert_array_equal(stored, keys)
    np.testing.assert_array_equal(asked, q)


def test_centred_keys_differ_from_the_exact_by_half_a_step(draw):
    """Rounding happens in the rotated space: there no component is off by more than half a step."""
    keys = draw.normal(size=(40, HEADS, DIM)).astype(np.float32) + 5
    stored, _ = key_indexes.rounded("int4 centred", keys, keys[:, 0])
    bits = np.arange(DIM)
    signs = [[(-1) ** bin(i & j).count("1") for j in bits] for i in bits]
    turn = np.array(signs) / np.sqrt(DIM)
    np.testing.assert_allclose(turn @ turn.T, np.eye(DIM), atol=1e-12)
    before, after = ((part - keys.mean(0)) @ turn for part in (keys, stored))
    step = np.abs(before).max(-1, keepdims=True) / 7
    assert (np.abs(after - before) <= step / 2 + 1e-5).all()
    assert np.abs(after - before).max() > step.min() / 4
    plain, _ = key_indexes.rounded("int4 token", keys, keys[:, 0])
    assert np.abs(plain - keys).mean() > 2 * np.abs(stored - keys).mean()


@pytest.mark.parametrize("index", ["exact", *key_indexes.INDEXES])
def test_what_is_found_equals_the_definition(draw, index):
    """Scan by rounded keys, keep by exact ones; what no candidate has counts as rounded."""
    rows = 70
    keys = draw.normal(size=(rows, HEADS, DIM)).astype(np.float32)
    q = 2 * draw.normal(size=(HEADS * GROUP, DIM)).astype(np.float32)
    outside = draw.normal(size=HEADS * GROUP).astype(np.float32)
    counts, most = np.array([5, 9, 70]), np.array([5, 21, 70])
    kept, candidates = key_indexes.find(index, q, keys, counts, most, outside)
    assert kept.shape == candidates.shape == (3, HEADS, rows)
    np.testing.assert_array_equal(kept.sum(-1), counts[:, None].repeat(HEADS, 1))
    np.testing.assert_array_equal(candidates.sum(-1), most[:, None].repeat(HEADS, 1))
    assert (kept <= candidates).all()
    if index in key_indexes.PRODUCT:
        kind = key_indexes.PRODUCT[index]
        codes = reference.quantise_keys(keys, kind), reference.quantise_queries(q, kind)
        seen, asked = (c * s[..., None] for c, s in codes)
    else:
        seen, asked = key_indexes.rounded(index, keys, q)
    for h in range(HEADS):
        mine = slice(h * GROUP, (h + 1) * GROUP)
        rounded, exact = (
            np.exp(queries[mine].astype(float) @ rows_[:, h].T.astype(float) * DIM**-0.5)
            for queries, rows_ in ((asked, seen), (q, keys))
        )
        total = rounded.sum(1) + np.exp(outside[mine])
        scanned = (rounded / total[:, None]).sum(0)
        for e, (count, several) in enumerate(zip(counts, most, strict=True)):
            wanted = reference.top_rows(scanned, several, key_indexes.SINKS)
            assert list(np.flatnonzero(candidates[e, h])) == list(wanted)
            rest = total - rounded[:, wanted].sum(1)
            normaliser = rest + exact[:, wanted].sum(1)
            judged_here = np.full(rows, -np.inf)
            judged_here[wanted] = (exact[:, wanted] / normaliser[:, None]).sum(0)
            best = reference.top_rows(judged_here, count, key_indexes.SINKS)
            assert list(np.flatnonzero(kept[e, h])) == list(best)


@pytest.fixture(scope="module")
def measured():
    """Rows of one document of 2,048 tokens, at 5%, as the command makes them."""
    config, model = checkpoint.load(EMBEDDED, dtype="float32")
    network = Network(config, model)
    prompt = prompt_ids(Tokenizer.from_directory(EMBEDDED, config), "passage", 2048, 0)
    made = decode(network, prompt, GenerationConfig(), 1)
    found = index_recall.measure(network, made, [0.05], [1.0, 2.0])
    assert {selector for selector, _ in found} == {"merged", "herald-merged"}
    rows = list(index_recall.rows_of(found, [0.05], [1.0, 2.0], config.head_dim))
    assert {row["n"] for row in rows if row["layer"] == "all"} == {5 * config.num_kv_heads}
    return {
        (row["selector"], row["index"], row["candidates_ratio"]): row
        for row in rows
        if row["layer"] == "all"
    }


@pytest.mark.parametrize("selector", ["merged", "herald-merged"])
def test_the_int8_index_finds_the_exact_choice_on_real_keys(measured, selector):
    """Nearly all of it alone, all of it among twice the candidates."""
    alone, twice = (measured[selector, "int8 token", ratio] for ratio in (1.0, 2.0))
    assert alone["recall"] == alone["covered"] >= 0.985
    assert alone["mass"] >= 0.999
    assert twice["covered"] >= 0.999
    assert twice["recall"] >= 0.999
    assert twice["mass"] >= 0.9999


@pytest.mark.parametrize("selector", ["merged", "herald-merged"])
def test_the_int4_index_finds_nearly_all_among_twice_the_candidates(measured, selector):
    """It loses more alone than int8, and with the one merged query less than without rotation."""
    alone, twice = (measured[selector, "int4 rotated", ratio] for ratio in (1.0, 2.0))
    plain = measured[selector, "int4 token", 1.0]
    whole = measured[selector, "int8 token", 1.0]
    assert alone["recall"] < whole["recall"]
    assert plain["recall"] < whole["recall"]
    if selector == "merged":
        assert plain["recall"] < alone["recall"]
    else:
        # Of ten units: too few to tell by recall alone which of the two is ahead.
        assert plain["mass"] < alone["mass"]
    assert alone["key_bytes"] == plain["key_bytes"] < whole["key_bytes"]
    assert twice["covered"] >= 0.99
    assert twice["mass"] >= 0.999


def test_the_command_writes_rows_and_a_picture(monkeypatch, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    out, picture = tmp_path / "index.json", tmp_path / "index.png"
    options = ["--contexts", "256", "--items", "1", "--tasks", "passage", "--blocks", "1"]
    options += ["--budgets", "0.2", "--json", str(out), "--plot", str(picture)]
    monkeypatch.setattr(sys, "argv", ["index_recall", *options])
    index_recall.main()
    rows = json.loads(out.read_text())["rows"]
    named = {
        "model",
        "selector",
        "reference",
        "layer",
        "context",
        "budget",
        "recall",
        "mass",
        "p10",
    }
    assert all(named <= row.keys() for row in rows)
    assert {row["index"] for row in rows} == set(key_indexes.INDEXES)
    assert picture.stat().st_size > 10_000
    assert capsys.readouterr().out.startswith("| context | selector | budget |")


def test_wrong_options_are_refused_in_one_sentence():
    index_recall.check(index_recall.parser().parse_args([]))
    for name, value in (("items", 0), ("blocks", 0), ("contexts", [8]), ("ratios", [0.5])):
        bad = index_recall.parser().parse_args([])
        setattr(bad, name, value)
        with pytest.raises(ValueError, match=f"--{name} "):
            index_recall.check(bad)
