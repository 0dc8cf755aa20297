"""Products of tokens with the experts they take, as two kernels that read each expert once.

The first gathers its tokens by index and makes the inner rows of an expert, silu(x @ gate) * (x @
up); the second multiplies them with ``down``. A program works on one tile of rows of one expert and
one tile of columns. Rows beyond the expert's own are masked, so nothing is padded in memory, and a
tile with few rows is multiplied as a lower one. Written in Pallas for Triton; where there is no
CUDA device they run interpreted, for tests.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from herald_jax.models.assignments import Assignments
from herald_jax.models.pallas_call import kernel_call


class Tiling(NamedTuple):
    """A program's tile: rows at most and at least, output columns, depth of a step of the sum,
    warps, and steps in flight. Rows, columns and depth are powers of two.
    """

    rows: int
    lowest: int
    columns: int
    depth: int
    warps: int
    stages: int

    @property
    def heights(self) -> list[int]:
        """Heights a tile may be multiplied as, each half of the one before."""
        heights = [self.rows]
        while heights[-1] > self.lowest:
            heights.append(heights[-1] // 2)
        return heights


class Tiles(NamedTuple):
    """Which rows each tile works on: int32 [tiles] each.

    Attributes:
      expert: whose weights; ``start``: first sorted row; ``rows``: how many, 0 for a spare tile.
    """

    expert: jax.Array
    start: jax.Array
    rows: jax.Array


#: Tilings of the inner and the outer kernel by the mean rows of an expert, up to the key.
TILINGS = {
    20: (Tiling(32, 16, 128, 64, 4, 4), Tiling(32, 16, 128, 64, 4, 4)),
    48: (Tiling(64, 32, 128, 64, 8, 4), Tiling(64, 32, 128, 64, 8, 4)),
    1 << 30: (Tiling(128, 32, 128, 64, 8, 3), Tiling(128, 32, 128, 64, 8, 3)),
}
#: What widths must be multiples of, for the tilings above.
WIDTH_STEP = 128


def tilings(assignments: int, experts: int) -> tuple[Tiling, Tiling]:
    """The tilings of both kernels for so many rows of so many experts."""
    return next(both for most, both in TILINGS.items() if assignments <= most * experts)


def tiles(taken: Assignments, height: int) -> Tiles:
    """Cuts every expert's rows into tiles of ``height``; as many as any routing may need."""
    most = -(-len(taken.order) // height) + min(len(taken.sizes), len(taken.order))
    counts = -(-taken.sizes // height)
    ends = jnp.cumsum(counts)
    tile = jnp.arange(most, dtype=jnp.int32)
    expert = jnp.minimum((ends <= tile[:, None]).sum(1, dtype=jnp.int32), len(ends) - 1)
    offset = height * (tile - (ends - counts)[expert])
    rows = jnp.clip(taken.sizes[expert] - offset, 0, height)
    return Tiles(expert, taken.starts[expert] + offset, jnp.where(tile < ends[-1], rows, 0))


class _Place(NamedTuple):
    """Where a program works: its expert, a slice of its rows and which are valid, its columns."""

    expert: jax.Array
    rows: Any
    valid: jax.Array
    columns: Any


def _at_its_height(
    tiling: Tiling, tile: tuple[Any, Any, Any], run: Callable[[_Place], None]
) -> None:
    """Runs a program at the lowest height that holds its tile's rows; a spare tile not at all."""
    columns = pl.ds(pl.program_id(0) * tiling.columns, tiling.columns)
    expert, start, count = (part[pl.program_id(1)] for part in tile)
    heights = tiling.heights
    for height, below in zip(heights, [*heights[1:], 0], strict=True):

        def at_this(height: int = height) -> None:
            run(_Place(expert, pl.ds(start, height), jnp.arange(height) < count, columns))

        pl.when((count > below) & (count <= height))(at_this)


def _step(step: jax.Array, depth: int) -> Any:
    """The slice of a sum's ``step``-th part."""
    return pl.ds(pl.multiple_of(step * depth, depth), depth)


def _inner_kernel(
    expert: Any,
    start: Any,
    rows: Any,
    order: Any,
    x: Any,
    gate: Any,
    up: Any,
    out: Any,
    *,
    tiling: Tiling,
    taken: int,
) -> None:
    """One tile of inner rows: out[rows, columns] = silu(x[tokens] @ gate) * (x[tokens] @ up)."""

    def run(at: _Place) -> None:
        token = plgpu.load(order.at[at.rows], mask=at.valid, other=0) // taken

        def add(step: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            weights = at.expert, _step(step, tiling.depth), at.columns
            channel = step * tiling.depth + jnp.arange(tiling.depth)
            some = plgpu.load(x.at[token[:, None], channel[None, :]])
            return (
                sums[0] + plgpu.dot(some, plgpu.load(gate.at[weights])),
                sums[1] + plgpu.dot(some, plgpu.load(up.at[weights])),
            )

        zero = jnp.zeros((len(at.valid), tiling.columns), jnp.float32)
        gated, wide = jax.lax.fori_loop(0, x.shape[1] // tiling.depth, add, (zero, zero))
        made = (gated / (1 + jnp.exp(-gated)) * wide).astype(out.dtype)
        plgpu.store(out.at[at.rows, at.columns], made, mask=at.valid[:, None])

    _at_its_height(tiling, (expert, start, rows), run)


def _outer_kernel(
    expert: Any, start: Any, rows: Any, inner: Any, down: Any, out: Any, *, tiling: Tiling
) -> None:
    """One tile of outer rows: out[rows, columns] = inner[rows] @ down."""

    def run(at: _Place) -> None:
        valid = at.valid[:, None]

        def add(step: jax.Array, total: jax.Array) -> jax.Array:
            part = _step(step, tiling.depth)
            some = plgpu.load(inner.at[at.rows, part], mask=valid, other=0.0)
            return total + plgpu.dot(some, plgpu.load(down.at[at.expert, part, at.columns]))

        zero = jnp.zeros((len(at.valid), tiling.columns), jnp.float32)
        total = jax.lax.fori_loop(0, inner.shape[1] // tiling.depth, add, zero)
        plgpu.store(out.at[at.rows, at.columns], total.astype(out.dtype), mask=valid)

    _at_its_height(tiling, (expert, start, rows), run)


def _call(
    kernel: Any, name: str, tiling: Tiling, cut: Tiles, shape: tuple[int, int], dtype: Any
) -> Any:
    return kernel_call(
        functools.partial(kernel, tiling=tiling),
        name,
        # Columns first: programs that share the rows of a tile, then those of its expert.
        grid=(shape[1] // tiling.columns, len(cut.rows)),
        out_shape=jax.ShapeDtypeStruct(shape, dtype),
        warps=tiling.warps,
        stages=tiling.stages,
    )


def inner_rows(
    x: jax.Array, taken: Assignments, gate: jax.Array, up: jax.Array, tiling: Tiling
) -> jax.Array:
    """silu(x @ gate) * (x @ up) for every assignment.

    Args:
      x: [T, hidden], tokens in their own order; ``taken``: their assignments.
      gate, up: [E, hidden, inner], widths multiples of the tiling's depth and columns.

    Returns:
      [A, inner], sorted by expert.
    """
    cut, assignments = tiles(taken, tiling.rows), len(taken.order)
    kernel = functools.partial(_inner_kernel, taken=assignments // len(x))
    call = _call(kernel, "experts_inner", tiling, cut, (assignments, gate.shape[2]), x.dtype)
    return call(*cut, taken.order, x, gate, up)


def outer_rows(inner: jax.Array, taken: Assignments, down: jax.Array, tiling: Tiling) -> jax.Array:
    """inner @ down for every assignment: [A, inner] sorted by expert -> [A, hidden] likewise."""
    cut = tiles(taken, tiling.rows)
    shape = (len(taken.order), down.shape[2])
    return _call(_outer_kernel, "experts_outer", tiling, cut, shape, inner.dtype)(*cut, inner, down)


def expert_rows(
    x: jax.Array, taken: Assignments, gate: jax.Array, up: jax.Array, down: jax.Array
) -> jax.Array:
    """The output of its expert for every assignment; arguments and result as ``grouped.tiled``."""
    first, second = tilings(len(taken.order), len(gate))
    return outer_rows(inner_rows(x, taken, gate, up, first), taken, down, second)
