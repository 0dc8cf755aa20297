"""The live comparison with torch and transformers, over random networks: ``pytest -m oracle``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from flax import nnx
from oracle.parity import TOLERANCE, cached, prompt_lengths, uncached

from checkpoints_convert import convert
from herald_jax import checkpoint

pytestmark = pytest.mark.oracle

SIZES = [(4, 4, 4), (4, 2, 8), (4, 1, 16), (8, 2, 4)]


# Every class of networks once, and all sizes; the rest only at length.
@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(n, marks=pytest.mark.slow) for n in (6, 7))]
)
def test_a_random_network_equals_transformers(seed: int, tmp_path: Path):
    networks = pytest.importorskip("oracle.torch_networks")
    checkpoints = pytest.importorskip("oracle.torch_checkpoints")
    draw = np.random.default_rng(seed)
    heads, kv_heads, head_dim = SIZES[seed % len(SIZES)]
    model_type = list(networks.CLASSES)[seed % len(networks.CLASSES)]
    tiny = networks.TinyNetwork(
        model_type=model_type,
        block_size=int(draw.choice([1, 4, 8, 32])),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        layers=int(draw.integers(1, 4)),
        # Qwen2 takes a head to be an equal share of the hidden width.
        hidden=heads * head_dim if model_type == "Fast_dLLM_Qwen" else int(draw.choice([24, 40])),
        tied=bool(draw.integers(2)),
        rope_theta=float(draw.choice([1e4, 1e6])),
        yarn=bool(draw.integers(2)),
        dtype=str(draw.choice(["float32", "bfloat16"])),
        shards=int(draw.choice([1, 2])),
        # With one expert a token LLaDA2 leaves its weight as it is, and Glm4Moe does not.
        experts_per_token=int(draw.choice([2, 4, 7])),
    )
    network = networks.build(tiny, seed)
    checkpoints.store(network, tiny, tmp_path / "hf")
    report = convert(tmp_path / "hf", tmp_path / "ours", dtype="float32")
    assert report.config.tie_word_embeddings == tiny.tied
    _, model = checkpoint.load(tmp_path / "ours")

    whole = 3 * tiny.block_size
    tokens = draw.integers(0, tiny.vocab, (2, whole), dtype=np.int32)
    theirs = networks.run(network, tokens, tiny.block_size)
    prompt = int(draw.choice(prompt_lengths(tiny.block_size, whole)))
    for ours in (uncached(model, tokens), cached(model, tokens, prompt, tiny.block_size)):
        np.testing.assert_allclose(ours[0], theirs[0], atol=TOLERANCE, err_msg=str(tiny))
        np.testing.assert_allclose(ours[1], theirs[1], atol=TOLERANCE, err_msg=str(tiny))

    ragged = tokens[:, : whole - 1]
    theirs = networks.run(network, ragged, tiny.block_size)
    np.testing.assert_allclose(uncached(model, ragged)[1], theirs[1], atol=TOLERANCE)


@pytest.mark.parametrize("model_type", ["llada2_moe", "sdar_moe", "sdar", "Fast_dLLM_Qwen"])
def test_half_precision_agrees_on_the_argmax(model_type: str, tmp_path: Path, capsys):
    """bfloat16 against transformers' bfloat16, and both against float32: shares of equal argmax.

    Rounding differs between any two implementations, so the bar is that ours strays from float32
    no more often than transformers does, within the noise of so few tokens.
    """
    networks = pytest.importorskip("oracle.torch_networks")
    checkpoints = pytest.importorskip("oracle.torch_checkpoints")
    tiny = networks.TinyNetwork(
        model_type, block_size=8, head_dim=16, hidden=64, layers=4, vocab=257, dtype="bfloat16"
    )
    network = networks.build(tiny, 3)
    checkpoints.store(network, tiny, tmp_path / "hf")
    tokens = np.random.default_rng(0).integers(0, tiny.vocab, (8, 256), dtype=np.int32)
    exact = networks.logits(network, tokens, tiny.block_size).numpy().argmax(-1)
    theirs = networks.logits(networks.halved(network), tokens, tiny.block_size).numpy().argmax(-1)
    convert(tmp_path / "hf", tmp_path / "ours")
    _, model = checkpoint.load(tmp_path / "ours")
    ours = np.asarray(nnx.jit(type(model).__call__)(model, tokens)).argmax(-1)
    ours_exact, theirs_exact = (ours == exact).mean(), (theirs == exact).mean()
    with capsys.disabled():
        print(
            f"\n{model_type}: argmax of bfloat16 equals float32's: ours {ours_exact:.4f}, "
            f"transformers {theirs_exact:.4f}; each other's {(ours == theirs).mean():.4f}"
        )
    assert ours_exact > theirs_exact - 0.02
    assert ours_exact > 0.9
