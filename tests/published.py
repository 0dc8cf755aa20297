"""Every published checkpoint: its config.json, and its tensors' names and shapes by hand.

Written from what the authors' files say, and independent of the package's own tables.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

Shapes = dict[str, tuple[int, ...]]

_LLADA2: dict[str, Any] = {
    "architectures": ["LLaDA2MoeModelLM"],
    "auto_map": {
        "AutoConfig": "configuration_llada2_moe.LLaDA2MoeConfig",
        "AutoModelForCausalLM": "modeling_llada2_moe.LLaDA2MoeModelLM",
    },
    "attention_dropout": 0.0,
    "dtype": "bfloat16",
    "embedding_dropout": 0.0,
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "llada2_moe",
    "moe_router_enable_expert_bias": True,
    "n_group": 8,
    "norm_head": False,
    "norm_topk_prob": True,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 4,
    "num_shared_experts": 1,
    "output_dropout": 0.0,
    "output_router_logits": False,
    "pad_token_id": 156892,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 600000,
    "rotary_dim": 64,
    "routed_scaling_factor": 2.5,
    "router_dtype": "fp32",
    "score_function": "sigmoid",
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "transformers_version": "4.57.1",
    "use_bias": False,
    "use_cache": False,
    "use_qk_norm": True,
    "use_qkv_bias": False,
    "use_rmsnorm": True,
    "use_sliding_window": False,
    "vocab_size": 157184,
}
_MINI = _LLADA2 | {
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "moe_intermediate_size": 512,
    "num_attention_heads": 16,
    "num_hidden_layers": 20,
}
_FLASH = _LLADA2 | {
    "hidden_size": 4096,
    "intermediate_size": 9216,
    "moe_intermediate_size": 1024,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
}
_SDAR: dict[str, Any] = {
    "architectures": ["SDARForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_sdar.SDARConfig",
        "AutoModelForCausalLM": "modeling_sdar.SDARForCausalLM",
    },
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_implementation": "flex_attention",
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "fuse_cross_entropy": True,
    "head_dim": 128,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 32768,
    "max_window_layers": 36,
    "model_type": "sdar",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.52.4",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
_4B = _SDAR | {"hidden_size": 2560, "intermediate_size": 9728}
_8B = _SDAR | {"hidden_size": 4096, "intermediate_size": 12288}
_FAST: dict[str, Any] = {
    "architectures": ["Fast_dLLM_QwenForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling.Fast_dLLM_QwenForCausalLM"},
    "attention_dropout": 0.0,
    "bd_size": 32,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "Fast_dLLM_Qwen",
    "num_hidden_layers": 28,
    "pad_token_id": 151645,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.53.1",
    "use_cache": True,
    "use_sliding_window": False,
}

#: Repository's name without the owner -> its config.json.
CONFIGS: dict[str, dict[str, Any]] = {
    "LLaDA2.0-mini": _MINI | {"transformers_version": "4.52.3"},
    "LLaDA2.0-flash": _FLASH | {"transformers_version": "4.52.3"},
    "LLaDA2.1-mini": _MINI,
    "LLaDA2.1-flash": _FLASH,
    "SDAR-1.7B-Chat": _SDAR
    | {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
    },
    "SDAR-4B-Chat": _4B,
    "SDAR-8B-Chat": _8B,
    "SDAR-8B-Chat-b32": _8B,
    "SDAR-30B-A3B-Chat": _SDAR
    | {
        "architectures": ["SDARMoeForCausalLM"],
        "decoder_sparse_step": 1,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "mlp_only_layers": [],
        "model_type": "sdar_moe",
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
    },
    "TraDo-4B-Instruct": _4B,
    "TraDo-8B-Instruct": _8B,
    "Fast_dLLM_v2_1.5B": _FAST
    | {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "vocab_size": 151936,
    },
    "Fast_dLLM_v2_7B": _FAST
    | {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
        "vocab_size": 152064,
    },
}

#: What the repositories' indices give as total_size, in bytes.
TOTAL_SIZES = {"SDAR-4B-Chat": 8_822_848_512, "SDAR-8B-Chat": 16_381_470_720}


def shapes(hf: dict[str, Any]) -> Shapes:
    """Names and shapes of all tensors of a checkpoint, from its config.json."""
    hidden, vocab = hf["hidden_size"], hf["vocab_size"]
    llada2 = hf["model_type"] == "llada2_moe"
    embedding = "model.word_embeddings.weight" if llada2 else "model.embed_tokens.weight"
    found: Shapes = {embedding: (vocab, hidden), "model.norm.weight": (hidden,)}
    if not hf["tie_word_embeddings"]:
        found["lm_head.weight"] = (vocab, hidden)
    for i in range(hf["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        found[layer + "input_layernorm.weight"] = (hidden,)
        found[layer + "post_attention_layernorm.weight"] = (hidden,)
        found |= _llada2_attention(hf, layer) if llada2 else _qwen_attention(hf, layer)
        if llada2 and i >= hf["first_k_dense_replace"]:
            found |= _llada2_experts(hf, layer + "mlp.")
        elif hf["model_type"] == "sdar_moe":
            found |= _sdar_experts(hf, layer + "mlp.")
        else:
            found |= _mlp(layer + "mlp.", hidden, hf["intermediate_size"])
    return found


def _mlp(name: str, hidden: int, inner: int) -> Shapes:
    return {
        f"{name}gate_proj.weight": (inner, hidden),
        f"{name}up_proj.weight": (inner, hidden),
        f"{name}down_proj.weight": (hidden, inner),
    }


def _qwen_attention(hf: dict[str, Any], layer: str) -> Shapes:
    hidden, name = hf["hidden_size"], layer + "self_attn."
    dim = hf.get("head_dim", hidden // hf["num_attention_heads"])
    q, kv = hf["num_attention_heads"] * dim, hf["num_key_value_heads"] * dim
    found: Shapes = {
        f"{name}q_proj.weight": (q, hidden),
        f"{name}k_proj.weight": (kv, hidden),
        f"{name}v_proj.weight": (kv, hidden),
        f"{name}o_proj.weight": (hidden, q),
    }
    if hf["model_type"] == "Fast_dLLM_Qwen":
        for part, width in (("q", q), ("k", kv), ("v", kv)):
            found[f"{name}{part}_proj.bias"] = (width,)
    elif hf["model_type"] != "llama":
        found |= {f"{name}q_norm.weight": (dim,), f"{name}k_norm.weight": (dim,)}
    return found


def _sdar_experts(hf: dict[str, Any], name: str) -> Shapes:
    hidden, inner = hf["hidden_size"], hf["moe_intermediate_size"]
    found: Shapes = {f"{name}gate.weight": (hf["num_experts"], hidden)}
    for expert in range(hf["num_experts"]):
        found |= _mlp(f"{name}experts.{expert}.", hidden, inner)
    return found


def _llada2_attention(hf: dict[str, Any], layer: str) -> Shapes:
    hidden, dim, name = hf["hidden_size"], hf["head_dim"], layer + "attention."
    heads = hf["num_attention_heads"]
    return {
        f"{name}query_key_value.weight": ((heads + 2 * hf["num_key_value_heads"]) * dim, hidden),
        f"{name}query_layernorm.weight": (dim,),
        f"{name}key_layernorm.weight": (dim,),
        f"{name}dense.weight": (hidden, heads * dim),
    }


def _llada2_experts(hf: dict[str, Any], name: str) -> Shapes:
    found = _sdar_experts(hf, name) | {f"{name}gate.expert_bias": (hf["num_experts"],)}
    shared = hf["moe_intermediate_size"] * hf["num_shared_experts"]
    return found | _mlp(f"{name}shared_experts.", hf["hidden_size"], shared)


def write_headers(folder: Path, hf: dict[str, Any], *, shard_bytes: int = 10**10) -> Shapes:
    """A sharded folder of the right names, shapes and file sizes, whose tensors are holes.

    Args:
      folder: to make.
      hf: its config.json.
      shard_bytes: a file ends after the tensor that reaches this size.

    Returns:
      Names and shapes of its tensors.
    """
    folder.mkdir(parents=True)
    found = shapes(hf)
    where: dict[str, str] = {}
    shard: dict[str, Any] = {}
    end, total = 0, 0
    for name, shape in found.items():
        # Experts' biases are the only tensors that are not bfloat16.
        kind, width = ("F32", 4) if name.endswith("expert_bias") else ("BF16", 2)
        size = width * math.prod(shape)
        shard[name] = {"dtype": kind, "shape": shape, "data_offsets": [end, end + size]}
        end, total = end + size, total + size
        if end >= shard_bytes or len(where) + len(shard) == len(found):
            file = f"model-{len(set(where.values())) + 1:05d}.safetensors"
            _write_hollow(folder / file, shard, end)
            where |= dict.fromkeys(shard, file)
            shard, end = {}, 0
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(hf))
    return found


def _write_hollow(path: Path, header: dict[str, Any], size: int) -> None:
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + size)
