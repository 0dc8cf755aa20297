"""A measurement paired with a read loop on the same threads, just before and just after it.

Machines are shared and clocks drift: what a kernel reaches is told as a share of what reading
reaches in the same moments.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

import host_kernels

#: What the best read loop is chosen from.
STREAMS, PREFETCH = (1, 2, 4), (0, 512, 1024, 2048, 4096)


class ReadLoop:
    """Reads parts of a buffer that were not read lately."""

    def __init__(self, data: NDArray[np.uint8], nbytes: int, threads: int) -> None:
        """``nbytes`` of ``data`` are read at a time."""
        self.data, self.threads = data, threads
        self.nbytes = max(256, min(nbytes, data.size // 2))
        self._at = data.size // 2
        tried = [(self._rate(s, p, 3), s, p) for s in STREAMS for p in PREFETCH]
        _, self.streams, self.prefetch = max(tried)

    def plain(self) -> float:
        """GB/s of one sequential stream a thread, without software prefetch."""
        return self._rate(1, 0)

    def best(self) -> float:
        """GB/s of the number of streams and the prefetch distance that read fastest here."""
        return self._rate(self.streams, self.prefetch)

    def _rate(self, streams: int, prefetch: int, repeats: int = 1) -> float:
        rates = []
        for _ in range(repeats):
            if self._at + self.nbytes > self.data.size:
                self._at = 0
            part = self.data[self._at : self._at + self.nbytes]
            self._at += self.nbytes
            rates.append(
                host_kernels.read_bandwidth(
                    part, threads=self.threads, repeats=1, streams=streams, prefetch=prefetch
                )
            )
        return statistics.median(rates)


@dataclass(frozen=True)
class Paired:
    """Medians over rounds.

    Attributes:
      seconds: of a sample; ``rate``: GB/s of it; ``read``, ``best``: GB/s of the read loops.
      fraction: of the plain read loop, and its 10th and 90th percentile, ``low`` and ``high``.
      undisturbed: rounds in which no thread of this process was made to give up its CPU.
    """

    seconds: float
    rate: float
    read: float
    best: float
    fraction: float
    low: float
    high: float
    undisturbed: int


def measure(run: Callable[[int], object], nbytes: int, read: ReadLoop, rounds: int) -> Paired:
    """Times ``run(round)``, which counts ``nbytes``, between two read loops; the first is warm-up.

    The best read loop takes its turn after the pair. Disturbed rounds are replaced, at most
    ``rounds`` of them; where most are disturbed all the same, all count.
    """
    run(0)
    quiet: list[tuple[float, ...]] = []
    every: list[tuple[float, ...]] = []
    while len(quiet) < rounds and len(every) < 2 * rounds:
        switches = _switches()
        before = read.plain()
        began = time.perf_counter()
        run(len(every) + 1)
        seconds = time.perf_counter() - began
        beside = (before + read.plain()) / 2
        disturbed = _switches() > switches
        every.append((seconds, beside, read.best(), nbytes / seconds / 1e9 / beside))
        if not disturbed:
            quiet.append(every[-1])
    kept = np.asarray(quiet if 2 * len(quiet) > rounds else every)
    seconds, beside, best, fraction = np.median(kept, axis=0).tolist()
    low, high = spread(kept[:, 3])
    return Paired(
        seconds, nbytes / seconds / 1e9, beside, best, fraction, low, high, undisturbed=len(quiet)
    )


def _switches() -> int:
    """How often threads of this process were made to give up their CPU."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def spread(values: Sequence[float] | NDArray[np.float64]) -> tuple[float, float]:
    """The 10th and the 90th percentile."""
    low, high = np.percentile(np.asarray(values), (10, 90))
    return float(low), float(high)
