"""Greedy tokens and their probability, without ever holding the logits of a whole vocabulary.

A program multiplies a tile of rows with a tile of the head's columns and keeps, of every row, the
largest logit, its column and the sum of exponentials; what the tiles found is then put together.
Rows that nobody asks for are not computed. Written in Pallas for Triton, and interpreted where
there is no CUDA device, for tests.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from herald_jax.models.pallas_call import kernel_call, on_gpu

ROWS, COLUMNS, DEPTH, WARPS, STAGES = 128, 256, 64, 8, 3


def applies(dtype: jnp.dtype, hidden: int) -> bool:
    """Whether the kernel is the way: half precision, on CUDA, of a width that its depth divides."""
    return on_gpu() and dtype == jnp.bfloat16 and hidden % DEPTH == 0


def _kernel(
    count: Any,
    x: Any,
    head: Any,
    best: Any,
    column: Any,
    total: Any,
    *,
    vocabulary: int,
    banned: int | None,
    tied: bool,
    sizes: tuple[int, int, int],
) -> None:
    """One tile: of ``ROWS`` rows the peak, where it is, and the sum of exp(logit - peak)."""
    rows, columns, depth = sizes
    at, tile = pl.program_id(0), pl.program_id(1)

    @pl.when(at * rows < count[0])
    def _() -> None:
        own = pl.ds(at * rows, rows)
        some = pl.ds(tile * columns, columns)
        names = tile * columns + jnp.arange(columns)
        inside = names < vocabulary

        def body(step: jax.Array, sums: jax.Array) -> jax.Array:
            part = pl.ds(pl.multiple_of(step * depth, depth), depth)
            if tied:
                weights = plgpu.load(head.at[some, part], mask=inside[:, None], other=0.0).T
            else:
                weights = plgpu.load(head.at[part, some], mask=inside[None, :], other=0.0)
            return sums + plgpu.dot(plgpu.load(x.at[own, part]), weights)

        zero = jnp.zeros((rows, columns), jnp.float32)
        logits = jax.lax.fori_loop(0, x.shape[1] // depth, body, zero)
        # A network's logits are of its own dtype: unrounded ones would break ties differently.
        logits = logits.astype(x.dtype).astype(jnp.float32)
        allowed = inside if banned is None else inside & (names != banned)
        logits = jnp.where(allowed[None, :], logits, -jnp.inf)
        peak = jnp.max(logits, axis=1)
        first = jnp.where(logits == peak[:, None], names[None, :], vocabulary)
        plgpu.store(best.at[tile, own], peak)
        plgpu.store(column.at[tile, own], jnp.min(first, axis=1))
        # Of a tile with nothing that is allowed the peak is minus infinity.
        below = jnp.where(allowed[None, :], logits - peak[:, None], -jnp.inf)
        plgpu.store(total.at[tile, own], jnp.sum(jnp.exp(below), axis=1))


def greedy_rows(
    x: jax.Array,
    head: jax.Array,
    needed: jax.Array,
    *,
    banned: int | None,
    tied: bool,
    sizes: tuple[int, int, int] = (ROWS, COLUMNS, DEPTH),
) -> tuple[jax.Array, jax.Array]:
    """What ``diffusion.sampling.greedy`` says of the logits, for the rows that are needed.

    Args:
      x: [R, hidden], normed.
      head: [hidden, vocabulary], or its transpose if ``tied``.
      needed: bool [R]; other rows get token 0 and probability 0.
      banned: a token that is never chosen and has no probability, or None.
      sizes: rows, columns and depth of a tile, powers of two; the depth divides ``hidden``.

    Returns:
      token int32 [R], the first of equals, and its softmax probability float32 [R]; not a number
      where a logit is not.
    """
    rows, columns, _ = sizes
    vocabulary = head.shape[0] if tied else head.shape[1]
    count, hidden = x.shape
    tiles, heights = -(-vocabulary // columns), -(-count // rows)
    # Needed rows first, in their order.
    place = jnp.cumsum(needed) - 1
    total = place[-1:] + 1
    place = jnp.where(needed, place, heights * rows)
    packed = jnp.zeros((heights * rows, hidden), x.dtype).at[place].set(x, mode="drop")
    shape = (tiles, heights * rows)
    found = kernel_call(
        functools.partial(_kernel, vocabulary=vocabulary, banned=banned, tied=tied, sizes=sizes),
        "head_greedy",
        grid=(heights, tiles),
        out_shape=[
            jax.ShapeDtypeStruct(shape, kind) for kind in (jnp.float32, jnp.int32, jnp.float32)
        ],
        warps=WARPS,
        stages=STAGES,
    )(total.astype(jnp.int32), packed, head)
    peaks, columns_of, sums = found
    peak = peaks.max(axis=0)
    token = jnp.where(peaks == peak, columns_of, vocabulary).min(axis=0)
    whole = (sums * jnp.exp(peaks - peak)).sum(axis=0)
    token = jnp.where(token < vocabulary, token, 0)
    at = jnp.minimum(place, heights * rows - 1)
    return jnp.where(needed, token[at], 0), jnp.where(needed, 1 / whole[at], 0.0)
