"""Hugging Face folders that are loaded without a conversion."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import families
import hf_folders
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding
from safetensors.numpy import save_file

from checkpoints_convert import convert
from herald_jax import checkpoint, checkpoint_published
from herald_jax.checkpoint import CheckpointError
from herald_jax.cli import main
from herald_jax.engine.engine import EMBEDDED
from herald_jax.models import registry
from herald_jax.tokenizer import Tokenizer


@pytest.mark.parametrize("family", families.CONFIGS)
@pytest.mark.parametrize(("stored", "dtype"), [("bf16", "bfloat16"), ("f32", "float32")])
def test_the_same_network_as_by_conversion(
    tmp_path: Path, family: str, stored: str, dtype: str
) -> None:
    """Bit by bit, and in the same order; without a dtype it is the stored one."""
    hf = tmp_path / "hf"
    hf_folders.write(hf, bf16=stored == "bf16", shards=2, config=families.CONFIGS[family])
    convert(hf, tmp_path / "out", dtype=dtype)
    config, network = checkpoint.load(tmp_path / "out")
    assert checkpoint.read_config(hf) == (config, dtype)
    ours_config, ours = checkpoint.load(hf)
    assert ours_config == config
    expected, found = registry.parameters(network), registry.parameters(ours)
    assert list(found) == list(expected)
    for path, value in found.items():
        assert value.dtype == expected[path].dtype, path
        np.testing.assert_array_equal(
            hf_folders.bits(np.asarray(value)),
            hf_folders.bits(np.asarray(expected[path])),
            err_msg=path,
        )


def test_dtype_is_changed_on_the_way(tmp_path: Path) -> None:
    """But for the routers' biases, which stay float32."""
    hf_folders.write(tmp_path / "hf", config=families.CONFIGS["llada2"])
    _, single = checkpoint.load(tmp_path / "hf", dtype="float32")
    _, half = checkpoint.load(tmp_path / "hf", dtype="bfloat16")
    wide = registry.parameters(single)
    for path, value in registry.parameters(half).items():
        kind = jnp.float32 if path.endswith("router.bias") else jnp.bfloat16
        assert value.dtype == kind
        np.testing.assert_array_equal(value, np.asarray(wide[path]).astype(kind))
    with pytest.raises(CheckpointError, match="'int8' is not supported"):
        checkpoint.load(tmp_path / "hf", dtype="int8")


def test_mixed_dtypes_load_as_bfloat16(tmp_path: Path) -> None:
    weights = hf_folders.tensors(hf_folders.CONFIG)
    weights["model.norm.weight"] = weights["model.norm.weight"].astype(ml_dtypes.bfloat16)
    hf_folders.write(tmp_path / "hf", weights)
    assert checkpoint.read_config(tmp_path / "hf")[1] == "bfloat16"


def test_arrays_do_not_depend_on_the_file_any_more(tmp_path: Path) -> None:
    """Matrices that need no change come from the mapped file: they are copied all the same."""
    hf_folders.write(tmp_path / "hf")
    _, model = checkpoint.load(tmp_path / "hf")
    before = {path: np.array(value) for path, value in registry.parameters(model).items()}
    file = tmp_path / "hf" / "model.safetensors"
    with file.open("r+b") as stream:
        stream.write(b"\x7f" * file.stat().st_size)
    for path, value in registry.parameters(model).items():
        np.testing.assert_array_equal(value, before[path], err_msg=path)


def test_one_parameter_at_a_time_is_on_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is on its device, and let go of here, before the next one is read."""
    hf_folders.write(tmp_path / "hf", config=families.CONFIGS["llada2"])
    source = checkpoint_published.open_published(tmp_path / "hf")
    events = []
    kind = type(next(iter(source.parameters.values())))
    read, wait = kind.read, jax.block_until_ready
    monkeypatch.setattr(kind, "read", lambda self: (events.append("read"), read(self))[1])
    monkeypatch.setattr(jax, "block_until_ready", lambda x: (events.append("put"), wait(x))[1])
    device = SingleDeviceSharding(jax.devices()[0])
    arrays = checkpoint_published.read(source, lambda _path, _shape: device)
    assert events == ["read", "put"] * len(source.parameters) == ["read", "put"] * len(arrays)


def test_a_name_gives_what_the_file_lacks(tmp_path: Path) -> None:
    hf_folders.write(tmp_path / "SDAR-8B-Chat-b32", block_size=None)
    config, _ = checkpoint.load(tmp_path / "SDAR-8B-Chat-b32")
    assert config.block_size == 32


def test_what_cannot_be_read_is_a_checkpoint_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba9"}')
    for call in (checkpoint.load, checkpoint.read_config):
        with pytest.raises(CheckpointError, match=r"config\.json: model_type 'mamba9' is not"):
            call(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(hf_folders.CONFIG))
    with pytest.raises(CheckpointError, match=r"has no \*\.safetensors file"):
        checkpoint.load(tmp_path)


def test_a_checkpoint_without_its_header_is_not_taken_for_one(tmp_path: Path) -> None:
    hf_folders.write(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "out")
    (tmp_path / "out" / "herald.json").unlink()
    with pytest.raises(CheckpointError, match=r"out is not a checkpoint \(no herald.json\)"):
        checkpoint.load(tmp_path / "out")


@pytest.mark.skipif(not EMBEDDED.is_dir(), reason="the embedded model is not in this checkout")
def test_generate_reads_a_folder_and_says_what_is_faster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Network and tokenizer from one folder; the answer is that of the converted checkpoint."""
    config, model = checkpoint.load(EMBEDDED)
    hf = tmp_path / "hf"
    hf.mkdir()
    (hf / "config.json").write_text(json.dumps(registry.to_hf(config)))
    save_file(hf_folders.tensors_of(model), hf / "model.safetensors", {"format": "pt"})
    for name in checkpoint.TOKENIZER_FILES:
        if (EMBEDDED / name).is_file():
            shutil.copyfile(EMBEDDED / name, hf / name)
    tokens = Tokenizer.from_directory(hf, config).encode("The gate code is 48213.")
    assert tokens == Tokenizer.from_directory(EMBEDDED, config).encode("The gate code is 48213.")
    prompt = ["--prompt", "The gate code is 48213.", "--max-new-tokens", "32"]
    assert main(["generate", "--model", str(hf), "--method", "dense", *prompt]) == 0
    said = capsys.readouterr()
    assert said.out.strip()
    hint = f"reading Hugging Face format; `herald convert {hf} OUT` makes later starts faster"
    assert said.err.count(hint) == 1
