"""Products of tokens with the experts they take: tokens sorted by expert, each expert read once.

Two ways to the same rows that run anywhere. ``tiled`` walks over short runs of rows of one expert
and is what a CPU does well; ``padded`` gives every expert a fixed number of rows and multiplies
them as one batch, which an accelerator does well. On CUDA in bfloat16 ``expert_kernels`` is better.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from herald_jax.models.assignments import Assignments
from herald_jax.models.config import EXPERT_ROWS

#: Rows of a tile on the CPU, whatever the number of tokens.
TILE = 8


def tiled(
    x: jax.Array, taken: Assignments, gate: jax.Array, up: jax.Array, down: jax.Array
) -> jax.Array:
    """Tile after tile of ``TILE`` rows of one expert; experts that nobody takes are not read.

    Args:
      x: [T, hidden], tokens in their own order.
      taken: their assignments.
      gate, up: [E, hidden, inner]; ``down``: [E, inner, hidden].

    Returns:
      [A, hidden], the output of its expert for each row.
    """
    tiles = -(-taken.sizes // TILE)
    ends = jnp.cumsum(tiles)
    # A last tile may reach over the rows of the next expert, whose own tile comes later and
    # writes them anew, and over the end.
    x = jnp.pad(_sorted(x, taken), ((0, TILE), (0, 0)))

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
    x = _sorted(x, taken)
    last, within = len(x) - 1, jnp.arange(EXPERT_ROWS)
    each = jnp.arange(len(x))
    experts = (taken.starts + taken.sizes <= each[:, None]).sum(1)
    ranks = each - taken.starts[experts]

    def one(turn: jax.Array, out: jax.Array) -> jax.Array:
        rows = taken.starts[:, None] + turn * EXPERT_ROWS + within
        made = gated_mlp(x[jnp.minimum(rows, last)], gate, up, down)
        own = made[experts, ranks % EXPERT_ROWS]
        return jnp.where((ranks // EXPERT_ROWS == turn)[:, None], own, out)

    return jax.lax.fori_loop(0, -(-taken.sizes.max() // EXPERT_ROWS), one, jnp.zeros_like(x))


def _sorted(x: jax.Array, taken: Assignments) -> jax.Array:
    """The token of every assignment [A, hidden], sorted by expert."""
    return x[taken.order // (len(taken.order) // len(x))]


def run(
    products: Callable[..., jax.Array],
    assigned: Callable[[jax.Array, int], Assignments],
    x: jax.Array,
    weights: jax.Array,
    ids: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
) -> jax.Array:
    """Sorts tokens by expert, multiplies, and adds up what each token gets, in fp32.

    Args:
      products: ``tiled``, ``padded`` or ``expert_kernels.expert_rows``.
      assigned: ``assignments.assign`` or ``routing_kernels.place``.
      x: [T, hidden]; the rest as ``moe.mix``.

    Returns:
      [T, hidden] in the dtype of ``x``.
    """
    taken = assigned(ids, len(gate))
    out = products(x, taken, gate, up, down)
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
