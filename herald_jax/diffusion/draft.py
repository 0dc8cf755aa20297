"""The draft of a block: what step 0 already says about all of its positions (paper IV-A1)."""

from __future__ import annotations

from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

Place = TypeVar("Place", np.ndarray, jax.Array)


def draft(tokens: jax.Array, masked: jax.Array, argmax: jax.Array) -> jax.Array:
    """Accepted tokens kept, the argmax of the step-0 logits elsewhere.

    The draft guides selection for the next block only and never reaches the output.

    Args:
      tokens: int32 [N, B] and ``masked``: bool [N, B], the block after step 0.
      argmax: int32 [N, B], argmax of the step-0 logits.

    Returns:
      int32 [N, B].
    """
    return jnp.where(masked, argmax, tokens)


def mask_places(block_size: int, count: int) -> tuple[int, ...]:
    """Where ``count`` masks stand in a block of B positions, evenly: one at its centre, B at each.

    Args:
      block_size: B; ``count``: 1 to B.
    """
    return tuple((2 * i + 1) * block_size // (2 * count) for i in range(count))


def spaced_masks(block_size: int, spacing: int) -> tuple[int, ...]:
    """Where masks stand in a block of B positions if one in ``spacing`` is there, at least one."""
    return mask_places(block_size, block_size // spacing or 1)


def equal_parts(count: int, most: int) -> int:
    """Into how many equal parts so many masks can be cut, ``most`` at most."""
    return max(parts for parts in range(1, most + 1) if count % parts == 0)


def representative_position(start: Place, block_size: int) -> Place:
    """The centre of the next block, where the representative query stands (paper IV-A2).

    Args:
      start: first position of the current block, NumPy or JAX, any shape.
      block_size: B.
    """
    (centre,) = mask_places(block_size, 1)
    return start + block_size + centre
