"""Top-k of scores in cache: the histogram of the kernels against a binary heap, in one run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

import host_kernels
from benchmarks.paired import spread
from host_kernels import _native

Select = Callable[[NDArray[np.float32], int], NDArray[np.int32]]

#: Calls timed together.
CALLS = 10


def orders(count: int, seed: int) -> dict[str, NDArray[np.float32]]:
    """Scores as they come: anyhow, growing with position (recency), and many of them equal."""
    rng = np.random.default_rng(seed)
    noise = rng.exponential(size=count)
    return {
        "random": noise.astype(np.float32),
        "growing": (np.arange(count) / count + 0.1 * noise).astype(np.float32),
        "ties": rng.integers(1, 9, count).astype(np.float32),
    }


def rows(scores: int, counts: list[int], rounds: int, seed: int) -> list[dict[str, Any]]:
    """A row for each of the two, order of scores and number of selected ones.

    They take turns; both must select the same. The read loop runs over the scores in cache.
    """
    made = []
    for order, values in orders(scores, seed).items():
        data = values.view(np.uint8)
        for count in counts:
            if not np.array_equal(
                host_kernels.top_k(values, count), np.sort(_native.heap_top_k(values, count))
            ):
                raise SystemExit(f"the histogram and the heap select differently: {order}, {count}")
            times: dict[str, list[float]] = {"top_k": [], "heap": []}
            reads = []
            for _ in range(rounds):
                times["top_k"].append(_seconds(host_kernels.top_k, values, count))
                times["heap"].append(_seconds(_native.heap_top_k, values, count))
                reads.append(host_kernels.read_bandwidth(data, threads=1, repeats=CALLS))
            read = statistics.median(reads)
            for kernel, seconds in times.items():
                ratios = [heap / own for heap, own in zip(times["heap"], seconds, strict=True)]
                low, high = spread(ratios)
                middle = statistics.median(seconds)
                made.append(
                    {
                        "kernel": kernel,
                        "isa": host_kernels.cpu_info()["isa"],
                        "threads": 1,
                        "context": scores,
                        "head_dim": None,
                        "group": None,
                        "topk_fraction": round(count / scores, 4),
                        "seconds": middle,
                        "gb_per_s": round(4 * scores / middle / 1e9, 3),
                        "read_gb_per_s": round(read, 3),
                        "fraction_of_read": 4 * scores / middle / 1e9 / read,
                        "keys_per_second": scores / middle,
                        "axis": "order",
                        "order": order,
                        "selected": count,
                        "over_heap": statistics.median(ratios),
                        "low": low,
                        "high": high,
                    }
                )
    return made


def _seconds(select: Select, values: NDArray[np.float32], count: int) -> float:
    began = time.perf_counter()
    for _ in range(CALLS):
        select(values, count)
    return (time.perf_counter() - began) / CALLS
