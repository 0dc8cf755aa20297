"""What the two streams hand each other: rows for the host, the next pool for the device."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import jax

from herald_jax.diffusion.draft import mask_places
from herald_jax.engine.batch import Batch
from herald_jax.engine.block_rows import BlockRows
from herald_jax.engine.lookahead import Lookahead
from herald_jax.engine.retrieval_stream import RetrievalStream
from herald_jax.engine.step_programs import Queries
from herald_jax.engine.timeline import Timeline
from herald_jax.kv.device_cache import DeviceCache
from herald_jax.selection import LayerSerialSelector, QueryOnceSelector, SelectionJob


class Handover:
    """Begins a block's retrieval in the middle of denoising and ends it at the block boundary."""

    def __init__(
        self, batch: Batch, cache: DeviceCache, retrieval: RetrievalStream, timeline: Timeline
    ) -> None:
        self.batch, self.cache, self.retrieval = batch, cache, retrieval
        self.timeline = timeline
        self._committed: BlockRows | None = None

    def lookahead(self, *, idle: bool = False) -> Lookahead | None:
        """What the selector wants of the block to come; None where no slot has a next block.

        With ``idle`` it wants as much of a batch without requests, and selects nothing.
        """
        selector, shape = self.retrieval.selector, self.batch.shape
        if not idle and not self.batch.continues():
            return None
        job: SelectionJob
        places = mask_places(shape.block_size, shape.masks)

        def prepare() -> None:
            nonlocal job
            job = self.batch.job(selector.candidates_ratio, selector.attends_draft)
            if self._committed is not None:
                # Now, so that it is done when the queries come.
                self.retrieval.store(self._committed)
                self._committed = None

        def begin(
            representative: jax.Array | None,
            drafts: list[jax.Array] | None,
            queries: Sequence[Future[Queries]] | None,
        ) -> None:
            rows = []
            if drafts is not None and selector.attends_draft:
                taking = [
                    booking if job.active[n] else None
                    for n, booking in enumerate(self.batch.bookings())
                ]
                rows.append(BlockRows(taking, job.start, drafts))
            self.retrieval.begin(job, rows, representative=representative, queries=queries)

        if isinstance(selector, LayerSerialSelector):
            return Lookahead(places, True, selector.attends_draft, None, prepare, begin)
        assert isinstance(selector, QueryOnceSelector)
        if not selector.drafted:
            places = ()
        return Lookahead(places, False, selector.drafted, selector.merge_step, prepare, begin)

    def boundary(self) -> dict[int, str]:
        """Joins the retrieval and swaps pools; the wait is the block-boundary stall.

        Returns:
          per slot, why its next block cannot be decoded.

        Raises:
          WaitTimeout: the retrieval stream did not end in time.
          EngineError: it could not fetch the next pool.
        """
        if not self.retrieval.busy:
            self.retrieval.settle()
            self._committed = None
            self.cache.reset_pool()
            self.retrieval.transfer.forget()
            return {}
        with self.timeline.stall("stall"):
            done = self.retrieval.join()
        with self.timeline.span("main", "swap"):
            committed = self.retrieval.swap(self.cache, done)
        self._committed = BlockRows(self.batch.bookings(), done.job.start, [committed])
        for n, slot in self.batch.active():
            slot.selected = int(done.job.candidates[n])
        return done.failures

    def placed(self, index: int) -> None:
        """Says that a slot's pool was filled by other means than a retrieval."""
        self.retrieval.transfer.forget(index)

    def abandon(self) -> None:
        """Waits until no retrieval reads the bookings any more, and forgets it."""
        self.retrieval.settle()
        self.batch.forget_indices()
        self._committed = None

    def clear(self, index: int) -> None:
        """Forgets rows of a slot that may not be finite numbers; no retrieval may be running."""
        self.retrieval.transfer.clear(index)

    def close(self) -> None:
        """Ends the retrieval's threads and gives its memory back."""
        self.retrieval.close()
