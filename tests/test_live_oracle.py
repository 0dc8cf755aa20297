"""The live comparison with torch and transformers, over random networks: ``pytest -m oracle``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from oracle.parity import TOLERANCE, cached, prompt_lengths, uncached

from checkpoints_convert import convert
from herald_jax import checkpoint

pytestmark = pytest.mark.oracle

SIZES = [(4, 4, 4), (4, 2, 8), (4, 1, 16), (8, 2, 4)]


@pytest.mark.parametrize("seed", range(10))
def test_a_random_network_equals_transformers(seed: int, tmp_path: Path):
    networks = pytest.importorskip("oracle.torch_networks")
    draw = np.random.default_rng(seed)
    heads, kv_heads, head_dim = SIZES[seed % len(SIZES)]
    tiny = networks.TinyNetwork(
        model_type=("sdar", "qwen3", "llama")[seed % 3],
        block_size=int(draw.choice([1, 4, 8, 32])),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        layers=int(draw.integers(1, 4)),
        hidden=int(draw.choice([24, 40])),
        tied=bool(draw.integers(2)),
        rope_theta=float(draw.choice([1e4, 1e6])),
        dtype=str(draw.choice(["float32", "bfloat16"])),
        shards=int(draw.choice([1, 2])),
    )
    network = networks.build(tiny, seed)
    networks.store(network, tiny, tmp_path / "hf")
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
