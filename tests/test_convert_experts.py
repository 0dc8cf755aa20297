"""Mixtures of experts through the converter, in every layout they are published in."""

from __future__ import annotations

import os
from pathlib import Path

import families
import hf_folders
import ml_dtypes
import numpy as np
import pytest

from checkpoints_convert import convert
from herald_jax import checkpoint

Tensors = dict[str, np.ndarray]
MIXTURES = ("sdar_moe", "llada2")


def stacked(weights: Tensors, layer: str, part: str) -> np.ndarray:
    """[E, out, in], from tensors of single experts."""
    count = sum(name.startswith(layer) and name.endswith(f"{part}_proj.weight") for name in weights)
    return np.stack([weights[f"{layer}{expert}.{part}_proj.weight"] for expert in range(count)])


def layers_of(weights: Tensors) -> list[str]:
    found = {name.partition("experts.")[0] for name in weights if ".mlp.experts." in name}
    return [f"{layer}experts." for layer in sorted(found)]


def merged(weights: Tensors, ending: str) -> Tensors:
    """One tensor for each kind of a layer's experts."""
    kept = {name: value for name, value in weights.items() if ".mlp.experts." not in name}
    for layer in layers_of(weights):
        for part in ("gate", "up", "down"):
            kept[f"{layer}{part}_proj{ending}"] = stacked(weights, layer, part)
    return kept


def fused(weights: Tensors) -> Tensors:
    """Gate and up in one tensor, gate first, as transformers 5 keeps them."""
    kept = {name: value for name, value in weights.items() if ".mlp.experts." not in name}
    for layer in layers_of(weights):
        both = [stacked(weights, layer, part) for part in ("gate", "up")]
        kept[f"{layer}gate_up_proj"] = np.concatenate(both, axis=1)
        kept[f"{layer}down_proj"] = stacked(weights, layer, "down")
    return kept


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("bf16", [True, False])
def test_every_expert_arrives_bit_by_bit(tmp_path: Path, family: str, bf16: bool) -> None:
    config = families.CONFIGS[family]
    stored = hf_folders.write(tmp_path / "hf", bf16=bf16, shards=3, config=config)
    dtype = "bfloat16" if bf16 else "float32"
    report = convert(tmp_path / "hf", tmp_path / "out", dtype=dtype)
    assert report.tensors == len(stored)
    assert report.parameters == sum(value.size for value in stored.values())
    ours = hf_folders.parameters_of(tmp_path / "out")
    for layer in layers_of(stored):
        index = layer.split(".")[2]
        for part in ("gate", "up", "down"):
            theirs = stacked(stored, layer, part).swapaxes(1, 2)
            np.testing.assert_array_equal(
                hf_folders.bits(ours[f"layers.{index}.mlp.experts.{part}"]),
                hf_folders.bits(theirs),
            )
        router = stored[f"{layer.removesuffix('experts.')}gate.weight"].T
        np.testing.assert_array_equal(ours[f"layers.{index}.mlp.router.kernel"], router)


def test_the_parts_of_llada2_are_told_apart(tmp_path: Path) -> None:
    """Queries, keys and values of one tensor; the shared expert; the plain first layer."""
    config = families.CONFIGS["llada2"]
    stored = hf_folders.write(tmp_path / "hf", config=config)
    convert(tmp_path / "hf", tmp_path / "out", dtype="float32")
    ours = hf_folders.parameters_of(tmp_path / "out")
    dim, kv = config["head_dim"], config["num_key_value_heads"] * config["head_dim"]
    q = config["num_attention_heads"] * dim
    whole = stored["model.layers.1.attention.query_key_value.weight"]
    for part, rows in (("q", whole[:q]), ("k", whole[q : q + kv]), ("v", whole[q + kv :])):
        np.testing.assert_array_equal(ours[f"layers.1.attention.{part}.kernel"], rows.T)
    for path, name in [
        ("layers.0.mlp.gate.kernel", "model.layers.0.mlp.gate_proj.weight"),
        ("layers.2.mlp.shared.up.kernel", "model.layers.2.mlp.shared_experts.up_proj.weight"),
        ("layers.2.attention.o.kernel", "model.layers.2.attention.dense.weight"),
        ("layers.2.attention.k_norm.scale", "model.layers.2.attention.key_layernorm.weight"),
        ("embedding.embedding", "model.word_embeddings.weight"),
    ]:
        theirs = stored[name].T if path.endswith("kernel") else stored[name]
        np.testing.assert_array_equal(ours[path], theirs, err_msg=path)


@pytest.mark.parametrize("stored_as", [np.float32, ml_dtypes.bfloat16])
def test_the_bias_of_a_router_stays_float32(tmp_path: Path, stored_as: type) -> None:
    """Whatever dtype is asked for, and whatever it is stored in."""
    config = families.CONFIGS["llada2"]
    weights = {
        name: value.astype(stored_as if name.endswith("bias") else ml_dtypes.bfloat16)
        for name, value in hf_folders.tensors(config).items()
    }
    hf_folders.write(tmp_path / "hf", weights, config=config)
    convert(tmp_path / "hf", tmp_path / "out")
    ours = hf_folders.parameters_of(tmp_path / "out")
    for layer in (1, 2):
        bias = ours[f"layers.{layer}.mlp.router.bias"]
        assert bias.dtype == np.float32
        theirs = weights[f"model.layers.{layer}.mlp.gate.expert_bias"].astype(np.float32)
        np.testing.assert_array_equal(bias, theirs)
        assert ours[f"layers.{layer}.mlp.router.kernel"].dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("layout", ["merged", "merged.weight", "fused"])
def test_other_layouts_give_the_same_network(tmp_path: Path, family: str, layout: str) -> None:
    config = families.CONFIGS[family]
    weights = hf_folders.tensors(config)
    ending = layout.removeprefix("merged")
    other = fused(weights) if layout == "fused" else merged(weights, ending)
    hf_folders.write(tmp_path / "one", weights, config=config)
    hf_folders.write(tmp_path / "other", other, bf16=False, shards=2, config=config)
    convert(tmp_path / "one", tmp_path / "a", dtype="float32")
    report = convert(tmp_path / "other", tmp_path / "b", dtype="float32")
    assert report.tensors == len(other)
    one, two = (hf_folders.parameters_of(tmp_path / name) for name in "ab")
    assert list(one) == list(two)
    for path, value in one.items():
        np.testing.assert_array_equal(value, two[path], err_msg=path)


def test_each_kind_of_a_layers_experts_is_an_item(tmp_path: Path) -> None:
    hf_folders.write(tmp_path / "hf", config=families.CONFIGS["llada2"])
    convert(tmp_path / "hf", tmp_path / "out")
    experts = [f"layer_{n:03d}_experts_{part}" for n in (1, 2) for part in ("gate", "up", "down")]
    layers = ["layer_000", "layer_001", "layer_002"]
    assert sorted(os.listdir(tmp_path / "out" / "params")) == sorted(
        ["embed", "final", *layers, *experts]
    )
    # A checkpoint made from a network in memory is laid out likewise.
    config, model = checkpoint.load(tmp_path / "out")
    checkpoint.save(tmp_path / "again", config, model)
    assert sorted(os.listdir(tmp_path / "again" / "params")) == sorted(
        os.listdir(tmp_path / "out" / "params")
    )
