"""The kernels in plain NumPy and float64: the definition of right.

Same names, arguments and checks as ``host_kernels``; ``threads`` is accepted and ignored.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from host_kernels.checks import (
    Extents,
    check_array,
    check_attend,
    check_gather,
    check_self,
    check_store,
)

IMPORTANCE_FLOOR = 2.0**-100
"""A query head's share below this counts as zero importance."""


def scores(q: NDArray[np.float32], keys: NDArray[Any], scale: float) -> NDArray[np.float64]:
    """Scaled dot products ``[H_q, rows]`` of ``q [H_q, D]`` with ``keys [H_kv, rows, D]``.

    Summed row by row, so that equal keys get equal scores wherever they stand.
    """
    heads, rows, dim = keys.shape
    grouped = q.astype(np.float64).reshape(heads, -1, 1, dim)
    products = grouped * keys.astype(np.float64)[:, None]
    result: NDArray[np.float64] = products.sum(axis=-1).reshape(q.shape[0], rows) * scale
    return result


def importance(
    q: NDArray[np.float32],
    extent: NDArray[Any],
    attend_len: int,
    *,
    self_k: NDArray[np.float32] | None = None,
    elsewhere: NDArray[np.float32] | None = None,
    scale: float | None = None,
) -> NDArray[np.float64]:
    """Softmax mass ``[H_kv, attend_len]`` of each row, summed over the query heads of a KV head.

    HERALD v2, section IV-B4.

    Args:
        q: ``[H_q, D]`` of one slot.
        extent: ``[H_kv, rows, 2, D]``.
        attend_len: rows attended.
        self_k: ``[H_kv, D]``, takes part in the normaliser.
        elsewhere: ``[H_q]``, log of the sum of exp(score) over further keys in the normaliser.
        scale: softmax scale, 1/sqrt(D) by default.
    """
    weights = _softmax(q, extent, attend_len, self_k, scale, elsewhere)[:, :attend_len]
    weights = np.where(weights < IMPORTANCE_FLOOR, 0, weights)
    heads = extent.shape[0]
    grouped = weights.reshape(heads, q.shape[0] // heads, attend_len)
    mass: NDArray[np.float64] = grouped.sum(axis=1)
    return mass


def _softmax(
    q: NDArray[np.float32],
    extent: NDArray[Any],
    attend_len: int,
    self_k: NDArray[np.float32] | None,
    scale: float | None,
    elsewhere: NDArray[np.float32] | None = None,
) -> NDArray[np.float64]:
    """Probabilities ``[H_q, attend_len (+ 1)]``; NaN where a score does not fit float32."""
    keys = extent[:, :attend_len, 0]
    if self_k is not None:
        keys = np.concatenate([keys.astype(np.float64), self_k[:, None]], axis=1)
    with np.errstate(over="ignore", invalid="ignore"):
        s = scores(q, keys, q.shape[-1] ** -0.5 if scale is None else scale)
        if not np.isfinite((s * np.log2(np.e)).astype(np.float32)).all():
            return np.full(s.shape, np.nan)
        # In base 2 and fp32, as the scores above.
        outside = np.float32(-np.inf) if elsewhere is None else elsewhere
        if not np.all(outside * np.float32(np.log2(np.e)) < np.inf):
            return np.full(s.shape, np.nan)
    if not s.shape[1]:
        return s
    outside = np.broadcast_to(np.asarray(outside, np.float64), len(s))
    most = np.maximum(s.max(axis=1), outside)
    weights: NDArray[np.float64] = np.exp(s - most[:, None])
    weights /= (weights.sum(axis=1) + np.exp(outside - most))[:, None]
    return weights


def top_rows(values: NDArray[np.float64], budget: int, sinks: int) -> NDArray[np.int32]:
    """The ``budget`` largest of ``values [rows]``, ascending; sinks first, ties by lower row."""
    ranked = values.copy()
    ranked[: min(sinks, budget)] = np.inf
    return np.sort(np.argsort(-ranked, kind="stable")[:budget]).astype(np.int32)


def recent_rows(select_len: int, budget: int, sinks: int) -> NDArray[np.int32]:
    """What a slot that met a non-finite number selects: the sinks and the most recent rows."""
    first = min(sinks, budget)
    recent = np.arange(select_len - (budget - first), select_len)
    return np.concatenate([np.arange(first), recent]).astype(np.int32)


def attend_select(
    q: NDArray[np.float32],
    kv: Extents,
    attend_len: NDArray[np.int32],
    select_len: NDArray[np.int32],
    budget: NDArray[np.int32],
    indices: NDArray[np.int32],
    *,
    sinks: int = 4,
    self_k: NDArray[np.float32] | None = None,
    self_v: NDArray[np.float32] | None = None,
    scale: float | None = None,
    threads: int | None = None,
) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """See ``host_kernels.attend_select``."""
    shape = check_attend(q, kv, attend_len, select_len, budget, indices, sinks, scale)
    check_self(self_k, self_v, shape)
    out = np.zeros_like(q)
    status = np.zeros(shape.slots, np.int32)
    for n, extent in enumerate(kv):
        length = int(attend_len[n])
        own_k = None if self_k is None else self_k[n]
        weights = _softmax(q[n], extent, length, own_k, scale)
        values = extent[:, :length, 1].astype(np.float64)
        if self_v is not None:
            values = np.concatenate([values, self_v[n][:, None]], axis=1)
        with np.errstate(over="ignore", invalid="ignore"):
            group = q.shape[1] // shape.heads
            grouped = weights.reshape(shape.heads, group, weights.shape[1])
            result = (grouped @ values).astype(np.float32).reshape(q.shape[1:])
        status[n] = 0 if np.isfinite(result).all() else 1
        if status[n] == 0:
            out[n] = result
    _select(q, kv, attend_len, select_len, budget, indices, sinks, self_k, scale, status)
    return out, status


def select(
    q: NDArray[np.float32],
    kv: Extents,
    attend_len: NDArray[np.int32],
    select_len: NDArray[np.int32],
    budget: NDArray[np.int32],
    indices: NDArray[np.int32],
    *,
    sinks: int = 4,
    elsewhere: NDArray[np.float32] | None = None,
    scale: float | None = None,
    threads: int | None = None,
) -> NDArray[np.int32]:
    """See ``host_kernels.select``."""
    shape = check_attend(q, kv, attend_len, select_len, budget, indices, sinks, scale)
    if elsewhere is not None:
        check_array("elsewhere", elsewhere, np.dtype(np.float32), q.shape[:2])
    status = np.zeros(shape.slots, np.int32)
    for n, extent in enumerate(kv):
        outside = None if elsewhere is None else elsewhere[n]
        weights = _softmax(q[n], extent, int(attend_len[n]), None, scale, outside)
        status[n] = 0 if np.isfinite(weights).all() else 1
    _select(q, kv, attend_len, select_len, budget, indices, sinks, None, scale, status, elsewhere)
    return status


def _select(
    q: NDArray[np.float32],
    kv: Extents,
    attend_len: NDArray[np.int32],
    select_len: NDArray[np.int32],
    budget: NDArray[np.int32],
    indices: NDArray[np.int32],
    sinks: int,
    self_k: NDArray[np.float32] | None,
    scale: float | None,
    status: NDArray[np.int32],
    elsewhere: NDArray[np.float32] | None = None,
) -> None:
    indices[:] = -1
    for n, extent in enumerate(kv):
        wanted, limit = int(budget[n]), int(select_len[n])
        if status[n]:
            indices[n, :, :wanted] = recent_rows(limit, wanted, sinks)
            continue
        own = None if self_k is None else self_k[n]
        outside = None if elsewhere is None else elsewhere[n]
        length = int(attend_len[n])
        mass = importance(q[n], extent, length, self_k=own, elsewhere=outside, scale=scale)
        for h, values in enumerate(mass):
            indices[n, h, :wanted] = top_rows(values[:limit], wanted, sinks)


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
    for n, extent in enumerate(kv):
        used = indices[n, :, : counts[n]]
        if used.size and (np.min(used) < 0 or np.max(used) >= extent.shape[1]):
            raise ValueError(f"indices[{n}] leaves the {extent.shape[1]} rows of kv[{n}]")
    for n, extent in enumerate(kv):
        for h in range(shape.heads):
            rows = indices[n, h, : counts[n]]
            target = slice(row_offset, row_offset + int(counts[n]))
            out_k[n, target, h] = extent[h, rows, 0]
            out_v[n, target, h] = extent[h, rows, 1]


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
        extent[:, target, 0] = k[n, : counts[n]].swapaxes(0, 1)
        extent[:, target, 1] = v[n, : counts[n]].swapaxes(0, 1)
