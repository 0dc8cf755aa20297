"""Random tiny networks of the transformers library, run under a block-causal mask.

The independent reference: nothing here comes from herald_jax.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import (
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

#: model_type of the checkpoint -> the class that computes the same.
CLASSES: dict[str, tuple[Any, Any]] = {
    "sdar": (Qwen3ForCausalLM, Qwen3Config),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config),
    "llama": (LlamaForCausalLM, LlamaConfig),
    "sdar_moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig),
    "Fast_dLLM_Qwen": (Qwen2ForCausalLM, Qwen2Config),
    "llada2_moe": (Glm4MoeForCausalLM, Glm4MoeConfig),
}


@dataclass(frozen=True)
class TinyNetwork:
    """What to build: sizes, the block size of the mask, and how it is stored."""

    model_type: str = "sdar"
    block_size: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    layers: int = 2
    hidden: int = 32
    inner: int = 48
    vocab: int = 53
    tied: bool = False
    rope_theta: float = 1e4
    yarn: bool = False
    dtype: str = "float32"
    shards: int = 1
    experts: int = 16
    experts_per_token: int = 4

    @property
    def rope(self) -> dict[str, Any]:
        """transformers' ``rope_parameters``, but for the base."""
        if not self.yarn:
            return {"rope_type": "default"}
        return {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}

    @property
    def mixture(self) -> dict[str, Any]:
        """What the configuration classes call the mixture of experts."""
        common = {
            "num_experts_per_tok": self.experts_per_token,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
        }
        if self.model_type == "sdar_moe":
            return common | {
                "num_experts": self.experts,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
            }
        if self.model_type == "llada2_moe":
            return common | {
                "n_routed_experts": self.experts,
                "n_shared_experts": 1,
                "n_group": 4,
                "topk_group": 2,
                "first_k_dense_replace": 1,
                "routed_scaling_factor": 2.5,
                "use_qk_norm": True,
                "attention_bias": False,
            }
        return {}


def build(tiny: TinyNetwork, seed: int) -> torch.nn.Module:
    """A network with weights large enough, and norms far enough from 1, for mistakes to show.

    The bias by which LLaDA2 chooses experts is strongly negative, so that experts of groups that
    were not kept would win if they were given zero.
    """
    kind, config_kind = CLASSES[tiny.model_type]
    rope = tiny.rope | {"rope_theta": tiny.rope_theta}
    if tiny.model_type == "llada2_moe":
        rope |= {"partial_rotary_factor": 0.5}
    config = config_kind(
        vocab_size=tiny.vocab,
        hidden_size=tiny.hidden,
        intermediate_size=tiny.inner,
        num_hidden_layers=tiny.layers,
        num_attention_heads=tiny.heads,
        num_key_value_heads=tiny.kv_heads,
        head_dim=tiny.head_dim,
        max_position_embeddings=1024,
        rms_norm_eps=1e-6,
        rope_parameters=rope,
        tie_word_embeddings=tiny.tied,
        attn_implementation="sdpa",
        **tiny.mixture,
    )
    model = kind(config).eval()
    generator = torch.Generator().manual_seed(seed)

    def fill(name: str, weight: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(weight.shape, generator=generator)
        if "correction_bias" in name:
            return 0.8 * noise - 1
        if weight.ndim == 1:
            return 1 + 0.3 * noise
        scale = 0.7 if "embed" in name else 1.3 / weight.shape[-1] ** 0.5
        # Rounded first, so that a bfloat16 checkpoint holds exactly these numbers.
        return (scale * noise).to(getattr(torch, tiny.dtype)).float()

    with torch.no_grad():
        for name, weight in model.named_parameters():
            value = fill(name, weight)
            weight.copy_(value.to(getattr(torch, tiny.dtype)).float())
        for name, buffer in model.named_buffers():
            if "correction_bias" in name:
                buffer.copy_(fill(name, buffer))
    return model


def logits(model: torch.nn.Module, tokens: np.ndarray, block: int, **more: Any) -> Any:
    """One uncached pass over int [N, S] under the block-causal mask; what the class returns."""
    length = tokens.shape[1]
    at = torch.arange(length) // block
    seen = at[None, :] <= at[:, None]
    mask = torch.where(seen, 0.0, float("-inf"))[None, None].expand(tokens.shape[0], 1, -1, -1)
    with torch.no_grad():
        return model(
            input_ids=torch.tensor(tokens),
            attention_mask=mask.to(next(model.parameters()).dtype),
            position_ids=torch.arange(length)[None].expand(tokens.shape[0], -1),
            use_cache=False,
            **more,
        ).logits.float()


def run(model: torch.nn.Module, tokens: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Hidden states after the embedding and each layer [layers + 1, N, S, H], and logits."""
    hidden: list[torch.Tensor] = []
    inner = model.model
    hooks = [inner.embed_tokens.register_forward_hook(lambda _m, _i, out: hidden.append(out))]
    for layer in inner.layers:
        hooks.append(
            layer.register_forward_hook(
                lambda _m, _i, out: hidden.append(out[0] if isinstance(out, tuple) else out)
            )
        )
    scores = logits(model, tokens, block)
    for hook in hooks:
        hook.remove()
    return torch.stack(hidden).numpy(), scores.numpy()


def halved(model: torch.nn.Module) -> torch.nn.Module:
    """The network with bfloat16 parameters; buffers stay, as transformers keeps them on loading."""
    for weight in model.parameters():
        weight.data = weight.data.to(torch.bfloat16)
    return model
