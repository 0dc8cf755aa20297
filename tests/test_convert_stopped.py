"""Conversions that are refused, killed or interrupted, and what they leave alone."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import families
import hf_folders
import pytest

from checkpoints_convert import convert
from checkpoints_convert.__main__ import main
from herald_jax import checkpoint
from herald_jax.checkpoint import CheckpointError
from herald_jax.cli import main as herald


class TestRefusals:
    """Wrong use is one sentence and exit code 2."""

    def refusal(self, capsys, *arguments: object) -> str:
        assert main([str(argument) for argument in arguments]) == 2
        said = capsys.readouterr()
        lines = [line for line in said.err.splitlines() if not line.startswith("[")]
        assert len(lines) == 1, said.err
        return lines[0]

    def test_source(self, tmp_path, capsys):
        out = tmp_path / "out"
        tmp_path = tmp_path / "hf"
        tmp_path.mkdir()
        assert "is not a folder" in self.refusal(capsys, tmp_path / "nothing", out)
        assert "has no config.json" in self.refusal(capsys, tmp_path, out)
        (tmp_path / "config.json").write_text("{")
        assert "cannot be read as JSON" in self.refusal(capsys, tmp_path, out)
        (tmp_path / "config.json").write_text("[]")
        assert "is not a JSON object" in self.refusal(capsys, tmp_path, out)
        (tmp_path / "config.json").write_text(json.dumps(hf_folders.CONFIG))
        assert "has no *.safetensors file" in self.refusal(capsys, tmp_path, out)
        for name in "ab":
            (tmp_path / f"{name}.safetensors").touch()
        assert "2 safetensors files but no" in self.refusal(capsys, tmp_path, out)
        (tmp_path / "model.safetensors.index.json").write_text("{}")
        assert "cannot be read as a safetensors index" in self.refusal(capsys, tmp_path, out)
        assert not out.exists()

    def test_output_exists(self, tmp_path, capsys):
        hf_folders.write(tmp_path / "hf")
        (tmp_path / "mine").mkdir()
        assert "already exists" in self.refusal(capsys, tmp_path / "hf", tmp_path / "mine")
        forced = self.refusal(capsys, tmp_path / "hf", tmp_path / "mine", "--force")
        assert "is not a checkpoint, so force will not replace it" in forced
        assert (tmp_path / "mine").is_dir()

    def test_force_replaces_a_checkpoint(self, tmp_path):
        hf_folders.write(tmp_path / "hf")
        convert(tmp_path / "hf", tmp_path / "out")
        convert(tmp_path / "hf", tmp_path / "out", block_size=2, force=True)
        assert checkpoint.read_config(tmp_path / "out")[0].block_size == 2

    def test_dtype(self, tmp_path, capsys):
        hf_folders.write(tmp_path / "hf")
        said = self.refusal(capsys, tmp_path / "hf", tmp_path / "out", "--dtype", "float8_e4m3fn")
        assert said == "error: dtype 'float8_e4m3fn' is not supported; use bfloat16 or float32"

    def test_rule(self, tmp_path, capsys):
        hf_folders.write(tmp_path / "hf")
        said = self.refusal(capsys, tmp_path / "hf", tmp_path / "out", "--rule", "llada9")
        assert said.startswith("error: --rule 'llada9' is unknown: use one of sdar, ")
        assert herald(["convert", str(tmp_path / "hf"), str(tmp_path / "out"), "--rule", "no"]) == 2
        assert "--rule 'no' is unknown" in capsys.readouterr().err
        assert os.listdir(tmp_path) == ["hf"]

    def test_output_cannot_be_written(self, tmp_path, capsys):
        hf_folders.write(tmp_path / "hf")
        (tmp_path / "file").touch()
        said = self.refusal(capsys, tmp_path / "hf", tmp_path / "file" / "out")
        assert "file is not a directory" in said

    def test_disk_known_to_be_too_small(self, tmp_path, capsys, monkeypatch):
        hf_folders.write(tmp_path / "hf")
        usage = shutil.disk_usage(tmp_path)._replace(free=1000)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
        assert "GB are free" in self.refusal(capsys, tmp_path / "hf", tmp_path / "out")
        assert os.listdir(tmp_path) == ["hf"]

    def test_disk_full_in_the_middle(self, tmp_path):
        """A file-size limit stands in for a full disk: writes fail half-way.

        One array of a layer alone is above it: a layer may go to several files.
        """
        hf_folders.write(
            tmp_path / "hf", hidden_size=512, intermediate_size=128, num_hidden_layers=2
        )
        code = (
            "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000));"
            "from checkpoints_convert.__main__ import main; sys.exit(main(sys.argv[1:]))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, tmp_path / "hf", tmp_path / "out"],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 2, done.stderr
        errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
        assert len(errors) == 1
        assert f"{tmp_path}/out cannot be written" in errors[0]
        assert os.listdir(tmp_path) == ["hf"]


class TestOtherFolders:
    """A conversion deletes nothing that it did not make."""

    def test_names_like_ours_are_left_alone(self, tmp_path):
        source = tmp_path / "out.partial"
        hf_folders.write(source)
        others = [tmp_path / "out.replaced", tmp_path / ".herald-unfinished-mine"]
        for other in others:
            other.mkdir()
            (other / "notes").write_text("mine")
        convert(source, tmp_path / "out")
        convert(source, tmp_path / "out", force=True)
        assert (source / "model.safetensors").is_file()
        assert all((other / "notes").read_text() == "mine" for other in others)
        assert len(os.listdir(tmp_path)) == 4

    @pytest.mark.parametrize(("src", "out"), [("a", "a"), ("a", "a/b"), ("a/b", "a"), ("a", "l/b")])
    def test_source_and_output_must_be_apart(self, tmp_path, src, out):
        hf_folders.write(tmp_path / src)
        (tmp_path / "a" / "herald.json").write_text("{}")
        (tmp_path / "l").symlink_to("a")
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(CheckpointError, match="lie in one another"):
            convert(tmp_path / src, tmp_path / out, force=True)
        assert sorted(tmp_path.rglob("*")) == before

    def test_names_that_are_no_place_are_refused_at_once(self, tmp_path, capsys):
        hf_folders.write(tmp_path / "hf")
        (tmp_path / "link").symlink_to("nowhere")
        with pytest.raises(CheckpointError, match="link is a link to nothing"):
            convert(tmp_path / "hf", tmp_path / "link")
        for arguments, said in [(["hf", ""], "OUT is empty"), (["", "out"], "SRC is empty")]:
            assert main(arguments if "hf" not in arguments else [str(tmp_path / "hf"), ""]) == 2
            assert said in capsys.readouterr().err
        assert sorted(os.listdir(tmp_path)) == ["hf", "link"]


def test_a_killed_conversion_leaves_nothing_that_loads_and_can_be_repeated(tmp_path):
    hf_folders.write(tmp_path / "hf", config=families.CONFIGS["llada2"])
    code = (
        "import sys, time; from checkpoints_convert import convert;"
        "convert(*sys.argv[1:], progress=lambda done, total, item: ("
        "print(item, flush=True), time.sleep(60 if done == 3 else 0)))"
    )
    worker = subprocess.Popen(
        [sys.executable, "-c", code, tmp_path / "hf", tmp_path / "out"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert worker.stdout is not None
        items = [worker.stdout.readline().strip() for _ in range(3)]
        time.sleep(0.1)
    finally:
        worker.send_signal(signal.SIGKILL)
        worker.wait(timeout=30)
        worker.stdout.close()
    assert items == ["embed", "layer_000", "layer_001"]
    assert not (tmp_path / "out").exists()
    (left,) = tmp_path.glob(".herald-unfinished-*")
    for folder in (left, left / "new"):
        with pytest.raises(CheckpointError):
            checkpoint.load(folder)
    assert main([str(tmp_path / "hf"), str(tmp_path / "out")]) == 0
    assert sorted(os.listdir(tmp_path)) == ["hf", "out"]
    checkpoint.load(tmp_path / "out")


def test_ctrl_c_in_the_middle_of_an_item_leaves_nothing(tmp_path):
    """The array store's own threads included: nothing is written or said after the sentence."""
    hf_folders.write(tmp_path / "hf", num_hidden_layers=2)
    code = (
        "import os, signal, sys; from herald_jax import checkpoint;"
        "from checkpoints_convert.__main__ import main; make = checkpoint._orbax;"
        "checkpoint._orbax = lambda: (os.kill(os.getpid(), signal.SIGINT), make())[1];"
        "sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "hf", tmp_path / "out"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 130
    assert done.stderr == f"interrupted: nothing was written to {tmp_path / 'out'}\n"
    assert os.listdir(tmp_path) == ["hf"]
    assert main([str(tmp_path / "hf"), str(tmp_path / "out")]) == 0
    checkpoint.load(tmp_path / "out")
