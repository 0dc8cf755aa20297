"""Gathering only what the device does not hold already."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from host_kernels import _native
from host_kernels.arguments import check_changes
from host_kernels.checks import Extents
from host_kernels.cpu import apply_environment
from host_kernels.kernels import raw
from host_kernels.threads import resolve_threads


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
    """Gathers the rows that a new selection has and the previous one lacked.

    ``source[n, h, j]`` tells where row ``indices[n, h, j]`` comes from: the place p >= 0 with
    ``previous[n, h, p] == indices[n, h, j]``, or -1 - f for row f of ``out_k`` and ``out_v``. New
    rows are numbered slot by slot, head by head, ascending; entries beyond ``counts`` are 0.

    Args:
        kv: N extents ``[H_kv, 2, rows, D]``.
        indices: int32 ``[N, H_kv, C_cap]``, ascending; ``counts``: int32 ``[N]``, at most C_cap.
        previous: int32 ``[N, H_kv, P_cap]``, ascending; ``previous_counts``: int32 ``[N]``.
        source: int32 of the shape of ``indices``, written.
        out_k, out_v: ``[F, D]`` of the extents' dtype, written from row 0.
        threads: threads to use.

    Returns:
        How many rows are new. If it exceeds F, the rows beyond F were not copied.

    Raises:
        TypeError, ValueError: an argument does not fit, or an index lies outside its extent.
    """
    shape = check_changes(kv, indices, counts, previous, previous_counts, source, out_k, out_v)
    if not shape.slots:
        return 0
    apply_environment()
    return _native.gather_changes(
        [raw(extent) for extent in kv],
        indices,
        counts,
        previous,
        previous_counts,
        source,
        raw(out_k),
        raw(out_v),
        resolve_threads(threads),
    )
