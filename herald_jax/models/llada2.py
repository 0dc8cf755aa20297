"""LLaDA2.0 and 2.1: Ling's mixture-of-experts network, run block-causally."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from herald_jax.models import hf_config
from herald_jax.models.chat_templates import LLADA2_CHAT_TEMPLATE
from herald_jax.models.config import LARGEST, ExpertsConfig, ModelConfig
from herald_jax.models.family import Checkpoint, Family, Verified
from herald_jax.models.stored import Stored, Tensors, decoder_tensors, expert_tensors

SIZES = {"mini": 16_255_643_392, "flash": 102_889_705_216}
#: What the published code does whatever the file says, or what other code would have to do.
ONLY = {
    "hidden_act": "silu",
    "use_bias": False,
    "use_qkv_bias": False,
    "use_qk_norm": True,
    "score_function": "sigmoid",
    "router_dtype": "fp32",
    "moe_router_enable_expert_bias": True,
    "norm_topk_prob": True,
    "norm_head": False,
}


def read(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Partial rotation and the mixture: sigmoid scores, groups, a shared expert.

    LLaDA2.2 is refused: of its network only the routing is published, and its answers need
    tokens to be inserted and deleted within a block.
    """
    if hf.get("expert_capacity") is not None:
        raise ValueError(
            "config.json: expert_capacity (LLaDA2.2, which routes whole blocks and inserts and "
            "deletes tokens) is not supported; use a LLaDA2.0 or LLaDA2.1 checkpoint"
        )
    hf_config.refuse_other_attention(hf)
    hf_config.refuse(hf, ONLY)
    heads, hidden = (hf_config.positive(hf, key) for key in ("num_attention_heads", "hidden_size"))
    head_dim = hf_config.positive(hf, "head_dim", hidden // heads)
    inner = hf_config.positive(hf, "moe_intermediate_size")
    experts = ExpertsConfig(
        count=hf_config.positive(hf, "num_experts"),
        per_token=hf_config.positive(hf, "num_experts_per_tok"),
        intermediate_size=inner,
        router="sigmoid",
        groups=hf_config.positive(hf, "n_group", 1),
        groups_per_token=hf_config.positive(hf, "topk_group", 1),
        scale=hf_config.real("routed_scaling_factor", hf.get("routed_scaling_factor")),
        shared_size=inner * hf_config.natural(hf, "num_shared_experts", 1),
        dense_layers=tuple(range(min(1000, hf_config.natural(hf, "first_k_dense_replace", 1)))),
    )
    share = hf_config.partial_rotation(hf)
    if share > 1 or head_dim > LARGEST:
        raise ValueError(
            f"config.json: partial_rotary_factor {share:g} of head_dim {head_dim} is no part of it"
        )
    turned = hf_config.positive(hf, "rotary_dim", int(head_dim * share))
    if turned != int(head_dim * share):
        raise ValueError(
            f"config.json: rotary_dim {turned} contradicts partial_rotary_factor {share:g} of "
            f"head_dim {head_dim}"
        )
    return {"qk_norm": True, "rotary_dim": turned, "experts": experts}


def write(config: ModelConfig) -> dict[str, Any]:
    """The mixture in LLaDA2's words."""
    experts = config.experts
    assert experts is not None
    turned = config.rotary_dim or config.head_dim
    return {
        "num_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.intermediate_size,
        "n_group": experts.groups,
        "topk_group": experts.groups_per_token,
        "routed_scaling_factor": experts.scale,
        "num_shared_experts": experts.shared_size // experts.intermediate_size,
        "first_k_dense_replace": len(experts.dense_layers),
        "partial_rotary_factor": turned / config.head_dim,
        "rotary_dim": turned,
    } | ONLY


def tensors(config: ModelConfig) -> Tensors:
    """Ling's names, with queries, keys and values in one tensor."""
    layer, dim = "model.layers.{i}.", config.head_dim
    kv = config.num_kv_heads * dim
    last = config.num_heads * dim + 2 * kv
    cuts = {"q": (0, last - 2 * kv), "k": (last - 2 * kv, last - kv), "v": (last - kv, last)}
    attention = layer + "attention."
    own = {
        "embedding.embedding": Stored("model.word_embeddings.weight"),
        "layers.{i}.attention.o.kernel": Stored(attention + "dense.weight", True),
        "layers.{i}.attention.q_norm.scale": Stored(attention + "query_layernorm.weight"),
        "layers.{i}.attention.k_norm.scale": Stored(attention + "key_layernorm.weight"),
        "layers.{i}.mlp.router.kernel": Stored(layer + "mlp.gate.weight", True),
        "layers.{i}.mlp.router.bias": Stored(layer + "mlp.gate.expert_bias"),
    }
    for part, (first, stop) in cuts.items():
        fused = Stored(attention + "query_key_value.weight", True, rows=(first, stop, last))
        own[f"layers.{{i}}.attention.{part}.kernel"] = fused
    for part in ("gate", "up", "down"):
        shared = Stored(f"{layer}mlp.shared_experts.{part}_proj.weight", True)
        own[f"layers.{{i}}.mlp.shared.{part}.kernel"] = shared
    return decoder_tensors() | expert_tensors(config) | {path: (way,) for path, way in own.items()}


LLADA2 = Family(
    "llada2",
    "LLaDA2.0, LLaDA2.1",
    ("llada2_moe", "llada2_moe_veomni"),
    ("LLaDA2MoeModelLM",),
    read,
    write,
    tensors,
    Verified("transformers Glm4MoeForCausalLM", 1e-4, ("llada2.0", "llada2.1", "llada2.1-speed")),
    rule="llada2.0",
    block_size=32,
    mask_token_id=156895,
    stop_token_ids=(156892,),
    mask_literal="<|mask|>",
    chat_template=LLADA2_CHAT_TEMPLATE,
    checkpoints=(
        *(
            Checkpoint(f"LLaDA2.0-{size}{kind}", parameters)
            for size, parameters in SIZES.items()
            for kind in ("", "-CAP", "-preview")
        ),
        *(
            Checkpoint(f"LLaDA2.1-{size}", parameters, rule="llada2.1")
            for size, parameters in SIZES.items()
        ),
    ),
)
