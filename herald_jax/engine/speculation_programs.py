"""The compiled programs of selection one layer ahead: the pass that calibrates, and the look."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from herald_jax.engine.choice import best_rows, mean_query, tail_rows, voters
from herald_jax.engine.step_programs import BlockState, Buffer, write_rows
from herald_jax.models.attention import attend_blocks
from herald_jax.models.config import ModelConfig


@dataclass(frozen=True)
class SpeculationPrograms:
    """Bodies of the programs; equal instances stand for the same compiled programs.

    Attributes:
      sinks: leading positions always selected; ``selected``: K's capacity.
    """

    config: ModelConfig
    sinks: int
    selected: int

    def calibrate(
        self, layers: Sequence[Any], buffers: Sequence[Buffer], x: jax.Array, start: jax.Array
    ) -> tuple[jax.Array, list[tuple[jax.Array, jax.Array]]]:
        """A pass of x [1, C, hidden], whole blocks from position ``start`` (int32 []).

        Args:
          buffers: [1, R, H_kv, D], whose rows before ``start`` are attended; what is written is
            not kept, and rows past the end are dropped.

        Returns:
          x, and q [C, H_q, D] and k [C, H_kv, D] of every layer.
        """
        positions = (start + jnp.arange(x.shape[1], dtype=jnp.int32))[None]
        seen = []
        for layer, (keys, values) in zip(layers, buffers, strict=True):
            q, k, v = layer.pre(x, positions)
            keys, values = write_rows(keys, k, start[None]), write_rows(values, v, start[None])
            x = layer.post(x, attend_blocks(q, keys, values, positions, self.config.block_size))
            seen.append((q[0], k[0]))
        return x, seen

    def look(
        self,
        layers: Sequence[Any],
        x: jax.Array,
        state: BlockState,
        keys: jax.Array,
        projection: jax.Array,
        kept: jax.Array,
    ) -> jax.Array:
        """Chooses rows for the second of two layers from the input of the first.

        Args:
          x: [N, B, hidden], the input of ``layers[0]``.
          keys: [N, H_kv, R, P] and ``projection``: float32 [N, H_kv, D, P], of ``layers[1]``.
          kept: int32 [N], K_r.

        Returns:
          int32 [N, H_kv, B + K]: the tail's rows, then K_r chosen ones, ascending.
        """
        source, target = layers
        q, _, _ = target.attention.qkv(source.input_norm(x), state.positions)
        mean = mean_query(q, voters(state.masked))
        scores = partial_importance(mean, keys, projection, state.start)
        block = self.config.block_size
        best = best_rows(scores, state.start - block, self.selected, sinks=self.sinks)
        used = jnp.arange(self.selected) < kept[:, None, None]
        chosen = jnp.sort(jnp.where(used, best, keys.shape[2]), axis=-1)
        chosen = jnp.where(used, chosen, 0)
        tail = tail_rows(state.start, block)
        tail = jnp.broadcast_to(tail[:, None], (*chosen.shape[:2], block))
        return jnp.concatenate([tail, chosen], axis=-1).astype(jnp.int32)


def partial_importance(
    q: jax.Array, keys: jax.Array, projection: jax.Array, lengths: jax.Array
) -> jax.Array:
    """Softmax mass of every row in the kept channels, summed over the G queries of a KV head.

    Args:
      q: float32 [N, H_q, D]; ``keys``: [N, H_kv, R, P].
      projection: float32 [N, H_kv, D, P]; ``lengths``: int32 [N], rows that enter the softmax.

    Returns:
      float32 [N, H_kv, R], zero from ``lengths`` on.
    """
    n, heads, rows, _ = keys.shape
    dim = q.shape[-1]
    grouped = q.reshape(n, heads, -1, dim)
    exact = jax.lax.Precision.HIGHEST
    turned = jnp.matmul(grouped, projection, precision=exact)
    logits = jnp.einsum(
        "nhgp,nhrp->nhgr",
        turned.astype(keys.dtype),
        keys,
        precision=exact if keys.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    valid = (jnp.arange(rows) < lengths[:, None])[:, None, None]
    logits = jnp.where(valid, logits * dim**-0.5, -jnp.inf)
    peak = jnp.max(logits, axis=-1, keepdims=True)
    weights = jnp.exp(logits - jnp.where(jnp.isneginf(peak), 0.0, peak))
    total = weights.sum(-1, keepdims=True)
    return (weights / jnp.where(total == 0, 1.0, total)).sum(2)
