"""herald-draft-indexed: herald-draft's query over an index of the keys, and over chosen rows."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

import host_kernels
from herald_jax.selection.herald_draft import HeraldDraft
from herald_jax.selection.job import SelectionJob


class HeraldDraftIndexed(HeraldDraft):
    """The scan reads rounded keys alone; keys and values are read of what it chose.

    The representative then attends the K chosen rows, the draft and itself, as the next block's
    positions will. Where no index is kept, the keys are scanned.
    """

    name: ClassVar[str] = "herald-draft-indexed"
    summary: ClassVar[str] = "herald-draft by its key index: keys-only scan, attends what it chose"
    indexed: ClassVar[bool] = True

    def attend(
        self,
        layer: int,
        q: np.ndarray,
        self_k: np.ndarray,
        self_v: np.ndarray,
        job: SelectionJob,
    ) -> np.ndarray:
        """See ``LayerSerialSelector.attend``; attention is that over the rows chosen here."""
        # The representative's own key takes its share of the softmax, as if it stood outside.
        group, dim = q.shape[1] // self_k.shape[1], q.shape[2]
        own = np.einsum("nhd,nhd->nh", q, np.repeat(self_k, group, axis=1)) * dim**-0.5
        status = job.scan_keys(layer, q, job.attend_len, own.astype(np.float32))
        out, bad = host_kernels.attend_rows(
            q,
            job.extents[layer],
            job.indices[layer],
            np.where(status == 0, job.candidates, 0).astype(np.int32),
            job.select_len,
            job.attend_len,
            self_k=self_k,
            self_v=self_v,
        )
        np.maximum(job.status, np.maximum(status, bad), out=job.status)
        return out
