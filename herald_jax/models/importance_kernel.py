"""Importance of every key, without ever holding a matrix of probabilities.

One kernel finds the log of each query row's sum of exponentials, the other adds up, key by key,
what the voting rows give it. Scores are computed twice, which costs less than writing them once.
Written in Pallas for Triton; where there is no CUDA device they run interpreted, for tests.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from herald_jax.models.pallas_call import kernel_call

#: Query rows and keys of a tile, powers of two; warps, and steps in flight.
ROWS, KEYS, WARPS, STAGES = 128, 128, 4, 2


def _scores(query: jax.Array, keys: jax.Array, names: jax.Array, length: jax.Array) -> jax.Array:
    """Scores in units of log 2; minus infinity from ``length`` on."""
    scale = math.log2(math.e) / math.sqrt(query.shape[1])
    scores = plgpu.dot(query, keys, trans_b=True) * scale
    return jnp.where(names[None, :] < length, scores, -jnp.inf)


def _mass_kernel(lengths: Any, q: Any, k: Any, mass: Any, *, sizes: tuple[int, int]) -> None:
    """log2 of the sum of exponentials of a tile of query rows."""
    rows, width = sizes
    tile, head, slot = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    at = pl.ds(tile * rows, rows)
    inside = tile * rows + jnp.arange(rows) < q.shape[1]
    length = lengths[slot]
    query = plgpu.load(q.at[slot, at, head, :], mask=inside[:, None], other=0.0)

    def add(step: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        peak, sums = state
        first = pl.multiple_of(step * width, width)
        names = first + jnp.arange(width)
        known = (names < length)[:, None]
        keys = plgpu.load(k.at[slot, pl.ds(first, width), head, :], mask=known, other=0.0)
        scores = _scores(query, keys, names, length)
        higher = jnp.maximum(peak, jnp.max(scores, axis=1))
        weights = jnp.sum(jnp.exp2(scores - higher[:, None]), axis=1)
        return higher, sums * jnp.exp2(peak - higher) + weights

    # Not minus infinity: a row's first peak is below it by nothing that is a number.
    state = jnp.full(rows, -1e30, jnp.float32), jnp.zeros(rows, jnp.float32)
    peak, sums = jax.lax.fori_loop(0, (length + width - 1) // width, add, state)
    found = peak + jnp.log2(jnp.where(sums > 0, sums, 1.0))
    plgpu.store(mass.at[slot, head, at], found, mask=inside)


def _vote_kernel(
    lengths: Any, q: Any, k: Any, mass: Any, votes: Any, out: Any, *, sizes: tuple[int, int]
) -> None:
    """What the votes give a tile of keys."""
    rows, width = sizes
    tile, head, slot = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    names = tile * width + jnp.arange(width)
    at, length = pl.ds(tile * width, width), lengths[slot]
    known = names < length
    keys = plgpu.load(k.at[slot, at, head, :], mask=known[:, None], other=0.0)

    def add(step: jax.Array, total: jax.Array) -> jax.Array:
        part = pl.ds(step * rows, rows)
        inside = step * rows + jnp.arange(rows) < q.shape[1]
        query = plgpu.load(q.at[slot, part, head, :], mask=inside[:, None], other=0.0)
        below = plgpu.load(mass.at[slot, head, part], mask=inside, other=0.0)
        weight = plgpu.load(votes.at[slot, part], mask=inside, other=0.0)
        given = jnp.exp2(_scores(query, keys, names, length) - below[:, None])
        # A row without a vote may hold what is no number.
        given = jnp.where(weight[:, None] > 0, given * weight[:, None], 0.0)
        return total + jnp.sum(given, axis=0)

    steps = (q.shape[1] + rows - 1) // rows
    total = jax.lax.fori_loop(0, steps, add, jnp.zeros(width, jnp.float32))
    plgpu.store(out.at[slot, head, at], total, mask=names < k.shape[1])


def importance_of_rows(
    q: jax.Array,
    k: jax.Array,
    lengths: jax.Array,
    votes: jax.Array,
    mass: jax.Array | None = None,
    sizes: tuple[int, int] = (ROWS, KEYS),
) -> jax.Array:
    """Sum over query rows of vote times softmax probability, for every key.

    Args:
      q: [N, S, H, D], rows of every KV head; ``votes``: float32 [N, S], not negative.
      k: [N, R, H, D]; ``lengths``: int32 [N], keys that enter the softmax.
      mass: float32 [N, S, H], log of every row's sum of exponentials, or None to find it here.
      sizes: query rows and keys of a tile, powers of two of at least 16.

    Returns:
      float32 [N, H, R], zero outside the valid keys.
    """
    slots, count, heads, _ = q.shape
    rows, width = sizes
    keys = k.shape[1]
    if mass is None:
        powers = kernel_call(
            functools.partial(_mass_kernel, sizes=sizes),
            "importance_mass",
            grid=(-(-count // rows), heads, slots),
            out_shape=jax.ShapeDtypeStruct((slots, heads, count), jnp.float32),
            warps=WARPS,
            stages=STAGES,
        )(lengths, q, k)
    else:
        powers = mass.swapaxes(1, 2) * math.log2(math.e)
    out: jax.Array = kernel_call(
        functools.partial(_vote_kernel, sizes=sizes),
        "importance_votes",
        grid=(-(-keys // width), heads, slots),
        out_shape=jax.ShapeDtypeStruct((slots, heads, keys), jnp.float32),
        warps=WARPS,
        stages=STAGES,
    )(lengths, q, k, powers, votes)
    return out
