"""Weights and key-value caches of the PyTorch baseline: random ones, or those of our networks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from herald_jax.models.config import ModelConfig

FAMILIES = ("sdar", "sdar_moe", "llada2")


@dataclass
class Mlp:
    """A gated MLP: gate_up [2 * inner, hidden], gate first; down [hidden, inner]."""

    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass
class Experts:
    """A mixture: router [E, hidden], gate_up [E, 2 * inner, hidden], down [E, hidden, inner].

    Attributes:
      bias: float32 [E], by which the sigmoid router chooses, else None.
      shared: the expert that every token takes, or None.
    """

    router: torch.Tensor
    bias: torch.Tensor | None
    gate_up: torch.Tensor
    down: torch.Tensor
    shared: Mlp | None


@dataclass
class Layer:
    """A decoder layer: qkv [(H_q + 2 H_kv) * D, hidden], o [hidden, H_q * D], norms vectors."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    q_norm: torch.Tensor
    k_norm: torch.Tensor
    o: torch.Tensor
    mlp_norm: torch.Tensor
    mlp: Mlp | Experts


@dataclass
class Weights:
    """A network, every matrix as [out, in]: embedding and head [vocab, hidden]."""

    embedding: torch.Tensor
    layers: list[Layer]
    norm: torch.Tensor
    head: torch.Tensor


@dataclass
class Cache:
    """Keys and values of every layer, [N, R, H_kv, D]; row r holds position r."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]


def check(config: ModelConfig) -> None:
    """Refuses networks with parts that the baseline does not have.

    Raises:
      ValueError: one sentence that names the part.
    """
    parts = {
        f"family {config.family}": config.family not in FAMILIES,
        "biases in attention": config.attention_bias,
        "no norms of queries and keys": not config.qk_norm,
        "tied embeddings": config.tie_word_embeddings,
        "YaRN": config.yarn is not None,
        "shifted logits": config.shifts_logits,
    }
    for part, has in parts.items():
        if has:
            raise ValueError(f"the PyTorch baseline has no network with {part}")


def random_weights(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> Weights:
    """Random weights distributed as in ``shapes.random_model``, made where they stay.

    Normal with variance 1 / fan-in; the embedding counts its vocabulary as that, vectors are one.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, fan_in: int | None = None) -> torch.Tensor:
        made = torch.empty(shape, dtype=dtype, device=device)
        return made.normal_(std=(fan_in or shape[-1]) ** -0.5, generator=generator)

    def ones(size: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.ones(size, dtype=kind, device=device)

    def plain(inner: int) -> Mlp:
        return Mlp(normal(2 * inner, hidden), normal(hidden, inner))

    def mixture() -> Experts:
        experts = config.experts
        assert experts is not None
        count, inner = experts.count, experts.intermediate_size
        return Experts(
            router=normal(count, hidden),
            bias=ones(count, torch.float32) if experts.router == "sigmoid" else None,
            gate_up=normal(count, 2 * inner, hidden),
            down=normal(count, hidden, inner),
            shared=plain(experts.shared_size) if experts.shared_size else None,
        )

    hidden, dim = config.hidden_size, config.head_dim
    layers = [
        Layer(
            input_norm=ones(hidden),
            qkv=normal((config.num_heads + 2 * config.num_kv_heads) * dim, hidden),
            q_norm=ones(dim),
            k_norm=ones(dim),
            o=normal(hidden, config.num_heads * dim),
            mlp_norm=ones(hidden),
            mlp=mixture() if config.has_experts(index) else plain(config.intermediate_size),
        )
        for index in range(config.num_layers)
    ]
    embedding = normal(config.vocab_size, hidden, fan_in=config.vocab_size)
    return Weights(embedding, layers, ones(hidden), normal(config.vocab_size, hidden))


def random_cache(
    config: ModelConfig,
    batch: int,
    rows: int,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 1,
) -> Cache:
    """Standard normal keys and values, the size that norms and random weights give them."""
    generator = torch.Generator(device).manual_seed(seed)
    shape = (batch, rows, config.num_kv_heads, config.head_dim)

    def part() -> list[torch.Tensor]:
        empty = (torch.empty(shape, dtype=dtype, device=device) for _ in range(config.num_layers))
        return [each.normal_(generator=generator) for each in empty]

    return Cache(part(), part())


def weights_of(model: Any) -> Weights:
    """The weights of a ``herald_jax.models.decoder.Decoder``, float32 on the CPU."""

    def tensor(parameter: Any) -> torch.Tensor:
        return torch.tensor(np.asarray(parameter[...], np.float32))

    def matrices(*parameters: Any) -> torch.Tensor:
        """Kernels [..., in, out], one below the other as [..., out, in]."""
        return torch.cat([tensor(each).mT for each in parameters], dim=-2).contiguous()

    def plain(mlp: Any) -> Mlp:
        return Mlp(matrices(mlp.gate.kernel, mlp.up.kernel), matrices(mlp.down.kernel))

    def mixture(mlp: Any) -> Experts:
        return Experts(
            router=matrices(mlp.router.kernel),
            bias=tensor(mlp.router.bias) if hasattr(mlp.router, "bias") else None,
            gate_up=matrices(mlp.experts.gate, mlp.experts.up),
            down=matrices(mlp.experts.down),
            shared=plain(mlp.shared) if hasattr(mlp, "shared") else None,
        )

    layers = [
        Layer(
            input_norm=tensor(layer.input_norm.scale),
            qkv=matrices(*(getattr(layer.attention, name).kernel for name in "qkv")),
            q_norm=tensor(layer.attention.q_norm.scale),
            k_norm=tensor(layer.attention.k_norm.scale),
            o=matrices(layer.attention.o.kernel),
            mlp_norm=tensor(layer.mlp_norm.scale),
            mlp=mixture(layer.mlp) if hasattr(layer.mlp, "experts") else plain(layer.mlp),
        )
        for layer in model.layers
    ]
    embedding = tensor(model.embedding.embedding)
    return Weights(embedding, layers, tensor(model.norm.scale), matrices(model.lm_head.kernel))
