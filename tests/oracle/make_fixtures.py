"""Writes tests/fixtures: ``python -m tests.oracle.make_fixtures`` from the repository's root.

Each folder is a Hugging Face checkpoint of a random tiny network with what transformers computes
for it, so that the parity tests need no torch.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from .torch_checkpoints import store
from .torch_networks import TinyNetwork, build, run

FIXTURES = Path(__file__).parent.parent / "fixtures"
NETWORKS = {
    "sdar_b4": TinyNetwork(block_size=4, heads=4, kv_heads=4),
    "sdar_b8_tied": TinyNetwork(block_size=8, heads=4, kv_heads=2, tied=True, rope_theta=1e6),
    "qwen3_b32_sharded": TinyNetwork(
        "qwen3", block_size=32, heads=8, kv_heads=2, hidden=24, shards=3
    ),
    "llama_b8_bf16": TinyNetwork(
        "llama", block_size=8, heads=4, kv_heads=1, dtype="bfloat16", layers=3
    ),
    "llada2_b8": TinyNetwork(
        "llada2_moe", block_size=8, head_dim=16, hidden=48, layers=3, vocab=97, shards=2
    ),
    "sdar_moe_b4_yarn": TinyNetwork("sdar_moe", experts=8, experts_per_token=3, yarn=True),
    "fast_dllm_v2_b8_tied": TinyNetwork("Fast_dLLM_Qwen", block_size=8, kv_heads=1, tied=True),
}


def main() -> None:
    """Rewrites every fixture."""
    for seed, (name, tiny) in enumerate(NETWORKS.items()):
        folder = FIXTURES / name
        shutil.rmtree(folder, ignore_errors=True)
        model = build(tiny, seed)
        blocks = 2 if tiny.block_size == 32 else 4
        tokens = np.random.default_rng(seed).integers(0, tiny.vocab, (2, blocks * tiny.block_size))
        hidden, logits = run(model, tokens, tiny.block_size)
        store(model, tiny, folder)
        np.savez_compressed(
            folder / "expected.npz", tokens=tokens.astype(np.int32), hidden=hidden, logits=logits
        )
        size = sum(file.stat().st_size for file in folder.iterdir())
        print(f"{name}: {size / 1000:.0f} kB, |logits| up to {np.abs(logits).max():.1f}")


if __name__ == "__main__":
    main()
