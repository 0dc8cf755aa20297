"""Decisions over random blocks against diffusers' scheduler of LLaDA2: ``pytest -m oracle``."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from herald_jax.diffusion.accept import AcceptRule
from herald_jax.diffusion.block import Block, Limits, Proposal, advance
from herald_jax.diffusion.edit import Editing
from herald_jax.diffusion.rules import RULES, Rule
from herald_jax.diffusion.sampling import greedy

pytestmark = pytest.mark.oracle

BLOCK, VOCAB, MASK, SLOTS = 8, 12, 11, 150
CASES = [(steps, edit) for steps in (8, 4, 3) for edit in (None, 0.3, 0.6)]


def block_logits(rng, shape, favourite):
    """Logits of any sharpness; at most positions the favourite leads, as in a real network."""
    scale = rng.uniform(0.5, 4, (*shape, 1))
    logits = rng.normal(size=(*shape, VOCAB)) * scale
    bonus = rng.uniform(0, 6, shape) * (rng.random(shape) < 0.7)
    np.put_along_axis(
        logits,
        favourite[..., None],
        np.take_along_axis(logits, favourite[..., None], -1) + bonus[..., None],
        -1,
    )
    return logits.astype(np.float32)


def rule_of(steps: int, edit: float | None) -> Rule:
    return dataclasses.replace(
        RULES["llada2.1"],
        steps=steps,
        threshold=0.6,
        edit_threshold=edit,
        max_post_steps=4,
        ban_mask=False,
    )


def limits_of(rule: Rule, slots: int) -> Limits:
    def full(value, dtype):
        return jnp.full(slots, value, dtype)

    return Limits(
        full(rule.threshold, jnp.float32),
        full(rule.steps, jnp.int32),
        full(rule.edit_threshold or 0.0, jnp.float32),
        full(rule.max_post_steps, jnp.int32),
        full(rule.entropy_bound, jnp.float32),
    )


def scheduler_of(rule: Rule):
    schedulers = pytest.importorskip("diffusers.schedulers")
    made = schedulers.BlockRefinementScheduler(
        block_length=BLOCK, threshold=rule.threshold, editing_threshold=rule.edit_threshold
    )
    made.set_timesteps(rule.steps, block_length=BLOCK)
    return made


def start(rng, slots):
    """Blocks with a prompt's remainder and accepted tokens: tokens, mask, fixed."""
    head = rng.integers(0, BLOCK, slots)[:, None]
    fixed = np.arange(BLOCK) < head
    masked = ~fixed & (rng.random((slots, BLOCK)) < rng.random((slots, 1)) * 1.2)
    tokens = np.where(masked, MASK, rng.integers(0, MASK, (slots, BLOCK))).astype(np.int32)
    return tokens, masked, fixed


RUN = jax.jit(advance, static_argnums=(4, 5))


def ours(logits, tokens, masked, fixed, rule, step):
    slots, accepting = len(tokens), AcceptRule.of(rule)
    editing = None
    if accepting.edits:
        editing = Editing(fixed, np.zeros(slots, np.int32), np.zeros(slots, bool))
    proposal = Proposal(*greedy(jnp.asarray(logits)), None)
    block, _, _ = RUN(
        Block(tokens, masked, editing), proposal, limits_of(rule, slots), step, accepting, MASK
    )
    return np.asarray(block.tokens), np.asarray(block.masked)


@pytest.mark.parametrize(("steps", "edit"), CASES)
def test_a_step_decides_as_the_scheduler(steps, edit):
    """4,050 random blocks in all: the mask token may be proposed, prompts are never edited."""
    torch = pytest.importorskip("torch")
    rng, rule = np.random.default_rng(steps), rule_of(steps, edit)
    scheduler = scheduler_of(rule)
    edited = 0
    for step in (0, steps - 2, steps - 1):
        tokens, masked, fixed = start(rng, SLOTS)
        logits = block_logits(rng, (SLOTS, BLOCK), rng.integers(0, VOCAB, (SLOTS, BLOCK)))
        got, left = ours(logits, tokens, masked, fixed, rule, step)
        for i in range(SLOTS):
            theirs = scheduler.step(
                torch.from_numpy(logits[i : i + 1]),
                step,
                torch.from_numpy(tokens[i : i + 1]).long(),
                mask_token_id=MASK,
                prompt_mask=torch.from_numpy(fixed[i]),
            )
            np.testing.assert_array_equal(got[i], theirs.prev_sample[0].numpy())
            np.testing.assert_array_equal(left[i], theirs.prev_sample[0].numpy() == MASK)
            edited += int(theirs.editing_transfer_index.sum())
    assert (edited > 0) == (edit is not None)


@pytest.mark.parametrize(("steps", "edit"), CASES)
def test_a_block_ends_as_the_schedulers_loop(steps, edit):
    """Whole blocks, with the scheduler's own word on when to go on.

    But for its cap of T steps, which denies a block that needed them all its rounds of edits; the
    authors' loop has no such cap.
    """
    torch = pytest.importorskip("torch")
    rng, rule = np.random.default_rng(steps), rule_of(steps, edit)
    accepting, slots = AcceptRule.of(rule), 40
    most = accepting.rounds(BLOCK, rule.steps, rule.max_post_steps)
    tokens, masked, fixed = start(rng, slots)
    # A network that never proposes its mask token: the loops differ in when they give up.
    favourite = rng.integers(0, MASK, (slots, BLOCK))
    logits = np.stack([block_logits(rng, (slots, BLOCK), favourite) for _ in range(most + 1)])
    logits[..., MASK] = -30
    editing = None
    if accepting.edits:
        editing = Editing(fixed, np.zeros(slots, np.int32), np.zeros(slots, bool))
    block = Block(tokens, masked, editing)
    for step in range(most + 1):
        proposal = Proposal(*greedy(jnp.asarray(logits[step])), None)
        block, _, _ = RUN(block, proposal, limits_of(rule, slots), step, accepting, MASK)
    for i in range(slots):
        scheduler = scheduler_of(rule)
        sample = torch.from_numpy(tokens[i : i + 1]).long()
        step = post = 0
        while True:
            remaining = bool((sample == MASK).any())
            post += not remaining
            if not remaining and post > rule.max_post_steps:
                break
            theirs = scheduler.step(
                torch.from_numpy(logits[step, i : i + 1]),
                step,
                sample,
                mask_token_id=MASK,
                prompt_mask=torch.from_numpy(fixed[i]),
            )
            sample, step = theirs.prev_sample, step + 1
            if not scheduler.check_block_should_continue(
                step_idx=0,
                masks_remaining=remaining,
                editing_enabled=edit is not None,
                editing_transfer_index=theirs.editing_transfer_index,
                post_steps=post,
                max_post_steps=rule.max_post_steps,
                finished=torch.zeros(1, dtype=torch.bool),
            ):
                break
        np.testing.assert_array_equal(np.asarray(block.tokens[i]), sample[0].numpy())
