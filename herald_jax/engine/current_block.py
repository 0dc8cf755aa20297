"""Sparse layers for selectors that choose by the block being denoised, on the device: whole layers.

A step that selects takes each layer's whole KV from a stream of them. Where that holds one layer at
a time, nothing overlaps: the exact reference that the other selectors approximate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from herald_jax.engine.block_selection import BlockSelection
from herald_jax.engine.choice import best_rows, pool_of, voters
from herald_jax.engine.layer_stream import LayerStream
from herald_jax.engine.stack import LayerStack
from herald_jax.engine.step_programs import BlockState, Buffer, write_rows
from herald_jax.engine.timeline import Timeline
from herald_jax.engine.wait import wait_ready
from herald_jax.kv.device_cache import DeviceCache
from herald_jax.kv.full_pool import Booking
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


class CurrentBlock(BlockSelection):
    """Runs the steps that select over whole layers."""

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
        """Allocates staging.

        Raises:
          MemoryError: the host refuses it.
        """
        self.layers = LayerStream(cache, timeout=timeout, timeline=timeline)
        super().__init__(stack, cache, self.layers, timeout=timeout, timeline=timeline)
        self.selector, self.programs = selector, programs

    def begin(self, bookings: Sequence[Booking | None], start: np.ndarray) -> None:
        """See ``BlockSelection.begin``; layers are on their way from now on."""
        super().begin(bookings, start)
        self.layers.begin(bookings, start)

    def selects_at(self, step: int) -> bool:
        """See ``BlockSelection.selects_at``."""
        return step == 0 or self.selector.every_step

    def step(self, x: jax.Array, state: BlockState, lengths: jax.Array) -> jax.Array:
        """See ``BlockSelection.step``."""
        cache, block = self.cache, self.programs.config.block_size
        select_len = jax.device_put(np.maximum(self.start - block, 0), cache.device)
        if not self.layers.busy:
            self.layers.begin(self.bookings, self.start)
        cache.pool = []
        for layer, group in enumerate(self.groups):
            program = self.stack.on_layers(self.programs.step, group, donate=[0])
            x, pool = program(self.layers.take(layer), x, state, select_len, lengths)[:2]
            cache.pool.append(pool)
            # A later layer takes the place of this one, on the device and in staging.
            wait_ready(x, self.timeout, f"sparse layer {layer} over its whole KV")
            self.layers.computed(layer)
        return x
