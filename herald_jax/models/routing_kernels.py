"""Who is chosen and where it goes, as two kernels in place of half a dozen sorts.

Sorting a few hundred scores of every token costs an accelerator more than looking for the largest k
times, and sorting the assignments more than counting them. Both kernels work on tiles of tokens and
are written in Pallas for Triton; where there is no CUDA device they run interpreted, for tests.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from herald_jax.models.assignments import Assignments
from herald_jax.models.config import ExpertsConfig
from herald_jax.models.pallas_call import kernel_call, on_gpu, power_of_two

#: Tokens of a tile, and the warps that choose.
CHOSEN, CHOSEN_WARPS, PLACED = 2, 1, 32
#: Fewest experts: what a product of Triton takes.
FEWEST = 16


def applies(config: ExpertsConfig, dtype: jnp.dtype) -> bool:
    """Whether the kernels are the way: half precision, on CUDA, of sizes that they take."""
    sizes = power_of_two(config.count, FEWEST) and power_of_two(config.groups)
    return on_gpu() and dtype == jnp.bfloat16 and sizes


def _largest(values: jax.Array, free: jax.Array, names: jax.Array) -> jax.Array:
    """Name of the largest free value along the last axis, the lowest of equals; never one twice."""
    some = jnp.where(free, values, -jnp.inf)
    peak = jnp.max(some, axis=-1, keepdims=True)
    return jnp.min(jnp.where(free & (some == peak), names, names.shape[-1]), axis=-1, keepdims=True)


def _usable(choice: jax.Array, config: ExpertsConfig) -> jax.Array:
    """Minus infinity for the experts of groups that a token may not use."""
    tokens, count = choice.shape
    parts = choice.reshape(tokens, config.groups, count // config.groups)
    names = jax.lax.broadcasted_iota(jnp.int32, parts.shape, 2)
    best = jnp.max(parts, axis=2)
    first = jnp.min(jnp.where(parts == best[:, :, None], names, parts.shape[2]), axis=2)
    second = jnp.max(jnp.where(names == first[:, :, None], -jnp.inf, parts), axis=2)
    strength = best + second
    mine, other = strength[:, :, None], strength[:, None, :]
    square = (tokens, config.groups, config.groups)
    earlier = jax.lax.broadcasted_iota(jnp.int32, square, 2) < jax.lax.broadcasted_iota(
        jnp.int32, square, 1
    )
    ahead = (other > mine) | ((other == mine) & earlier)
    kept = jnp.sum(ahead.astype(jnp.int32), axis=2) < config.groups_per_token
    return jnp.where(kept[:, :, None], parts, -jnp.inf).reshape(tokens, count)


def _choose_kernel(
    logits: Any, bias: Any, weights: Any, ids: Any, *, config: ExpertsConfig, tokens: int
) -> None:
    """Weights and ids of ``CHOSEN`` tokens."""
    at = pl.ds(pl.program_id(0) * CHOSEN, CHOSEN)
    inside = pl.program_id(0) * CHOSEN + jnp.arange(CHOSEN) < tokens
    scores = plgpu.load(logits.at[at, :], mask=inside[:, None], other=0.0)
    if config.router == "sigmoid":
        scores = 1 / (1 + jnp.exp(-scores))
        choice = scores + plgpu.load(bias.at[:])[None, :]
    else:
        scores = jnp.exp(scores - jnp.max(scores, axis=1, keepdims=True))
        scores = choice = scores / jnp.sum(scores, axis=1, keepdims=True)
    # A token whose scores are not numbers still takes k different experts.
    choice = jnp.where(choice == choice, choice, -jnp.inf)
    if config.groups > 1:
        choice = _usable(choice, config)
    names = jax.lax.broadcasted_iota(jnp.int32, choice.shape, 1)
    free = names >= 0
    total = jnp.zeros((CHOSEN, 1), jnp.float32)
    found = []
    for slot in range(config.per_token):
        who = _largest(choice, free, names)
        hit = names == who
        free = free & ~hit
        weight = jnp.sum(jnp.where(hit, scores, 0.0), axis=1, keepdims=True)
        total = total + weight
        found.append(weight)
        plgpu.store(ids.at[at, pl.ds(slot, 1)], who, mask=inside[:, None])
    if not config.normalizes or (config.router == "sigmoid" and config.per_token == 1):
        total = jnp.ones_like(total)
    elif config.router == "sigmoid":
        total = total + 1e-20
    for slot, weight in enumerate(found):
        made = weight / total * config.scale
        plgpu.store(weights.at[at, pl.ds(slot, 1)], made, mask=inside[:, None])


def choose(
    logits: jax.Array, bias: jax.Array | None, config: ExpertsConfig
) -> tuple[jax.Array, jax.Array]:
    """What ``moe.route_sigmoid`` and ``moe.route_softmax`` say, best first.

    Args:
      logits: float32 [T, E], E and the number of groups powers of two.
      bias: float32 [E] for "sigmoid", else None.
      config: the mixture.

    Returns:
      weights float32 [T, k] and expert ids int32 [T, k]; ties go to the lower id.
    """
    tokens, count = logits.shape
    shape = (tokens, config.per_token)
    weights, ids = kernel_call(
        functools.partial(_choose_kernel, config=config, tokens=tokens),
        "experts_choose",
        grid=(-(-tokens // CHOSEN),),
        out_shape=[jax.ShapeDtypeStruct(shape, kind) for kind in (jnp.float32, jnp.int32)],
        warps=CHOSEN_WARPS,
        stages=1,
    )(logits, jnp.zeros(count, jnp.float32) if bias is None else bias)
    return weights, ids


def _place_kernel(
    ids: Any, before: Any, order: Any, rows: Any, *, count: int, tokens: int, taken: int
) -> None:
    """Sorted rows of the assignments of ``PLACED`` tokens."""
    tile = pl.program_id(0)
    at = pl.ds(tile * PLACED, PLACED)
    token = tile * PLACED + jnp.arange(PLACED)
    inside = token < tokens
    names = jax.lax.broadcasted_iota(jnp.int32, (PLACED, count), 1)
    own = [
        plgpu.load(ids.at[at, pl.ds(slot, 1)], mask=inside[:, None], other=count)
        for slot in range(taken)
    ]
    chosen = jnp.zeros((PLACED, count), jnp.bfloat16)
    for who in own:
        chosen = chosen + (names == who).astype(jnp.bfloat16)
    square = (PLACED, PLACED)
    earlier = jax.lax.broadcasted_iota(jnp.int32, square, 1) < jax.lax.broadcasted_iota(
        jnp.int32, square, 0
    )
    # Zeros and ones: their products and sums are exact.
    rank = plgpu.dot(earlier.astype(jnp.bfloat16), chosen).astype(jnp.int32)
    place = plgpu.load(before.at[tile, :])[None, :] + rank
    for slot, who in enumerate(own):
        row = jnp.sum(jnp.where(names == who, place, 0), axis=1)
        # Interpreted, a row that is masked is written with what it held: it must be none at all.
        row = jnp.where(inside, row, tokens * taken)
        plgpu.store(rows.at[at, pl.ds(slot, 1)], row[:, None], mask=inside[:, None])
        plgpu.store(order.at[row], token * taken + slot, mask=inside)


def place(ids: jax.Array, count: int) -> Assignments:
    """What ``assign`` says; no expert may stand twice with a token.

    Args:
      ids: int32 [T, k]; ``count``: E, a power of two of at least 16.
    """
    tokens, taken = ids.shape
    tiles = -(-tokens // PLACED)
    padded = jnp.pad(ids, ((0, tiles * PLACED - tokens), (0, 0)), constant_values=count)
    each = padded.reshape(tiles, -1, 1) == jnp.arange(count)
    counts = each.sum(1, dtype=jnp.int32)
    upto = jnp.cumsum(counts, axis=0)
    sizes = upto[-1]
    starts = jnp.cumsum(sizes) - sizes
    # The kernel leaves no row of ``order`` unwritten, so none needs a value before.
    order, rows = kernel_call(
        functools.partial(_place_kernel, count=count, tokens=tokens, taken=taken),
        "experts_place",
        grid=(tiles,),
        out_shape=[
            jax.ShapeDtypeStruct((tokens * taken,), jnp.int32),
            jax.ShapeDtypeStruct((tokens, taken), jnp.int32),
        ],
        warps=4,
        stages=1,
    )(ids, upto - counts + starts)
    return Assignments(order, rows.reshape(-1), sizes, starts)
