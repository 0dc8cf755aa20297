"""What both streams did and when: counters for the summary, spans for a picture."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Span:
    """Something a stream did, in seconds since the timeline began."""

    stream: str
    label: str
    begin: float
    end: float
    block: int


@dataclass
class Timeline:
    """Totals over a run, and spans while ``trace`` is set. Safe to use from several threads.

    Attributes:
      blocks, steps: lockstep blocks denoised and forward passes of the main stream.
      block_seconds: time in denoising, commit and boundary; ``stall_seconds``: of which the main
        stream waited for the retrieval stream (the block-boundary stall) or for whole layers.
      retrieval_seconds: time the retrieval stream took.
      warm_up_seconds: time in which programs were compiled before requests were admitted.
      rows_selected: rows of a position and KV head that were selected for coming blocks, over slots
        and sparse layers; ``rows_moved``: of which the device did not hold yet.
    """

    trace: bool = False
    blocks: int = 0
    steps: int = 0
    tokens: int = 0
    block_seconds: float = 0.0
    stall_seconds: float = 0.0
    retrieval_seconds: float = 0.0
    prefill_seconds: float = 0.0
    warm_up_seconds: float = 0.0
    rows_selected: int = 0
    rows_moved: int = 0
    spans: list[Span] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.began = time.perf_counter()
        self._lock = threading.Lock()

    @contextmanager
    def span(self, stream: str, label: str) -> Iterator[None]:
        """Records what the body does, if tracing."""
        if not self.trace:
            yield
            return
        begin, block = time.perf_counter() - self.began, self.blocks
        try:
            yield
        finally:
            end = time.perf_counter() - self.began
            with self._lock:
                self.spans.append(Span(stream, label, begin, end, block))

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """What the body does is neither counted nor recorded."""
        before = dict(vars(self))
        self.trace = False
        try:
            yield
        finally:
            vars(self).update(before)

    @contextmanager
    def stall(self, label: str) -> Iterator[None]:
        """A span of the main stream in which it waits, unless the body fails."""
        began = time.perf_counter()
        with self.span("main", label):
            yield
        self.stall_seconds += time.perf_counter() - began

    def count_rows(self, selected: int, moved: int) -> None:
        """Adds to ``rows_selected`` and ``rows_moved``."""
        with self._lock:
            self.rows_selected += selected
            self.rows_moved += moved

    @property
    def rows_moved_fraction(self) -> float | None:
        """Share of selected rows that were copied to the device; None where none was selected."""
        return self.rows_moved / self.rows_selected if self.rows_selected else None

    @property
    def stall_fraction(self) -> float:
        """Share of block time the main stream waited for retrieval."""
        return self.stall_seconds / self.block_seconds if self.block_seconds else 0.0
