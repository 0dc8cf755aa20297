"""Dense block diffusion with the classes of transformers, as they come."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from benchmarks.torch_denoise import Block, accept, propose
from benchmarks.torch_weights import Cache, Experts, Layer, Mlp, Weights
from herald_jax.models.config import ModelConfig


class BlockCache:
    """A static cache as transformers' attention calls it: writes the block, gives everything.

    A class of the library counts positions itself, each version in its own way, and takes the
    second step over a block for the block after it.
    """

    def __init__(self, cache: Cache, start: int) -> None:
        self.cache, self.start = cache, start

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[N, H_kv, B, D] of a layer -> keys and values [N, H_kv, start + B, D]."""
        end = self.start + keys.shape[2]
        filled = []
        for buffer, new in ((self.cache.keys, keys), (self.cache.values, values)):
            whole = buffer[layer].transpose(1, 2)[:, :, :end]
            whole[:, :, self.start :] = new
            filled.append(whole)
        return filled[0], filled[1]

    def get_seq_length(self, layer: int = 0) -> int:
        """Positions before the block."""
        return self.start


class Plain:
    """transformers' class over a static cache, called step after step.

    Attributes:
      model: the class, on the very tensors of ``weights``.
      notes: what a row says about it.
    """

    def __init__(
        self, config: ModelConfig, weights: Weights, cache: Cache, start: int, block: Block
    ) -> None:
        self.block = block
        self.model = model_of(config, weights)
        batch, size = block.tokens.shape
        device = block.tokens.device
        position = torch.arange(start, start + size, device=device)
        # Later versions of transformers have the second name.
        known = inspect.signature(self.model.forward).parameters
        cache_name = "past_key_values" if "past_key_values" in known else "cache"
        self.inputs = {
            # Without a mask of four dimensions the class would make a causal one.
            "attention_mask": torch.ones(
                1, 1, size, start + size, dtype=torch.bool, device=device
            ).expand(batch, -1, -1, -1),
            "position_ids": position.expand(batch, -1),
            cache_name: BlockCache(cache, start),
            "use_cache": True,
        }
        experts = getattr(self.model.config, "_experts_implementation", None)
        self.notes = {
            "network": type(self.model).__name__,
            "attention": "sdpa with a mask, as transformers calls it",
            "experts": f"transformers, {experts or 'eager'}" if config.experts else None,
            "compiled": False,
            "cuda_graph": False,
        }

    def logits(self) -> torch.Tensor:
        """[N, B, vocab] of the block, whose keys and values are written to the cache."""
        return self.model(input_ids=self.block.tokens, **self.inputs).logits

    def step(self) -> None:
        """One forward pass; positions accept."""
        block = self.block
        proposed, confidence = propose(self.logits(), block.mask_token)
        accept(block.tokens, block.masked, block.due, proposed, confidence)

    def commit(self) -> None:
        """Writes the keys and values of the block as it is."""
        self.model.model(input_ids=self.block.tokens, **self.inputs)


def model_of(config: ModelConfig, weights: Weights) -> Any:
    """transformers' class for a network, on the tensors of ``weights`` without a copy.

    Args:
      config: of a family in ``torch_weights.FAMILIES``.
      weights: of that shape.
    """
    import transformers

    names = {"sdar": "Qwen3", "sdar_moe": "Qwen3Moe", "llada2": "Glm4Moe"}
    name = names[config.family]
    # Memory is taken by the weights alone: the class is made without any and given those.
    with torch.device("meta"):
        model = getattr(transformers, f"{name}ForCausalLM")(
            getattr(transformers, f"{name}Config")(**_fields(config))
        )
    model.load_state_dict(_state(config, weights), strict=True, assign=True)
    # Its frequencies are no weights and are still missing.
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config).to(
        weights.embedding.device
    )
    return model.eval().requires_grad_(False)


def _fields(config: ModelConfig) -> dict[str, Any]:
    """A configuration in transformers' words."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    # Glm4Moe turns half of the channels unless told otherwise.
    rope["partial_rotary_factor"] = (config.rotary_dim or config.head_dim) / config.head_dim
    fields: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": rope,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "attn_implementation": "sdpa",
    }
    experts = config.experts
    if experts is None:
        return fields
    fields |= {
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.intermediate_size,
        "norm_topk_prob": experts.normalizes,
    }
    if config.family == "sdar_moe":
        return fields | {
            "num_experts": experts.count,
            "decoder_sparse_step": 1,
            "mlp_only_layers": list(experts.dense_layers),
        }
    return fields | {
        "n_routed_experts": experts.count,
        "n_shared_experts": experts.shared_size // experts.intermediate_size,
        "n_group": experts.groups,
        "topk_group": experts.groups_per_token,
        "first_k_dense_replace": len(experts.dense_layers),
        "routed_scaling_factor": experts.scale,
        "use_qk_norm": True,
    }


def _state(config: ModelConfig, weights: Weights) -> dict[str, torch.Tensor]:
    """The tensors of ``weights``, or views of them, under transformers' names."""
    state = {
        "model.embed_tokens.weight": weights.embedding,
        "model.norm.weight": weights.norm,
        "lm_head.weight": weights.head,
    }
    for index, layer in enumerate(weights.layers):
        named = _layer(config, layer)
        state |= {f"model.layers.{index}.{name}": tensor for name, tensor in named.items()}
    return state


def _layer(config: ModelConfig, layer: Layer) -> dict[str, torch.Tensor]:
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    parts = layer.qkv.split([queries, keys, keys])
    named = {
        "input_layernorm.weight": layer.input_norm,
        "post_attention_layernorm.weight": layer.mlp_norm,
        "self_attn.q_norm.weight": layer.q_norm,
        "self_attn.k_norm.weight": layer.k_norm,
        "self_attn.o_proj.weight": layer.o,
    }
    named |= {
        f"self_attn.{name}_proj.weight": part for name, part in zip("qkv", parts, strict=True)
    }
    mlp = layer.mlp
    if isinstance(mlp, Mlp):
        return named | _mlp("mlp", mlp)
    named |= {
        "mlp.gate.weight": mlp.router,
        "mlp.experts.gate_up_proj": mlp.gate_up,
        "mlp.experts.down_proj": mlp.down,
    }
    return named | _extras(mlp)


def _extras(mlp: Experts) -> dict[str, torch.Tensor]:
    """What only LLaDA2's mixture has."""
    named = {} if mlp.shared is None else _mlp("mlp.shared_experts", mlp.shared)
    if mlp.bias is not None:
        named["mlp.gate.e_score_correction_bias"] = mlp.bias
    return named


def _mlp(stem: str, mlp: Mlp) -> dict[str, torch.Tensor]:
    gate, up = mlp.gate_up.chunk(2)
    return {
        f"{stem}.gate_proj.weight": gate,
        f"{stem}.up_proj.weight": up,
        f"{stem}.down_proj.weight": mlp.down,
    }
