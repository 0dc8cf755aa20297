"""The best rows of every KV head, found by halving instead of sorting.

The bits of a score that is not negative ascend as the score does, so the K-th largest is found bit
by bit, by counting. Written in Pallas for Triton; where there is no CUDA device it runs
interpreted, for tests.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from herald_jax.models.pallas_call import kernel_call

#: Most rows that a program holds.
LARGEST = 1 << 14
_TOP = (1 << 31) - 1


def _kernel(
    scores: Any, counts: Any, valid: Any, out: Any, *, size: int, rows: int, sinks: int
) -> None:
    """One KV head of one slot: where its best rows are, then where the others are."""
    head, slot = pl.program_id(0), pl.program_id(1)
    name = jnp.arange(size)
    real = name < rows
    value = plgpu.load(scores.at[slot, head, pl.ds(0, size)], mask=real, other=0.0)
    # What is no number is worth nothing, as a score of zero.
    value = jnp.where(value > 0, value, 0.0)
    bits = jax.lax.bitcast_convert_type(value, jnp.int32)
    bits = jnp.where(name < sinks, _TOP, bits)
    bits = jnp.where(name < valid[slot], bits, -1)
    wanted = jnp.minimum(counts[slot], valid[slot])

    def refine(step: jax.Array, least: jax.Array) -> jax.Array:
        higher = least | (1 << (30 - step))
        enough = jnp.sum((bits >= higher).astype(jnp.int32)) >= wanted
        return jnp.where(enough, higher, least)

    least = jax.lax.fori_loop(0, 31, refine, jnp.int32(0))
    above = bits > least
    missing = wanted - jnp.sum(above.astype(jnp.int32))
    level = bits == least
    kept = above | (level & (jnp.cumsum(level.astype(jnp.int32)) <= missing))
    ahead = jnp.cumsum(kept.astype(jnp.int32))
    place = jnp.where(kept, ahead - 1, wanted + name - ahead)
    inside = real & (place < out.shape[2])
    # Interpreted, a place that is masked is written with what it held: it must be none at all.
    place = jnp.where(inside, place, out.shape[2])
    plgpu.store(out.at[slot, head, place], name, mask=inside)


def best_of(
    scores: jax.Array, counts: jax.Array, valid: jax.Array, capacity: int, *, sinks: int
) -> jax.Array:
    """The ``counts[n]`` best of rows [0, valid[n]), sinks first, ties by the lower row.

    Args:
      scores: float32 [N, H, C], not negative, C at most ``LARGEST``.
      counts, valid: int32 [N].
      capacity: K, at most C.

    Returns:
      int32 [N, H, K]: ``min(counts[n], valid[n])`` rows, ascending, then others.
    """
    slots, heads, rows = scores.shape
    size = 1 << max(0, rows - 1).bit_length()
    out: jax.Array = kernel_call(
        functools.partial(_kernel, size=size, rows=rows, sinks=sinks),
        "best_of",
        grid=(heads, slots),
        out_shape=jax.ShapeDtypeStruct((slots, heads, capacity), jnp.int32),
        warps=8,
        stages=1,
    )(scores, counts, valid)
    return out
