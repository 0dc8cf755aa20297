"""Hugging Face folders through the converter."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import families
import hf_folders
import ml_dtypes
import numpy as np
import pytest

from checkpoints_convert import ConversionError, convert
from checkpoints_convert.__main__ import main
from herald_jax import checkpoint
from herald_jax.models import registry


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("bf16", [True, False])
def test_every_tensor_arrives_bit_by_bit(tmp_path, shards, bf16):
    """bfloat16, which NumPy alone cannot read (huggingface/safetensors#598), single and sharded."""
    stored = hf_folders.write(tmp_path / "hf", bf16=bf16, shards=shards)
    report = convert(tmp_path / "hf", tmp_path / "out", dtype="bfloat16" if bf16 else "float32")
    ours = hf_folders.parameters_of(tmp_path / "out")
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
        np.testing.assert_array_equal(
            hf_folders.bits(ours[path]), hf_folders.bits(theirs), err_msg=path
        )


def test_tiled_transpose_covers_edges(tmp_path):
    """Matrices just below, at and above the transpose's tile, in both directions."""
    size = {"hidden_size": 127, "intermediate_size": 129, "vocab_size": 257, "head_dim": 32}
    stored = hf_folders.write(tmp_path / "hf", num_hidden_layers=1, **size)
    convert(tmp_path / "hf", tmp_path / "out", dtype="float32")
    ours = hf_folders.parameters_of(tmp_path / "out")
    down = stored["model.layers.0.mlp.down_proj.weight"]
    np.testing.assert_array_equal(ours["layers.0.mlp.down.kernel"], down.T)
    np.testing.assert_array_equal(ours["lm_head.kernel"], stored["lm_head.weight"].T)
    query = stored["model.layers.0.self_attn.q_proj.weight"]
    np.testing.assert_array_equal(ours["layers.0.attention.q.kernel"], query.T)


def test_dtypes_round_as_numpy_does(tmp_path):
    stored = hf_folders.write(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "out")
    rounded = stored["model.embed_tokens.weight"].astype(ml_dtypes.bfloat16)
    ours = hf_folders.parameters_of(tmp_path / "out")["embedding.embedding"]
    np.testing.assert_array_equal(hf_folders.bits(ours), hf_folders.bits(rounded))


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


class TestNames:
    """A folder that has a published checkpoint's name decodes as that checkpoint does."""

    def convert(self, folder, family, **changes):
        hf_folders.write(folder, config=families.CONFIGS[family] | changes)
        (folder / "tokenizer.json").write_text("{}")
        return convert(folder, folder.parent / "out")

    def test_block_size(self, tmp_path):
        report = self.convert(tmp_path / "SDAR-8B-Chat-b32", "sdar", block_size=None)
        assert report.config.block_size == 32
        assert report.notes == ("block_size 32 is taken from the name SDAR-8B-Chat-b32",)
        assert checkpoint.read_config(tmp_path / "out")[0] == report.config
        # As converted, the file says so itself, whatever its folder is called.
        written = json.loads((tmp_path / "out" / "config.json").read_text())
        assert registry.from_hf(written) == report.config

    def test_rule(self, tmp_path):
        report = self.convert(tmp_path / "llada2.1-MINI", "llada2", block_size=None)
        assert (report.config.rule, report.config.block_size) == ("llada2.1", 32)
        assert report.notes == ("rule llada2.1 is taken from the name LLaDA2.1-mini",)
        written = json.loads((tmp_path / "out" / "config.json").read_text())
        assert registry.from_hf(written) == report.config

    def test_without_a_known_name_the_family_decides(self, tmp_path):
        report = self.convert(tmp_path / "mine", "llada2", block_size=None)
        assert (report.config.rule, report.config.block_size) == ("llada2.0", 32)
        assert "decodes by llada2.0; others of its family need --rule llada2.1" in report.notes[0]
        report = self.convert(tmp_path / "b" / "ours", "sdar", block_size=None)
        assert "decodes by 4; others of its family need --block-size 8 or 16" in report.notes[0]
        assert self.convert(tmp_path / "c" / "ours", "sdar", block_size=8).notes == ()

    def test_an_unknown_rule_in_the_file_is_refused(self, tmp_path):
        with pytest.raises(ValueError, match=r"config\.json: rule 'magic' is unknown"):
            self.convert(tmp_path / "mine", "sdar", herald={"rule": "magic", "stop_token_ids": [5]})

    def test_the_hubs_cache(self, tmp_path):
        folder = tmp_path / "models--JetLM--SDAR-8B-Chat-b16" / "snapshots" / "0123abc"
        assert self.convert(folder, "sdar", block_size=None).config.block_size == 16

    def test_the_file_comes_before_the_name(self, tmp_path):
        report = self.convert(tmp_path / "SDAR-8B-Chat-b32", "sdar", block_size=4)
        assert report.config.block_size == 4
        (note,) = report.notes
        assert note == ("the name SDAR-8B-Chat-b32 says block_size 32, config.json says 4: kept 4")

    def test_what_is_asked_for_comes_first(self, tmp_path):
        folder = tmp_path / "LLaDA2.1-mini"
        hf_folders.write(folder, config=families.CONFIGS["llada2"])
        asked = ["--block-size", "16", "--rule", "llada2.0"]
        assert main([str(folder), str(tmp_path / "out"), *asked]) == 0
        config, _ = checkpoint.read_config(tmp_path / "out")
        assert (config.block_size, config.rule) == (16, "llada2.0")
        written = json.loads((tmp_path / "out" / "config.json").read_text())
        assert registry.from_hf(written) == config

    def test_a_block_size_under_a_name_of_the_family(self, tmp_path):
        """Fast-dLLM v2 calls it bd_size, which must not win over what was asked for."""
        hf_folders.write(tmp_path / "hf", config=families.CONFIGS["fast_dllm_v2"])
        report = convert(tmp_path / "hf", tmp_path / "out", block_size=16)
        written = json.loads((tmp_path / "out" / "config.json").read_text())
        assert registry.from_hf(written) == report.config
        assert report.config.block_size == 16


class TestHead:
    """Tied, untied, and configurations that contradict the stored tensors."""

    def test_tied_stores_it_once(self, tmp_path):
        hf_folders.write(tmp_path / "hf", tie_word_embeddings=True)
        report = convert(tmp_path / "hf", tmp_path / "out")
        assert report.config.tie_word_embeddings
        assert "lm_head.kernel" not in hf_folders.parameters_of(tmp_path / "out")

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
        ours = hf_folders.parameters_of(tmp_path / "out")
        np.testing.assert_array_equal(ours["lm_head.kernel"], weights["lm_head.weight"].T)
        written = json.loads((tmp_path / "out" / "config.json").read_text())
        assert written["tie_word_embeddings"] is False

    @pytest.mark.parametrize("equal", [True, False])
    def test_a_family_has_its_own_name_for_the_embedding(self, tmp_path, equal):
        config = families.CONFIGS["llada2"]
        weights = hf_folders.tensors(config)
        if equal:
            weights["lm_head.weight"] = weights["model.word_embeddings.weight"].copy()
        hf_folders.write(tmp_path / "hf", weights, config=config | {"tie_word_embeddings": True})
        report = convert(tmp_path / "hf", tmp_path / "out")
        assert report.config.tie_word_embeddings == equal
        assert "lm_head" in report.notes[1]
        assert "has no tokenizer.json: `herald generate` needs it" in report.notes[2]

    def test_untied_without_a_head_is_missing_one(self, tmp_path):
        weights = hf_folders.tensors(hf_folders.CONFIG)
        del weights["lm_head.weight"]
        hf_folders.write(tmp_path / "hf", weights)
        with pytest.raises(ConversionError) as caught:
            convert(tmp_path / "hf", tmp_path / "out")
        assert caught.value.missing == ["lm_head.weight"]


def test_json_report(tmp_path, capsys):
    hf_folders.write(tmp_path / "hf", bf16=True)
    assert main([str(tmp_path / "hf"), str(tmp_path / "out"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["config"]["num_layers"] == 3
    assert report["dtype"] == "bfloat16"
    assert report["nbytes"] == 2 * report["parameters"]


_MEASURE = """
import json, sys
from checkpoints_convert import ConversionError, convert
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
