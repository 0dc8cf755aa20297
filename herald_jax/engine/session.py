"""Everything one sized engine holds, and one lockstep block of it: denoise, join, swap."""

from __future__ import annotations

import time

import jax
import numpy as np

import host_kernels
from herald_jax.diffusion.accept import AcceptRule
from herald_jax.diffusion.rules import Rule
from herald_jax.engine.batch import Batch
from herald_jax.engine.block_methods import block_selection
from herald_jax.engine.config import EngineConfig, GenerationConfig
from herald_jax.engine.handover import Handover
from herald_jax.engine.lookahead import Lookahead
from herald_jax.engine.lookahead_programs import LookaheadPrograms
from herald_jax.engine.main_stream import Denoised, MainStream
from herald_jax.engine.prefill import Prefill
from herald_jax.engine.prefill_programs import PrefillPrograms
from herald_jax.engine.request import Request, Result, Slot
from herald_jax.engine.retrieval_stream import RetrievalStream
from herald_jax.engine.stack import LayerStack
from herald_jax.engine.timeline import Timeline
from herald_jax.kv.device_cache import CacheShape, DeviceCache
from herald_jax.kv.full_pool import FullPool
from herald_jax.models.config import ModelConfig
from herald_jax.selection import QueryOnceSelector, Selector

SPARE_CORES = 2


