"""SDAR and TraDo: Qwen3 networks run block-causally. Also those under their base model's name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from herald_jax.models import hf_config
from herald_jax.models.config import ModelConfig
from herald_jax.models.family import Checkpoint, Family, Verified
from herald_jax.models.stored import Tensors, decoder_tensors

MASK, STOPS = 151669, (151645, 151643)
BLOCK_VARIANTS = (8, 16, 32, 64)


def read(hf: Mapping[str, Any]) -> dict[str, Any]:
    """QK-norm, after refusing biases and partial rotation."""
    hf_config.refuse_other_attention(hf)
    hf_config.refuse_partial_rotation(hf)
    hf_config.refuse(hf, {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu"})
    return {"qk_norm": True}


def write(config: ModelConfig) -> dict[str, Any]:
    """Nothing of its own."""
    return {"attention_bias": False}


def tensors(config: ModelConfig) -> Tensors:
    """Qwen3's names."""
    return decoder_tensors()


def with_blocks(name: str, parameters: int) -> tuple[Checkpoint, ...]:
    """A published checkpoint and its variants for larger blocks, named -b8 and so on."""
    return (
        Checkpoint(name, parameters),
        *(Checkpoint(f"{name}-b{size}", parameters, size) for size in BLOCK_VARIANTS),
    )


SDAR = Family(
    "sdar",
    "SDAR, TraDo",
    ("sdar",),
    ("SDARForCausalLM",),
    read,
    write,
    tensors,
    Verified("transformers Qwen3ForCausalLM", 1e-4, ("sdar", "sdar-entropy")),
    rule="sdar",
    block_size=4,
    mask_token_id=MASK,
    stop_token_ids=STOPS,
    checkpoints=(
        *with_blocks("SDAR-1.7B-Chat", 2_031_739_904),
        *with_blocks("SDAR-4B-Chat", 4_411_424_256),
        *with_blocks("SDAR-8B-Chat", 8_190_735_360),
        Checkpoint("TraDo-4B-Instruct", 4_411_424_256),
        Checkpoint("TraDo-8B-Instruct", 8_190_735_360),
        Checkpoint("TraDo-8B-Thinking", 8_190_735_360),
    ),
)

# The same network under its base model's names; generation constants are its own.
QWEN3 = Family(
    "qwen3",
    "Qwen3 decoding by blocks",
    ("qwen3",),
    ("Qwen3ForCausalLM",),
    read,
    write,
    tensors,
    Verified("transformers Qwen3ForCausalLM", 1e-4),
)
