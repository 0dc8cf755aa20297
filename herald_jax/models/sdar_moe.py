"""SDAR-MoE: a Qwen3-MoE network run block-causally."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from herald_jax.models import hf_config, sdar
from herald_jax.models.config import ExpertsConfig, ModelConfig
from herald_jax.models.family import Family, Verified
from herald_jax.models.stored import Stored, Tensors, decoder_tensors, expert_tensors


def read(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The mixture: softmax scores, no groups, no shared expert."""
    layers = hf_config.positive(hf, "num_hidden_layers")
    period = hf_config.positive(hf, "decoder_sparse_step", 1)
    plain = hf_config.listed(hf, "mlp_only_layers")
    experts = ExpertsConfig(
        count=hf_config.positive(hf, "num_experts"),
        per_token=hf_config.positive(hf, "num_experts_per_tok"),
        intermediate_size=hf_config.positive(hf, "moe_intermediate_size"),
        router="softmax",
        normalizes=hf_config.boolean(hf, "norm_topk_prob"),
        dense_layers=tuple(
            layer for layer in range(min(layers, 1000)) if (layer + 1) % period or layer in plain
        ),
    )
    return sdar.read(hf) | {"experts": experts}


def write(config: ModelConfig) -> dict[str, Any]:
    """The mixture in Qwen3-MoE's words."""
    experts = config.experts
    assert experts is not None
    return sdar.write(config) | {
        "num_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.intermediate_size,
        "norm_topk_prob": experts.normalizes,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(experts.dense_layers),
    }


def tensors(config: ModelConfig) -> Tensors:
    """Qwen3-MoE's names."""
    router = Stored("model.layers.{i}.mlp.gate.weight", True)
    return decoder_tensors() | expert_tensors(config) | {"layers.{i}.mlp.router.kernel": (router,)}


SDAR_MOE = Family(
    "sdar_moe",
    "SDAR-MoE",
    ("sdar_moe",),
    ("SDARMoeForCausalLM",),
    read,
    write,
    tensors,
    Verified("transformers Qwen3MoeForCausalLM", 1e-4, ("sdar", "sdar-sequential", "sdar-static")),
    rule="sdar",
    block_size=4,
    mask_token_id=sdar.MASK,
    stop_token_ids=sdar.STOPS,
    checkpoints=sdar.with_blocks("SDAR-30B-A3B-Chat", 30_532_122_624),
)
