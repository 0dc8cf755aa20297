"""merged: one query merged from the current block, keys only."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np

from herald_jax.selection.job import SelectionJob
from herald_jax.selection.selector import MergedQueries, QueryOnceSelector


class Merged(QueryOnceSelector):
    """Mean of the masked positions' post-RoPE queries at step 0, rotated one block on.

    The scan reads the key index, or the keys where none is kept. With C / K above 1 the device
    keeps the best of the candidates, which also puts right what rounding misplaced.

    The variants and ``herald-merged`` differ from it in class attributes only.
    """

    name: ClassVar[str] = "merged"
    summary: ClassVar[str] = "current block's merged step-0 query, keys-only CPU scan"
    merge_step: ClassVar[Literal[0, 1] | None] = 0
    refines: ClassVar[bool] = True
    indexed: ClassVar[bool] = True

    def choose(self, layer: int, queries: MergedQueries | None, job: SelectionJob) -> None:
        """See ``QueryOnceSelector.choose``; every layer is independent of the others."""
        assert queries is not None, f"{self.name} needs the merged queries"
        status = job.scan_keys(layer, queries.q, job.select_len, queries.elsewhere)
        np.maximum(job.status, status, out=job.status)
