"""The compiled programs of a denoising step, over exact buffers and sparse pools.

A buffer is a pair ``(k, v)`` of [N, R, H_kv, D]. Exact buffers hold position r in row r; a sparse
pool holds ``[own block (B) | tail (B) | selected (K)]``. Programs work on groups of layers, and
groups of the same shape share one executable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from herald_jax.diffusion.accept import AcceptRule
from herald_jax.diffusion.block import Block, Limits, Proposal, advance
from herald_jax.diffusion.edit import Editing
from herald_jax.diffusion.rules import Confidence
from herald_jax.diffusion.sampling import Sampling, ban, entropy, greedy, measured, sample
from herald_jax.engine.choice import best_rows, mean_query, voters
from herald_jax.engine.choice_kernel import LARGEST, best_of
from herald_jax.models import attention_kernel
from herald_jax.models.attention import attend, attend_with_mass, importance
from herald_jax.models.config import ModelConfig
from herald_jax.models.head_kernel import applies
from herald_jax.models.rope import rotary_angles, rotate

Buffer = tuple[jax.Array, jax.Array]
# One layer's merged queries on the device, see ``MergedQueries``.
Queries = tuple[jax.Array, jax.Array | None]


class BlockState(NamedTuple):
    """The block every slot is denoising.

    Attributes:
      tokens: int32 [N, B]; ``masked``: bool [N, B], the only record of what is masked.
      positions: int32 [N, B]; ``start``: int32 [N], the first of them.
      broken: bool [N], whether a step's logits were not finite numbers.
      editing: what rules that edit remember of the block, else None.
    """

    tokens: jax.Array
    masked: jax.Array
    positions: jax.Array
    start: jax.Array
    broken: jax.Array
    editing: Editing | None = None


class Decoding(NamedTuple):
    """Per-slot generation parameters: the rule's numbers and those of sampling."""

    limits: Limits
    sampling: Sampling


class Decision(NamedTuple):
    """What a step decided.

    Attributes:
      state: the block after it.
      argmax: int32 [N, B], greedy tokens of this step's logits (the draft's source).
      flags: bool [2], whether any slot has masks left to fill, and whether any slot's block
        changed or may change, so that this step is not its commit.
      following: int32 [N], greedy token after the block where logits are shifted, else None.
    """

    state: BlockState
    argmax: jax.Array
    flags: jax.Array
    following: jax.Array | None


def write_rows(buffer: jax.Array, rows: jax.Array, start: jax.Array) -> jax.Array:
    """Writes rows [N, S, H, D] at row ``start[n]`` of each slot; rows past the end are dropped."""
    n, count = rows.shape[:2]
    slots = jnp.arange(n)[:, None]
    at = start[:, None] + jnp.arange(count)
    return buffer.at[slots, at].set(rows, mode="drop", unique_indices=True, indices_are_sorted=True)


def after(value: Any, buffer: Buffer) -> Buffer:
    """The buffer, available only once ``value`` is: later writes then need no copy of it."""
    buffer, _ = jax.lax.optimization_barrier((buffer, value))
    return buffer


