"""Key indexes: a quarter or an eighth of the bytes of K and V, for selecting without reading them.

Tiles of 32 keys: codes, then a float32 scale for each key, so that a scan is one sequential stream
without horizontal sums. Keys are rounded one by one: adding some never changes others.

- "int8": unsigned bytes (code + 128) ``[D/4][32 keys][4]``.
- "int4": half a byte each (code + 8) ``[D/8][32 keys][4]``, the low halves four dimensions, the
  high halves the next four. Keys and queries are rotated before they are rounded (Walsh-Hadamard,
  over as many dimensions as the largest power of two that divides D), so that a few large
  dimensions do not take the range of all others.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from host_kernels import _native
from host_kernels.arguments import (
    check_elsewhere,
    check_index_rows,
    check_indexed,
    check_rerank,
    check_rest,
)
from host_kernels.checks import TILE, Extents, Indexes, IndexKind, tile_bytes
from host_kernels.cpu import apply_environment
from host_kernels.kernels import clipped, raw, run_attend
from host_kernels.threads import resolve_threads


def index_shape(heads: int, rows: int, dim: int, kind: IndexKind = "int8") -> tuple[int, int, int]:
    """Shape of the uint8 key index of an extent ``[heads, 2, rows, dim]``."""
    return heads, -(-rows // TILE), tile_bytes(dim, kind)


def index_rows(
    kv: Extents,
    index: Indexes,
    start: NDArray[np.int32],
    counts: NDArray[np.int32],
    *,
    threads: int | None = None,
) -> None:
    """Writes the index of keys that are new or have changed.

    ``scale = max|k| / m`` and ``code = k * (m / max|k|)``, in float32, rounded half to even; m is
    127 or, for int4, where k is the rotated key, 7. A key whose components are all below 2^-100
    counts as zero; one with a number that is not finite gives its slot status 1 when it is scanned.

    Args:
        kv: N extents ``[H_kv, 2, rows, D]``; only keys are read.
        index: N arrays of ``index_shape`` of one kind, written at these rows only.
        start: int32 ``[N]``, first row.
        counts: int32 ``[N]``, rows; 0 skips the slot.
        threads: threads to use.

    Raises:
        TypeError, ValueError: an argument does not fit; nothing has been written then.
    """
    shape = check_index_rows(kv, index, start, counts)
    if not shape.slots:
        return
    apply_environment()
    rows = [raw(extent) for extent in kv]
    _native.index_rows(rows, list(index), start, counts, resolve_threads(threads))


def select_indexed(
    q: NDArray[np.float32],
    index: Indexes,
    attend_len: NDArray[np.int32],
    select_len: NDArray[np.int32],
    budget: NDArray[np.int32],
    indices: NDArray[np.int32],
    *,
    sinks: int = 4,
    recent: int = 0,
    elsewhere: NDArray[np.float32] | None = None,
    log_rest: NDArray[np.float32] | None = None,
    scale: float | None = None,
    threads: int | None = None,
) -> NDArray[np.int32]:
    """``select`` from a key index: the same selection by scores that are rounded.

    Queries are rounded to int8, whatever the keys are; products of codes are exact integers, so
    scores are the same on every instruction set. They are products of a code's scale at a time, so
    with keys beyond about 1e34 a slot may be reported as not finite though ``select`` would manage.

    Args:
        q, attend_len, select_len, budget, indices, sinks, recent, elsewhere, scale, threads: see
            ``select``.
        index: N arrays of ``index_shape``, of one kind.
        log_rest: float32 ``[N, H_q]``, written: log of the mass (sum of exp(score)) that each query
            attends and that is not selected, which ``rerank`` takes as ``elsewhere``; 0 where the
            status is 1. At most 16 queries a KV head.

    Returns:
        The status, int32 ``[N]``: 0, or 1 where a score was not finite.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it.
    """
    shape = check_indexed(q, index, attend_len, select_len, budget, indices, sinks, recent, scale)
    check_elsewhere(elsewhere, q)
    check_rest(log_rest, q, shape)
    return run_attend(
        shape, q, index, attend_len, select_len, budget, indices, sinks, recent, None, None, scale,
        None, threads, elsewhere, log_rest,
    )  # fmt: skip


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
    """Keeps the best of some candidates by their exact scores.

    Args:
        q: float32 ``[N, H_q, D]``; ``kv``: N extents ``[H_kv, 2, rows, D]``.
        candidates: int32 ``[N, H_kv, C_cap]``, ascending rows; ``counts``: int32 ``[N]``, how many.
        budget: int32 ``[N]``, rows to keep per KV head, at most ``counts``.
        indices: int32 ``[N, H_kv, K_cap]``, written: ``budget`` rows ascending, then -1.
        sinks, recent: the first and last candidates that are always kept.
        elsewhere: float32 ``[N, H_q]``, log of the mass that each query attends beside the
            candidates, such as ``select_indexed`` tells; it takes part in the normaliser. -inf is
            none.
        scale: softmax scale, 1/sqrt(D) by default.
        threads: threads to use.

    Returns:
        The status, int32 ``[N]``: 0, or 1 where a score was not finite; such a slot keeps the first
        ``sinks`` and the last candidates.

    Raises:
        TypeError, ValueError: an argument does not fit, or a candidate lies outside its extent.
    """
    shape = check_rerank(q, kv, candidates, counts, budget, indices, sinks, recent, scale)
    check_elsewhere(elsewhere, q)
    status = np.zeros(shape.slots, np.int32)
    apply_environment()
    _native.rerank(
        q,
        [raw(extent) for extent in kv],
        candidates,
        counts,
        budget,
        indices,
        clipped(sinks),
        clipped(recent),
        elsewhere,
        shape.dim**-0.5 if scale is None else scale,
        status,
        resolve_threads(threads),
    )
    return status
