"""The commands that train and that draw a history: what they print, refuse and keep."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("optax")

from training_reader import BLOCK, SHIPPED

from herald_jax.training import curriculum, plot, prose, train
from herald_jax.training.data import KINDS, Batch, Stage, make_batch
from herald_jax.training.documents import Style
from herald_jax.training.settings import Settings
from herald_jax.training.vocabulary import Encoder

STAGE = Stage("only", 64, 2, 2, (1, 3), style=Style(adjectives=4, nouns=4))


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """Runs the command in ``tmp_path / "run"``, whose tokenizer is there already."""
    out = tmp_path / "run"
    out.mkdir()
    shutil.copy(SHIPPED, out)
    monkeypatch.setattr(curriculum, "stages", lambda name: [STAGE])

    def call(*options: str, out: Path = out) -> tuple[str, str]:
        given = ["train", "--out", str(out), "--model", "micro", *options]
        monkeypatch.setattr(sys, "argv", given)
        train.main()
        captured = capsys.readouterr()
        return captured.out, captured.err

    return call


@pytest.fixture
def made_here(monkeypatch):
    """Batches are made in this process; calls ``hook`` before each."""

    def install(hook=lambda index: None):
        encoder = Encoder.load(SHIPPED)

        @contextmanager
        def batch_maker(tokenizer: Path, workers: int):
            def submit(stage: Stage, block: int, seed: int, index: int) -> Future[Batch]:
                future: Future[Batch] = Future()
                try:
                    hook(index)
                    future.set_result(make_batch(encoder, stage, block, seed, index))
                except Exception as error:
                    future.set_exception(error)
                return future

            yield submit

        monkeypatch.setattr(train, "batch_maker", batch_maker)

    return install


@pytest.mark.slow
def test_ctrl_c_saves_and_the_same_command_goes_on(run, made_here, tmp_path) -> None:
    def interrupt(index: int) -> None:
        if index == 6:
            os.kill(os.getpid(), signal.SIGINT)

    made_here(interrupt)
    before = signal.getsignal(signal.SIGINT)
    options = ("--steps", "8", "--workers", "1")
    out, err = run(*options)
    assert out.startswith("stopped and saved: the same command goes on")
    assert "a new run" in err
    assert "stopping after this step" in err
    assert signal.getsignal(signal.SIGINT) is before
    step = int(err.split("\nstep ")[1].split()[0])
    assert 0 < step < 8
    made_here()
    out, err = run(*options)
    assert f"going on at step {step}" in err
    folder = tmp_path / "run"
    assert f"`herald convert {folder} DIR`" in out
    names = {path.name for path in folder.iterdir()}
    assert names == {
        *("config.json", "model.safetensors", "history.json", "state.npz", "tokenizer.json")
    }
    (row,) = json.loads((folder / "history.json").read_text())
    assert (row["step"], row["stage"]) == (8, 0)
    assert run(*options)[0] == out  # nothing left to do


def test_missing_prose_is_told_in_one_sentence(run, made_here, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(prose, "_texts", lambda: iter(()))
    # Around the cache, which other tests go on using.
    monkeypatch.setattr(prose, "_split", prose._split.__wrapped__)
    with pytest.raises(SystemExit, match=r"error: no prose: .* use a Python installed with"):
        run(out=tmp_path / "new")
    made_here(lambda index: prose.sentences())
    with pytest.raises(SystemExit, match="error: no prose: "):
        run("--steps", "2")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--steps", "0"), "--steps 0 is too few: give 1 or more"),
        (("--workers", "-1"), "--workers -1 is too few"),
        (("--seconds", "nan"), "--seconds nan is not a number above 0"),
        (("--rate", "-1"), "--rate -1.0 is not a number above 0"),
        (("--bind-weight", "-1"), "--bind-weight -1.0 is not 0 or a number above"),
        (("--decay-share", "1.5"), "--decay-share 1.5 is no share"),
        (("--attention", "cudnn"), "--attention cudnn cannot compute in float32: add --dtype"),
    ],
)
def test_bad_numbers_are_refused(run, options, message) -> None:
    with pytest.raises(SystemExit, match=f"error: {message}"):
        run(*options)


def test_folders_of_something_else_are_refused(run, tmp_path) -> None:
    with pytest.raises(SystemExit, match="is a file: give a folder"):
        run(out=SHIPPED)
    model, lost, damaged = (tmp_path / name for name in ("model", "lost", "damaged"))
    for folder, name in ((model, "config.json"), (lost, "state.npz"), (damaged, "tokenizer.json")):
        folder.mkdir()
        (folder / name).write_text("{")
    with pytest.raises(SystemExit, match="holds a model but no state"):
        run(out=model)
    with pytest.raises(SystemExit, match="has a state but no tokenizer"):
        run(out=lost)
    with pytest.raises(SystemExit, match=r"tokenizer\.json cannot be read"):
        run(out=damaged)
    with pytest.raises(ValueError, match="float16 is unknown: use float32 or bfloat16"):
        Settings(dtype="float16")


def test_background_processes_make_the_same_batches() -> None:
    with train.batch_maker(SHIPPED, 1) as submit:
        found = submit(STAGE, BLOCK, 3, 5).result(timeout=60)
    wanted = make_batch(Encoder.load(SHIPPED), STAGE, BLOCK, 3, 5)
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array)


def history() -> list[dict[str, float]]:
    rows = []
    for number, stage in enumerate((0, 0, 1, 0, 1, 2, 2)):
        row = {"step": 25.0 * (number + 1), "stage": stage, "end": 0.5}
        row |= dict.fromkeys(KINDS, -1.0) | {"one": 0.1 * number}
        rows.append(row | {"answer_loss": 1.0, "end_loss": 0.1, "binding_loss": 0.01})
    return rows


def test_lines_follow_the_newest_stage() -> None:
    steps, values = plot.line(history(), "one")
    assert steps.tolist() == [25, 50, 75, 125, 150, 175]
    np.testing.assert_allclose(values, [0, 0.05, 0.2, 0.3, 0.5, 0.55])
    assert len(plot.line(history(), "copy")[0]) == 0
    assert plot.openings(history()) == {1: 75, 2: 150}


def test_the_picture_is_small_and_bad_histories_are_refused(monkeypatch, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    source, out = tmp_path / "history.json", tmp_path / "pictures" / "out.png"
    monkeypatch.setattr(sys, "argv", ["plot", str(source), str(out)])
    for text, message in (("[", "cannot be read"), ("[]", "has no rows yet")):
        source.write_text(text)
        with pytest.raises(SystemExit, match=message):
            plot.main()
    source.write_text(json.dumps(history()))
    plot.main()
    assert 5_000 < out.stat().st_size < 80_000
    assert out.read_bytes().startswith(b"\x89PNG")
