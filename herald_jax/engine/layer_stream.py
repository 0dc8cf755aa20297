"""Whole layers on their way from the full pool to the device, ahead of the steps that read them."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import host_kernels
from herald_jax.engine.errors import EngineError, WaitTimeout
from herald_jax.engine.timeline import Timeline
from herald_jax.engine.wait import wait_ready
from herald_jax.engine.worker import Worker
from herald_jax.kv.device_cache import Buffer, DeviceCache
from herald_jax.kv.full_pool import Booking, layer_extents
from herald_jax.kv.transfer import Staging


@dataclass
class _Pass:
    """One run over all sparse layers.

    Attributes:
      room: counts the layers that may still be started; ``stopped``: nobody will take the rest.
      loaded: layers in order as their copies were started, or what went wrong.
    """

    extents: Sequence[Sequence[np.ndarray]]
    start: np.ndarray
    room: threading.Semaphore
    loaded: queue.SimpleQueue[Buffer | BaseException] = field(default_factory=queue.SimpleQueue)
    stopped: bool = False


class LayerStream:
    """Gathers and copies one sparse layer after the other on a thread of its own.

    Of its ``CacheShape.whole_layers`` places one holds the layer that computes; the others are
    filled meanwhile. Rows lie contiguous in a head's plane of the full pool, so the gather reads
    them as a copy would, and what it writes is the layout that attention takes on the device.
    """

    def __init__(self, cache: DeviceCache, *, timeout: float, timeline: Timeline) -> None:
        """Allocates staging for the layers in flight.

        Raises:
          MemoryError: the host refuses it.
        """
        self.cache, self.timeout, self.timeline = cache, timeout, timeline
        shape = cache.shape
        self.places = shape.whole_layers
        self.staging = Staging(
            self.places, shape.buffer_shape(shape.rows), shape.dtype, cache.device
        )
        every = np.arange(shape.rows, dtype=np.int32)
        self._indices = np.ascontiguousarray(
            np.broadcast_to(every, (shape.slots, shape.kv_heads, shape.rows))
        )
        # Rows of each place and slot that were written since they were last zero.
        self._written = np.zeros((self.places, shape.slots), np.int32)
        self._worker = Worker("layers")
        self._pass: _Pass | None = None
        self._future: Future[None] | None = None

    def begin(self, bookings: Sequence[Booking | None], start: np.ndarray) -> None:
        """Starts a pass over all sparse layers; returns at once.

        Args:
          bookings: of every slot; ``start``: int32 [N], rows that are committed.
        """
        self.stop()
        shape = self.cache.shape
        layers = range(shape.sparse_layers)
        extents = [layer_extents(bookings, layer, shape.nothing) for layer in layers]
        made = _Pass(extents, start.copy(), threading.Semaphore(self.places))
        self._pass = made
        self._future = self._worker.submit(lambda: self._run(made))

    @property
    def busy(self) -> bool:
        """Whether a pass was begun and neither stopped nor taken to its end."""
        return self._pass is not None

    def take(self, layer: int) -> Buffer:
        """The next layer [N, R, H_kv, D], position r in row r, zeros from ``start`` on.

        Waits until it has arrived, and counts that time as a stall of the main stream.

        Raises:
          WaitTimeout: it did not arrive in time.
          EngineError: it could not be fetched.
        """
        made = self._pass
        assert made is not None, "take without begin"
        what = f"the KV of sparse layer {layer}"
        with self.timeline.stall("load"):
            try:
                loaded = made.loaded.get(timeout=self.timeout)
            except queue.Empty:
                raise WaitTimeout(f"waited {self.timeout:g} s for {what}") from None
            if isinstance(loaded, BaseException):
                raise EngineError(f"{what} could not be fetched: {loaded}") from loaded
            for part in loaded:
                wait_ready(part, self.timeout, what)
        return loaded

    def computed(self, layer: int) -> None:
        """Says that nothing holds a layer any more: another takes its place."""
        made = self._pass
        assert made is not None, "computed without begin"
        if layer == len(made.extents) - 1:
            self._pass = None
        made.room.release()

    def stop(self) -> None:
        """Ends a pass that nobody takes to its end, once it no longer reads the full pool."""
        if self._pass is not None:
            self._pass.stopped = True
            self._pass.room.release()
            self._pass = None
        if self._future is not None:
            with contextlib.suppress(TimeoutError):
                self._future.exception(timeout=self.timeout)
            self._future = None

    def close(self) -> None:
        """Ends the thread and unregisters staging."""
        self.stop()
        self._worker.close()
        self.staging.close()

    def _run(self, made: _Pass) -> None:
        try:
            for layer in range(len(made.extents)):
                made.room.acquire()
                if made.stopped:
                    return
                with self.timeline.span("layers", "gather"):
                    made.loaded.put(self._load(made, layer))
        except BaseException as error:
            made.loaded.put(error)

    def _load(self, made: _Pass, layer: int) -> Any:
        staging, place = self.staging, layer % self.places
        staging.reclaim(place)
        keys, values = staging.keys[place], staging.values[place]
        host_kernels.gather(made.extents[layer], self._indices, made.start, keys, values)
        written = self._written[place]
        for slot, rows in enumerate(made.start):
            # What an earlier request left there may not be finite, and 0 * NaN is NaN.
            keys[slot, rows : written[slot]] = 0
            values[slot, rows : written[slot]] = 0
        written[:] = made.start
        return staging.send(place)
