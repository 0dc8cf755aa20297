"""The body of the host callback. It must never touch JAX: see docs/architecture.md.

A callback that raises would end the whole batch, so every failure is recorded in the job and the
answer is zeros; the engine then retires the slots concerned.
"""

from __future__ import annotations

import itertools

import numpy as np

from herald_jax.selection.job import SelectionJob
from herald_jax.selection.selector import LayerSerialSelector

_NUMBERS = itertools.count()
_LIVE: dict[int, SelectionCallback] = {}


def dispatch(
    number: object, stream: object, layer: object, q: object, self_k: object, self_v: object
) -> np.ndarray:
    """What programs call: finds the callback by its number.

    A program that named a callback itself would keep it, its buffers and its full pool alive, and
    would have to be compiled for each engine.
    """
    callback = _LIVE.get(int(np.asarray(number)))
    if callback is None:
        return np.zeros_like(np.asarray(q))
    return callback(stream, layer, q, self_k, self_v)


class SelectionCallback:
    """Finds the job of a stream and lets the selector attend one layer of it.

    Each retrieval worker owns one stream number; its job is set before its programs are launched
    and stays until they are done, so a repeated call sees the same job.
    """

    def __init__(self, selector: LayerSerialSelector, streams: int) -> None:
        self.selector = selector
        self.jobs: list[SelectionJob | None] = [None] * streams
        self.number = next(_NUMBERS)
        _LIVE[self.number] = self

    def close(self) -> None:
        """Forgets the jobs, and with them the memory they look at."""
        _LIVE.pop(self.number, None)
        self.jobs = []

    def __call__(
        self, stream: object, layer: object, q: object, self_k: object, self_v: object
    ) -> np.ndarray:
        """Arrays as JAX hands them over (converted here) -> float32 [N, H_q, D]."""
        queries = np.ascontiguousarray(np.asarray(q), np.float32)
        job = self.jobs[int(np.asarray(stream))]
        try:
            if job is None:
                raise RuntimeError("a callback arrived for a stream without a job")
            index = int(np.asarray(layer))
            if not job.active.any():
                job.selected[index].set()
                return np.zeros_like(queries)
            keys = np.ascontiguousarray(np.asarray(self_k), np.float32)
            values = np.ascontiguousarray(np.asarray(self_v), np.float32)
            out = self.selector.attend(index, queries, keys, values, job)
            job.selected[index].set()
            return np.ascontiguousarray(out, np.float32)
        except BaseException as error:
            if job is not None:
                job.error = error
                for event in job.selected:
                    event.set()
            return np.zeros_like(queries)
