"""Attention of several sets of rows that come out as one, weighed by their mass.

A set's mass is the sum of the exponentials of its scores; its log is what cuDNN returns beside its
output. So long buffers can be cut for a device with more multiprocessors than there are heads, and
rows can be attended that lie beside a buffer.
"""

from __future__ import annotations

import math
from typing import Literal

import jax
import jax.numpy as jnp

Implementation = Literal["xla", "cudnn"]
#: Of Hopper GPUs; where there are others, the choice of parts is only less apt.
MULTIPROCESSORS = 132
#: What a part costs beside its rows, as a share of the whole; parts at most, and rows of one.
PART_COST, MOST_PARTS, LEAST_ROWS = 0.05, 8, 800


def attended_in_parts(parallel: int, rows: int) -> int:
    """In how many parts of equal length a GPU best attends the rows of a buffer.

    A multiprocessor takes a KV head of a slot, so few long slots leave most of them idle, and a
    few more than there are take as long as twice as many.

    Args:
      parallel: slots times KV heads; ``rows``: of the buffer.
    """

    def rounds(parts: int) -> float:
        return math.ceil(parallel * parts / MULTIPROCESSORS) / parts * (1 + PART_COST * parts)

    able = [n for n in range(1, MOST_PARTS + 1) if rows % n == 0 and rows // n >= LEAST_ROWS]
    return min(able or [1], key=rounds)


def attend_parts(
    packed: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lengths: jax.Array,
    parts: int,
    implementation: Implementation,
) -> tuple[jax.Array, jax.Array]:
    """Attends equal parts of the buffers as slots of their own, and weighs them by their mass.

    Args:
      packed: [N, S, H, D], see ``pack``.
      k, v: [N, R, H, D].
      lengths: int32 [N], valid rows, at least 1.
      parts: a divisor of R.

    Returns:
      [N, S, H, D] in the dtype of ``v``, and the log of the mass float32 [N, S, H].
    """
    n, s, heads, dim = packed.shape
    rows = k.shape[1] // parts
    inside = jnp.clip(lengths[:, None] - jnp.arange(parts) * rows, 0, rows).reshape(-1)

    def cut(buffer: jax.Array) -> jax.Array:
        return buffer.reshape(n * parts, rows, heads, dim)

    out, mass = jax.nn.dot_product_attention(
        jnp.repeat(packed, parts, axis=0),
        cut(k),
        cut(v),
        # A part without valid rows attends one, and is left out below.
        key_value_seq_lengths=jnp.maximum(inside, 1),
        implementation=implementation,
        return_residual=True,
    )
    # JAX hands it out in the dtype of the output. Cast back at once, XLA leaves the rounding out,
    # and parts are not weighed by rounded numbers.
    mass = mass.astype(jnp.float32)
    if parts == 1:
        return out, mass
    known = (inside > 0)[:, None, None]
    mass = jnp.where(known, mass, -jnp.inf).reshape(n, parts, s, heads)
    out = jnp.where(known[..., None], out, 0).reshape(n, parts, s, heads, dim)
    return _joined(out, mass, 1)


def attend_sides(
    packed: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lengths: jax.Array,
    own: tuple[jax.Array, jax.Array],
    alone: int,
    implementation: Implementation,
) -> jax.Array:
    """``attend_beside`` without joining the buffers: what each gives is weighed by its mass.

    Args:
      packed: [N, S, H, D], see ``pack``; ``lengths``: at least 1.
      alone: of S, those that attend the buffer only.

    Returns:
      [N, S, H, D] in the dtype of ``v``.
    """
    parts = attended_in_parts(k.shape[0] * k.shape[2], k.shape[1])
    every = jnp.full_like(lengths, own[0].shape[1])
    out, mass = attend_parts(packed, k, v, lengths, parts, implementation)
    more, its_mass = attend_parts(packed[:, alone:], *own, every, 1, implementation)
    both = jnp.stack([out[:, alone:], more]), jnp.stack([mass[:, alone:], its_mass])
    return jnp.concatenate([out[:, :alone], _joined(*both, 0)[0]], axis=1)


def _joined(out: jax.Array, mass: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
    """What queries make of several sets of rows, as if they were one set."""
    share = jax.nn.softmax(mass, axis=axis)[..., None]
    whole = (out.astype(jnp.float32) * share).sum(axis=axis).astype(out.dtype)
    return whole, jax.nn.logsumexp(mass, axis=axis)
