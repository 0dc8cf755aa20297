"""What the main stream asks of methods whose blocks select for themselves, at their own steps."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Protocol

import jax
import numpy as np

from herald_jax.engine.block_rows import BlockRows
from herald_jax.engine.request import Slot
from herald_jax.engine.stack import LayerStack
from herald_jax.engine.step_programs import BlockState
from herald_jax.engine.timeline import Timeline
from herald_jax.engine.wait import wait_ready
from herald_jax.kv.device_cache import Buffer, DeviceCache
from herald_jax.kv.full_pool import Booking
from herald_jax.kv.pool_transfer import own_rows
from herald_jax.kv.transfer import Staging, fetched


class RowSource(Protocol):
    """What brings rows of the full pool to the device for a selection: a thread and its staging.

    Attributes:
      staging: host memory that copies to the device leave from.
    """

    staging: Staging

    def stop(self) -> None:
        """Waits until nothing reads the full pool any more."""

    def close(self) -> None:
        """Ends the thread and unregisters staging."""


class BlockSelection(abc.ABC):
    """Runs the sparse layers of steps that select, and returns committed blocks to the full pool.

    There is no retrieval stream: the committed block is in the full pool before the next begins.

    Attributes:
      bookings: of every slot; ``start``: int32 [N], first position of the block being denoised.
      groups: the sparse layers, each on its own.
    """

    def __init__(
        self,
        stack: LayerStack,
        cache: DeviceCache,
        source: RowSource,
        *,
        timeout: float,
        timeline: Timeline,
    ) -> None:
        self.stack, self.cache, self.source = stack, cache, source
        self.timeout, self.timeline = timeout, timeline
        self.groups = stack.groups(cache.shape.exact_layers, len(stack), 1)
        self.bookings: Sequence[Booking | None] = [None] * cache.shape.slots
        self.start = np.zeros(cache.shape.slots, np.int32)

    @property
    def staging(self) -> Staging:
        """Host memory that copies to the device leave from."""
        return self.source.staging

    def begin(self, bookings: Sequence[Booking | None], start: np.ndarray) -> None:
        """Names the block to come: per slot its booking, and int32 [N], its first position."""
        self.bookings, self.start = bookings, start

    def prefilled(self, index: int, slot: Slot, buffers: Sequence[Buffer]) -> None:
        """Looks at a request before its first block.

        Args:
          buffers: of every layer [1, R, H_kv, D], its prompt's whole blocks; empty without any.
        """
        del index, slot, buffers

    def enters(self, layer: int, x: jax.Array, state: BlockState) -> None:
        """Looks at the input x [N, B, hidden] of an exact layer, before the layer runs."""
        del layer, x, state

    @abc.abstractmethod
    def selects_at(self, step: int) -> bool:
        """Whether this step selects; the others run over the pool."""

    @abc.abstractmethod
    def step(self, x: jax.Array, state: BlockState, lengths: jax.Array) -> jax.Array:
        """The sparse layers of a selecting step; leaves the pool of the selection in the cache.

        Args:
          x: [N, B, hidden] after the exact layers.
          lengths: int32 [N], rows of the pool in use, 2B + K_r.

        Returns:
          x after the last layer.

        Raises:
          WaitTimeout: a layer did not end in time.
          EngineError: rows could not be fetched.
        """

    def commit(self) -> jax.Array:
        """Writes the finished block's KV to the full pool, before the next block needs it.

        Returns:
          the block's rows [L, 2, N, B, H_kv, D], keys then values.
        """
        with self.timeline.span("main", "rows to host"):
            shape = self.cache.shape
            committed = own_rows(self.cache.pool, shape.block_size)
            rows = fetched(committed)
            wait_ready(rows, self.timeout, "the committed block's KV")
            BlockRows(self.bookings, self.start, [rows]).store(shape, 0, shape.slots)
        return committed

    def clear(self, slot: int) -> None:
        """Forgets a slot's rows that may not be finite numbers; no block may be on its way."""
        self.staging.clear(slot)

    def abandon(self) -> None:
        """Forgets the bookings, once nothing reads them any more."""
        self.source.stop()
        self.bookings = [None] * self.cache.shape.slots

    def close(self) -> None:
        """Ends threads and unregisters staging."""
        self.abandon()
        self.source.close()
