"""Random tiny networks of the transformers library, run under a block-causal mask.

The independent reference: nothing here comes from herald_jax.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM


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
    dtype: str = "float32"
    shards: int = 1


def build(tiny: TinyNetwork, seed: int) -> torch.nn.Module:
    """A network with weights large enough, and norms far enough from 1, for mistakes to show."""
    kind, config_kind = (
        (LlamaForCausalLM, LlamaConfig)
        if tiny.model_type == "llama"
        else (Qwen3ForCausalLM, Qwen3Config)
    )
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
        rope_parameters={"rope_type": "default", "rope_theta": tiny.rope_theta},
        tie_word_embeddings=tiny.tied,
        attn_implementation="sdpa",
    )
    model = kind(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim == 1:
                value = 1 + 0.3 * noise
            elif "embed" in name:
                value = 0.7 * noise
            else:
                value = noise * 1.3 / weight.shape[1] ** 0.5
            # Rounded first, so that a bfloat16 checkpoint holds exactly these numbers.
            weight.copy_(value.to(getattr(torch, tiny.dtype)).float())
    return model


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
    length = tokens.shape[1]
    at = torch.arange(length) // block
    seen = at[None, :] <= at[:, None]
    mask = torch.where(seen, 0.0, float("-inf"))[None, None].expand(tokens.shape[0], 1, -1, -1)
    with torch.no_grad():
        logits = model(
            input_ids=torch.tensor(tokens),
            attention_mask=mask,
            position_ids=torch.arange(length)[None].expand(tokens.shape[0], -1),
            use_cache=False,
        ).logits
    for hook in hooks:
        hook.remove()
    return torch.stack(hidden).numpy(), logits.numpy()


def store(model: torch.nn.Module, tiny: TinyNetwork, folder: Path) -> None:
    """Saves it as its authors would: safetensors by the library, and their style of config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    size = sum(weight.numel() for weight in model.parameters()) * 4
    shard = size if tiny.shards == 1 else size // tiny.shards
    # A copy, since casting also rounds the RoPE frequencies, which no checkpoint holds.
    copy.deepcopy(model).to(getattr(torch, tiny.dtype)).save_pretrained(
        folder, max_shard_size=int(shard)
    )
    (folder / "generation_config.json").unlink(missing_ok=True)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if tiny.model_type == "sdar":
        # SDAR's files predate rope_parameters.
        config.pop("rope_parameters", None)
        config |= {"rope_theta": tiny.rope_theta, "rope_scaling": None}
        config["architectures"] = ["SDARForCausalLM"]
    config |= {
        "model_type": tiny.model_type,
        "block_size": tiny.block_size,
        "mask_token_id": tiny.vocab - 1,
        "herald": {"stop_token_ids": [tiny.vocab - 2]},
    }
    path.write_text(json.dumps(config, indent=1) + "\n")
