"""Which masked positions accept their proposal in a denoising step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import jax
import jax.numpy as jnp

from herald_jax.diffusion.rules import Compare, Fallback, Rule, Strategy, check_options

Count = TypeVar("Count", int, jax.Array)

#: Confidences this close to the best are as good as it ("near").
NEAR = 1e-5


@dataclass(frozen=True)
class AcceptRule:
    """What of a generation rule is compiled in; see ``diffusion.rules.Rule`` for the options.

    Attributes:
      edits: accepted tokens may be replaced (``diffusion.edit``).
    """

    strategy: Strategy = "dynamic"
    compare: Compare = "gt"
    fallback: Fallback = "most_confident"
    clamp_quota: bool = True
    small_block: int | None = None
    edits: bool = False

    def __post_init__(self) -> None:
        check_options(vars(self))

    @classmethod
    def of(cls, rule: Rule) -> AcceptRule:
        """The part of ``rule`` that is compiled in."""
        return cls(
            rule.strategy,
            rule.compare,
            rule.fallback,
            rule.clamp_quota,
            rule.small_block,
            rule.edit_threshold is not None,
        )

    def rounds(self, block_size: int, steps: Count, post_steps: Count) -> Count | int:
        """Steps that may change a block; after these it ends as it is.

        A network whose [MASK] proposals count could otherwise keep a block open for ever. Without
        such proposals no block needs more.

        Args:
          block_size: B.
          steps: T; ``post_steps``: rounds of edits after the last mask. Numbers or int32 [N].
        """
        if self.edits:
            return block_size + post_steps + 1
        if self.strategy == "entropy_bounded" or self.small_block is not None:
            return block_size
        return steps


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


def eligible(masked: jax.Array, small_block: int | None) -> jax.Array:
    """Masked positions that may accept: those of the leftmost small block that has any.

    Args:
      masked: bool [N, B].
      small_block: positions of a small block (Fast-dLLM v2), or None for the whole block.
    """
    if small_block is None:
        return masked
    part = jnp.arange(masked.shape[1]) // small_block
    first = jnp.where(masked, part, masked.shape[1]).min(axis=1, keepdims=True)
    return masked & (part == first)


def accept(
    masked: jax.Array,
    confidence: jax.Array,
    due: jax.Array,
    threshold: jax.Array,
    rule: AcceptRule,
    entropy: jax.Array | None = None,
    bound: jax.Array | None = None,
) -> jax.Array:
    """Chooses the positions that accept (SDAR's remasking strategies and other engines' forms).

    With a clamped quota a clean or prompt position is never rewritten.

    Args:
      masked: bool [N, B]; ``confidence``: float32 [N, B].
      due: int32 [N], the step's quota; ``threshold``: float32 [N].
      rule: the named options.
      entropy: float32 [N, B] and ``bound``: float32 [N], nats, for "entropy_bounded".

    Returns:
      bool [N, B], not empty for a slot that has masks and empty for any other.
    """
    candidates = eligible(masked, rule.small_block)
    if rule.strategy == "entropy_bounded":
        assert entropy is not None, "an entropy-bounded rule needs the entropy of each position"
        assert bound is not None, "an entropy-bounded rule needs a bound"
        return _surest(candidates, entropy, bound)
    hidden = jnp.where(candidates, confidence, -jnp.inf)
    chosen = _quota(candidates, hidden, due[:, None], threshold[:, None], rule)
    return chosen & (candidates if rule.clamp_quota else masked.any(axis=1, keepdims=True))


def _quota(
    candidates: jax.Array,
    hidden: jax.Array,
    due: jax.Array,
    threshold: jax.Array,
    rule: AcceptRule,
) -> jax.Array:
    """The strategies that count positions; of too few candidates they choose others as well."""
    position = jnp.arange(candidates.shape[1])
    if rule.strategy == "sequential":
        first = jnp.argmax(candidates, axis=1, keepdims=True)
        return (position >= first) & (position < first + due)
    most_confident = rank(hidden) < due
    if rule.strategy == "static":
        return most_confident
    if rule.fallback == "leftmost":
        filling = rank(jnp.where(candidates, -position, -jnp.inf)) < due
    else:
        filling = most_confident
    if rule.compare == "near":
        threshold = jnp.minimum(hidden.max(axis=1, keepdims=True) - NEAR, threshold)
    passing = candidates & (hidden > threshold if rule.compare == "gt" else hidden >= threshold)
    return jnp.where(passing.sum(axis=1, keepdims=True) >= due, passing, filling)


def _surest(candidates: jax.Array, entropy: jax.Array, bound: jax.Array) -> jax.Array:
    """The longest run of ascending entropies whose sum is below the bound, at least one."""
    spread = jnp.where(candidates, entropy, jnp.inf)
    ascending = rank(-spread)
    total = jnp.cumsum(jnp.sort(spread, axis=1), axis=1)
    count = jnp.maximum((total < bound[:, None]).sum(axis=1, keepdims=True), 1)
    return candidates & (ascending < count)
