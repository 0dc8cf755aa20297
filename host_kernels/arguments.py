"""What each kernel asks of its arguments, native and reference alike.

Every refusal names the argument and says what it must be.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from host_kernels.checks import (
    TILE,
    Extents,
    Indexes,
    RowShape,
    check_array,
    check_between,
    check_extents,
    check_index,
    check_rows_of,
    check_scale,
    check_slots,
    whole,
)


def check_attend(
    q: object,
    kv: Extents,
    attend_len: object,
    select_len: object,
    budget: object,
    indices: object,
    sinks: int,
    recent: int,
    scale: float | None,
) -> RowShape:
    """Checks what ``attend_select`` and ``select`` have in common."""
    shape = check_extents(kv, _query_dim(q))
    check_query(q, shape)
    rows = np.array([extent.shape[2] for extent in kv], np.int64)
    _check_lengths(shape, attend_len, select_len, budget, indices, rows)
    check_forced(sinks, recent)
    check_scale(scale)
    return shape


def _query_dim(q: object) -> int:
    if not isinstance(q, np.ndarray) or q.ndim != 3:
        raise TypeError("q must be a NumPy array of shape [N, H_q, D]")
    return int(q.shape[2])


def check_query(q: object, shape: RowShape) -> None:
    """Refuses queries that do not fit the slots and the KV heads."""
    assert isinstance(q, np.ndarray)
    check_array("q", q, np.dtype(np.float32), (shape.slots, *q.shape[1:]))
    if shape.slots and (q.shape[1] == 0 or q.shape[1] % shape.heads):
        raise ValueError(
            f"q has {q.shape[1]} query heads, but needs a multiple of the {shape.heads} KV heads"
        )


def check_forced(sinks: int, recent: int) -> None:
    """Refuses negative counts of rows that are always selected."""
    for name, value in (("sinks", sinks), ("recent", recent)):
        if whole(name, value) < 0:
            raise ValueError(f"{name} must not be negative, but is {value}")


def _check_lengths(
    shape: RowShape,
    attend_len: object,
    select_len: object,
    budget: object,
    indices: object,
    rows: NDArray[np.int64],
) -> None:
    attended = check_slots("attend_len", attend_len, shape.slots)
    selectable = check_slots("select_len", select_len, shape.slots)
    wanted = check_slots("budget", budget, shape.slots)
    check_between("attend_len", 0, attended, rows, "the rows of its extent")
    check_between("select_len", 0, selectable, attended, "attend_len")
    check_between("budget", 0, wanted, selectable, "select_len")
    _check_chosen(shape, wanted, indices)


def _check_chosen(shape: RowShape, budget: NDArray[np.int32], indices: object) -> None:
    capacity = check_rows_of("indices", indices, shape, written=True)
    check_between("budget", 0, budget, capacity, "the last axis of indices")


def check_index_rows(kv: Extents, index: Indexes, start: object, counts: object) -> RowShape:
    """Checks everything about building a part of the key index."""
    if isinstance(kv, np.ndarray) or len(kv) != len(index):
        raise ValueError(
            f"kv and index must have one array a slot each, not {len(kv)} and {len(index)}"
        )
    dim = int(kv[0].shape[-1]) if len(kv) and isinstance(kv[0], np.ndarray) and kv[0].ndim else 16
    shape = check_extents(kv, dim)
    if not shape.slots:
        return shape
    found = check_index(index, dim, written=True)
    if found.heads != shape.heads:
        raise ValueError(f"index has {found.heads} KV heads, but kv has {shape.heads}")
    first = check_slots("start", start, shape.slots)
    wanted = check_slots("counts", counts, shape.slots)
    rows = np.array(
        [min(e.shape[2], t.shape[1] * TILE) for e, t in zip(kv, index, strict=True)], np.int64
    )
    check_between("counts", 0, wanted, rows, "the rows of its extent and index")
    used = np.where(wanted > 0, first, 0).astype(np.int32)
    check_between("start", 0, used, rows - wanted, "the rows of its extent and index less counts")
    return shape


def check_indexed(
    q: object,
    index: Indexes,
    attend_len: object,
    select_len: object,
    budget: object,
    indices: object,
    sinks: int,
    recent: int,
    scale: float | None,
) -> RowShape:
    """Checks what ``select_indexed`` shares with ``select``."""
    shape = check_index(index, _query_dim(q))
    check_query(q, shape)
    rows = np.array([tiles.shape[1] * TILE for tiles in index], np.int64)
    _check_lengths(shape, attend_len, select_len, budget, indices, rows)
    check_forced(sinks, recent)
    check_scale(scale)
    return shape


def check_elsewhere(elsewhere: object, q: NDArray[np.float32]) -> None:
    """Refuses an ``elsewhere`` that has not one number a query."""
    if elsewhere is not None:
        check_array("elsewhere", elsewhere, np.dtype(np.float32), q.shape[:2])


def check_rest(log_rest: object, q: NDArray[np.float32], shape: RowShape) -> None:
    """Refuses a ``log_rest`` that does not fit, or of more queries than weights are kept for."""
    if log_rest is None:
        return
    check_array("log_rest", log_rest, np.dtype(np.float32), q.shape[:2], written=True)
    if shape.slots and q.shape[1] > 16 * shape.heads:
        raise ValueError(
            f"log_rest is for at most 16 queries a KV head, not {q.shape[1] // shape.heads}"
        )


def check_rerank(
    q: object,
    kv: Extents,
    candidates: object,
    counts: object,
    budget: object,
    indices: object,
    sinks: int,
    recent: int,
    scale: float | None,
) -> RowShape:
    """Checks everything about a re-ranking but the candidates themselves."""
    shape = check_extents(kv, _query_dim(q))
    check_query(q, shape)
    capacity = check_rows_of("candidates", candidates, shape)
    held = check_slots("counts", counts, shape.slots)
    wanted = check_slots("budget", budget, shape.slots)
    check_between("counts", 0, held, capacity, "the last axis of candidates")
    check_between("budget", 0, wanted, held, "counts")
    _check_chosen(shape, wanted, indices)
    check_forced(sinks, recent)
    check_scale(scale)
    return shape


def check_attend_rows(
    q: object,
    kv: Extents,
    indices: object,
    counts: object,
    select_len: object,
    attend_len: object,
    scale: float | None,
) -> RowShape:
    """Checks everything about attending chosen rows but the indices themselves."""
    shape = check_extents(kv, _query_dim(q))
    check_query(q, shape)
    capacity = check_rows_of("indices", indices, shape)
    held = check_slots("counts", counts, shape.slots)
    check_between("counts", 0, held, capacity, "the last axis of indices")
    rows = np.array([extent.shape[2] for extent in kv], np.int64)
    attended = check_slots("attend_len", attend_len, shape.slots)
    selectable = check_slots("select_len", select_len, shape.slots)
    check_between("attend_len", 0, attended, rows, "the rows of its extent")
    check_between("select_len", 0, selectable, attended, "attend_len")
    check_scale(scale)
    return shape


def check_candidates(
    kv: Extents, rows: NDArray[np.int32], counts: NDArray[np.int32], name: str = "indices"
) -> None:
    """Refuses row lists that leave their extent."""
    for n, extent in enumerate(kv):
        used = rows[n, :, : counts[n]]
        if used.size and (np.min(used) < 0 or np.max(used) >= extent.shape[2]):
            raise ValueError(f"{name}[{n}] leaves the {extent.shape[2]} rows of kv[{n}]")


def check_changes(
    kv: Extents,
    indices: object,
    counts: object,
    previous: object,
    previous_counts: object,
    source: object,
    out_k: object,
    out_v: object,
) -> RowShape:
    """Checks everything about a gather of changes but the indices themselves."""
    if not isinstance(out_k, np.ndarray) or out_k.ndim != 2:
        raise TypeError("out_k must be a NumPy array of shape [F, D]")
    shape = check_extents(kv, int(out_k.shape[1]))
    if not shape.slots:
        return shape
    check_array("out_k", out_k, shape.dtype, out_k.shape, written=True)
    check_array("out_v", out_v, shape.dtype, out_k.shape, written=True)
    for rows, array, lengths, count in (
        ("indices", indices, "counts", counts),
        ("previous", previous, "previous_counts", previous_counts),
    ):
        capacity = check_rows_of(rows, array, shape)
        used = check_slots(lengths, count, shape.slots)
        check_between(lengths, 0, used, capacity, f"the last axis of {rows}")
    assert isinstance(indices, np.ndarray)
    check_array("source", source, np.dtype(np.int32), indices.shape, written=True)
    return shape


def check_top_k(values: object, count: int) -> None:
    """Refuses anything but float32 values of at least 0 and a count they have."""
    if not isinstance(values, np.ndarray) or values.ndim != 1:
        raise TypeError("values must be a NumPy array of shape [rows]")
    check_array("values", values, np.dtype(np.float32), values.shape)
    if not 0 <= whole("count", count) <= len(values):
        raise ValueError(f"count is {count}, but must be between 0 and {len(values)}, the rows")
    if len(values) and not np.min(values) >= 0:
        raise ValueError("values must be numbers of at least 0")


def check_self(self_k: object, self_v: object, shape: RowShape) -> None:
    """Refuses a self key without its value, or either misshapen."""
    if (self_k is None) != (self_v is None):
        raise ValueError("self_k and self_v must be given together")
    if self_k is not None:
        want = (shape.slots, shape.heads, shape.dim)
        check_array("self_k", self_k, np.dtype(np.float32), want)
        check_array("self_v", self_v, np.dtype(np.float32), want)


def check_gather(
    kv: Extents, indices: object, counts: object, out_k: object, out_v: object, row_offset: int
) -> RowShape:
    """Checks everything about a gather but the indices themselves."""
    whole("row_offset", row_offset)
    if not isinstance(out_k, np.ndarray) or out_k.ndim != 4:
        raise TypeError("out_k must be a NumPy array of shape [N, R, H_kv, D]")
    shape = check_extents(kv, int(out_k.shape[3]))
    if not shape.slots:
        return shape
    want = (shape.slots, int(out_k.shape[1]), shape.heads, shape.dim)
    check_array("out_k", out_k, shape.dtype, want, written=True)
    check_array("out_v", out_v, shape.dtype, want, written=True)
    wanted = check_slots("counts", counts, shape.slots)
    capacity = check_rows_of("indices", indices, shape)
    check_between("counts", 0, wanted, capacity, "the last axis of indices")
    if row_offset < 0 or row_offset > want[1]:
        raise ValueError(f"row_offset is {row_offset}, but out_k has rows 0 to {want[1]}")
    check_between("counts", 0, wanted, want[1] - row_offset, "the rows of out_k after row_offset")
    return shape


def check_store(kv: Extents, start: object, counts: object, k: object, v: object) -> RowShape:
    """Checks everything about a store."""
    if not isinstance(k, np.ndarray) or k.ndim != 4:
        raise TypeError("k must be a NumPy array of shape [N, S, H_kv, D]")
    shape = check_extents(kv, int(k.shape[3]), written=True)
    if not shape.slots:
        return shape
    want = (shape.slots, int(k.shape[1]), shape.heads, shape.dim)
    check_array("k", k, shape.dtype, want)
    check_array("v", v, shape.dtype, want)
    first = check_slots("start", start, shape.slots)
    wanted = check_slots("counts", counts, shape.slots)
    check_between("counts", 0, wanted, want[1], "the rows of k")
    rows = np.array([extent.shape[2] for extent in kv], np.int64)
    # A skipped slot may name any start.
    used = np.where(wanted > 0, first, 0).astype(np.int32)
    check_between("start", 0, used, rows - wanted, "the rows of its extent less counts")
    return shape
