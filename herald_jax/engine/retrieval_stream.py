"""The retrieval stream: selects and fetches the next block's rows while the main stream denoises.

Each worker thread owns a range of slots. With two workers the halves alternate: while one half
is being scanned on the host, the other's projections and MLP run on the device.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from herald_jax.diffusion.draft import representative_position
from herald_jax.engine.block_rows import BlockRows
from herald_jax.engine.errors import EngineError, WaitTimeout
from herald_jax.engine.promise import await_promise
from herald_jax.engine.retrieval import Retrieval
from herald_jax.engine.stack import LayerStack
from herald_jax.engine.step_programs import Queries
from herald_jax.engine.timeline import Timeline
from herald_jax.engine.transfers import pool_transfer
from herald_jax.engine.worker import Worker, wait_done
from herald_jax.kv.device_cache import DeviceCache
from herald_jax.selection import (
    LayerSerialSelector,
    MergedQueries,
    QueryOnceSelector,
    SelectionJob,
    Selector,
)
from herald_jax.selection.callback import SelectionCallback, dispatch


class RetrievalStream:
    """Runs selections on its own threads; one block at a time."""

    def __init__(
        self,
        selector: Selector,
        stack: LayerStack,
        cache: DeviceCache,
        pool: np.ndarray,
        *,
        streams: int,
        timeout: float,
        timeline: Timeline,
    ) -> None:
        self.selector, self.stack, self.shape = selector, stack, cache.shape
        self.timeout, self.timeline = timeout, timeline
        shape, device = cache.shape, cache.device
        self.device = device
        streams = min(streams, shape.slots)
        cuts = [shape.slots * part // streams for part in range(streams + 1)]
        self.parts = list(itertools.pairwise(cuts))
        self.transfer = pool_transfer(cache, self.parts, pool, timeout=timeout, timeline=timeline)
        self.workers = [Worker(f"retrieval-{index}") for index in range(streams)]
        self._lock = threading.Lock()
        self._current: Retrieval | None = None
        self._futures: list[Future[Any]] = []
        self._stored: list[Future[Any]] = []
        self._callback: SelectionCallback | None = None
        if isinstance(selector, LayerSerialSelector):
            self._callback = SelectionCallback(selector, streams)
            # On the device ahead of time: copied later, they would queue behind rows.
            numbers = range(max(shape.sparse_layers, streams))
            self._numbers = jax.device_put([np.int32(n) for n in numbers], device)
            self._number = jax.device_put(np.int32(self._callback.number), device)

    # -- called by the main stream --------------------------------------------------------------

    def store(self, rows: BlockRows) -> None:
        """Starts to write a committed block to the full pool; returns at once.

        What is begun later finds it there. The block's bookings must live until that was joined.
        """
        self._stored = [
            worker.submit(functools.partial(self._store, rows, index))
            for index, worker in enumerate(self.workers)
        ]

    def begin(
        self,
        job: SelectionJob,
        rows: list[BlockRows],
        *,
        representative: jax.Array | None = None,
        queries: Sequence[Future[Queries]] | None = None,
    ) -> None:
        """Starts a retrieval; returns at once.

        Args:
          job: what may be selected for each slot.
          rows: further blocks to write to the full pool first, in order.
          representative: [N, 1, hidden] at the first sparse layer (layer-serial selectors).
          queries: per sparse layer what ``MergedQueries`` holds, or will once it is queued
            (query-once selectors that ask).
        """
        layers = self.shape.sparse_layers
        block = self.shape.block_size
        positions = representative_position(job.start, block).astype(np.int32)[:, None]
        retrieval = Retrieval(
            job,
            rows,
            representative,
            positions,
            queries,
            self._stored,
            [None] * layers,
            [len(self.parts)] * layers,
        )
        self._stored = []
        self._current = retrieval
        self.transfer.begins()
        self._futures = [
            worker.submit(functools.partial(self._run, retrieval, index))
            for index, worker in enumerate(self.workers)
        ]

    @property
    def busy(self) -> bool:
        """Whether a retrieval was begun and not yet joined."""
        return self._current is not None

    def settle(self) -> None:
        """Waits until nothing reads or writes bookings any more, whatever becomes of it.

        A thread that does not end in time is given up.
        """
        for futures in (self._stored, self._futures):
            with contextlib.suppress(EngineError):
                self._await(futures)
        self._stored, self._futures, self._current = [], [], None
        with contextlib.suppress(EngineError):
            self.transfer.settle()

    def join(self) -> Retrieval:
        """Waits for the retrieval that was begun and returns it.

        Raises:
          WaitTimeout: it did not end in time; the message says how far it came.
          EngineError: the idle pool could not be filled.
        """
        retrieval = self._current
        assert retrieval is not None, "join without begin"
        self.transfer.awaited()
        try:
            self._await(self._futures)
            self.transfer.settle()
        finally:
            # A thread that did not end in time is given up: nobody waits for it again.
            self._futures, self._current = [], None
        if any(sent is None for sent in retrieval.sent):
            # Of several threads the one that did not start the copy does not know that it failed.
            raise EngineError(f"the retrieval stream failed: {retrieval.error}")
        self.timeline.retrieval_seconds += retrieval.seconds
        return retrieval

    def _await(self, futures: Sequence[Future[Any]]) -> None:
        def unfinished(state: str) -> str:
            current = self._current
            layer, layers = current.reached if current else 0, self.shape.sparse_layers
            place = f"sparse layer {layer} of {layers}"
            if current is not None and not all(future.done() for future in current.stored):
                place = "the rows of the block before, on their way to the host"
            return (
                f"waited {self.timeout:g} s for the retrieval stream, whose thread {state} at "
                f"{place}"
            )

        wait_done(futures, self.workers, self.timeout, unfinished)
        for future in futures:
            if (error := future.exception()) is not None:
                raise EngineError(f"the retrieval stream failed: {error}") from error

    def swap(self, cache: DeviceCache, done: Retrieval) -> jax.Array:
        """Makes what a joined retrieval fetched the active pool.

        Returns:
          the committed block's rows [layers, 2, N, B, H_kv, D], keys then values.
        """
        committed = self.transfer.swap(cache, done.sent, done.job.indices, _fetched(done.job))
        for slot in done.failures:
            self.transfer.forget(slot)
        return committed

    def close(self) -> None:
        """Ends the threads and unregisters staging."""
        for worker in self.workers:
            worker.close()
        if self._callback is not None:
            self._callback.close()
        with contextlib.suppress(EngineError):
            self.transfer.settle()
        self.transfer.close()

    # -- on the worker threads ------------------------------------------------------------------

    def _store(self, rows: BlockRows, stream: int) -> None:
        with self.timeline.span(f"retrieval-{stream}", "rows to host"):
            rows.store(self.shape, *self.parts[stream])

    def _run(self, retrieval: Retrieval, stream: int) -> None:
        first, last = self.parts[stream]
        began = time.perf_counter()
        delivered = 0
        part = retrieval.job.part(first, last)
        try:
            if retrieval.stored:
                # Slots whose rows could not be written cannot go on.
                retrieval.stored[stream].result()
            for rows in retrieval.rows:
                self._store(rows, stream)
            for layer in self._select(retrieval, part, stream):
                if part.error is not None:
                    raise part.error
                with self.timeline.span(f"retrieval-{stream}", "gather"):
                    self._gather(layer, part, stream)
                self._deliver(retrieval, layer)
                delivered += 1
        except BaseException as error:
            retrieval.error = error
            for slot in range(first, last):
                if retrieval.job.active[slot]:
                    retrieval.failures[slot] = f"selection failed: {error}"
        for layer in range(delivered, self.shape.sparse_layers):
            self.transfer.skip(layer, stream)
            self._deliver(retrieval, layer)
        for bad in np.flatnonzero(part.status):
            retrieval.failures.setdefault(
                first + int(bad), "selection met scores that are not finite numbers"
            )
        retrieval.seconds = max(retrieval.seconds, time.perf_counter() - began)

    def _select(self, retrieval: Retrieval, part: SelectionJob, stream: int) -> Any:
        """Yields each sparse layer once its indices are there."""
        first, last = self.parts[stream]
        name = f"retrieval-{stream}"
        if isinstance(self.selector, QueryOnceSelector):
            queries = retrieval.queries
            for layer in range(self.shape.sparse_layers):
                with self.timeline.span(name, "scan"):
                    merged = None
                    if queries is not None:
                        promised = f"the queries of sparse layer {layer}"
                        q, elsewhere = await_promise(queries[layer], self.timeout, promised)
                        outside = None if elsewhere is None else np.asarray(elsewhere)[first:last]
                        merged = MergedQueries(np.asarray(q)[first:last], outside)
                    if part.active.any():
                        self.selector.choose(layer, merged, part)
                retrieval.reached = layer
                yield layer
            return
        assert self._callback is not None
        assert retrieval.representative is not None
        self._callback.jobs[stream] = part
        x = _rows(retrieval.representative, first, last)
        positions = jax.device_put(retrieval.positions[first:last], self.device)
        groups = self.stack.groups(self.shape.exact_layers, len(self.stack), 1)
        for layer, group in enumerate(groups):
            with self.timeline.span(name, "layer"):
                program = self.stack.on_layers(_representative_layer, group)
                at = self._numbers[stream], self._numbers[layer]
                x = program(x, positions, self._number, *at)
                if not part.selected[layer].wait(self.timeout):
                    raise WaitTimeout(
                        f"waited {self.timeout:g} s for the host callback of sparse layer {layer}"
                    )
            retrieval.reached = layer
            yield layer
        self._callback.jobs[stream] = None

    def _gather(self, layer: int, part: SelectionJob, stream: int) -> None:
        counts = _fetched(part)
        moved = self.transfer.gather(
            layer, stream, part.extents[layer], part.indices[layer], counts
        )
        self.timeline.count_rows(int(counts.sum()) * self.shape.kv_heads, moved)

    def _deliver(self, retrieval: Retrieval, layer: int) -> None:
        """Starts the copy of a layer once all parts have gathered their rows."""
        with self._lock:
            retrieval.waiting[layer] -= 1
            if retrieval.waiting[layer] == 0:
                retrieval.sent[layer] = self.transfer.send(layer)


def _fetched(job: SelectionJob) -> np.ndarray:
    """int32 [N], rows that a job fetches for each slot and KV head."""
    return np.where(job.active, job.candidates, 0).astype(np.int32)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _rows(x: jax.Array, first: int, last: int) -> jax.Array:
    return x[first:last]


def _representative_layer(
    layers: Sequence[Any],
    x: jax.Array,
    positions: jax.Array,
    callback: jax.Array,
    stream: jax.Array,
    index: jax.Array,
) -> jax.Array:
    """One layer for the representative queries x [n, 1, hidden]: device, host, device."""
    (layer,) = layers
    q, k, v = layer.pre(x, positions)
    operands = [part[:, 0].astype(jnp.float32) for part in (q, k, v)]
    answer = jax.ShapeDtypeStruct(operands[0].shape, jnp.float32)
    out = jax.pure_callback(dispatch, answer, callback, stream, index, *operands)
    return layer.post(x, out[:, None].astype(x.dtype))
