"""The draft of a block: what step 0 already says about all of its positions (paper IV-A1)."""

from __future__ import annotations

import jax
import jax.numpy as jnp


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
