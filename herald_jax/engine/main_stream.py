"""The main stream: denoises the current block of every slot."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from herald_jax.diffusion.draft import draft
from herald_jax.engine.block_selection import BlockSelection
from herald_jax.engine.errors import EngineError
from herald_jax.engine.lookahead import Lookahead
from herald_jax.engine.lookahead_programs import LookaheadPrograms
from herald_jax.engine.promise import Promises, kept
from herald_jax.engine.stack import LayerGroup, LayerStack
from herald_jax.engine.step_programs import BlockState, Decision, Decoding, Queries
from herald_jax.engine.timeline import Timeline
from herald_jax.engine.wait import wait_ready
from herald_jax.kv.device_cache import DeviceCache
from herald_jax.kv.transfer import fetched, start_fetch

#: Places in ``Decision.flags``.
MASKS_LEFT, UNSETTLED = 0, 1


@dataclass(frozen=True)
class Denoised:
    """A block of every slot that is final and committed.

    Attributes:
      tokens: int32 [N, B]; ``broken``: bool [N], slots whose logits were not finite numbers.
      following: int32 [N], the token after the block where logits are shifted, else None.
      steps: forward passes, commit included.
    """

    tokens: np.ndarray
    broken: np.ndarray
    following: np.ndarray | None
    steps: int

    @classmethod
    def of(cls, decision: Decision, steps: int) -> Denoised:
        """What the commit, the last of ``steps`` passes, left."""
        state, following = decision.state, decision.following
        return cls(
            np.asarray(state.tokens),
            np.asarray(state.broken),
            None if following is None else np.asarray(following),
            steps,
        )


class MainStream:
    """Runs the step programs over the device's cache.

    Attributes:
      current: runs the sparse layers of steps that select for their own block, if any do.
    """

    def __init__(
        self,
        stack: LayerStack,
        programs: LookaheadPrograms,
        cache: DeviceCache,
        *,
        layer_group: int | None,
        queue_depth: int,
        timeout: float,
        timeline: Timeline,
        current: BlockSelection | None = None,
    ) -> None:
        self.stack, self.programs, self.cache, self.current = stack, programs, cache, current
        self.timeout, self.timeline = timeout, timeline
        exact = cache.shape.exact_layers
        self.exact_groups = stack.groups(0, exact, layer_group if current is None else 1)
        self.pool_groups = stack.groups(exact, len(stack), layer_group)
        self.block = programs.block
        self.queue_depth = queue_depth
        self._queued: deque[jax.Array] = deque()
        self._numbers: list[jax.Array] = []

    def denoise(
        self,
        state: BlockState,
        decoding: Decoding,
        pool_rows: np.ndarray,
        kept_rows: np.ndarray,
        budget: np.ndarray,
        lookahead: Lookahead | None,
        most_rounds: int,
    ) -> Denoised:
        """Denoises the block of every slot until it is final, and commits its KV.

        While masks remain, what a step decided is read after the next one was queued: a step
        follows in any case. Once none remain, a step may be the last. One that changes nothing
        leaves the KV of the final tokens and is the commit (its draft half, should it be step 1,
        only informs selection); rules that edit go on from one that does.

        Args:
          state: the block before step 0.
          pool_rows: int32 [N], rows in use at step 0; ``kept_rows``: at later steps.
          budget: int32 [N], entries kept where step 0 refines candidates.
          lookahead: what to prepare for the retrieval stream, or None.
          most_rounds: steps that may change a block, see ``AcceptRule.rounds``.

        Raises:
          WaitTimeout: a step did not end in time.
        """
        rows, kept, keep = jax.device_put((pool_rows, kept_rows, budget), self.cache.device)
        previous: jax.Array | None = None
        argmax = state.tokens
        for step in range(most_rounds + 2):
            lengths = rows if step == 0 else kept
            with self.timeline.span("main", "queue"):
                ahead = lookahead if lookahead and lookahead.begin_step == step else None
                if ahead is not None and ahead.places:
                    decision = self._pair_step(state, argmax, decoding, lengths, ahead)
                else:
                    prepare = lookahead.prepare if lookahead and step == 0 else None
                    decision = self._step(step, state, decoding, lengths, keep, ahead, prepare)
            decision.flags.copy_to_host_async()
            state, argmax = decision.state, decision.argmax
            if previous is not None:
                with self.timeline.span("main", "denoise"):
                    wait_ready(previous, self.timeout, f"denoising step {step - 1}")
                if not np.asarray(previous)[MASKS_LEFT]:
                    with self.timeline.span("main", "commit"):
                        wait_ready(decision.flags, self.timeout, "the commit pass")
                    if not np.asarray(decision.flags)[UNSETTLED]:
                        return Denoised.of(decision, step + 1)
            previous = decision.flags
        raise EngineError(
            f"a block of {self.block} tokens is not final after {most_rounds + 2} steps"
        )

    def _pace(self, x: jax.Array) -> jax.Array:
        """Keeps the device's queue short, so that the retrieval stream's programs get in between.

        There is one compute stream: what is launched waits for all that was queued before it.
        """
        if self.queue_depth:
            self._queued.append(x)
            while len(self._queued) > self.queue_depth:
                wait_ready(self._queued.popleft(), self.timeout, "a program of the main stream")
        return x

    def _number(self, step: int) -> jax.Array:
        """int32, on the device already: copied now, it would queue behind rows of the next pool."""
        while len(self._numbers) <= step:
            more = range(len(self._numbers), max(step + 1, self.block + 2))
            self._numbers += jax.device_put([np.int32(n) for n in more], self.cache.device)
        return self._numbers[step]

    def _decide(self, x: jax.Array, state: BlockState, decoding: Decoding, step: int) -> Decision:
        return self.stack.on_shell(self.programs.decide)(x, state, decoding, self._number(step))

    def _exact(self, x: jax.Array, state: BlockState) -> jax.Array:
        for group in self.exact_groups:
            if self.current is not None:
                self.current.enters(group.first, x, state)
            program = self.stack.on_layers(self.programs.exact_step, group, donate=[0])
            part = slice(group.first, group.last)
            x, self.cache.exact[part] = program(
                self.cache.exact[part], x, state.positions, state.start
            )
            self._pace(x)
        return x

    def _step(
        self,
        step: int,
        state: BlockState,
        decoding: Decoding,
        lengths: jax.Array,
        budget: jax.Array,
        ahead: Lookahead | None,
        prepare: Callable[[], None] | None,
    ) -> Decision:
        """A step of the denoising group alone; ``ahead`` where retrieval begins at it."""
        x = self._exact(self.stack.embed(state.tokens), state)
        if prepare is not None:
            prepare()
        refines = step == 0 and self.cache.shape.candidates > self.cache.shape.selected
        merges = ahead is not None and ahead.merge_step == step
        queries: list[Queries] | None = None
        if self.current is not None and self.current.selects_at(step):
            x = self.current.step(x, state, lengths)
        elif refines or merges:
            x, queries = self._queried(x, state, lengths, budget, refines)
        else:
            x = self._pool(x, state, lengths)
        decision = self._decide(x, state, decoding, step)
        if ahead is not None:
            start_fetch(jax.tree.leaves(queries))
            ahead.begin(None, None, None if queries is None else kept(queries))
        return decision

    def _pool(self, x: jax.Array, state: BlockState, lengths: jax.Array) -> jax.Array:
        for group, part in self._pool_parts():
            program = self.stack.on_layers(self.programs.pool_step, group, donate=[0])
            x, self.cache.pool[part] = program(self.cache.pool[part], x, state.positions, lengths)
            self._pace(x)
        return x

    def _queried(
        self,
        x: jax.Array,
        state: BlockState,
        lengths: jax.Array,
        budget: jax.Array,
        refines: bool,
    ) -> tuple[jax.Array, list[Queries]]:
        """As ``_pool``, with the merged queries of every sparse layer."""
        queries: list[Queries] = []
        candidates: list[Any] = []
        keeps = refines and self.cache.shape.keeps_candidates
        for group, part in self._pool_parts():
            program = self.stack.on_layers(self.programs.query_step, group, donate=[0])
            x, self.cache.pool[part], merged, passed = program(
                self.cache.pool[part], x, state.positions, lengths, state.masked, budget
            )
            if keeps:
                candidates += passed
            # Nothing else may hold what takes the room of the next pool.
            del passed
            queries += merged
            self._pace(x)
        if keeps:
            self.cache.candidates = candidates
        return x, queries

    def _pair_step(
        self,
        state: BlockState,
        argmax: jax.Array,
        decoding: Decoding,
        lengths: jax.Array,
        lookahead: Lookahead,
    ) -> Decision:
        mask_id, b = self.programs.config.mask_token_id, self.block
        tokens, positions = _pair_inputs(state, argmax, mask_id, lookahead.places)
        x = self.stack.embed(tokens)
        row = state.positions[:, -1] + 1 if lookahead.attends_draft else state.start
        for group in self.exact_groups:
            program = self.stack.on_layers(self.programs.exact_pair, group, donate=[0])
            part = slice(group.first, group.last)
            x, self.cache.exact[part] = program(
                self.cache.exact[part], x, positions, state.start, row
            )
            self._pace(x)
        if lookahead.representative:
            representative, x = _columns(x, 2 * b, 2 * b + 1), _columns(x, 0, 2 * b)
            pair = _columns(positions, 0, 2 * b)
            drafts: list[jax.Array] = []
            x = self._through_pool(
                self.programs.pool_pair,
                *(x, pair, lengths),
                lambda _, rows: drafts.append(fetched(rows)),
            )
            lookahead.begin(representative, drafts, None)
        else:
            with Promises[Queries](self.cache.shape.sparse_layers) as promised:

                def hand_over(part: slice, queries: list[Queries]) -> None:
                    start_fetch(jax.tree.leaves(queries))
                    promised.keep(part, queries)
                    if part.start == 0:
                        # The first layers are scanned while the last ones are still to run.
                        lookahead.begin(None, None, promised.made)

                x = self._through_pool(self.programs.pool_ahead, x, positions, lengths, hand_over)
        return self._decide(_columns(x, 0, b), state, decoding, 1)

    def _through_pool(
        self,
        body: Callable[..., Any],
        x: jax.Array,
        positions: jax.Array,
        lengths: jax.Array,
        tell: Callable[[slice, Any], None],
    ) -> jax.Array:
        """Sparse layers with a program that returns x, buffers and more; ``tell`` gets the more of
        every group as soon as it is queued, with which layers of the pool they are."""
        for group, part in self._pool_parts():
            program = self.stack.on_layers(body, group, donate=[0])
            x, self.cache.pool[part], more = program(self.cache.pool[part], x, positions, lengths)
            tell(part, more)
            self._pace(x)
        return x

    def _pool_parts(self) -> list[tuple[LayerGroup, slice]]:
        exact = self.cache.shape.exact_layers
        return [(g, slice(g.first - exact, g.last - exact)) for g in self.pool_groups]


@functools.partial(jax.jit, static_argnums=(1, 2))
def _columns(x: jax.Array, first: int, last: int) -> jax.Array:
    return x[:, first:last]


@functools.partial(jax.jit, static_argnums=(2, 3))
def _pair_inputs(
    state: BlockState, argmax: jax.Array, mask_id: int, places: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    """Tokens and positions [N, 2B + A]: denoising group, draft group, next block's masks."""
    block, positions = argmax.shape[1], state.positions
    drafted = draft(state.tokens, state.masked, argmax)
    following = (state.start + block)[:, None] + jnp.array(places, jnp.int32)
    tokens = jnp.concatenate([state.tokens, drafted, jnp.full_like(following, mask_id)], axis=1)
    return tokens, jnp.concatenate([positions, positions, following], axis=1)
