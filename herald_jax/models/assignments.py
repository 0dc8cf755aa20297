"""Which token goes to which expert, sorted by expert."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Assignments(NamedTuple):
    """The tokens of every expert, sorted by expert and, within one, by token.

    Attributes:
      order: int32 [A], the assignment (token * k + slot) at each sorted row.
      rows: int32 [A], the sorted row of each assignment.
      sizes: int32 [E], rows of each expert; ``starts`` int32 [E], its first row.
    """

    order: jax.Array
    rows: jax.Array
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
    _, order = jax.lax.sort_key_val(flat, each, is_stable=True)
    rows = jnp.zeros_like(each).at[order].set(each, unique_indices=True)
    sizes = (flat[:, None] == jnp.arange(count)).sum(0, dtype=jnp.int32)
    return Assignments(order, rows, sizes, jnp.cumsum(sizes) - sizes)
