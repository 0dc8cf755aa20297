"""Gathers of changes: native against reference, and against the full gather they stand for."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import host_kernels as hk
from host_kernels import reference

BF16 = np.dtype(ml_dtypes.bfloat16)
LENGTHS = [0, 5, 300, 700]
HEADS, DIM, CAPACITY = 2, 48, 260


def selection(seed: int, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Random ascending rows of every slot and head."""
    rng = np.random.default_rng(seed)
    counts = np.array([int(n * share) for n in LENGTHS], np.int32)
    rows = np.full((len(LENGTHS), HEADS, CAPACITY), -1, np.int32)
    for n, length in enumerate(LENGTHS):
        for h in range(HEADS):
            rows[n, h, : counts[n]] = np.sort(rng.choice(length, counts[n], replace=False))
    return rows, counts


@pytest.mark.parametrize("dtype", [BF16, np.dtype(np.float32)])
@pytest.mark.parametrize("known", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("threads", [1, 3])
def test_sources_and_new_rows_make_the_selection(dtype: Any, known: float, threads: int) -> None:
    rng = np.random.default_rng(0)
    kv = [rng.standard_normal((HEADS, 2, n, DIM)).astype(dtype) for n in LENGTHS]
    before, before_counts = selection(1, known)
    after, counts = selection(2, 0.3)
    results = []
    for module, options in ((hk, {"threads": threads}), (reference, {})):
        source = np.full_like(after, 7)
        out_k, out_v = np.zeros((2, 700, DIM), dtype)
        missing = module.gather_changes(
            kv, after, counts, before, before_counts, source, out_k, out_v, **options
        )
        results.append((missing, source, out_k, out_v))
    for ours, theirs in zip(*results, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    missing, source, out_k, out_v = results[0]
    assert 0 < missing <= counts.sum() * HEADS
    for n, extent in enumerate(kv):
        for h in range(HEADS):
            for j, row in enumerate(after[n, h, : counts[n]]):
                place = source[n, h, j]
                if place >= 0:
                    assert before[n, h, place] == row
                else:
                    np.testing.assert_array_equal(out_k[-1 - place], extent[h, 0, row])
                    np.testing.assert_array_equal(out_v[-1 - place], extent[h, 1, row])


def test_more_new_rows_than_room_are_counted_and_not_copied() -> None:
    kv = [np.ones((HEADS, 2, n, DIM), np.float32) for n in LENGTHS]
    rows, counts = selection(1, 0.3)
    nothing = np.zeros(len(LENGTHS), np.int32)
    source, (out_k, out_v) = np.zeros_like(rows), np.zeros((2, 12, DIM), np.float32)
    guard = np.zeros((2, 40, DIM), np.float32)
    out_k, out_v = guard[0, :12], guard[1, :12]
    missing = hk.gather_changes(kv, rows, counts, rows, nothing, source, out_k, out_v)
    assert missing == HEADS * counts.sum() > 12
    assert (guard[:, :12] == 1).all()
    assert (guard[:, 12:] == 0).all()


def test_bad_arguments_are_refused_in_one_sentence() -> None:
    kv = [np.ones((HEADS, 2, 9, DIM), np.float32)]
    rows, one = np.zeros((1, HEADS, 4), np.int32), np.ones(1, np.int32)
    out = np.zeros((5, DIM), np.float32)
    good: dict[str, Any] = {
        "kv": kv, "indices": rows, "counts": one, "previous": rows, "previous_counts": one,
        "source": rows.copy(), "out_k": out, "out_v": out.copy(),
    }  # fmt: skip
    for module in (hk, reference):
        assert module.gather_changes(**good) == 0
        for name, value, wording in (
            ("out_k", np.zeros((5, DIM + 1), np.float32), "must have shape"),
            ("counts", one * 5, "last axis of indices"),
            ("previous_counts", one * 5, "last axis of previous"),
            ("indices", rows + 9, "kv"),
            ("source", rows[:, :1].copy(), "source must have shape"),
            ("previous", rows.astype(np.int64), "previous must have dtype"),
        ):
            with pytest.raises((TypeError, ValueError), match=wording):
                module.gather_changes(**(good | {name: value}))
