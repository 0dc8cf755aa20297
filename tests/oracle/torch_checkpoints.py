"""Stores a network of transformers as the authors of its family publish theirs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from .torch_networks import TinyNetwork

#: LLaDA2's words for those of Glm4Moe.
LLADA2_WORDS = {
    "model.embed_tokens.": "model.word_embeddings.",
    "self_attn.o_proj.": "attention.dense.",
    "self_attn.q_norm.": "attention.query_layernorm.",
    "self_attn.k_norm.": "attention.key_layernorm.",
    "mlp.gate.e_score_correction_bias": "mlp.gate.expert_bias",
}
ARCHITECTURES = {
    "sdar": "SDARForCausalLM",
    "sdar_moe": "SDARMoeForCausalLM",
    "Fast_dLLM_Qwen": "Fast_dLLM_QwenForCausalLM",
    "llada2_moe": "LLaDA2MoeModelLM",
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
}


def store(model: torch.nn.Module, tiny: TinyNetwork, folder: Path) -> None:
    """Writes safetensors and a config.json in the family's style."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = published(model, tiny)
    (folder / "config.json").write_text(json.dumps(config(model, tiny), indent=1) + "\n")
    if tiny.shards == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return
    where = {
        name: f"model-{1 + index * tiny.shards // len(tensors):05d}.safetensors"
        for index, name in enumerate(tensors)
    }
    for file in sorted(set(where.values())):
        part = {name: tensor for name, tensor in tensors.items() if where[name] == file}
        save_file(part, folder / file, {"format": "pt"})
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def published(model: torch.nn.Module, tiny: TinyNetwork) -> dict[str, torch.Tensor]:
    """The state of a network under its family's names, experts one by one."""
    state: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(tensor):
                gate, up = both.chunk(2)
                stem = f"{name.removesuffix('gate_up_proj')}{expert}."
                state |= {f"{stem}gate_proj.weight": gate, f"{stem}up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            for expert, down in enumerate(tensor):
                state[f"{name.removesuffix('down_proj')}{expert}.down_proj.weight"] = down
        else:
            state[name] = tensor
    if tiny.tied:
        state.pop("lm_head.weight", None)
    if tiny.model_type == "llada2_moe":
        state = _as_llada2(state)
    kind = getattr(torch, tiny.dtype)
    return {
        name: tensor.to(torch.float32 if "expert_bias" in name else kind).contiguous().clone()
        for name, tensor in state.items()
    }


def _as_llada2(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    renamed: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        split = re.fullmatch(r"(.*)self_attn\.([qkv])_proj\.weight", name)
        if split is None:
            for theirs, ours in LLADA2_WORDS.items():
                name = name.replace(theirs, ours)
            renamed[name] = tensor
        elif split[2] == "q":
            parts = [state[f"{split[1]}self_attn.{part}_proj.weight"] for part in "qkv"]
            renamed[f"{split[1]}attention.query_key_value.weight"] = torch.cat(parts)
    return renamed


def config(model: torch.nn.Module, tiny: TinyNetwork) -> dict[str, Any]:
    """A config.json with the keys that the family's published ones have."""
    made: dict[str, Any] = {
        "architectures": [ARCHITECTURES[tiny.model_type]],
        "model_type": tiny.model_type,
        "vocab_size": tiny.vocab,
        "hidden_size": tiny.hidden,
        "intermediate_size": tiny.inner,
        "num_hidden_layers": tiny.layers,
        "num_attention_heads": tiny.heads,
        "num_key_value_heads": tiny.kv_heads,
        "head_dim": tiny.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": tiny.tied,
        "rope_theta": tiny.rope_theta,
        "rope_scaling": tiny.rope if tiny.yarn else None,
        "mask_token_id": tiny.vocab - 1,
        "herald": {"stop_token_ids": [tiny.vocab - 2]},
    } | tiny.mixture
    made["bd_size" if tiny.model_type == "Fast_dLLM_Qwen" else "block_size"] = tiny.block_size
    if tiny.model_type == "llada2_moe":
        made["num_experts"] = made.pop("n_routed_experts")
        made["num_shared_experts"] = made.pop("n_shared_experts")
        made["use_qkv_bias"] = made.pop("attention_bias")
        made |= {
            "partial_rotary_factor": 0.5,
            "rotary_dim": tiny.head_dim // 2,
            "score_function": "sigmoid",
            "router_dtype": "fp32",
            "moe_router_enable_expert_bias": True,
            "use_bias": False,
        }
    if tiny.model_type in ("qwen3", "llama"):
        # Newer files keep RoPE here.
        made.pop("rope_theta")
        made.pop("rope_scaling")
        made["rope_parameters"] = tiny.rope | {"rope_theta": tiny.rope_theta}
    return made
