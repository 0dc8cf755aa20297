"""herald-merged: one query merged from the current block, keys only, refined on the device."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np

from herald_jax.selection.job import SelectionJob
from herald_jax.selection.selector import MergedQueries, QueryOnceSelector


class HeraldMerged(QueryOnceSelector):
    """Mean of the masked positions' post-RoPE queries at step 0, rotated one block on.

    The scan reads the key index, or the keys where none is kept: what rounding misplaces among C
    candidates, the refinement puts right.

    The variants differ from it in class attributes only.
    """

    name: ClassVar[str] = "herald-merged"
    summary: ClassVar[str] = "merged step-0 query, keys-only CPU scan, refinement on the device"
    merge_step: ClassVar[Literal[0, 1] | None] = 0
    refines: ClassVar[bool] = True
    indexed: ClassVar[bool] = True
    own_ratio: ClassVar[float] = 2.0

    def choose(self, layer: int, queries: MergedQueries | None, job: SelectionJob) -> None:
        """See ``QueryOnceSelector.choose``; every layer is independent of the others."""
        assert queries is not None, f"{self.name} needs the merged queries"
        status = job.scan_keys(layer, queries.q, job.select_len, queries.elsewhere)
        np.maximum(job.status, status, out=job.status)
