"""Products of tokens with the experts they take: tokens sorted by expert, each expert read once.

Three ways to the same rows. ``tiled`` walks over short runs of rows of one expert and is what a
CPU does well; ``padded`` gives every expert a fixed number of rows and multiplies them as one
batch, which an accelerator does well; ``ragged`` leaves both to a kernel of tokamax.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from herald_jax.models.config import EXPERT_ROWS

#: Rows of a tile on the CPU, whatever the number of tokens.
TILE = 8


class Assignments(NamedTuple):
    """Which token goes to which expert, sorted by expert and, within one, by token.

    Attributes:
      order: int32 [A], the assignment (token * k + slot) at each sorted row.
      rows: int32 [A], the sorted row of each assignment.
      experts: int32 [A], the expert of each sorted row, ascending.
      sizes: int32 [E], rows of each expert; ``starts`` int32 [E], its first row.
    """

    order: jax.Array
    rows: jax.Array
    experts: jax.Array
    sizes: jax.Array
    starts: jax.Array


def assign(ids: jax.Array, count: int) -> Assignments:
    """Sorts the experts that tokens take.

    Args:
      ids: int32 [T, k].
      count: E.

    Returns:
      the T * k assignments.
    """
    flat = ids.reshape(-1)
    each = jnp.arange(len(flat), dtype=jnp.int32)
    experts, order = jax.lax.sort_key_val(flat, each, is_stable=True)
    rows = jnp.zeros_like(each).at[order].set(each, unique_indices=True)
    sizes = (flat[:, None] == jnp.arange(count)).sum(0, dtype=jnp.int32)
    return Assignments(order, rows, experts, sizes, jnp.cumsum(sizes) - sizes)


def tiled(
    x: jax.Array, taken: Assignments, gate: jax.Array, up: jax.Array, down: jax.Array
) -> jax.Array:
    """Tile after tile of ``TILE`` rows of one expert; experts that nobody takes are not read.

    Args:
      x: [A, hidden], sorted by expert.
      taken: where the rows of each expert are.
      gate, up: [E, hidden, inner]; ``down``: [E, inner, hidden].

    Returns:
      [A, hidden], the output of its expert for each row.
    """
    tiles = -(-taken.sizes // TILE)
    ends = jnp.cumsum(tiles)
    # A last tile may reach over the rows of the next expert, whose own tile comes later and
    # writes them anew, and over the end.
    x = jnp.pad(x, ((0, TILE), (0, 0)))

    def one(tile: jax.Array, out: jax.Array) -> jax.Array:
        expert = jnp.searchsorted(ends, tile, side="right")
        start = taken.starts[expert] + TILE * (tile - ends[expert] + tiles[expert])
        some = jax.lax.dynamic_slice_in_dim(x, start, TILE)
        made = gated_mlp(some, gate[expert], up[expert], down[expert])
        return jax.lax.dynamic_update_slice_in_dim(out, made, start, 0)

    def body(tile: jax.Array, out: jax.Array) -> jax.Array:
        # This always holds, but not to XLA's CPU backend: it knows no slice of bfloat16, and would
        # widen the weights of all experts to fp32 ahead of a loop without a condition.
        return jax.lax.cond(tile < ends[-1], one, lambda _, out: out, tile, out)

    return jax.lax.fori_loop(0, ends[-1], body, jnp.zeros_like(x))[:-TILE]


def padded(
    x: jax.Array, taken: Assignments, gate: jax.Array, up: jax.Array, down: jax.Array
) -> jax.Array:
    """Batches of up to ``EXPERT_ROWS`` rows of every expert, as many as the fullest expert needs.

    Arguments and result as ``tiled``; memory grows with E * EXPERT_ROWS, whatever the routing.
    """
    last, within = len(x) - 1, jnp.arange(EXPERT_ROWS)
    ranks = jnp.arange(len(x)) - taken.starts[taken.experts]

    def one(turn: jax.Array, out: jax.Array) -> jax.Array:
        rows = taken.starts[:, None] + turn * EXPERT_ROWS + within
        made = gated_mlp(x[jnp.minimum(rows, last)], gate, up, down)
        own = made[taken.experts, ranks % EXPERT_ROWS]
        return jnp.where((ranks // EXPERT_ROWS == turn)[:, None], own, out)

    return jax.lax.fori_loop(0, -(-taken.sizes.max() // EXPERT_ROWS), one, jnp.zeros_like(x))


def ragged(
    x: jax.Array, taken: Assignments, gate: jax.Array, up: jax.Array, down: jax.Array
) -> jax.Array:
    """The grouped matrix products of tokamax; arguments and result as ``tiled``.

    Raises:
      NotImplementedError: tokamax has no kernel for the device, dtype or shapes.
    """
    import tokamax

    def product(rows: jax.Array, weights: jax.Array) -> jax.Array:
        # By name: left to itself tokamax may end at ``jax.lax.ragged_dot``, which multiplies every
        # token with every expert.
        return tokamax.ragged_dot(rows, weights, taken.sizes, implementation="mosaic")

    # Its table of tuned shapes may differ by token count, and warns of every shape it lacks.
    with tokamax.config.ignore_autotuning_cache(True):
        return product(jax.nn.silu(product(x, gate)) * product(x, up), down)


def run(
    products: Callable[..., jax.Array],
    x: jax.Array,
    weights: jax.Array,
    ids: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
) -> jax.Array:
    """Sorts tokens by expert, multiplies, and adds up what each token gets, in fp32.

    Args:
      products: ``tiled``, ``padded`` or ``ragged``.
      x: [T, hidden]; the rest as ``moe.mix``.

    Returns:
      [T, hidden] in the dtype of ``x``.
    """
    taken = assign(ids, len(gate))
    out = products(x[taken.order // ids.shape[1]], taken, gate, up, down)
    rows = taken.rows.reshape(ids.shape)
    # One slot after the other: the order of a reduction could change with the number of tokens.
    total = jnp.zeros(x.shape, jnp.float32)
    for slot in range(ids.shape[1]):
        total += weights[:, slot, None] * out[rows[:, slot]].astype(jnp.float32)
    return total.astype(x.dtype)


def gated_mlp(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """SwiGLU with or without a leading axis of experts."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    inner = jax.nn.silu(jnp.matmul(x, gate, precision=precision))
    inner = inner * jnp.matmul(x, up, precision=precision)
    return jnp.matmul(inner, down, precision=precision)
