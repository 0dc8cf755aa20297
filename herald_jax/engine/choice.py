"""Choosing rows on the device: who votes, which rows are best, the pool they make."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def voters(masked: jax.Array) -> jax.Array:
    """bool [N, B]: the masked positions of each slot, or all of them once none is masked."""
    return masked | ~masked.any(axis=1, keepdims=True)


def mean_query(q: jax.Array, voting: jax.Array) -> jax.Array:
    """Mean of the voting positions' queries: [N, B, H_q, D], bool [N, B] -> float32 [N, H_q, D]."""
    votes = voting[..., None, None].astype(jnp.float32)
    return (q.astype(jnp.float32) * votes).sum(1) / votes.sum(1)


def tail_rows(start: jax.Array, block: int) -> jax.Array:
    """Rows of the block before that at int32 [N] ``start``: [N, B]; at 0 they mean nothing."""
    return jnp.maximum(start[:, None] - block + jnp.arange(block), 0)


def best_rows(scores: jax.Array, select_len: jax.Array, count: int, *, sinks: int) -> jax.Array:
    """The ``count`` best of rows [0, select_len), sinks first, ties by the lower index.

    Args:
      scores: float32 [..., H_kv, R], finite; ``select_len``: int32 [...].
      count: at most R.

    Returns:
      int32 [..., H_kv, count] in descending order, so that the leading K_r rows are the selection
      of a slot with budget K_r; what lies past ``select_len`` comes last.
    """
    row = jnp.arange(scores.shape[-1])
    scores = jnp.where(row < sinks, jnp.inf, scores)
    scores = jnp.where(row < select_len[..., None, None], scores, -jnp.inf)
    return jax.lax.top_k(scores, count)[1]


def pool_of(
    buffer: jax.Array, own: jax.Array, start: jax.Array, best: jax.Array, selected: int
) -> jax.Array:
    """The pool rows of a block: its own, the block before it, the best.

    Args:
      buffer: [N, R, H_kv, D] with position r in row r; ``own``: [N, B, H_kv, D].
      start: int32 [N], the block's first position; at 0 the tail means nothing.
      best: int32 [N, H_kv, C] with C <= ``selected``, the pool's capacity.

    Returns:
      [N, 2B + selected, H_kv, D].
    """
    block = own.shape[1]
    tail = jnp.take_along_axis(buffer, tail_rows(start, block)[..., None, None], axis=1)
    chosen = jnp.take_along_axis(buffer, best.swapaxes(1, 2)[..., None], axis=1)
    spare = selected - chosen.shape[1]
    chosen = jnp.pad(chosen, ((0, 0), (0, spare), (0, 0), (0, 0)))
    return jnp.concatenate([own, tail, chosen], axis=1)
