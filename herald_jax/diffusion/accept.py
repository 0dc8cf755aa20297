"""Which masked positions accept their proposal in a denoising step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

Strategy = Literal["dynamic", "static"]
Compare = Literal["gt", "ge"]
Fallback = Literal["most_confident", "leftmost"]


@dataclass(frozen=True)
class AcceptRule:
    """Options of SDAR's low-confidence remasking; the defaults are the authors'.

    Attributes:
      strategy: "dynamic" accepts everything above the threshold and at least the step's quota;
        "static" accepts exactly the quota.
      compare: whether a confidence equal to the threshold passes.
      fallback: which positions fill the quota when too few pass the threshold.
    """

    strategy: Strategy = "dynamic"
    compare: Compare = "gt"
    fallback: Fallback = "most_confident"

    def __post_init__(self) -> None:
        choices = {
            "strategy": ("dynamic", "static"),
            "compare": ("gt", "ge"),
            "fallback": ("most_confident", "leftmost"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name} {getattr(self, name)!r} is unknown: use one of {', '.join(allowed)}"
                )


def quota(steps: jax.Array, block_size: int, step: jax.Array) -> jax.Array:
    """Positions due in a step: B // T each, the remainder on the first steps.

    Args:
      steps: int32 [N], T of each slot; ``step``: int32 scalar, counted from 0.
      block_size: B.

    Returns:
      int32 [N], at least 1, so that every block ends.
    """
    due = block_size // steps + (step < block_size % steps).astype(jnp.int32)
    return jnp.maximum(due, 1)


def rank(values: jax.Array) -> jax.Array:
    """Rank of each entry in descending order along the last axis; ties go to the lower index."""
    order = jnp.argsort(-values, axis=-1, stable=True)
    return jnp.argsort(order, axis=-1, stable=True)


def accept(
    masked: jax.Array,
    confidence: jax.Array,
    due: jax.Array,
    threshold: jax.Array,
    rule: AcceptRule,
) -> jax.Array:
    """Chooses the positions that accept (SDAR ``low_confidence_dynamic`` / ``_static``).

    The quota is clamped to the masked positions, so a clean or prompt position is never rewritten.

    Args:
      masked: bool [N, B]; ``confidence``: float32 [N, B].
      due: int32 [N], the step's quota; ``threshold``: float32 [N].
      rule: the named options.

    Returns:
      bool [N, B], a subset of ``masked``; not empty for a slot that has masks.
    """
    hidden = jnp.where(masked, confidence, -jnp.inf)
    by_confidence = rank(hidden)
    if rule.fallback == "leftmost":
        by_fallback = rank(jnp.where(masked, -jnp.arange(masked.shape[1]), -jnp.inf))
    else:
        by_fallback = by_confidence
    if rule.strategy == "static":
        return masked & (by_confidence < due[:, None])
    limit = threshold[:, None]
    passing = masked & (hidden >= limit if rule.compare == "ge" else hidden > limit)
    enough = passing.sum(axis=1, keepdims=True) >= due[:, None]
    return jnp.where(enough, passing, masked & (by_fallback < due[:, None]))
