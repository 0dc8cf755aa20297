"""Attention whose rows end where they like, without ever holding a matrix of scores.

A program takes a tile of query rows of one KV head through the keys up to the last that any of its
rows attends, and keeps a running peak, sum and weighted mean of each row (FlashAttention, arXiv
2205.14135). Written in Pallas for Triton; where there is no CUDA device it runs interpreted, for
tests.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from herald_jax.models.pallas_call import kernel_call, on_gpu, power_of_two


class Tiling(NamedTuple):
    """Query rows and keys of a step, powers of two; warps, and steps in flight."""

    rows: int = 128
    keys: int = 64
    warps: int = 8
    stages: int = 3


TILING = Tiling()


def applies(dtype: jnp.dtype, head_dim: int) -> bool:
    """Whether the kernel is the way: half precision, on CUDA, of a size that it takes."""
    half = dtype in (jnp.bfloat16, jnp.float16)
    return on_gpu() and half and power_of_two(head_dim, 16) and head_dim <= 256


def _kernel(ends: Any, q: Any, k: Any, v: Any, out: Any, *, tiling: Tiling, total: int) -> None:
    """Rows [at, at + rows) of one slot and KV head."""
    slot, head, tile = pl.program_id(2), pl.program_id(1), pl.program_id(0)
    at = pl.ds(tile * tiling.rows, tiling.rows)
    inside = tile * tiling.rows + jnp.arange(tiling.rows) < total
    end = plgpu.load(ends.at[slot, at], mask=inside, other=0)
    most = jnp.max(end)
    least = jnp.min(jnp.where(inside, end, most))
    dim = q.shape[-1]
    # exp2 is what the device has; the factor turns it into exp.
    scale = math.log2(math.e) / math.sqrt(dim)
    query = plgpu.load(q.at[slot, at, head, :], mask=inside[:, None], other=0.0)

    def add(step: jax.Array, state: tuple[jax.Array, ...], whole: bool) -> tuple[jax.Array, ...]:
        peak, sums, mean = state
        first = pl.multiple_of(step * tiling.keys, tiling.keys)
        rows = pl.ds(first, tiling.keys)
        name = first + jnp.arange(tiling.keys)
        if whole:
            keys = plgpu.load(k.at[slot, rows, head, :])
            values = plgpu.load(v.at[slot, rows, head, :])
        else:
            # Rows beyond every end may lie beyond the buffer, or hold what is no number.
            known = (name < most)[:, None]
            keys = plgpu.load(k.at[slot, rows, head, :], mask=known, other=0.0)
            values = plgpu.load(v.at[slot, rows, head, :], mask=known, other=0.0)
        scores = plgpu.dot(query, keys, trans_b=True) * scale
        if not whole:
            scores = jnp.where(name[None, :] < end[:, None], scores, -jnp.inf)
        higher = jnp.maximum(peak, jnp.max(scores, axis=1))
        # A row without any key yet has no peak to be below of.
        base = jnp.where(higher == -jnp.inf, 0.0, higher)
        weights, kept = jnp.exp2(scores - base[:, None]), jnp.exp2(peak - base)
        mean = mean * kept[:, None] + plgpu.dot(weights.astype(values.dtype), values)
        return higher, sums * kept + jnp.sum(weights, axis=1), mean

    state = (
        jnp.full(tiling.rows, -jnp.inf, jnp.float32),
        jnp.zeros(tiling.rows, jnp.float32),
        jnp.zeros((tiling.rows, dim), jnp.float32),
    )
    split = least // tiling.keys
    state = jax.lax.fori_loop(0, split, functools.partial(add, whole=True), state)
    steps = (most + tiling.keys - 1) // tiling.keys
    _, sums, mean = jax.lax.fori_loop(split, steps, functools.partial(add, whole=False), state)
    made = mean / jnp.where(sums > 0, sums, 1.0)[:, None]
    plgpu.store(out.at[slot, at, head, :], made.astype(out.dtype), mask=inside[:, None])


def attend_to_ends(
    q: jax.Array, k: jax.Array, v: jax.Array, ends: jax.Array, tiling: Tiling = TILING
) -> jax.Array:
    """Row i of a slot attends keys [0, ends[i]) with softmax(q k / sqrt(D)); none gives zeros.

    Args:
      q: [N, S, H, D], rows of every KV head.
      k, v: [N, R, H, D]; D a power of two of at least 16.
      ends: int32 [N, S], at most R.
      tiling: how the work is cut.

    Returns:
      [N, S, H, D] in the dtype of ``v``.
    """
    slots, rows, heads, _ = q.shape
    out: jax.Array = kernel_call(
        functools.partial(_kernel, tiling=tiling, total=rows),
        "attend_to_ends",
        grid=(-(-rows // tiling.rows), heads, slots),
        out_shape=jax.ShapeDtypeStruct(q.shape, v.dtype),
        warps=tiling.warps,
        stages=tiling.stages,
    )(ends, q, k, v)
    return out
