"""Replacing tokens of a block that were accepted already (LLaDA2.1, token-to-token editing)."""

from __future__ import annotations

from typing import NamedTuple

import jax


class Editing(NamedTuple):
    """What a block that may be edited remembers, arrays over the N slots.

    Attributes:
      fixed: bool [N, B], positions known before the first step, which are never edited.
      rounds: int32 [N], steps so far that began without masks.
      settled: bool [N], whether such a step changed nothing. The block is then final, and the keys
        and values of that step are those of its final tokens.
    """

    fixed: jax.Array
    rounds: jax.Array
    settled: jax.Array


def choose_edits(
    editing: Editing,
    tokens: jax.Array,
    masked: jax.Array,
    proposal: jax.Array,
    confidence: jax.Array,
    threshold: jax.Array,
    post_steps: jax.Array,
) -> tuple[jax.Array, Editing]:
    """Chooses the positions whose token is replaced, in every step, also while masks remain.

    Args:
      tokens: int32 [N, B] and ``masked``: bool [N, B], the block before the step.
      proposal: int32 [N, B], and its ``confidence``: float32 [N, B].
      threshold: float32 [N], above which a different proposal replaces the token.
      post_steps: int32 [N], steps without masks that may edit.

    Returns:
      bool [N, B], disjoint from ``masked``; the block's memory, in which a slot is newly settled
      only by a step that began without masks and edits nothing.
    """
    clean = ~masked.any(axis=1)
    rounds = editing.rounds + clean
    may = ~editing.settled & (~clean | (rounds <= post_steps))
    edits = ~masked & ~editing.fixed & may[:, None]
    edits &= (proposal != tokens) & (confidence > threshold[:, None])
    settled = editing.settled | (clean & ~edits.any(axis=1))
    return edits, Editing(editing.fixed, rounds, settled)