class Session:
    """Buffers, pools and streams for requests up to one size, decoded with one rule."""

    def __init__(
        self,
        model: ModelConfig,
        stack: LayerStack,
        shape: CacheShape,
        selector: Selector | None,
        config: EngineConfig,
        generation: GenerationConfig,
        *,
        sampled: bool,
        host_bytes: int,
        device: jax.Device,
        timeline: Timeline,
    ) -> None:
        """Allocates everything.

        Args:
          sampled: some request has a temperature.
          host_bytes: size of the full pool.

        Raises:
          ValueError: the rule is unknown.
          MemoryError: the host refuses the full pool or staging.
        """
        accelerator = device.platform != "cpu"
        host_kernels.set_thread_count(config.threads)
        if config.threads is None and accelerator:
            # The main stream and the retrieval threads need cores of their own to keep the
            # device's queue filled.
            host_kernels.set_thread_count(max(1, host_kernels.thread_count() - SPARE_CORES))
        host_kernels.set_background(accelerator)
        if shape.sparse_layers:
            host_kernels.calibrate_prefetch()
        self.model, self.config, self.shape, self.selector = model, config, shape, selector
        self.generation, self.timeline = generation, timeline
        self.rule = generation.resolve(model.rule)
        self.batch = Batch(shape, model.mask_token_id, config.budget, config.sinks, device)
        self.cache = DeviceCache(shape, device)
        self.full_pool = FullPool(
            layers=shape.sparse_layers,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            dtype=shape.dtype,
            nbytes=host_bytes,
            key_index=shape.key_index,
            threads=config.threads,
        )
        group = config.layer_group or (4 if accelerator else None)
        depth = (2 if accelerator else 0) if config.queue_depth is None else config.queue_depth
        self.current = block_selection(
            selector, stack, self._step_programs(self.rule, sampled), self.cache, config, timeline
        )
        self.main = MainStream(
            stack,
            self._step_programs(self.rule, sampled),
            self.cache,
            layer_group=group,
            queue_depth=depth,
            timeout=config.timeout,
            timeline=timeline,
            current=self.current,
        )
        self.prefill = Prefill(
            stack,
            PrefillPrograms(model, sinks=config.sinks, selected=shape.selected),
            self.cache,
            selector=selector,
            current=self.current,
            budget=config.budget,
            chunk=config.chunk(device.platform),
            layer_group=group,
            timeout=config.timeout,
            timeline=timeline,
        )
        self.retrieval: RetrievalStream | None = None
        self.handover: Handover | None = None
        if selector is not None and self.current is None:
            streams = config.retrieval_streams or (2 if accelerator else 1)
            self.retrieval = RetrievalStream(
                selector,
                stack,
                self.cache,
                self.full_pool.buffer,
                streams=streams,
                timeout=config.timeout,
                timeline=timeline,
            )
            self.handover = Handover(self.batch, self.cache, self.retrieval, timeline)

    def take(self, rows: int, generation: GenerationConfig, sampled: bool) -> bool:
        """Takes another generation on, if it can.

        Returns:
          Whether requests of ``rows`` positions fit and what is compiled of the rule is the same.
        """
        rule = generation.resolve(self.model.rule)
        same = self._step_programs(rule, sampled) == self.main.programs
        if not same or self.shape.rows < rows:
            return False
        self.generation, self.rule = generation, rule
        return True

    def _step_programs(self, rule: Rule, sampled: bool) -> LookaheadPrograms:
        once = self.selector if isinstance(self.selector, QueryOnceSelector) else None
        return LookaheadPrograms(
            self.model,
            sinks=self.config.sinks,
            selected=self.shape.selected,
            rule=AcceptRule.of(rule),
            # Without sampling nothing is filtered, and rules share what is compiled.
            confidence=rule.confidence if sampled else "unfiltered",
            sampled=sampled,
            ban_mask=rule.ban_mask,
            rotates=once.rotates if once else True,
            segments=once.segments if once else 1,
        )

    @property
    def host_kv_bytes(self) -> int:
        """Host memory that holds KV: bookings at present and staging."""
        staging = 0
        if self.retrieval is not None:
            staging = self.retrieval.transfer.nbytes
        elif self.current is not None:
            staging = self.current.staging.nbytes
        return self.full_pool.used + staging

    def admit(self, index: int, request: Request) -> Slot:
        """Books host memory for a request and reads its prompt into slot ``index``.

        Raises:
          PoolFull: the full pool has no room at present; nothing has changed.
        """
        began = time.perf_counter()
        booking = None
        if self.shape.sparse_layers:
            booking = self.full_pool.book(request.id, request.rows(self.shape.block_size))
        slot = Slot(
            request,
            booking,
            Result(request.id, prompt_tokens=len(request.prompt_ids)),
            seed=self.generation.seed if request.own.seed is None else request.own.seed,
            admitted_at=began,
        )
        try:
            self.prefill.run(index, slot)
        except BaseException:
            if booking is not None:
                self.full_pool.release(booking)
            raise
        if self.handover is not None:
            self.handover.placed(index)
        self.batch.slots[index] = slot
        slot.result.prefill_seconds = time.perf_counter() - began
        self.timeline.prefill_seconds += slot.result.prefill_seconds
        return slot

    def retire(self, index: int) -> Slot:
        """Empties a slot and releases its booking."""
        slot = self.batch.slots[index]
        assert slot is not None, f"slot {index} is empty"
        self.batch.slots[index] = None
        if slot.booking is not None:
            self.full_pool.release(slot.booking)
        slot.result.seconds = time.perf_counter() - slot.admitted_at
        return slot

    def clear(self, index: int) -> None:
        """Forgets what an emptied slot held, where it was not finite numbers.

        Call it between blocks, when no retrieval is running.
        """
        self.cache.clear(index)
        if self.handover is not None:
            self.handover.clear(index)
        if self.current is not None:
            self.current.clear(index)

    def run_block(self) -> tuple[np.ndarray, np.ndarray, dict[int, str]]:
        """Denoises and commits the current block of every slot and fetches the next pool.

        Returns:
          tokens int32 [N, B]; bool [N], slots whose tokens mean nothing because the network's
          output was not finite; per slot, why its next block cannot be decoded.

        Raises:
          WaitTimeout: a stream did not end in time.
        """
        began = time.perf_counter()
        batch, timeline = self.batch, self.timeline
        done = self._denoise(None if self.handover is None else self.handover.lookahead())
        failures = self._boundary()
        timeline.blocks += 1
        timeline.steps += done.steps
        timeline.block_seconds += time.perf_counter() - began
        for index, slot in batch.active():
            slot.result.blocks += 1
            slot.result.steps += done.steps
            if done.following is not None:
                slot.lead = int(done.following[index])
        return done.tokens, done.broken, failures

    def run_idle_block(self, *, ahead: bool) -> None:
        """Runs a block of a batch without requests, with retrieval for the next one or without.

        Every program of a block runs in one of the two.

        Raises:
          WaitTimeout: a stream did not end in time.
        """
        lookahead = self.handover.lookahead(idle=True) if self.handover and ahead else None
        self._denoise(lookahead)
        self._boundary()

    def _denoise(self, lookahead: Lookahead | None) -> Denoised:
        batch, accept, size = self.batch, AcceptRule.of(self.rule), self.shape.block_size
        if self.current is not None:
            self.current.begin(batch.bookings(), batch.per_slot(lambda slot: slot.start))
        return self.main.denoise(
            batch.state(accept.edits),
            batch.decoding(self.rule),
            batch.pool_rows(),
            batch.kept_rows(),
            batch.kept_budget(),
            lookahead,
            accept.rounds(size, self.rule.steps or size, self.rule.max_post_steps),
        )

    def _boundary(self) -> dict[int, str]:
        """Fetches the next pool or, where blocks select for themselves, returns this one's KV."""
        if self.handover is not None:
            return self.handover.boundary()
        if self.current is not None:
            self.current.commit()
            for _, slot in self.batch.active():
                slot.selected = self.config.budget.entries(slot.start)
        return {}

    def abandon(self) -> None:
        """Empties every slot, once no retrieval reads their bookings any more."""
        if self.handover is not None:
            self.handover.abandon()
        if self.current is not None:
            self.current.abandon()
        for index, _ in list(self.batch.active()):
            self.retire(index)

    def close(self) -> None:
        """Releases every booking, ends the threads and unregisters memory."""
        self.abandon()
        if self.handover is not None:
            self.handover.close()
        if self.current is not None:
            self.current.close()
