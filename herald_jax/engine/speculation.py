"""Selection one layer ahead: each layer's rows are chosen and fetched while the one before runs."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from herald_jax.engine.block_selection import BlockSelection
from herald_jax.engine.request import Slot
from herald_jax.engine.row_fetch import RowFetch, kept_rows
from herald_jax.engine.speculation_programs import SpeculationPrograms
from herald_jax.engine.stack import LayerGroup, LayerStack
from herald_jax.engine.step_programs import BlockState, StepPrograms
from herald_jax.engine.timeline import Timeline
from herald_jax.engine.wait import wait_ready
from herald_jax.kv.budget import Budget
from herald_jax.kv.device_cache import Buffer, DeviceCache, zeros
from herald_jax.kv.full_pool import Booking
from herald_jax.kv.partial_keys import PartialKeys
from herald_jax.kv.transfer import start_fetch
from herald_jax.selection import LayerAheadSelector

#: Positions whose queries and keys calibrate a request, the first generated block among them.
CALIBRATION = 512


class Speculation(BlockSelection):
    """Runs step 0 of every block over rows that were chosen a layer ahead.

    The layer before the first sparse one is exact, and its input chooses too. Without exact layers
    the first layer chooses from its own input, and waits for its rows.

    Attributes:
      partial: the channels of keys that choices are made by.
    """

    def __init__(
        self,
        selector: LayerAheadSelector,
        stack: LayerStack,
        programs: SpeculationPrograms,
        steps: StepPrograms,
        cache: DeviceCache,
        *,
        budget: Budget,
        chunk: int,
        timeout: float,
        timeline: Timeline,
    ) -> None:
        """Allocates partial keys and staging for a pool.

        Args:
          steps: whose program runs a layer over its pool.
          chunk: positions that calibrate in one program.

        Raises:
          MemoryError: the host refuses it.
        """
        shape = cache.shape
        self.fetch = RowFetch(shape, cache.device, timeout=timeout, timeline=timeline)
        super().__init__(stack, cache, self.fetch, timeout=timeout, timeline=timeline)
        self.selector, self.programs, self.steps = selector, programs, steps
        self.budget = budget
        self.chunk = max(1, min(chunk, shape.rows) // shape.block_size) * shape.block_size
        self._singles = stack.groups(0, len(stack), 1)
        self._pairs = [
            _pair(self._singles[max(0, at - 1)], self._singles[at])
            for at in range(shape.exact_layers, len(stack))
        ]
        self.partial = PartialKeys(shape, cache.device)
        self._looked = False

    def prefilled(self, index: int, slot: Slot, buffers: Sequence[Buffer]) -> None:
        """See ``BlockSelection.prefilled``; calibrates by the prompt's end and the first block."""
        shape, block = self.cache.shape, self.cache.shape.block_size
        first, _ = slot.block(block, self.programs.config.mask_token_id)
        tokens = np.concatenate([slot.request.prompt_ids[: slot.start], first])
        if not buffers:
            rows = shape.buffer_shape(self.chunk, 1)
            buffers = zeros(len(self.stack), rows, shape.dtype, self.cache.device)
        begin = max(0, len(tokens) - max(1, CALIBRATION // block) * block)
        seen: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in range(shape.sparse_layers)]
        for start in range(begin, len(tokens), self.chunk):
            part = np.zeros((1, self.chunk), np.int32)
            count = min(self.chunk, len(tokens) - start)
            part[0, :count] = tokens[start : start + count]
            x, fetched = self.stack.embed(part), []
            for layer, group in enumerate(self._singles):
                program = self.stack.on_layers(self.programs.calibrate, group)
                x, (pair,) = program(buffers[layer : layer + 1], x, np.int32(start))
                if layer >= shape.exact_layers:
                    start_fetch(pair)
                    fetched.append(pair)
            wait_ready(x, self.timeout, f"calibration for request {slot.request.id}")
            for layer, (q, k) in enumerate(fetched):
                seen[layer].append((np.asarray(q)[:count], np.asarray(k)[:count]))
        projections = [
            self.selector.projection(*(np.concatenate(rows) for rows in zip(*pieces, strict=True)))
            for pieces in seen
        ]
        self.partial.place(index, projections, [k for k, _ in buffers[shape.exact_layers :]])

    def begin(self, bookings: Sequence[Booking | None], start: np.ndarray) -> None:
        """See ``BlockSelection.begin``; the previous block's pool makes room for this one's."""
        super().begin(bookings, start)
        self.cache.pool = []
        self._looked = False
        kept, self._counts = kept_rows(bookings, start, self.budget, self.cache.shape.block_size)
        self._kept = jax.device_put(kept, self.cache.device)

    def selects_at(self, step: int) -> bool:
        """See ``BlockSelection.selects_at``."""
        return step == 0

    def enters(self, layer: int, x: jax.Array, state: BlockState) -> None:
        """See ``BlockSelection.enters``; the last exact layer's input chooses."""
        if layer == self.cache.shape.exact_layers - 1 and not self._looked:
            self._look(0, x, state)

    def step(self, x: jax.Array, state: BlockState, lengths: jax.Array) -> jax.Array:
        """See ``BlockSelection.step``."""
        if not self._looked:
            self._look(0, x, state)
        for layer, group in enumerate(self.groups):
            if layer + 1 < len(self.groups):
                self._look(layer + 1, x, state)
            program = self.stack.on_layers(self.steps.pool_step, group, donate=[0])
            x, pool = program([self.fetch.take(layer)], x, state.positions, lengths)
            self.cache.pool += pool
        return x

    def _look(self, layer: int, x: jax.Array, state: BlockState) -> None:
        """Chooses a sparse layer's rows by the input of the layer before, and starts to fetch."""
        self._looked = True
        program = self.stack.on_layers(self.programs.look, self._pairs[layer])
        keys, projection = self.partial.keys[layer], self.partial.projections[layer]
        rows = program(x, state, keys, projection, self._kept)
        rows.copy_to_host_async()
        self.fetch.start(layer, self.bookings, rows, self._counts)

    def commit(self) -> jax.Array:
        """See ``BlockSelection.commit``; the block's keys go to the partial ones."""
        committed = super().commit()
        self.partial.append(committed, self.start)
        return committed


def _pair(source: LayerGroup, target: LayerGroup) -> LayerGroup:
    return LayerGroup(source.first, source.kinds + target.kinds, source.states + target.states)
