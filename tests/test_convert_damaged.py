"""What is wrong with a checkpoint is said in one report, and nothing is left behind."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import hf_folders
import numpy as np
import pytest

from checkpoints_convert import ConversionError, convert
from herald_jax import checkpoint
from herald_jax.checkpoint import CheckpointError
from herald_jax.cli import main


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

    def lie(header: dict[str, Any]) -> None:
        header["model.norm.weight"]["data_offsets"][0] -= 4
        header["lm_head.weight"]["shape"] = [40, -16]
        header["model.embed_tokens.weight"] = {"dtype": "F32"}

    hf_folders.edit_header(tmp_path / "hf" / "model.safetensors", lie)
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
    hf_folders.edit_header(path, lambda header: header["model.norm.weight"].update(entry))
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


def drop(weights: dict[str, np.ndarray], part: str) -> dict[str, np.ndarray]:
    return {name: value for name, value in weights.items() if part not in name}


def test_thousands_of_tensors_are_a_short_report(tmp_path):
    """Experts under names of another kind: all missing, all unexpected, a screenful of lines."""
    config = families.CONFIGS["llada2"] | {"num_experts": 64, "n_group": 8, "topk_group": 4}
    weights = hf_folders.tensors(config)
    renamed = {name.replace(".experts.", ".specialists."): v for name, v in weights.items()}
    hf_folders.write(tmp_path / "hf", renamed, config=config)
    with pytest.raises(ConversionError) as caught:
        convert(tmp_path / "hf", tmp_path / "out")
    error = caught.value
    assert len(error.unexpected) == 2 * 3 * 64
    assert error.missing == [
        f"model.layers.{layer}.mlp.experts.0..63.{part}_proj.weight (64 tensors)"
        for layer in (1, 2)
        for part in ("down", "gate", "up")
    ]
    said = str(error).splitlines()
    assert len(said) == 1 + 6 + 20 + 1
    assert said[0].endswith("6 missing, 384 unexpected")
    assert said[-1] == "  unexpected: and 364 more"


def test_single_lost_experts_are_named(tmp_path):
    config = families.CONFIGS["sdar_moe"]
    lost = ["model.layers.0.mlp.experts.3.up_proj.weight"]
    lost += ["model.layers.2.mlp.experts.11.down_proj.weight"]
    weights = {n: v for n, v in hf_folders.tensors(config).items() if n not in lost}
    hf_folders.write(tmp_path / "hf", weights, config=config)
    with pytest.raises(ConversionError) as caught:
        convert(tmp_path / "hf", tmp_path / "out")
    assert caught.value.missing == lost


# What may befall a checkpoint, and what must be said of it. Each damages a folder of four shards.


def _last_shard(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[-1]


def truncated_shard(folder: Path) -> str:
    file = _last_shard(folder)
    os.truncate(file, file.stat().st_size - 2)
    return f"{file.name}: truncated"


def missing_index_entry(folder: Path) -> str:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"]["model.norm.weight"]
    path.write_text(json.dumps(index))
    return "holds model.norm.weight, which the index does not list there"


def missing_shard(folder: Path) -> str:
    file = _last_shard(folder)
    file.unlink()
    return f"{file.name}: no such file"


def wrong_shape(folder: Path) -> str:
    config = families.CONFIGS["llada2"]
    weights = hf_folders.tensors(config)
    name = "model.layers.1.mlp.experts.5.down_proj.weight"
    weights[name] = np.ascontiguousarray(weights[name].T)
    hf_folders.write(folder, weights, bf16=True, shards=4, config=config)
    return f"{name}: has shape [20, 48], needs [48, 20]"


def nan_scale(folder: Path) -> str:
    return _spoiled(folder, "model.layers.1.attention.query_layernorm.weight", np.nan)


def infinite_expert(folder: Path) -> str:
    return _spoiled(folder, "model.layers.2.mlp.experts.7.up_proj.weight", np.inf)


def infinite_router(folder: Path) -> str:
    return _spoiled(folder, "model.layers.2.mlp.gate.expert_bias", -np.inf)


def _spoiled(folder: Path, name: str, value: float) -> str:
    config = families.CONFIGS["llada2"]
    weights = hf_folders.tensors(config)
    weights[name].flat[3] = value
    hf_folders.write(folder, weights, bf16=True, shards=4, config=config)
    return f"{name}: has values that are not finite"


def _configured(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def unknown_family(folder: Path) -> str:
    _configured(folder, model_type="mamba9")
    return "model_type 'mamba9' is not supported; supported:"


def llada2_2(folder: Path) -> str:
    _configured(folder, expert_capacity=48, block_size=32, n_group=None, topk_group=None)
    return "expert_capacity (LLaDA2.2"


def quantised_configuration(folder: Path) -> str:
    _configured(folder, quantization_config={"quant_method": "fp8", "fmt": "e4m3"})
    return "quantization_config is not supported: use the bfloat16 checkpoint"


def quantised_tensors(folder: Path) -> str:
    def quantise(header: dict[str, Any]) -> None:
        for name in [name for name in header if name.endswith("_proj.weight")]:
            header[name]["dtype"] = "F8_E4M3"
            first, last = header[name]["data_offsets"]
            header[name]["data_offsets"] = [first, first + (last - first) // 2]
            header[f"{name}_scale_inv"] = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}

    for file in folder.glob("*.safetensors"):
        hf_folders.edit_header(file, quantise)
    return "tensors of dtype F8_E4M3: quantised checkpoints are not supported; use the bfloat16 one"


#: Those whose report is a single sentence.
SENTENCES = (unknown_family, llada2_2, quantised_configuration, quantised_tensors)


@pytest.mark.parametrize(
    "damage",
    [
        truncated_shard,
        missing_index_entry,
        missing_shard,
        wrong_shape,
        nan_scale,
        infinite_expert,
        infinite_router,
        *SENTENCES,
    ],
    ids=lambda damage: damage.__name__,
)
def test_a_damaged_checkpoint_leaves_one_report_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], str]
) -> None:
    """By ``herald convert``, and by reading the folder directly."""
    folder = tmp_path / "hf"
    hf_folders.write(folder, bf16=True, shards=4, config=families.CONFIGS["llada2"])
    expected = damage(folder)
    assert main(["convert", str(folder), str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert said.count("error:") == 1
    assert expected in said
    report = said[said.index("error:") :].splitlines()
    # A tensor that is one of many is one line beside the first.
    assert len(report) == (1 if damage in SENTENCES else 2), said
    assert os.listdir(tmp_path) == ["hf"]
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(folder)
    assert expected in str(caught.value)


def test_a_pipe_in_place_of_a_file_is_refused(tmp_path):
    hf_folders.write(tmp_path / "hf")
    (tmp_path / "hf" / "model.safetensors").unlink()
    os.mkfifo(tmp_path / "hf" / "model.safetensors")
    with pytest.raises(ConversionError, match=r"model\.safetensors: is not a regular file"):
        convert(tmp_path / "hf", tmp_path / "out")


def test_doubles_are_unsupported_and_not_called_quantised(tmp_path):
    weights = hf_folders.tensors(hf_folders.CONFIG)
    weights["model.norm.weight"] = weights["model.norm.weight"].astype(np.float64)
    hf_folders.write(tmp_path / "hf", weights)
    with pytest.raises(ConversionError, match="dtype F64 is not supported"):
        convert(tmp_path / "hf", tmp_path / "out")
