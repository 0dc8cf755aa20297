"""Benchmarks of the engine refuse what cannot be measured, in a sentence and before they begin."""

from __future__ import annotations

import sys

import pytest

from benchmarks import decode, end_to_end, prefill, step

TINY = ["--model", "tiny", "--dtype", "float32"]


@pytest.mark.parametrize(
    ("benchmark", "options", "told"),
    [
        (step, ["--points", "dense"], "no METHOD:BATCH"),
        (step, ["--points", "dense:x"], "no METHOD:BATCH"),
        (step, ["--points", "dense:0"], "no METHOD:BATCH"),
        (step, ["--points", "nope:2"], "unknown"),
        (step, ["--points", "auto:2"], "no method to measure"),
        (step, ["--points", "infinigen:2"], "selects within its steps"),
        (step, ["--context", "-4"], "--context -4 is too small"),
        (step, ["--steps", "99"], "more than the block size"),
        (step, ["--budget", "2"], "outside (0, 1]"),
        (prefill, ["--contexts", "64", "0"], "--contexts 0 is too small"),
        (prefill, ["--methods", "nope"], "unknown"),
        (end_to_end, ["--points", "dense:-1"], "no METHOD:BATCH"),
        (end_to_end, ["--device-memory", "much"], "is not a size"),
        (end_to_end, ["--candidates-ratio", "0.5"], "cannot be used"),
        (decode, ["--blocks", "-3"], "--blocks -3 is too small"),
        (decode, ["--candidates-ratio", "0.5"], "cannot be used"),
        (decode, ["--contexts", "5"], "no such point"),
        (decode, ["--headroom", "2"], "no share"),
    ],
)
def test_wrong_use_is_told_at_once(monkeypatch, capsys, benchmark, options, told):
    common = [] if benchmark is decode else TINY
    monkeypatch.setattr(sys, "argv", ["benchmark", *common, *options])
    with pytest.raises(SystemExit) as caught:
        benchmark.main()
    assert caught.value.code == 2
    assert told in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("text", ["", '{"rows": [', "[]", '{"rows": [{"a": 1}]}'])
def test_a_damaged_file_is_not_gone_on_from(monkeypatch, capsys, tmp_path, text):
    path = tmp_path / "decode.json"
    path.write_text(text)
    monkeypatch.setattr(sys, "argv", ["benchmark", "--quick", "--json", str(path)])
    with pytest.raises(SystemExit) as caught:
        decode.main()
    assert caught.value.code == 2
    assert "no result to go on from" in capsys.readouterr().err.splitlines()[-1]
    assert path.read_text() == text
