"""Fast-dLLM v2: a Qwen2 network run block-causally, whose logits are shifted by one position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from herald_jax.models import hf_config
from herald_jax.models.chat_templates import FAST_DLLM_V2_CHAT_TEMPLATE
from herald_jax.models.config import ModelConfig
from herald_jax.models.family import Checkpoint, Family, Verified
from herald_jax.models.stored import Tensors, decoder_tensors


def read(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Biases on queries, keys and values, which Qwen2's config.json takes for granted."""
    hf_config.refuse_other_attention(hf)
    hf_config.refuse_partial_rotation(hf)
    hf_config.refuse(hf, {"attention_bias": True, "mlp_bias": False, "hidden_act": "silu"})
    return {
        "qk_norm": False,
        "attention_bias": True,
        "shifts_logits": True,
        "block_size": hf.get("bd_size"),
    }


def write(config: ModelConfig) -> dict[str, Any]:
    """The block size under its own name."""
    return {"bd_size": config.block_size}


def tensors(config: ModelConfig) -> Tensors:
    """Qwen2's names."""
    return decoder_tensors()


FAST_DLLM_V2 = Family(
    "fast_dllm_v2",
    "Fast-dLLM v2",
    ("Fast_dLLM_Qwen",),
    ("Fast_dLLM_QwenForCausalLM",),
    read,
    write,
    tensors,
    Verified("transformers Qwen2ForCausalLM", 1e-4, ("fast-dllm-v2", "fast-dllm-v2-chat")),
    rule="fast-dllm-v2",
    block_size=32,
    mask_token_id=151665,
    stop_token_ids=(151645,),
    chat_template=FAST_DLLM_V2_CHAT_TEMPLATE,
    checkpoints=(
        Checkpoint("Fast_dLLM_v2_1.5B", 1_543_714_304),
        Checkpoint("Fast_dLLM_v2_7B", 7_615_616_512),
    ),
)
