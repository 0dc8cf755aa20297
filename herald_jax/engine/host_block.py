"""Step 0 with its attention on the CPU: every layer's queries go there, its answers come back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from herald_jax.engine.block_selection import BlockSelection
from herald_jax.engine.choice import voters
from herald_jax.engine.errors import EngineError
from herald_jax.engine.row_fetch import RowFetch, kept_rows
from herald_jax.engine.stack import LayerStack
from herald_jax.engine.step_programs import BlockState
from herald_jax.engine.timeline import Timeline
from herald_jax.engine.wait import wait_ready
from herald_jax.kv.budget import Budget
from herald_jax.kv.device_cache import DeviceCache
from herald_jax.kv.full_pool import Booking, layer_extents
from herald_jax.kv.rows import store_rows
from herald_jax.kv.transfer import fetched
from herald_jax.models.config import ModelConfig
from herald_jax.selection import HostBlockSelector, SelectionJob


@dataclass(frozen=True)
class HostBlockPrograms:
    """Bodies of a layer's two programs; equal instances stand for the same programs."""

    config: ModelConfig

    def ask(
        self, layers: Sequence[Any], x: jax.Array, state: BlockState
    ) -> tuple[jax.Array, jax.Array]:
        """What the host needs of x [N, B, hidden].

        Returns:
          queries float32 [N, H_kv, B, G, D], and the block's rows [2, N, B, H_kv, D].
        """
        (layer,) = layers
        q, k, v = layer.pre(x, state.positions)
        grouped = q.reshape(*q.shape[:2], self.config.num_kv_heads, -1, q.shape[-1])
        return grouped.swapaxes(1, 2).astype(jnp.float32), jnp.stack([k, v])

    def answer(self, layers: Sequence[Any], x: jax.Array, out: jax.Array) -> jax.Array:
        """The layer's output from its attention, float32 [N, H_kv, B, G, D]."""
        (layer,) = layers
        attended = out.swapaxes(1, 2).reshape(*x.shape[:2], self.config.num_heads, -1)
        return layer.post(x, attended.astype(x.dtype))


class HostBlock(BlockSelection):
    """Runs step 0 layer by layer between device and CPU; selected rows follow on another thread.

    The block's own rows are written behind the committed ones in the full pool, so that one scan is
    all of the attention; the committed block replaces them.
    """

    def __init__(
        self,
        selector: HostBlockSelector,
        stack: LayerStack,
        programs: HostBlockPrograms,
        cache: DeviceCache,
        *,
        budget: Budget,
        sinks: int,
        timeout: float,
        timeline: Timeline,
    ) -> None:
        """Allocates staging for a pool.

        Raises:
          MemoryError: the host refuses it.
        """
        self.fetch = RowFetch(cache.shape, cache.device, timeout=timeout, timeline=timeline)
        super().__init__(stack, cache, self.fetch, timeout=timeout, timeline=timeline)
        self.selector, self.programs = selector, programs
        self.budget, self.sinks = budget, sinks

    def begin(self, bookings: Sequence[Booking | None], start: np.ndarray) -> None:
        """See ``BlockSelection.begin``; the previous block's pool makes room for this one's."""
        super().begin(bookings, start)
        self.cache.pool = []

    def selects_at(self, step: int) -> bool:
        """See ``BlockSelection.selects_at``."""
        return step == 0

    def step(self, x: jax.Array, state: BlockState, lengths: jax.Array) -> jax.Array:
        """See ``BlockSelection.step``; exact attention over everything."""
        shape, start = self.cache.shape, self.start
        block = shape.block_size
        kept, counts = kept_rows(self.bookings, start, self.budget, block)
        job = self._job(kept)
        voting = np.asarray(voters(state.masked))
        own = np.full(shape.slots, block, np.int32)
        tail = np.maximum(start[:, None] - block + np.arange(block, dtype=np.int32), 0)
        tail = np.broadcast_to(tail[:, None], (shape.slots, shape.kv_heads, block))
        for layer, group in enumerate(self.groups):
            q, rows = self.stack.on_layers(self.programs.ask, group)(x, state)
            q, rows = fetched(q), fetched(rows)
            for part in (q, rows):
                wait_ready(part, self.timeout, f"the queries of sparse layer {layer}")
            with self.timeline.stall("scan"):
                k, v = np.asarray(rows)
                try:
                    store_rows(self.bookings, layer, start, own, k, v)
                    out = self.selector.attend(layer, np.asarray(q), voting, job)
                except Exception as error:
                    raise EngineError(f"selection failed: {error}") from error
            x = self.stack.on_layers(self.programs.answer, group)(x, out)
            chosen = np.concatenate([tail, job.indices[layer]], axis=2)
            self.fetch.start(layer, self.bookings, chosen, counts)
        self.cache.pool = [self.fetch.take(layer) for layer in range(shape.sparse_layers)]
        return x

    def _job(self, kept: np.ndarray) -> SelectionJob:
        """Selection for the block that is being denoised; its own rows are attended."""
        shape, block = self.cache.shape, self.cache.shape.block_size
        part = np.array([booking is not None for booking in self.bookings])
        select_len = np.where(part, np.maximum(self.start - block, 0), 0).astype(np.int32)
        layers = range(shape.sparse_layers)
        return SelectionJob(
            extents=[layer_extents(self.bookings, layer, shape.nothing) for layer in layers],
            index=None,
            start=self.start,
            attend_len=np.where(part, self.start + block, 0).astype(np.int32),
            select_len=select_len,
            budget=kept,
            candidates=kept,
            seeds=np.zeros(shape.slots, np.uint32),
            indices=np.full(
                (shape.sparse_layers, shape.slots, shape.kv_heads, max(shape.selected, 1)),
                -1,
                np.int32,
            ),
            status=np.zeros(shape.slots, np.int32),
            sinks=self.sinks,
        )
