"""A sized engine whose caches hold random numbers: decoding at long contexts without a prefill."""

from __future__ import annotations

import itertools
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import jax
import numpy as np

import host_kernels
from benchmarks.shapes import random_cache
from herald_jax import GenerationConfig
from herald_jax.engine.errors import EngineError
from herald_jax.engine.request import Request, Result, Slot
from herald_jax.engine.session import Session
from herald_jax.engine.sizing import Sizing
from herald_jax.engine.stack import LayerStack
from herald_jax.engine.timeline import Timeline
from herald_jax.engine.warm_up import WarmUp
from herald_jax.kv.full_pool import Booking
from host_kernels.checks import TILE

#: Rows of the numbers that caches are filled with.
LINE_ROWS = 1 << 17


@dataclass(frozen=True)
class Blocks:
    """What a run of blocks took.

    Attributes:
      seconds: of each block; ``passes``: forwards of a block, T and the commit.
      stall: share of the time that the main stream waited at block boundaries.
      retrieval: seconds of retrieval a block, mean.
      tokens_per_second: of the median block.
    """

    seconds: list[float]
    passes: float
    stall: float
    retrieval: float
    tokens_per_second: float

    @property
    def median(self) -> float:
        """Seconds of the median block."""
        return statistics.median(self.seconds)


class RandomSession:
    """A session every slot of which is full, at one context length."""

    def __init__(
        self,
        sizing: Sizing,
        stack: LayerStack,
        method: str,
        *,
        context: int,
        blocks: int,
        steps: int,
    ) -> None:
        """Allocates and fills.

        Args:
          sizing: of the network, with the batch.
          context: tokens before the first block; ``blocks``: how many will be run.
          steps: T.

        Raises:
          EngineError: it does not fit.
          MemoryError: host memory does not hold it.
        """
        self.config = sizing.model
        length = context + (blocks + 1) * self.config.block_size
        self.shape = sizing.shape(method, length)
        selector = sizing.selector(method)
        host_bytes = sizing.host_pool_bytes(method, self.shape)
        need = sizing.plan(self.shape).booked
        if host_bytes < need:
            raise EngineError(f"the host holds {host_bytes} of {need} bytes for {method}")
        self.timeline = Timeline()
        self.session = Session(
            self.config,
            stack,
            self.shape,
            selector,
            sizing.config,
            GenerationConfig(steps=steps, stop_token_ids=()),
            sampled=False,
            host_bytes=host_bytes,
            device=jax.devices()[0],
            timeline=self.timeline,
        )
        try:
            self._occupy(context, length)
        except BaseException:
            self.close()
            raise

    def _occupy(self, context: int, length: int) -> None:
        """Gives every slot a request of ``length`` tokens, ``context`` of them its prompt."""
        session = self.session
        slots = []
        for index in range(self.shape.slots):
            request = Request(str(index), np.zeros(context, np.int32), length - context)
            booking = None
            if self.shape.sparse_layers:
                booking = session.full_pool.book(request.id, length)
            slots.append(Slot(request, booking, Result(request.id), start=context))
            slots[-1].selected = self.shape.candidates
        with ThreadPoolExecutor(1) as thread:
            # The host's memory fills while programs compile.
            filled = thread.submit(self._fill, [s.booking for s in slots if s.booking is not None])
            WarmUp(session).run([])
            session.cache.exact = random_cache(session.cache.exact)
            session.cache.pool = random_cache(session.cache.pool)
            filled.result()
        session.batch.slots[:] = slots

    def _fill(self, bookings: list[Booking]) -> None:
        """Random keys and values, other ones for every slot, layer and head, and their index."""
        if not bookings:
            return
        rng = np.random.default_rng(0)
        heads, _, rows, dim = bookings[0].extents[0].shape
        # Numbers of one long line, read from another place by everyone who needs some. Places and
        # planes begin at tiles of the index, so that the line's own tiles are everybody's.
        line = rng.standard_normal((LINE_ROWS, dim), np.float32).astype(self.shape.dtype)
        tiles, plane = LINE_ROWS // TILE, rows // TILE
        layers = range(self.shape.sparse_layers)
        starts = rng.integers(0, tiles, (len(bookings), len(layers)))
        index = None
        if (kind := self.shape.key_index) is not None:
            assert rows % TILE == 0, f"{rows} rows are no whole tiles of the index"
            index = np.zeros(host_kernels.index_shape(1, LINE_ROWS, dim, kind), np.uint8)
            begin, count = np.zeros(1, np.int32), np.full(1, LINE_ROWS, np.int32)
            host_kernels.index_rows([np.stack([line, line])[None]], [index], begin, count)

        def fill(at: tuple[int, int]) -> None:
            n, layer = at
            flat = bookings[n].extents[layer].reshape(-1, dim)
            start, done = int(starts[n, layer]) * TILE, 0
            while done < len(flat):
                part = line[start : start + len(flat) - done]
                flat[done : done + len(part)] = part
                start, done = 0, done + len(part)
            if index is not None:
                for head in range(heads):
                    first = int(starts[n, layer]) + 2 * head * plane
                    own = np.arange(first, first + plane) % tiles
                    np.take(index[0], own, axis=0, out=bookings[n].index[layer][head], mode="clip")

        with ThreadPoolExecutor(host_kernels.thread_count()) as threads:
            list(threads.map(fill, itertools.product(range(len(bookings)), layers)))

    def run(self, count: int) -> Blocks:
        """Runs blocks, every slot moving on by one each time."""
        timeline, session = self.timeline, self.session
        stall, retrieval = timeline.stall_seconds, timeline.retrieval_seconds
        steps, seconds = timeline.steps, []
        for _ in range(count):
            began = time.perf_counter()
            _, broken, failures = session.run_block()
            seconds.append(time.perf_counter() - began)
            if failures or broken.any():
                raise EngineError(next(iter(failures.values()), "the output is not finite numbers"))
            for _, slot in session.batch.active():
                slot.start += self.config.block_size
        block = self.config.block_size
        return Blocks(
            seconds,
            (timeline.steps - steps) / count,
            (timeline.stall_seconds - stall) / sum(seconds),
            (timeline.retrieval_seconds - retrieval) / count,
            self.shape.slots * block / statistics.median(seconds),
        )

    def stop_selecting(self) -> None:
        """Every later block attends the pool at hand: nothing is retrieved, copied or refined."""
        session = self.session
        if session.handover is not None:
            session.handover.abandon()
        session.handover = None
        session.current = None
        session.main.current = None
        # The last one that refines leaves the pool that the others attend.
        self.run(1)
        if self.shape.refines:
            session.cache.shape = replace(self.shape, candidates=self.shape.selected)
        for _, slot in session.batch.active():
            slot.selected = min(slot.selected, self.shape.selected)

    def close(self) -> None:
        """Frees everything, device buffers too."""
        if self.session.retrieval is not None:
            self.session.retrieval.close()
        self.session.close()
        self.session.cache.exact, self.session.cache.pool = [], []
        self.session.cache.candidates = []
