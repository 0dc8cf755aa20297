"""A block of every slot, and what one step's proposals make of it."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from herald_jax.diffusion.accept import AcceptRule, accept, quota
from herald_jax.diffusion.edit import Editing, choose_edits


class Block(NamedTuple):
    """The block being denoised.

    Attributes:
      tokens: int32 [N, B]; ``masked``: bool [N, B], the only record of what is masked.
      editing: for rules that edit, else None.
    """

    tokens: jax.Array
    masked: jax.Array
    editing: Editing | None


class Limits(NamedTuple):
    """The numbers of a rule, arrays [N] over slots: float32, but steps and post steps int32."""

    threshold: jax.Array
    steps: jax.Array
    edit_threshold: jax.Array
    max_post_steps: jax.Array
    entropy_bound: jax.Array


class Proposal(NamedTuple):
    """What a step proposes for every position.

    Attributes:
      tokens: int32 [N, B]; ``confidence``: float32 [N, B].
      entropy: float32 [N, B] in nats, where the rule needs it.
    """

    tokens: jax.Array
    confidence: jax.Array
    entropy: jax.Array | None


def advance(
    block: Block,
    proposal: Proposal,
    limits: Limits,
    step: jax.Array,
    rule: AcceptRule,
    mask_id: int | None,
) -> tuple[Block, jax.Array, jax.Array]:
    """One step: masked positions accept, accepted ones are edited.

    A slot that is final never changes again, whatever its batch-mates still do.

    Args:
      step: int32 scalar, counted from 0.
      mask_id: of [MASK] where it may be proposed: a position written with it is masked (again), but
        uses up the quota. None where it is banned.

    Returns:
      the block; bool [N], slots with masks that further steps may fill; bool [N], slots that
      changed or may change, so that this step's keys and values are not the final ones.
    """
    size = block.masked.shape[1]
    most = rule.rounds(size, limits.steps, limits.max_post_steps)
    running = step < most
    open_ = block.masked.any(axis=1) & running
    written = open_[:, None] & accept(
        block.masked,
        proposal.confidence,
        quota(limits.steps, size, step),
        limits.threshold,
        rule,
        proposal.entropy,
        limits.entropy_bound,
    )
    unsettled, editing = open_, block.editing
    if editing is not None:
        edits, editing = choose_edits(
            editing,
            block.tokens,
            block.masked,
            proposal.tokens,
            proposal.confidence,
            limits.edit_threshold,
            limits.max_post_steps,
        )
        edits &= jnp.broadcast_to(running, open_.shape)[:, None]
        unsettled |= edits.any(axis=1)
        written |= edits
    masked = block.masked & ~written
    if mask_id is not None:
        masked |= written & (proposal.tokens == mask_id)
    tokens = jnp.where(written, proposal.tokens, block.tokens)
    masks_left = masked.any(axis=1) & (step + 1 < most)
    return Block(tokens, masked, editing), masks_left, unsettled
