"""Attention and selection in plain NumPy and float64: the definition of right."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from host_kernels.arguments import (
    check_attend,
    check_attend_rows,
    check_candidates,
    check_elsewhere,
    check_rerank,
    check_self,
    check_top_k,
)
from host_kernels.checks import Extents

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
        extent: ``[H_kv, 2, rows, D]``.
        attend_len: rows attended.
        self_k: ``[H_kv, D]``, takes part in the normaliser.
        elsewhere: ``[H_q]``, log of the sum of exp(score) over further keys in the normaliser.
        scale: softmax scale, 1/sqrt(D) by default.
    """
    weights = _softmax(q, extent, attend_len, self_k, scale, elsewhere)[:, :attend_len]
    return mass_of(weights, extent.shape[0])


def mass_of(weights: NDArray[np.float64], heads: int) -> NDArray[np.float64]:
    """Probabilities ``[H_q, rows]`` summed over the query heads of each KV head."""
    weights = np.where(weights < IMPORTANCE_FLOOR, 0, weights)
    mass: NDArray[np.float64] = weights.reshape(heads, len(weights) // heads, weights.shape[1]).sum(
        axis=1
    )
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
    keys = extent[:, 0, :attend_len]
    if self_k is not None:
        keys = np.concatenate([keys.astype(np.float64), self_k[:, None]], axis=1)
    with np.errstate(over="ignore", invalid="ignore"):
        s = scores(q, keys, q.shape[-1] ** -0.5 if scale is None else scale)
    return softmax_of(s, elsewhere)[0]


def softmax_of(
    s: NDArray[np.float64], elsewhere: NDArray[np.float32] | None = None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Probabilities of scores ``[H_q, rows]`` and the log ``[H_q]`` of what they were divided by.

    NaN, all of them, where a score or ``elsewhere`` does not fit float32.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        # In base 2 and fp32, as the kernels have them.
        outside = np.float32(-np.inf) if elsewhere is None else elsewhere
        fits = np.isfinite((s * np.log2(np.e)).astype(np.float32)).all()
        if not fits or not np.all(outside * np.float32(np.log2(np.e)) < np.inf):
            return np.full(s.shape, np.nan), np.full(len(s), np.nan)
    outside = np.broadcast_to(np.asarray(outside, np.float64), len(s))
    most = np.maximum(s.max(axis=1, initial=-np.inf), outside)
    # Nothing at all is attended where even the most is -inf.
    most = np.where(most == -np.inf, 0, most)
    weights: NDArray[np.float64] = np.exp(s - most[:, None])
    total = weights.sum(axis=1) + np.exp(outside - most)
    with np.errstate(divide="ignore"):
        return weights / np.where(total > 0, total, 1)[:, None], most + np.log(total)


def top_rows(
    values: NDArray[np.float64], budget: int, sinks: int, recent: int = 0
) -> NDArray[np.int32]:
    """The ``budget`` largest of ``values [rows]``, ascending; ties by lower row.

    The first ``sinks`` rows come before all others, then the last ``recent`` ones, the most recent
    first.
    """
    ranked = values.copy()
    first = min(sinks, budget)
    last = max(min(recent, budget - first, len(values) - first), 0)
    ranked[len(values) - last :] = np.inf
    ranked[:first] = np.inf
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
    recent: int = 0,
    self_k: NDArray[np.float32] | None = None,
    self_v: NDArray[np.float32] | None = None,
    scale: float | None = None,
    threads: int | None = None,
) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """See ``host_kernels.attend_select``."""
    shape = check_attend(q, kv, attend_len, select_len, budget, indices, sinks, recent, scale)
    check_self(self_k, self_v, shape)
    out = np.zeros_like(q)
    status = np.zeros(shape.slots, np.int32)
    for n, extent in enumerate(kv):
        length = int(attend_len[n])
        own_k = None if self_k is None else self_k[n]
        weights = _softmax(q[n], extent, length, own_k, scale)
        values = extent[:, 1, :length].astype(np.float64)
        if self_v is not None:
            values = np.concatenate([values, self_v[n][:, None]], axis=1)
        with np.errstate(over="ignore", invalid="ignore"):
            group = q.shape[1] // shape.heads
            grouped = weights.reshape(shape.heads, group, weights.shape[1])
            result = (grouped @ values).astype(np.float32).reshape(q.shape[1:])
        status[n] = 0 if np.isfinite(result).all() else 1
        if status[n] == 0:
            out[n] = result
    _select(q, kv, attend_len, select_len, budget, indices, sinks, recent, self_k, scale, status)
    return out, status