@dataclass(frozen=True)
class StepPrograms:
    """Bodies of the step programs for one network and one set of decoding options.

    Equal instances stand for the same compiled programs.

    Attributes:
      sinks: leading positions always kept; ``selected``: K's capacity.
      rule, confidence, ban_mask: see ``diffusion.rules.Rule``.
      sampled: False when every slot decodes greedily, which needs no sorting of logits.
      rotates: merged queries are rotated by B positions.
    """

    config: ModelConfig
    sinks: int
    selected: int
    rule: AcceptRule = field(default_factory=AcceptRule)
    confidence: Confidence = "unfiltered"
    sampled: bool = False
    ban_mask: bool = True
    rotates: bool = True

    @property
    def block(self) -> int:
        """B."""
        return self.config.block_size

    def decide(
        self, shell: Any, x: jax.Array, state: BlockState, decoding: Decoding, step: jax.Array
    ) -> Decision:
        """Head, proposal, acceptance and edits for the denoising group x [N, B, hidden]."""
        plain = not self.sampled and self.rule.strategy != "entropy_bounded"
        if plain and applies(x.dtype, x.shape[-1]):
            argmax, sure, following = self._greedy(shell, x, state)
            tokens, distribution = argmax, None
        else:
            argmax, tokens, sure, distribution, following = self._all(
                shell, x, state, decoding, step
            )
        # A slot without finite confidences ends its block like any other and fails alone.
        finite = jnp.isfinite(sure)
        broken = state.broken | (state.masked & ~finite).any(axis=1)
        spread = None
        if distribution is not None and self.rule.strategy == "entropy_bounded":
            spread = jnp.where(finite, entropy(distribution), 0.0)
        block, masks_left, unsettled = advance(
            Block(state.tokens, state.masked, state.editing),
            Proposal(tokens, jnp.where(finite, sure, 0.0), spread),
            decoding.limits,
            step,
            self.rule,
            None if self.ban_mask else self.config.mask_token_id,
        )
        flags = jnp.stack([masks_left.any(), unsettled.any()])
        return Decision(state._replace(**block._asdict(), broken=broken), argmax, flags, following)

    def _greedy(
        self, shell: Any, x: jax.Array, state: BlockState
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Greedy tokens, their probability and what follows, from the rows that matter alone."""
        needed = jnp.ones_like(state.masked) if self.rule.edits else state.masked
        mask_id = self.config.mask_token_id
        if not self.config.shifts_logits:
            return *shell.greedy(x, needed, mask_id if self.ban_mask else None), None
        # Row i speaks of position i + 1, and the last one of what leads the next block: that
        # counts as known, so it cannot be [MASK].
        last = jnp.zeros_like(needed[:, :1])
        needed = jnp.concatenate([needed[:, 1:], last], axis=1)
        following = greedy(ban(shell.head(x[:, -1:]), mask_id))[0][:, 0]
        # The first position of a block is always known: what stands there is never used.
        argmax, sure = (
            jnp.roll(part, 1, axis=1)
            for part in shell.greedy(x, needed, mask_id if self.ban_mask else None)
        )
        return argmax, sure, following

    def _all(
        self, shell: Any, x: jax.Array, state: BlockState, decoding: Decoding, step: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array | None]:
        """Greedy and proposed tokens, their confidence, their logits, and what follows."""
        logits = shell.head(x)
        following = None
        if self.config.shifts_logits:
            # What leads the next block counts as known, so it cannot be [MASK].
            last = ban(logits[:, -1:], self.config.mask_token_id)
            following = greedy(last)[0][:, 0]
        if self.ban_mask:
            logits = ban(logits, self.config.mask_token_id)
        if self.config.shifts_logits:
            # The first position of a block is always known: what its row says is never used.
            logits = jnp.concatenate([logits[:, :1], logits[:, :-1]], axis=1)
        argmax, sure = greedy(logits)
        if not self.sampled:
            return argmax, argmax, sure, logits, following
        index = state.start // self.block
        tokens, sure = sample(logits, decoding.sampling, index, step, self.confidence)
        spread = measured(logits, decoding.sampling, self.confidence)
        return argmax, tokens, sure, spread, following

    def _own(self, kind: str, buffer: Buffer, k: jax.Array, v: jax.Array, row: jax.Array) -> Buffer:
        if kind == "pool":
            zero = (0, 0, 0, 0)
            return (
                jax.lax.dynamic_update_slice(buffer[0], k, zero),
                jax.lax.dynamic_update_slice(buffer[1], v, zero),
            )
        return write_rows(buffer[0], k, row), write_rows(buffer[1], v, row)

    def _step(
        self,
        kind: str,
        layers: Sequence[Any],
        buffers: Sequence[Buffer],
        x: jax.Array,
        positions: jax.Array,
        lengths: jax.Array,
    ) -> tuple[jax.Array, list[Buffer]]:
        result = []
        for layer, buffer in zip(layers, buffers, strict=True):
            q, k, v = layer.pre(x, positions)
            buffer = self._own(kind, buffer, k, v, positions[:, 0])
            x = layer.post(x, attend(q, *buffer, lengths))
            result.append(buffer)
        return x, result

    def exact_step(
        self, layers: Any, buffers: Any, x: jax.Array, positions: jax.Array, start: jax.Array
    ) -> tuple[jax.Array, list[Buffer]]:
        """One step through exact layers: x [N, B, hidden], ``start`` int32 [N] of the block."""
        return self._step("exact", layers, buffers, x, positions, start + self.block)

    def pool_step(
        self, layers: Any, buffers: Any, x: jax.Array, positions: jax.Array, lengths: jax.Array
    ) -> tuple[jax.Array, list[Buffer]]:
        """One step through sparse layers: lengths = rows of the pool in use."""
        return self._step("pool", layers, buffers, x, positions, lengths)

    def query_step(
        self,
        layers: Any,
        buffers: Any,
        x: jax.Array,
        positions: jax.Array,
        lengths: jax.Array,
        masked: jax.Array,
        budget: jax.Array,
    ) -> tuple[jax.Array, list[Buffer], list[Queries], list[Buffer | None]]:
        """A step through sparse layers for selectors that use its queries.

        Where the pool holds candidates, they are all attended, and the ``budget[n]`` best by the
        mean softmax of the voting queries stay (compacted). The merged query of every layer is
        the mean over voting positions of the post-RoPE query, rotated by +B positions if asked.
        The masked positions vote, or all where none is left.

        Returns:
          x, buffers of capacity 2B + K, merged queries float32 [N, H_q, D] per layer, and the
          candidates of layers that were refined: a donated buffer that is a result is written in
          place, where one that is none would be copied.
        """
        result: list[Buffer] = []
        candidates: list[Buffer | None] = []
        merged: list[Queries] = []
        voting = voters(masked)
        angles = rotary_angles(jnp.array([self.block]), self.config)
        for layer, buffer in zip(layers, buffers, strict=True):
            q, k, v = layer.pre(x, positions)
            buffer = self._own("pool", buffer, k, v, positions[:, 0])
            refines = buffer[0].shape[1] > 2 * self.block + self.selected
            mean = mean_query(q, voting)
            merged.append((rotate(mean, angles) if self.rotates else mean, None))
            candidates.append(buffer if refines else None)
            if refines:
                out, mass = attend_with_mass(q, *buffer, lengths)
                x = layer.post(x, out)
                buffer = self._refine(q, buffer, lengths, voting, budget, mass)
            else:
                x = layer.post(x, attend(q, *buffer, lengths))
            result.append(buffer)
        return x, result, merged, candidates

    def _refine(
        self,
        q: jax.Array,
        buffer: Buffer,
        lengths: jax.Array,
        voting: jax.Array,
        budget: jax.Array,
        mass: jax.Array | None,
    ) -> Buffer:
        fixed = 2 * self.block
        scores = importance(q, buffer[0], lengths, voting, mass)[..., fixed:]
        valid = jnp.maximum(lengths - fixed, 0)
        # Candidates ascend by position, so the sinks come first.
        if attention_kernel.applies(q.dtype, q.shape[-1]) and scores.shape[-1] <= LARGEST:
            best = best_of(scores, budget, valid, self.selected, sinks=self.sinks)
        else:
            best = best_rows(scores, valid, self.selected, sinks=self.sinks)
        chosen = best.swapaxes(1, 2)[..., None] + fixed
        n, _, heads, _ = chosen.shape
        own = jnp.broadcast_to(jnp.arange(fixed)[:, None, None], (n, fixed, heads, 1))
        # The rows that all keep are gathered with the others: put in front of them, they would take
        # a copy of everything.
        rows = jnp.concatenate([own, chosen], axis=1)

        def keep(pool: jax.Array) -> jax.Array:
            return jnp.take_along_axis(pool, rows, axis=1, mode="clip")

        return keep(buffer[0]), keep(buffer[1])
