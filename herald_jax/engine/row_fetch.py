"""Chosen rows of one layer after another, gathered and copied while a step is under way."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, wait

import jax
import numpy as np
from numpy.typing import ArrayLike

import host_kernels
from herald_jax.engine.errors import EngineError, WaitTimeout
from herald_jax.engine.timeline import Timeline
from herald_jax.engine.wait import wait_ready
from herald_jax.engine.worker import Worker
from herald_jax.kv.budget import Budget
from herald_jax.kv.device_cache import Buffer, CacheShape
from herald_jax.kv.full_pool import Booking, layer_extents
from herald_jax.kv.transfer import Staging


def kept_rows(
    bookings: Sequence[Booking | None], start: np.ndarray, budget: Budget, block: int
) -> tuple[np.ndarray, np.ndarray]:
    """K_r of the block that begins at int32 [N] ``start``, and with its tail: int32 [N] each."""
    part = np.array([booking is not None for booking in bookings]) & (start > 0)
    kept = np.array([budget.entries(max(0, int(first) - block)) for first in start], np.int32)
    kept = np.where(part, kept, 0).astype(np.int32)
    return kept, kept + np.where(part, block, 0).astype(np.int32)


class RowFetch:
    """Makes the pool of the block that is being denoised, layer by layer, on a thread of its own.

    A layer's rows are its tail and the selection; the block itself writes its own.
    """

    def __init__(
        self, shape: CacheShape, device: jax.Device, *, timeout: float, timeline: Timeline
    ) -> None:
        """Allocates staging for a pool.

        Raises:
          MemoryError: the host refuses it.
        """
        self.shape, self.timeout, self.timeline = shape, timeout, timeline
        rows = shape.buffer_shape(shape.pool_rows)
        self.staging = Staging(shape.sparse_layers, rows, shape.dtype, device)
        self._worker = Worker("rows")
        self._futures: dict[int, Future[Buffer]] = {}

    def start(
        self,
        layer: int,
        bookings: Sequence[Booking | None],
        rows: ArrayLike,
        counts: np.ndarray,
    ) -> None:
        """Starts with a layer; returns at once.

        Args:
          bookings: of every slot.
          rows: int32 [N, H_kv, B + K], on the host or on its way there: the tail, then chosen rows.
          counts: int32 [N], how many of them each slot needs; 0 for a slot without a booking.
        """
        extents = layer_extents(bookings, layer, self.shape.nothing)

        def fetch() -> Buffer:
            indices = np.ascontiguousarray(np.asarray(rows), np.int32)
            with self.timeline.span("rows", "gather"):
                self.staging.reclaim(layer)
                host_kernels.gather(
                    extents,
                    indices,
                    counts,
                    self.staging.keys[layer],
                    self.staging.values[layer],
                    row_offset=self.shape.block_size,
                )
                return self.staging.send(layer)

        tail = np.minimum(counts, self.shape.block_size)
        chosen = int((counts - tail).sum()) * self.shape.kv_heads
        self.timeline.count_rows(chosen, chosen)
        self._futures[layer] = self._worker.submit(fetch)

    def take(self, layer: int) -> Buffer:
        """The layer's pool [N, 2B + K, H_kv, D]; waits until it arrived, which is a stall.

        Raises:
          WaitTimeout: it did not arrive in time.
          EngineError: it could not be fetched.
        """
        what = f"the selected rows of sparse layer {layer}"
        with self.timeline.stall("load"):
            try:
                pool = self._futures.pop(layer).result(timeout=self.timeout)
            except TimeoutError:
                raise WaitTimeout(f"waited {self.timeout:g} s for {what}") from None
            except BaseException as error:
                raise EngineError(f"{what} could not be fetched: {error}") from error
            for part in pool:
                wait_ready(part, self.timeout, what)
        return pool

    def stop(self) -> None:
        """Waits until nothing reads the full pool any more, and forgets what nobody took."""
        futures, self._futures = list(self._futures.values()), {}
        wait(futures, timeout=self.timeout)

    def close(self) -> None:
        """Ends the thread and unregisters staging."""
        self.stop()
        self._worker.close()
        self.staging.close()