def attend_rows(
    q: NDArray[np.float32],
    kv: Extents,
    indices: NDArray[np.int32],
    counts: NDArray[np.int32],
    select_len: NDArray[np.int32],
    attend_len: NDArray[np.int32],
    *,
    self_k: NDArray[np.float32] | None = None,
    self_v: NDArray[np.float32] | None = None,
    scale: float | None = None,
    threads: int | None = None,
) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """See ``host_kernels.attend_rows``: one head at a time, its rows side by side."""
    shape = check_attend_rows(q, kv, indices, counts, select_len, attend_len, scale)
    check_self(self_k, self_v, shape)
    check_candidates(kv, indices, counts)
    out, status = np.zeros_like(q), np.zeros(shape.slots, np.int32)
    nothing = np.zeros((1, 1, 0), np.int32)
    for n, extent in enumerate(kv):
        tail = np.arange(select_len[n], attend_len[n])
        for h, group in enumerate(np.split(np.arange(q.shape[1]), shape.heads)):
            rows = np.concatenate([indices[n, h, : counts[n]], tail])
            own_k, own_v = (
                part if part is None else np.ascontiguousarray(part[n : n + 1, h : h + 1])
                for part in (self_k, self_v)
            )
            beside = [np.ascontiguousarray(extent[h : h + 1, :, rows])]
            every, none = np.array([len(rows)], np.int32), np.zeros(1, np.int32)
            result, bad = attend_select(
                np.ascontiguousarray(q[n : n + 1, group]), beside, every, none, none, nothing,
                self_k=own_k, self_v=own_v, scale=scale,
            )  # fmt: skip
            out[n, group] = result[0]
            status[n] |= bad[0]
        if status[n]:
            out[n] = 0
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
    recent: int = 0,
    elsewhere: NDArray[np.float32] | None = None,
    scale: float | None = None,
    threads: int | None = None,
) -> NDArray[np.int32]:
    """See ``host_kernels.select``."""
    shape = check_attend(q, kv, attend_len, select_len, budget, indices, sinks, recent, scale)
    check_elsewhere(elsewhere, q)
    status = np.zeros(shape.slots, np.int32)
    for n, extent in enumerate(kv):
        outside = None if elsewhere is None else elsewhere[n]
        weights = _softmax(q[n], extent, int(attend_len[n]), None, scale, outside)
        status[n] = 0 if np.isfinite(weights).all() else 1
    _select(
        q,
        kv,
        attend_len,
        select_len,
        budget,
        indices,
        sinks,
        recent,
        None,
        scale,
        status,
        elsewhere,
    )
    return status


def _select(
    q: NDArray[np.float32],
    kv: Extents,
    attend_len: NDArray[np.int32],
    select_len: NDArray[np.int32],
    budget: NDArray[np.int32],
    indices: NDArray[np.int32],
    sinks: int,
    recent: int,
    self_k: NDArray[np.float32] | None,
    scale: float | None,
    status: NDArray[np.int32],
    elsewhere: NDArray[np.float32] | None = None,
) -> None:
    indices[:] = -1
    for n, extent in enumerate(kv):
        bad = bool(status[n])
        own = None if self_k is None else self_k[n]
        outside = None if elsewhere is None else elsewhere[n]
        length = int(attend_len[n])
        mass = np.zeros((len(extent), length))
        if not bad:
            mass = importance(q[n], extent, length, self_k=own, elsewhere=outside, scale=scale)
        pick(mass, int(select_len[n]), int(budget[n]), sinks, recent, bad, indices[n])


def pick(
    mass: NDArray[np.float64],
    select_len: int,
    budget: int,
    sinks: int,
    recent: int,
    bad: bool,
    indices: NDArray[np.int32],
) -> None:
    """Writes the rows of one slot: the best by ``mass [H_kv, rows]``, or the newest if ``bad``."""
    for h, values in enumerate(mass):
        if bad:
            indices[h, :budget] = recent_rows(select_len, budget, sinks)
        else:
            indices[h, :budget] = top_rows(values[:select_len], budget, sinks, recent)


def rerank(
    q: NDArray[np.float32],
    kv: Extents,
    candidates: NDArray[np.int32],
    counts: NDArray[np.int32],
    budget: NDArray[np.int32],
    indices: NDArray[np.int32],
    *,
    sinks: int = 4,
    recent: int = 0,
    elsewhere: NDArray[np.float32] | None = None,
    scale: float | None = None,
    threads: int | None = None,
) -> NDArray[np.int32]:
    """See ``host_kernels.rerank``."""
    shape = check_rerank(q, kv, candidates, counts, budget, indices, sinks, recent, scale)
    check_elsewhere(elsewhere, q)
    check_candidates(kv, candidates, counts, "candidates")
    status = np.zeros(shape.slots, np.int32)
    indices[:] = -1
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    for n, extent in enumerate(kv):
        count, wanted = int(counts[n]), int(budget[n])
        chosen = np.stack([extent[h, 0, candidates[n, h, :count]] for h in range(shape.heads)])
        with np.errstate(over="ignore", invalid="ignore"):
            s = scores(q[n], chosen, factor)
        weights = softmax_of(s, None if elsewhere is None else elsewhere[n])[0]
        status[n] = 0 if np.isfinite(weights).all() else 1
        mass = mass_of(weights, shape.heads)
        places = np.full((shape.heads, wanted), -1, np.int32)
        pick(mass, count, wanted, sinks, recent, bool(status[n]), places)
        for h in range(shape.heads):
            indices[n, h, :wanted] = candidates[n, h, places[h]]
    return status


def top_k(values: NDArray[np.float32], count: int) -> NDArray[np.int32]:
    """See ``host_kernels.top_k``."""
    check_top_k(values, count)
    return top_rows(values.astype(np.float64), count, 0)
