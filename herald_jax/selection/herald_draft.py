"""herald-draft: the paper's selector (v2), one representative query over prefix and draft."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

import host_kernels
from herald_jax.selection.job import SelectionJob
from herald_jax.selection.selector import LayerSerialSelector


class HeraldDraft(LayerSerialSelector):
    """Exact attention of the next block's centre [MASK] query fused with top-k (paper IV-B4)."""

    name: ClassVar[str] = "herald-draft"
    summary: ClassVar[str] = "paper v2: draft lookahead, centre [MASK] query, fused CPU scan"
    attends_draft: ClassVar[bool] = True

    def attend(
        self,
        layer: int,
        q: np.ndarray,
        self_k: np.ndarray,
        self_v: np.ndarray,
        job: SelectionJob,
    ) -> np.ndarray:
        """See ``LayerSerialSelector.attend``; the draft enters the softmax, never the top-k."""
        out, status = host_kernels.attend_select(
            q,
            job.extents[layer],
            job.attend_len,
            job.select_len,
            job.candidates,
            job.indices[layer],
            sinks=job.sinks,
            self_k=self_k,
            self_v=self_v,
        )
        np.maximum(job.status, status, out=job.status)
        return out
