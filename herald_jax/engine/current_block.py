"""Sparse layers for selectors that choose by the block being denoised: one whole layer at a time.

Nothing overlaps here: the main stream brings a layer's KV from the full pool, runs the layer, and
goes on to the next. It is the exact reference that the other selectors approximate.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

import host_kernels
from herald_jax.engine.block_rows import BlockRows
from herald_jax.engine.choice import best_rows, pool_of, voters
from herald_jax.engine.stack import LayerStack
from herald_jax.engine.step_programs import BlockState, Buffer, write_rows
from herald_jax.engine.timeline import Timeline
from herald_jax.engine.wait import wait_ready
from herald_jax.kv.device_cache import DeviceCache
from herald_jax.kv.full_pool import Booking
from herald_jax.kv.pool_transfer import own_rows
from herald_jax.kv.transfer import Staging
from herald_jax.models.attention import attend, importance
from herald_jax.models.config import ModelConfig
from herald_jax.selection import CurrentBlockSelector


@dataclass(frozen=True)
class CurrentBlockPrograms:
    """Body of the program of one sparse layer; equal instances stand for the same program.

    Attributes:
      sinks: leading positions always selected; ``selected``: K's capacity.
      every_step: the layer attends what it selects, not everything.
    """

    config: ModelConfig
    sinks: int
    selected: int
    every_step: bool

    def step(
        self,
        layers: Sequence[Any],
        buffer: Buffer,
        x: jax.Array,
        state: BlockState,
        select_len: jax.Array,
        lengths: jax.Array,
    ) -> tuple[jax.Array, Buffer, Buffer]:
        """One layer over its whole KV: exact importance, the K best rows, attention.

        A row whose score is not a number ranks highest: it is attended, and its slot fails like any
        whose output is not finite.

        Args:
          buffer: [N, R, H_kv, D] with position r in row r, valid before the block and finite
            everywhere.
          x: [N, B, hidden].
          select_len: int32 [N], rows that may be selected: all blocks before the tail.
          lengths: int32 [N], rows of the pool in use, 2B + K_r.

        Returns:
          x, the pool [N, 2B + K, H_kv, D] and the buffer, which lets the block be written in place.
        """
        (layer,) = layers
        q, k, v = layer.pre(x, state.positions)
        whole = write_rows(buffer[0], k, state.start), write_rows(buffer[1], v, state.start)
        end = state.start + self.config.block_size

        def score(slot: tuple[jax.Array, ...]) -> jax.Array:
            return importance(*(part[None] for part in slot))[0]

        # Slot by slot, because weights of B * H_q queries over the whole prefix are large.
        scores = jax.lax.map(score, (q, whole[0], end, voters(state.masked)))
        best = best_rows(scores, select_len, self.selected, sinks=self.sinks)
        pool = (
            pool_of(whole[0], k, state.start, best, self.selected),
            pool_of(whole[1], v, state.start, best, self.selected),
        )
        out = attend(q, *pool, lengths) if self.every_step else attend(q, *whole, end)
        return layer.post(x, out), pool, whole


class CurrentBlock:
    """Runs the steps that select, and returns committed blocks to the full pool."""

    def __init__(
        self,
        selector: CurrentBlockSelector,
        stack: LayerStack,
        programs: CurrentBlockPrograms,
        cache: DeviceCache,
        *,
        timeout: float,
        timeline: Timeline,
    ) -> None:
        """Allocates staging for one layer.

        Raises:
          MemoryError: the host refuses it.
        """
        self.selector, self.stack, self.programs, self.cache = selector, stack, programs, cache
        self.timeout, self.timeline = timeout, timeline
        shape = cache.shape
        self.groups = stack.groups(shape.exact_layers, len(stack), 1)
        self.staging = Staging(1, shape.buffer_shape(shape.rows), shape.dtype, cache.device)
        every = np.arange(shape.rows, dtype=np.int32)
        self._indices = np.ascontiguousarray(
            np.broadcast_to(every, (shape.slots, shape.kv_heads, shape.rows))
        )
        self._bookings: Sequence[Booking | None] = [None] * shape.slots
        self._start = np.zeros(shape.slots, np.int32)

    def begin(self, bookings: Sequence[Booking | None], start: np.ndarray) -> None:
        """Names the block to come: per slot its booking, and int32 [N], its first position."""
        self._bookings, self._start = bookings, start

    def selects_at(self, step: int) -> bool:
        """Whether this step needs whole layers; the others run over the pool."""
        return step == 0 or self.selector.every_step

    def step(self, x: jax.Array, state: BlockState, lengths: jax.Array) -> jax.Array:
        """The sparse layers for x [N, B, hidden]; leaves the pool of the selection in the cache.

        Raises:
          WaitTimeout: a layer did not end in time.
        """
        cache, block = self.cache, self.programs.config.block_size
        select_len = jax.device_put(np.maximum(self._start - block, 0), cache.device)
        cache.pool = []
        for layer, group in enumerate(self.groups):
            program = self.stack.on_layers(self.programs.step, group, donate=[0])
            x, pool = program(self._load(layer), x, state, select_len, lengths)[:2]
            cache.pool.append(pool)
            # The next layer takes the place of this one, on the device and in staging.
            wait_ready(x, self.timeout, f"sparse layer {layer} over its whole KV")
        return x

    def _load(self, layer: int) -> Buffer:
        """Starts the copy of one layer's committed rows; the main stream stalls for them."""
        began = time.perf_counter()
        with self.timeline.span("main", "load"):
            staging, nothing = self.staging, self.cache.shape.nothing
            staging.reclaim(0)
            extents = [nothing if b is None else b.extents[layer] for b in self._bookings]
            keys, values = staging.keys[0], staging.values[0]
            host_kernels.gather(extents, self._indices, self._start, keys, values)
            for slot, rows in enumerate(self._start):
                # What an earlier request left there may not be finite, and 0 * NaN is NaN.
                keys[slot, rows:] = 0
                values[slot, rows:] = 0
            loaded = staging.send(0)
        self.timeline.stall_seconds += time.perf_counter() - began
        return loaded

    def commit(self) -> None:
        """Writes the finished block's KV to the full pool, before the next block needs it."""
        with self.timeline.span("main", "rows to host"):
            committed = own_rows(self.cache.pool, self.programs.config.block_size)
            wait_ready(committed, self.timeout, "the committed block's KV")
            shape = self.cache.shape
            BlockRows(self._bookings, self._start, [committed]).store(shape, 0, shape.slots)

    def close(self) -> None:
        """Unregisters staging and forgets the bookings."""
        self._bookings = [None] * self.cache.shape.slots
        self.staging.close()
