"""The accuracy benchmark: pairing, intervals, resuming, and what it refuses."""

from __future__ import annotations

import json

import numpy as np
import pytest
from networks import TINY, make_model

from benchmarks import accuracy
from benchmarks.accuracy import Answers, check, compare, parts, rows_of
from herald_jax import Engine
from herald_jax.engine.engine import EMBEDDED
from herald_jax.selection import SELECTORS
from herald_jax.tokenizer import Tokenizer

pytestmark = pytest.mark.skipif(
    not EMBEDDED.is_dir(), reason="the embedded model is not in this checkout"
)
CELL = ("table", 512)


@pytest.fixture(scope="module")
def engine():
    from herald_jax.checkpoint import load

    config, _ = load(EMBEDDED, dtype="float32")
    return Engine(TINY, make_model(TINY, seed=0), Tokenizer.from_directory(EMBEDDED, config))


@pytest.fixture
def answering(monkeypatch):
    """Every method answers right where its name and the item's number say so."""
    asked = []

    def answers(self, method, budget, tokens, items):
        for number, item in items.items():
            asked.append((method, budget, tokens, number))
            right = method == "dense" or (method == "mage" and number % 2 == 0)
            yield number, item.guess if method == "chance" else item.answer if right else "wrong"

    monkeypatch.setattr(Answers, "_answers", answers)
    return asked


def options(**changed):
    made = {"items": 6, "methods": ["mage", "random"], "budgets": [0.05], "model": "embedded"}
    return accuracy.argparse.Namespace(**made | changed)


def test_rows_pair_a_method_with_dense_on_the_same_items(engine, answering, tmp_path):
    answers = Answers(engine, tmp_path / "a.items.jsonl", 2, None)
    rows = [row for row in rows_of(answers, CELL, options()) if row["depth"] == "all"]
    scores = {row["method"]: (row["score"], row["delta"], row["n"]) for row in rows}
    assert scores["dense"] == (1.0, 0.0, 6)
    assert scores["mage"] == (0.5, -0.5, 6)
    assert scores["random"] == (0.0, -1.0, 6)
    items = answers.items(CELL, 6)
    right = [item.guess == item.answer for item in items]
    assert scores["chance"][0] == pytest.approx(np.mean(right), abs=1e-4)
    by_depth = [r for r in rows_of(answers, CELL, options()) if r["depth"] != "all"]
    for method in ("dense", "mage"):
        assert sum(row["n"] for row in by_depth if row["method"] == method) == 6


def test_it_goes_on_where_it_stopped_also_after_half_a_line(engine, answering, tmp_path):
    path = tmp_path / "a.items.jsonl"
    whole = list(rows_of(Answers(engine, path, 2, None), CELL, options()))
    text = path.read_text()
    path.write_text(text[:-20])
    for _ in range(2):
        answering.clear()
        assert list(rows_of(Answers(engine, path, 2, None), CELL, options())) == whole
    assert not answering
    assert sorted(path.read_text().splitlines()) == sorted(text.splitlines())
    assert list(rows_of(Answers(engine, path, 2, 0), CELL, options())) == whole
    assert len(answering) == 6 * 4, "other exact layers are another measurement"
    assert all(len(json.loads(line)) == 7 for line in path.read_text().splitlines())


def test_intervals_hold_the_mean_and_shrink_with_the_items():
    rng = np.random.default_rng(0)
    widths = []
    for count in (50, 5000):
        dense = rng.random(count) < 0.9
        right = np.where(rng.random(count) < 0.7, dense, rng.random(count) < 0.5)
        found = compare(right, dense)
        assert found["ci_low"] <= found["delta"] <= found["ci_high"]
        assert found["delta"] == pytest.approx(right.mean() - dense.mean(), abs=1e-4)
        deviation = np.std(right.astype(float) - dense) / count**0.5
        widths.append(found["ci_high"] - found["ci_low"])
        assert widths[-1] == pytest.approx(2 * 1.96 * deviation, rel=0.15)
    assert widths[1] < widths[0] / 5
    same = np.ones(20, bool)
    assert (compare(same, same)["ci_low"], compare(same, same)["ci_high"]) == (0.0, 0.0)


def test_a_method_may_carry_its_ratio():
    assert parts("mage") == ("mage", None, "int8")
    assert parts("herald-merged:1.5") == ("herald-merged", 1.5, "int8")
    assert parts("herald-merged:int4:1.5") == ("herald-merged", 1.5, "int4")
    for name, made in SELECTORS.items():
        check(name)
        if made.refines:
            check(f"{name}:1.25")


@pytest.mark.parametrize(
    "method", ["nonsense", "dense", "auto", "window:2", "merged:0.5", "merged:x", "merged:nan"]
)
def test_a_method_that_is_none_is_refused_by_its_name(method):
    with pytest.raises(ValueError, match=method):
        check(method)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--methods", "merged:x"], "merged:x"),
        (["--items", "0"], "--items 0"),
        (["--budgets", "0"], "budget"),
        (["--exact-layers", "99"], "--exact-layers 99"),
        (["--contexts", "20000"], "--contexts 20000"),
        (["--contexts", "32", "--tasks", "several"], "32 tokens is too short"),
        (["--json", "."], "folder"),
        (["--model", "no/such/folder"], "no/such/folder"),
    ],
)
def test_bad_options_are_one_sentence_and_exit_code_2(given, said, monkeypatch, capsys):
    monkeypatch.setattr(accuracy.sys, "argv", ["accuracy", *given])
    with pytest.raises(SystemExit) as stopped:
        accuracy.main()
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]
