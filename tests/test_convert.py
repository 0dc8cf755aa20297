"""Hugging Face folders, good and damaged, through the converter."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import hf_folders
import ml_dtypes
import numpy as np
import pytest

from checkpoints_convert import ConversionError, convert
from checkpoints_convert.__main__ import main
from herald_jax import checkpoint
from herald_jax.checkpoint import CheckpointError
from herald_jax.models import registry


def parameters_of(out: Path, dtype: str | None = None) -> dict[str, np.ndarray]:
    _, model = checkpoint.load(out, dtype=dtype)
    return {path: np.asarray(value) for path, value in registry.parameters(model).items()}


def bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint16 if array.dtype.itemsize == 2 else np.uint32)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("bf16", [True, False])
def test_every_tensor_arrives_bit_by_bit(tmp_path, shards, bf16):
    """bfloat16, which NumPy alone cannot read (huggingface/safetensors#598), single and sharded."""
    stored = hf_folders.write(tmp_path / "hf", bf16=bf16, shards=shards)
    report = convert(tmp_path / "hf", tmp_path / "out", dtype="bfloat16" if bf16 else "float32")
    ours = parameters_of(tmp_path / "out")
    assert report.tensors == len(stored) == len(ours)
    assert report.parameters == sum(value.size for value in stored.values())
    for path, name, turned in [
        ("embedding.embedding", "model.embed_tokens.weight", False),
        ("norm.scale", "model.norm.weight", False),
        ("lm_head.kernel", "lm_head.weight", True),
        ("layers.0.attention.q.kernel", "model.layers.0.self_attn.q_proj.weight", True),
        ("layers.1.attention.k.kernel", "model.layers.1.self_attn.k_proj.weight", True),
        ("layers.2.attention.v.kernel", "model.layers.2.self_attn.v_proj.weight", True),
        ("layers.2.attention.o.kernel", "model.layers.2.self_attn.o_proj.weight", True),
        ("layers.1.attention.q_norm.scale", "model.layers.1.self_attn.q_norm.weight", False),
        ("layers.1.attention.k_norm.scale", "model.layers.1.self_attn.k_norm.weight", False),
        ("layers.0.input_norm.scale", "model.layers.0.input_layernorm.weight", False),
        ("layers.0.mlp_norm.scale", "model.layers.0.post_attention_layernorm.weight", False),
        ("layers.2.mlp.gate.kernel", "model.layers.2.mlp.gate_proj.weight", True),
        ("layers.2.mlp.up.kernel", "model.layers.2.mlp.up_proj.weight", True),
        ("layers.2.mlp.down.kernel", "model.layers.2.mlp.down_proj.weight", True),
    ]:
        theirs = stored[name].T if turned else stored[name]
        np.testing.assert_array_equal(bits(ours[path]), bits(theirs), err_msg=path)


def test_tiled_transpose_covers_edges(tmp_path):
    """Matrices just below, at and above the transpose's tile, in both directions."""
    size = {"hidden_size": 127, "intermediate_size": 129, "vocab_size": 257, "head_dim": 32}
    stored = hf_folders.write(tmp_path / "hf", num_hidden_layers=1, **size)
    convert(tmp_path / "hf", tmp_path / "out", dtype="float32")
    ours = parameters_of(tmp_path / "out")
    down = stored["model.layers.0.mlp.down_proj.weight"]
    np.testing.assert_array_equal(ours["layers.0.mlp.down.kernel"], down.T)
    np.testing.assert_array_equal(ours["lm_head.kernel"], stored["lm_head.weight"].T)
    query = stored["model.layers.0.self_attn.q_proj.weight"]
    np.testing.assert_array_equal(ours["layers.0.attention.q.kernel"], query.T)


def test_dtypes_round_as_numpy_does(tmp_path):
    stored = hf_folders.write(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "out")
    rounded = stored["model.embed_tokens.weight"].astype(ml_dtypes.bfloat16)
    ours = parameters_of(tmp_path / "out")["embedding.embedding"]
    np.testing.assert_array_equal(bits(ours), bits(rounded))


def test_every_mismatch_is_in_one_report(tmp_path):
    """AI-Hypercomputer/maxtext#3003: one error named one key; here all of them come at once."""
    weights = hf_folders.tensors(hf_folders.CONFIG)
    gone = ["model.norm.weight", "model.layers.2.mlp.up_proj.weight"]
    for name in gone:
        del weights[name]
    weights["model.layers.0.self_attn.q_proj.bias"] = np.zeros(24, np.float32)
    weights["model.layers.3.input_layernorm.weight"] = np.zeros(16, np.float32)
    weights["lm_head.weight"] = np.zeros((16, 40), np.float32)
    weights["model.layers.1.self_attn.k_norm.weight"] = np.zeros(7, np.float32)
    weights["model.layers.1.input_layernorm.weight"] = np.zeros(16, np.int8)
    hf_folders.write(tmp_path / "hf", weights)
    with pytest.raises(ConversionError) as caught:
        convert(tmp_path / "hf", tmp_path / "out")
    error = caught.value
    assert sorted(error.missing) == sorted(gone)
    assert error.unexpected == [
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.3.input_layernorm.weight",
    ]
    assert error.misshaped == [
        "model.layers.1.self_attn.k_norm.weight: has shape [7], needs [6]",
        "lm_head.weight: has shape [16, 40], needs [40, 16]",
    ]
    assert len(error.problems) == 1
    assert "model.layers.1.input_layernorm.weight: dtype I8" in error.problems[0]
    for name in [*gone, *error.unexpected, "k_norm", "lm_head", "I8"]:
        assert name in str(error)
    assert not (tmp_path / "out").exists()


def test_damaged_shards_are_in_the_same_report(tmp_path):
    folder = tmp_path / "hf"
    hf_folders.write(folder, shards=4)
    files = sorted(folder.glob("*.safetensors"))
    os.truncate(files[0], files[0].stat().st_size - 3)
    files[1].write_bytes(b"\x00" * 5)
    files[2].unlink()
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    kept = [name for name, file in content["weight_map"].items() if file == files[3].name]
    del content["weight_map"][kept[0]]
    content["weight_map"]["model.extra.weight"] = files[3].name
    index.write_text(json.dumps(content))
    with pytest.raises(ConversionError) as caught:
        convert(folder, tmp_path / "out")
    problems = "\n".join(caught.value.problems)
    assert f"{files[0].name}: truncated" in problems
    assert f"{files[1].name}: truncated, or not a safetensors file" in problems
    assert f"{files[2].name}: no such file" in problems
    assert f"holds {kept[0]}, which the index does not list there" in problems
    assert "lacks model.extra.weight, which the index says it holds" in problems
    # What a damaged file would have held is not called missing as well.
    assert caught.value.missing == []


@pytest.mark.parametrize("length", [0, 7, 8, 40])
def test_a_cut_file_is_refused_wherever_it_is_cut(tmp_path, length):
    hf_folders.write(tmp_path / "hf")
    os.truncate(tmp_path / "hf" / "model.safetensors", length)
    with pytest.raises(ConversionError, match=r"model\.safetensors: truncated"):
        convert(tmp_path / "hf", tmp_path / "out")


def test_headers_that_lie_are_refused(tmp_path):
    """Byte ranges outside the file or against the shape are reported, never mapped."""
    hf_folders.write(tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header["model.norm.weight"]["data_offsets"][0] -= 4
    header["lm_head.weight"]["shape"] = [40, -16]
    header["model.embed_tokens.weight"] = {"dtype": "F32"}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
    with pytest.raises(ConversionError) as caught:
        convert(tmp_path / "hf", tmp_path / "out")
    assert len(caught.value.problems) == 3
    assert caught.value.missing == []


@pytest.mark.parametrize(
    "entry",
    [
        {"shape": [float("inf"), 1]},
        {"data_offsets": [0, float("inf")]},
        {"shape": [1.5]},
        {"shape": [10**30]},
        {"dtype": []},
    ],
)
def test_header_entries_of_another_kind_are_refused(tmp_path, entry):
    hf_folders.write(tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header["model.norm.weight"] |= entry
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
    with pytest.raises(ConversionError, match=r"model\.norm\.weight"):
        convert(tmp_path / "hf", tmp_path / "out")


def test_endless_nesting_is_refused(tmp_path):
    """In the header, the index and config.json: the parser gives up, and says so."""
    deep = b"[" * 100_000
    folder = tmp_path / "hf"
    hf_folders.write(folder)
    (folder / "model.safetensors").write_bytes(len(deep).to_bytes(8, "little") + deep)
    with pytest.raises(ConversionError, match="the header is not JSON"):
        convert(folder, tmp_path / "out")
    (folder / "model.safetensors.index.json").write_bytes(deep)
    with pytest.raises(CheckpointError, match="cannot be read as a safetensors index"):
        convert(folder, tmp_path / "out")
    (folder / "config.json").write_bytes(deep)
    with pytest.raises(CheckpointError, match="cannot be read as JSON"):
        convert(folder, tmp_path / "out")


@pytest.mark.parametrize("bf16", [True, False])
def test_weights_that_are_not_finite_are_named_in_one_report(tmp_path, bf16):
    weights = hf_folders.tensors(hf_folders.CONFIG)
    bad = ["model.embed_tokens.weight", "model.layers.2.mlp.up_proj.weight", "model.norm.weight"]
    for name, value in zip(bad, [np.nan, np.inf, -np.inf], strict=True):
        weights[name].flat[-1] = value
    if not bf16:  # Finite as stored, but not in the dtype asked for.
        weights["lm_head.weight"][0, 0] = np.finfo(np.float32).max
        bad.append("lm_head.weight")
    hf_folders.write(tmp_path / "hf", weights, bf16=bf16)
    with pytest.raises(ConversionError) as caught:
        convert(tmp_path / "hf", tmp_path / "out")
    assert sorted(problem.partition(":")[0] for problem in caught.value.problems) == sorted(bad)
    assert os.listdir(tmp_path) == ["hf"]


def test_remote_code_is_never_run(tmp_path):
    """vllm-project/dllm-plugin documents trust_remote_code trouble: here there is none to trust."""
    marker = tmp_path / "executed"
    folder = tmp_path / "hf"
    remote = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    hf_folders.write(folder, auto_map=remote)
    code = f"open({str(marker)!r}, 'w').close()\nclass Config: pass\nclass Model: pass\n"
    (folder / "evil.py").write_text(code)
    convert(folder, tmp_path / "out")
    checkpoint.load(tmp_path / "out")
    assert not marker.exists()
    assert "auto_map" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert not list((tmp_path / "out").rglob("*.py"))


def test_companions_are_copied(tmp_path):
    hf_folders.write(tmp_path / "hf")
    for name in checkpoint.TOKENIZER_FILES:
        (tmp_path / "hf" / name).write_text(name)
    (tmp_path / "hf" / "README.md").write_text("not needed")
    convert(tmp_path / "hf", tmp_path / "out")
    for name in checkpoint.TOKENIZER_FILES:
        assert (tmp_path / "out" / name).read_text() == name
    assert not (tmp_path / "out" / "README.md").exists()


def test_block_size_override_is_kept(tmp_path):
    hf_folders.write(tmp_path / "hf")
    report = convert(tmp_path / "hf", tmp_path / "out", block_size=32)
    config, _ = checkpoint.read_config(tmp_path / "out")
    assert config == report.config
    assert config.block_size == 32
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert registry.from_hf(written) == config


class TestHead:
    """Tied, untied, and configurations that contradict the stored tensors."""

    def test_tied_stores_it_once(self, tmp_path):
        hf_folders.write(tmp_path / "hf", tie_word_embeddings=True)
        report = convert(tmp_path / "hf", tmp_path / "out")
        assert report.config.tie_word_embeddings
        assert "lm_head.kernel" not in parameters_of(tmp_path / "out")

    def test_tied_with_an_equal_head_stays_tied(self, tmp_path):
        weights = hf_folders.tensors(hf_folders.CONFIG)
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].copy()
        hf_folders.write(tmp_path / "hf", weights, tie_word_embeddings=True)
        report = convert(tmp_path / "hf", tmp_path / "out")
        assert report.config.tie_word_embeddings
        assert "kept tied" in report.notes[0]

    def test_tied_with_another_head_becomes_untied(self, tmp_path):
        weights = hf_folders.tensors(hf_folders.CONFIG)
        hf_folders.write(tmp_path / "hf", weights, tie_word_embeddings=True)
        report = convert(tmp_path / "hf", tmp_path / "out", dtype="float32")
        assert not report.config.tie_word_embeddings
        assert "kept untied" in report.notes[0]
        ours = parameters_of(tmp_path / "out")
        np.testing.assert_array_equal(ours["lm_head.kernel"], weights["lm_head.weight"].T)
        written = json.loads((tmp_path / "out" / "config.json").read_text())
        assert written["tie_word_embeddings"] is False

    def test_untied_without_a_head_is_missing_one(self, tmp_path):
        weights = hf_folders.tensors(hf_folders.CONFIG)
        del weights["lm_head.weight"]
        hf_folders.write(tmp_path / "hf", weights)
        with pytest.raises(ConversionError) as caught:
            convert(tmp_path / "hf", tmp_path / "out")
        assert caught.value.missing == ["lm_head.weight"]


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
        """A file-size limit stands in for a full disk: writes fail half-way."""
        hf_folders.write(tmp_path / "hf", hidden_size=512, num_hidden_layers=2)
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


def test_json_report(tmp_path, capsys):
    hf_folders.write(tmp_path / "hf", bf16=True)
    assert main([str(tmp_path / "hf"), str(tmp_path / "out"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["config"]["num_layers"] == 3
    assert report["dtype"] == "bfloat16"
    assert report["nbytes"] == 2 * report["parameters"]


def test_a_killed_conversion_leaves_nothing_that_loads_and_can_be_repeated(tmp_path):
    hf_folders.write(tmp_path / "hf", num_hidden_layers=6)
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
    report = convert(tmp_path / "hf", tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["hf", "out"]
    assert len(parameters_of(tmp_path / "out")) == report.tensors


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


_MEASURE = """
import json, sys
from checkpoints_convert import convert
import jax.numpy
convert(sys.argv[1], sys.argv[3])          # what imports and first use cost is not the network's
def read(key):
    for line in open("/proc/self/status"):
        if line.startswith(key):
            return int(line.split()[1]) * 1024
open("/proc/self/clear_refs", "w").write("5")   # starts VmHWM, the peak, anew
before = read("VmRSS:")
report = convert(sys.argv[2], sys.argv[4])
print(json.dumps([read("VmHWM:") - before, report.memory_bound, report.nbytes]))
"""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux /proc")
def test_host_memory_is_bounded(tmp_path):
    """AI-Hypercomputer/maxtext PR#4948: conversion held the whole network; here a few layers."""
    hf_folders.write(tmp_path / "small")
    shape = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 1, "head_dim": 128}
    layer = hf_folders.tensors({**hf_folders.CONFIG, **shape})
    shape["num_hidden_layers"] = 36
    # Random numbers, one layer's over and over: zeros would be cheaper to write, but they also
    # compress to nothing and would hide the store's own buffers.
    weights = {}
    for name, value in layer.items():
        for i in range(36):
            weights[name.replace("layers.0.", f"layers.{i}.")] = value
    hf_folders.write(tmp_path / "big", weights, bf16=True, **shape)
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE]
        + [tmp_path / name for name in ("small", "big", "small_out", "big_out")],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    added, bound, written = json.loads(done.stdout)
    assert written > 2 * bound
    assert added < bound
