"""The time below which no denoising step can be: operation by operation, reading or arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.ceilings import Ceilings
from herald_jax.kv.device_cache import CacheShape
from herald_jax.models.config import ModelConfig


@dataclass(frozen=True)
class Operation:
    """One kind of operation of a step: what it must read and compute, over all layers."""

    name: str
    nbytes: float
    flops: float

    def seconds(self, ceilings: Ceilings) -> float:
        """The longer of reading and computing."""
        return max(self.nbytes / ceilings.bytes_per_second, self.flops / ceilings.flops_per_second)


def operations(
    config: ModelConfig, shape: CacheShape, lengths: tuple[int, int], masked: float
) -> list[Operation]:
    """What one step must do.

    Args:
      config: the network; ``shape``: the cache it attends.
      lengths: rows attended in an exact layer and in a sparse one.
      masked: mean positions a slot has masked, the only ones whose logits are needed.
    """
    size, dim, hidden = shape.dtype.itemsize, config.head_dim, config.hidden_size
    tokens = shape.slots * config.block_size

    def product(name: str, weights: float, rows: float, count: float = 1) -> Operation:
        return Operation(name, count * weights * size, count * 2 * weights * rows)

    def attention(name: str, layers: int, rows: int) -> Operation:
        read = 2 * shape.slots * rows * config.num_kv_heads * dim * size
        return Operation(name, layers * read, layers * 4 * tokens * rows * config.num_heads * dim)

    layers = config.num_layers
    heads = config.num_heads + 2 * config.num_kv_heads
    found = [
        product("query, key, value", hidden * heads * dim, tokens, layers),
        attention("attention, exact layers", shape.exact_layers, lengths[0]),
        attention("attention, sparse layers", shape.sparse_layers, lengths[1]),
        product("attention output", config.num_heads * dim * hidden, tokens, layers),
    ]
    mixtures = sum(config.has_experts(layer) for layer in range(layers))
    found.append(product("mlp", 3 * hidden * config.intermediate_size, tokens, layers - mixtures))
    if config.experts is not None and mixtures:
        experts = config.experts
        one = 3 * hidden * experts.intermediate_size
        # The share of the experts that somebody takes, were all equally likely.
        taken = experts.count * (1 - (1 - experts.per_token / experts.count) ** tokens)
        found += [
            product("router", hidden * experts.count, tokens, mixtures),
            Operation(
                "experts",
                mixtures * taken * one * size,
                mixtures * 2 * one * tokens * experts.per_token,
            ),
            product("shared expert", 3 * hidden * experts.shared_size, tokens, mixtures),
        ]
    found.append(product("head", hidden * config.vocab_size, shape.slots * masked))
    return [operation for operation in found if operation.flops]
