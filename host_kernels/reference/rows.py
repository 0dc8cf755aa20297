"""Moving rows, in plain NumPy: the definition of right."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from host_kernels.arguments import check_candidates, check_changes, check_gather, check_store
from host_kernels.checks import Extents


def gather(
    kv: Extents,
    indices: NDArray[np.int32],
    counts: NDArray[np.int32],
    out_k: NDArray[Any],
    out_v: NDArray[Any],
    *,
    row_offset: int = 0,
    threads: int | None = None,
) -> None:
    """See ``host_kernels.gather``."""
    shape = check_gather(kv, indices, counts, out_k, out_v, row_offset)
    check_candidates(kv, indices, counts)
    for n, extent in enumerate(kv):
        for h in range(shape.heads):
            rows = indices[n, h, : counts[n]]
            target = slice(row_offset, row_offset + int(counts[n]))
            out_k[n, target, h] = extent[h, 0, rows]
            out_v[n, target, h] = extent[h, 1, rows]


def store(
    kv: Extents,
    start: NDArray[np.int32],
    counts: NDArray[np.int32],
    k: NDArray[Any],
    v: NDArray[Any],
    *,
    threads: int | None = None,
) -> None:
    """See ``host_kernels.store``."""
    check_store(kv, start, counts, k, v)
    for n, extent in enumerate(kv):
        target = slice(int(start[n]), int(start[n]) + int(counts[n]))
        extent[:, 0, target] = k[n, : counts[n]].swapaxes(0, 1)
        extent[:, 1, target] = v[n, : counts[n]].swapaxes(0, 1)


def gather_changes(
    kv: Extents,
    indices: NDArray[np.int32],
    counts: NDArray[np.int32],
    previous: NDArray[np.int32],
    previous_counts: NDArray[np.int32],
    source: NDArray[np.int32],
    out_k: NDArray[Any],
    out_v: NDArray[Any],
    *,
    threads: int | None = None,
) -> int:
    """See ``host_kernels.gather_changes``."""
    shape = check_changes(kv, indices, counts, previous, previous_counts, source, out_k, out_v)
    check_candidates(kv, indices, counts)
    source[:] = 0
    missing = 0
    for n, extent in enumerate(kv):
        for h in range(shape.heads):
            held = {int(row): j for j, row in enumerate(previous[n, h, : previous_counts[n]])}
            for j, row in enumerate(indices[n, h, : counts[n]]):
                if (place := held.get(int(row))) is not None:
                    source[n, h, j] = place
                    continue
                source[n, h, j] = -1 - missing
                if missing < len(out_k):
                    out_k[missing], out_v[missing] = extent[h, 0, row], extent[h, 1, row]
                missing += 1
    return missing
