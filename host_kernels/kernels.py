"""The kernels, on the best instruction set of this machine.

Each call checks its arguments, releases the GIL and uses the process-wide thread pool; results do
not depend on the number of threads. ``reference/`` has the same functions in plain NumPy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from host_kernels import _native
from host_kernels.arguments import (
    check_attend,
    check_attend_rows,
    check_elsewhere,
    check_gather,
    check_self,
    check_store,
    check_top_k,
)
from host_kernels.checks import Extents, RowShape
from host_kernels.cpu import apply_environment
from host_kernels.threads import resolve_threads


def raw(array: NDArray[Any]) -> NDArray[Any]:
    """bfloat16 crosses into native code as uint16."""
    return array.view(np.uint16) if array.dtype.itemsize == 2 else array


def clipped(count: int) -> int:
    """A count of rows, however large, as native code can take it."""
    return min(int(count), 2**31 - 1)


def top_k(values: NDArray[np.float32], count: int) -> NDArray[np.int32]:
    """The ``count`` largest of float32 ``[rows]``, ascending by row; ties go to the lower row.

    Raises:
        TypeError, ValueError: an argument does not fit, or a value is negative or not a number.
    """
    check_top_k(values, count)
    apply_environment()
    indices = np.empty(int(count), np.int32)
    _native.top_k(values, indices)
    return indices


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
    """Exact attention of one query a slot, fused with top-k selection (HERALD v2, section IV-B4).

    One pass over K and V with an online softmax. The importance of a row for a KV head is the sum
    over its G query heads of exp(score - m) / l, with m and l over everything attended; a share
    below 2^-100 counts as zero. The ``budget`` most important rows among the first ``select_len``
    are selected per KV head, equal ones by lower row number; the first ``sinks`` rows are always
    among them.

    On "avx512_bf16", bfloat16 keys meet a query rounded to bfloat16 (relative error 2^-9 a
    component); all else, and all of it on the other instruction sets, is fp32.

    Args:
        q: float32 ``[N, H_q, D]``, RoPE applied; H_q a multiple of H_kv, D of 16.
        kv: N extents ``[H_kv, 2, rows, D]``, bfloat16 or float32.
        attend_len: int32 ``[N]``, rows attended, at most the extent's.
        select_len: int32 ``[N]``, rows selectable, at most ``attend_len``.
        budget: int32 ``[N]``, rows to select per KV head, at most ``select_len``.
        indices: int32 ``[N, H_kv, K_cap]``, written: ``budget`` rows ascending, then -1.
        sinks: leading rows always selected, inside the budget.
        recent: of the rows before ``select_len``, the last ones that are always selected, inside
            what the sinks leave of the budget.
        self_k, self_v: float32 ``[N, H_kv, D]``, one more key and value that takes part in the
            softmax and the output but cannot be selected.
        scale: softmax scale, 1/sqrt(D) by default.
        threads: threads to use, ``thread_count()`` by default.

    Returns:
        The attention output, float32 ``[N, H_q, D]``, zeros where nothing is attended; and the
        status, int32 ``[N]``: 0, or 1 where a score or an output was not finite. Such a slot has
        zeros as output and selects the sinks and the most recent rows. Where |q| or |k| come
        near 3e38, products summed in fp32 may overflow, and the slot be reported so, though the
        exact score is finite.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it.
    """
    shape = check_attend(q, kv, attend_len, select_len, budget, indices, sinks, recent, scale)
    check_self(self_k, self_v, shape)
    out = np.zeros_like(q)
    status = run_attend(
        shape, q, kv, attend_len, select_len, budget, indices, sinks, recent, self_k, self_v, scale,
        out, threads,
    )  # fmt: skip
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
    """The selection of ``attend_select`` alone: reads keys only, computes no attention output.

    Arguments and errors are those of ``attend_select``. Several queries of one slot may stand
    where its G query heads do: importance is then summed over them too.

    Args:
        elsewhere: float32 ``[N, H_q]``, log of the sum of exp(score) over keys that the query
            attends outside ``kv``; they take part in the normaliser. -inf is none.

    Returns:
        The status, int32 ``[N]``: 0, or 1 where a score was not finite.
    """
    shape = check_attend(q, kv, attend_len, select_len, budget, indices, sinks, recent, scale)
    check_elsewhere(elsewhere, q)
    return run_attend(
        shape, q, kv, attend_len, select_len, budget, indices, sinks, recent, None, None, scale,
        None, threads, elsewhere,
    )  # fmt: skip


def run_attend(
    shape: RowShape,
    q: NDArray[np.float32],
    kv: Extents,
    attend_len: NDArray[np.int32],
    select_len: NDArray[np.int32],
    budget: NDArray[np.int32],
    indices: NDArray[np.int32],
    sinks: int,
    recent: int,
    self_k: NDArray[np.float32] | None,
    self_v: NDArray[np.float32] | None,
    scale: float | None,
    out: NDArray[np.float32] | None,
    threads: int | None,
    elsewhere: NDArray[np.float32] | None = None,
    log_rest: NDArray[np.float32] | None = None,
) -> NDArray[np.int32]:
    """Runs the native scan on checked arguments; see ``attend_select`` and ``select_indexed``."""
    apply_environment()
    status = np.zeros(shape.slots, np.int32)
    _native.attend(
        q,
        [raw(extent) for extent in kv],
        shape.heads,
        attend_len,
        select_len,
        budget,
        indices,
        clipped(sinks),
        clipped(recent),
        self_k,
        self_v,
        elsewhere,
        log_rest,
        shape.dim**-0.5 if scale is None else scale,
        out,
        status,
        resolve_threads(threads),
    )
    return status


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
    """Attention of one query a slot over chosen rows and those from ``select_len`` on.

    What ``attend_select`` gives where all else weighs nothing; with ``select_indexed`` before it,
    keys and values are read of the chosen rows alone.

    Args:
        q: float32 ``[N, H_q, D]``; ``kv``: N extents ``[H_kv, 2, rows, D]``.
        indices: int32 ``[N, H_kv, K_cap]``, chosen rows; ``counts``: int32 ``[N]``, how many.
        select_len, attend_len: int32 ``[N]``: rows [select_len, attend_len) are attended too.
        self_k, self_v, scale, threads: see ``attend_select``.

    Returns:
        The attention output, float32 ``[N, H_q, D]``, zeros where nothing is attended; and the
        status, int32 ``[N]``: 0, or 1, with zeros as output, where a number was not finite.

    Raises:
        TypeError, ValueError: an argument does not fit, or an index lies outside its extent.
    """
    shape = check_attend_rows(q, kv, indices, counts, select_len, attend_len, scale)
    check_self(self_k, self_v, shape)
    out, status = np.zeros_like(q), np.zeros(shape.slots, np.int32)
    apply_environment()
    _native.attend_rows(
        q,
        [raw(extent) for extent in kv],
        indices,
        counts,
        select_len,
        attend_len,
        self_k,
        self_v,
        shape.dim**-0.5 if scale is None else scale,
        out,
        status,
        resolve_threads(threads),
    )
    return out, status


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
    """Copies selected rows into a position-major buffer; nothing else of the buffer changes.

    ``out_k[n, row_offset + j, h] = kv[n][h, 0, indices[n, h, j]]`` for ``j < counts[n]``, and
    ``out_v`` likewise from ``kv[n][h, 1]``.

    Args:
        kv: N extents ``[H_kv, 2, rows, D]``.
        indices: int32 ``[N, H_kv, K_cap]``.
        counts: int32 ``[N]``, at most K_cap.
        out_k, out_v: ``[N, R, H_kv, D]`` of the extents' dtype, written.
        row_offset: first row of the buffer to write.
        threads: threads to use.

    Raises:
        TypeError, ValueError: an argument does not fit, or an index lies outside its extent;
            nothing has been written then.
    """
    shape = check_gather(kv, indices, counts, out_k, out_v, row_offset)
    if not shape.slots:
        return
    apply_environment()
    rows = [raw(extent) for extent in kv]
    _native.gather(
        rows, indices, counts, raw(out_k), raw(out_v), int(row_offset), resolve_threads(threads)
    )


def store(
    kv: Extents,
    start: NDArray[np.int32],
    counts: NDArray[np.int32],
    k: NDArray[Any],
    v: NDArray[Any],
    *,
    threads: int | None = None,
) -> None:
    """Writes new keys and values: ``kv[n][h, 0, start[n] + j] = k[n, j, h]``, and v to ``[h, 1]``.

    Args:
        kv: N extents ``[H_kv, 2, rows, D]``, written.
        start: int32 ``[N]``, first row to write.
        counts: int32 ``[N]``, rows to write; 0 skips the slot.
        k, v: ``[N, S, H_kv, D]`` of the extents' dtype.
        threads: threads to use.

    Raises:
        TypeError, ValueError: an argument does not fit; nothing has been written then.
    """
    shape = check_store(kv, start, counts, k, v)
    if not shape.slots:
        return
    rows = [raw(extent) for extent in kv]
    _native.store(rows, start, counts, raw(k), raw(v), resolve_threads(threads))
