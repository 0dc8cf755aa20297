"""Controls: selections that look at no query, to show what the others are worth."""

from __future__ import annotations

import abc

import numpy as np

from herald_jax.selection.job import SelectionJob
from herald_jax.selection.selector import MergedQueries, QueryOnceSelector


class ScoredControl(QueryOnceSelector):
    """A selection by scores that depend on positions and a seed only."""

    @abc.abstractmethod
    def scores(self, layer: int, kv_heads: int, rows: int, seed: int) -> np.ndarray:
        """float32 [kv_heads, rows]; the highest are selected, ties by the lower index."""

    def prefill_scores(
        self, layer: int, kv_heads: int, rows: int, select_len: int, seed: int
    ) -> np.ndarray | None:
        """The same scores choose for the first generated block."""
        scores = np.zeros((kv_heads, rows), np.float32)
        scores[:, :select_len] = self.scores(layer, kv_heads, select_len, seed)
        return scores

    def choose(self, layer: int, queries: MergedQueries | None, job: SelectionJob) -> None:
        """See ``QueryOnceSelector.choose``."""
        indices = job.indices[layer]
        indices[:] = -1
        for slot in np.flatnonzero(job.active):
            rows, count = int(job.select_len[slot]), int(job.candidates[slot])
            scores = self.scores(layer, indices.shape[1], rows, int(job.seeds[slot])).copy()
            scores[:, : min(job.sinks, count)] = np.inf
            order = np.argsort(-scores, axis=1, kind="stable")[:, :count]
            indices[slot, :, :count] = np.sort(order, axis=1)
