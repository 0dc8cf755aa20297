"""A tiny network of every family, as its config.json, that exercises all it has."""

from __future__ import annotations

from typing import Any

import hf_folders

COMMON: dict[str, Any] = hf_folders.CONFIG | {"herald": {"stop_token_ids": [5]}}
COMMON |= {
    "hidden_size": 48,
    "head_dim": 16,
    "num_hidden_layers": 3,
    "intermediate_size": 40,
    "vocab_size": 97,
    "mask_token_id": 96,
    "block_size": 8,
    "max_position_embeddings": 4096,
    "rope_theta": 1e4,
}

#: Family -> its config.json; the last has every number of experts, groups and norms that differ.
CONFIGS: dict[str, dict[str, Any]] = {
    "sdar": COMMON,
    "qwen3": COMMON | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
    "llama": COMMON | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "sdar_moe": COMMON
    | {
        "model_type": "sdar_moe",
        "architectures": ["SDARMoeForCausalLM"],
        "num_experts": 12,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "fast_dllm_v2": {key: value for key, value in COMMON.items() if key != "attention_bias"}
    | {
        "model_type": "Fast_dLLM_Qwen",
        "architectures": ["Fast_dLLM_QwenForCausalLM"],
        "block_size": None,
        "bd_size": 8,
        "tie_word_embeddings": True,
    },
    "llada2": {key: value for key, value in COMMON.items() if key != "attention_bias"}
    | {
        "model_type": "llada2_moe",
        "architectures": ["LLaDA2MoeModelLM"],
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 20,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "score_function": "sigmoid",
        "router_dtype": "fp32",
        "moe_router_enable_expert_bias": True,
        "norm_topk_prob": True,
        "partial_rotary_factor": 0.5,
        "rotary_dim": 8,
        "use_bias": False,
        "use_qkv_bias": False,
        "use_qk_norm": True,
    },
}
