"""herald-merged: one query merged from the current block, keys only, refined on the device."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

import host_kernels
from herald_jax.selection.job import SelectionJob
from herald_jax.selection.selector import QueryOnceSelector


class HeraldMerged(QueryOnceSelector):
    """Mean of the masked positions' post-RoPE queries at step 0, rotated one block on."""

    name: ClassVar[str] = "herald-merged"
    summary: ClassVar[str] = "merged step-0 query, keys-only CPU scan, refinement on the device"
    needs_queries: ClassVar[bool] = True
    candidates_ratio: ClassVar[float] = 2.0

    def choose(self, layer: int, q: np.ndarray | None, job: SelectionJob) -> None:
        """See ``QueryOnceSelector.choose``; every layer is independent of the others."""
        assert q is not None, "herald-merged needs the merged queries"
        status = host_kernels.select(
            q,
            job.extents[layer],
            job.select_len,
            job.select_len,
            job.candidates,
            job.indices[layer],
            sinks=job.sinks,
        )
        np.maximum(job.status, status, out=job.status)
