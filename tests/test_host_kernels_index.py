"""The key index: rounding, selection over it and re-ranking, against their NumPy reference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import host_kernels as hk
from host_kernels import reference

BF16 = np.dtype(ml_dtypes.bfloat16)
FP32 = np.dtype(np.float32)
DTYPES = [pytest.param(BF16, id="bf16"), pytest.param(FP32, id="fp32")]
ISAS = hk.cpu_info()["available"]
KINDS: list[hk.IndexKind] = ["int8", "int4"]


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test on each instruction set, then goes back to the one before."""
    before = hk.cpu_info()["isa"]
    hk.set_isa(request.param)
    yield request.param
    hk.set_isa(before)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> hk.IndexKind:
    """Runs the test on each kind of index."""
    made: hk.IndexKind = request.param
    return made


def slots(
    lengths: list[int],
    heads: int,
    dim: int,
    dtype: np.dtype[Any],
    seed: int = 0,
    kind: hk.IndexKind = "int8",
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Random extents and their whole index; unused codes and scales are garbage."""
    rng = np.random.default_rng(seed)
    kv = [rng.standard_normal((heads, 2, n, dim)).astype(dtype) for n in lengths]
    shapes = [hk.index_shape(heads, n, dim, kind) for n in lengths]
    index = [rng.integers(0, 256, shape, np.uint8) for shape in shapes]
    counts = np.array(lengths, np.int32)
    reference.index_rows(kv, index, counts * 0, counts)
    return kv, index


def choose(
    module: Any, q: np.ndarray, index: list[np.ndarray], lengths: list[int], **options: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Status, indices and log_rest of a selection of a fifth of all rows but three."""
    attend = np.array(lengths, np.int32)
    limit = np.maximum(attend - 3, 0).astype(np.int32)
    budget = (limit // 5).astype(np.int32)
    indices = np.full((len(index), len(index[0]), int(budget.max()) + 1), 7, np.int32)
    rest = np.full(q.shape[:2], 7, np.float32)
    if q.shape[1] <= 16 * len(index[0]):
        options["log_rest"] = rest
    status = module.select_indexed(q, index, attend, limit, budget, indices, **options)
    return status, indices, rest


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [16, 48, 64, 128])
def test_rounding_equals_the_reference_bit_for_bit(
    isa: str, kind: hk.IndexKind, dtype: Any, dim: int
) -> None:
    rng = np.random.default_rng(dim)
    kv = [rng.standard_normal((2, 2, n, dim)).astype(dtype) for n in (1, 70, 40)]
    kv[1][0, 0, 5] = 0
    kv[1][1, 0, 6] *= np.asarray(1e-32, dtype)
    kv[1][1, 0, 7, 3] = np.nan
    kv[1][1, 0, 8, 3] = -np.inf
    kv[1][1, 0, 9] = np.asarray(3e38, dtype)
    shapes = [hk.index_shape(2, e.shape[2], dim, kind) for e in kv]
    blank = [rng.integers(0, 256, shape, np.uint8) for shape in shapes]
    ours, theirs = [tiles.copy() for tiles in blank], [tiles.copy() for tiles in blank]
    start, counts = np.array([0, 3, 39], np.int32), np.array([1, 67, 0], np.int32)
    hk.index_rows(kv, ours, start, counts)
    reference.index_rows(kv, theirs, start, counts)
    for mine, want in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(mine, want)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 16, 17, 40])
@pytest.mark.parametrize("dim", [16, 48, 64, 128])
def test_selection_equals_the_reference(isa: str, kind: hk.IndexKind, group: int, dim: int) -> None:
    lengths = [0, 1, 31, 32, 33, 200]
    _, index = slots(lengths, 2, dim, BF16, kind=kind)
    rng = np.random.default_rng(group)
    q = (2 * rng.standard_normal((len(lengths), 2 * group, dim))).astype(np.float32)
    status, indices, total = choose(hk, q, index, lengths, recent=2)
    wanted_status, wanted, wanted_total = choose(reference, q, index, lengths, recent=2)
    np.testing.assert_array_equal(status, wanted_status)
    np.testing.assert_allclose(total, wanted_total, rtol=1e-5, atol=1e-5)
    if group <= 4:
        np.testing.assert_array_equal(indices, wanted)
    # Sums over many queries may put nearly equal rows in another order.
    assert (indices == wanted).mean() > 0.99


@pytest.mark.parametrize("group", [4, 20])
def test_thread_count_changes_no_bit(isa: str, kind: hk.IndexKind, group: int) -> None:
    # More heads than threads too, one too many: it is handed out by chunks.
    lengths = [9000] if group > 4 else [9000, 4500, 8200, 5000, 9100, 4100, 8192]
    _, index = slots(lengths, 1, 32, BF16, kind=kind)
    q = np.random.default_rng(1).standard_normal((len(lengths), group, 32)).astype(np.float32)
    runs = [choose(hk, q, index, lengths, threads=n) for n in (1, 2, 3, 6)]
    for run in runs[1:]:
        for mine, first in zip(run, runs[0], strict=True):
            np.testing.assert_array_equal(mine, first)


def test_instruction_sets_score_alike(kind: hk.IndexKind) -> None:
    """Products are exact integers, so at one query head no row changes places."""
    lengths = [3000]
    _, index = slots(lengths, 2, 64, BF16, kind=kind)
    q = np.random.default_rng(2).standard_normal((1, 2, 64)).astype(np.float32)
    before, chosen = hk.cpu_info()["isa"], []
    for name in ISAS:
        hk.set_isa(name)
        chosen.append(choose(hk, q, index, lengths)[1])
    hk.set_isa(before)
    for other in chosen[1:]:
        np.testing.assert_array_equal(other, chosen[0])


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_numbers_that_are_not_finite_fail_their_slot_alone(
    isa: str, kind: hk.IndexKind, poison: float
) -> None:
    lengths = [50, 60, 70]
    kv, index = slots(lengths, 2, 32, FP32, kind=kind)
    kv[1][1, 0, 40, 3] = poison
    counts = np.array(lengths, np.int32)
    hk.index_rows(kv, index, counts * 0, counts)
    q = np.ones((3, 4, 32), np.float32)
    q[2, 1, 5] = poison
    for module in (hk, reference):
        status, indices, total = choose(module, q, index, lengths)
        np.testing.assert_array_equal(status, [0, 1, 1])
        assert (total[1:] == 0).all()
        np.testing.assert_array_equal(indices[1, :, :11], [[0, 1, 2, 3, *range(50, 57)]] * 2)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_random_calls(data: st.DataObject) -> None:
    heads, group = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 18))
    dim = 16 * data.draw(st.integers(1, 9))
    lengths = data.draw(st.lists(st.integers(0, 150), min_size=1, max_size=3))
    hk.set_isa(data.draw(st.sampled_from(ISAS)))
    kind = data.draw(st.sampled_from(KINDS))
    _, index = slots(lengths, heads, dim, BF16, seed=dim, kind=kind)
    rng = np.random.default_rng(group)
    q = rng.standard_normal((len(lengths), heads * group, dim)).astype(np.float32)
    options = {"recent": data.draw(st.integers(0, 40)), "sinks": data.draw(st.integers(0, 40))}
    if data.draw(st.booleans()):
        options["elsewhere"] = rng.standard_normal(q.shape[:2]).astype(np.float32)
    _, indices, total = choose(hk, q, index, lengths, **options)
    _, wanted, wanted_total = choose(reference, q, index, lengths, **options)
    np.testing.assert_allclose(total, wanted_total, rtol=1e-5, atol=1e-5)
    assert (indices == wanted).mean() > 0.97
    hk.set_isa(ISAS[-1])


def candidates_of(
    lengths: list[int], heads: int, share: float, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Random ascending candidates and how many each slot has."""
    rng = np.random.default_rng(seed)
    counts = np.array([int(n * share) for n in lengths], np.int32)
    rows = np.full((len(lengths), heads, int(counts.max()) + 2), -1, np.int32)
    for n, length in enumerate(lengths):
        for h in range(heads):
            rows[n, h, : counts[n]] = np.sort(rng.choice(length, counts[n], replace=False))
    return rows, counts


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 4, 16])
@pytest.mark.parametrize("told", [False, True])
def test_rerank_equals_the_reference(isa: str, dtype: Any, group: int, told: bool) -> None:
    lengths = [0, 3, 64, 400]
    kv, _ = slots(lengths, 2, 64, dtype)
    rows, counts = candidates_of(lengths, 2, 0.7, group)
    budget = (counts // 2).astype(np.int32)
    rng = np.random.default_rng(group)
    q = rng.standard_normal((4, 2 * group, 64)).astype(BF16).astype(np.float32)
    total = (5 + rng.standard_normal(q.shape[:2])).astype(np.float32) if told else None
    results = []
    for module in (hk, reference):
        kept = np.full((4, 2, int(budget.max()) + 1), 7, np.int32)
        status = module.rerank(
            q, kv, rows, counts, budget, kept, sinks=2, recent=3, elsewhere=total
        )
        results.append((status, kept))
    np.testing.assert_array_equal(results[0][0], results[1][0])
    if group == 1:
        np.testing.assert_array_equal(results[0][1], results[1][1])
    assert (results[0][1] == results[1][1]).mean() > 0.97


def test_rerank_of_everything_is_select(isa: str) -> None:
    lengths = [333]
    kv, _ = slots(lengths, 2, 32, BF16)
    q = np.random.default_rng(0).standard_normal((1, 8, 32)).astype(np.float32)
    full, budget = np.array(lengths, np.int32), np.array([40], np.int32)
    chosen, kept = np.zeros((2, 1, 2, 40), np.int32)
    hk.select(q, kv, full, full, budget, chosen)
    every = np.broadcast_to(np.arange(333, dtype=np.int32), (1, 2, 333)).copy()
    hk.rerank(q, kv, every, full, budget, kept)
    np.testing.assert_array_equal(kept, chosen)


def test_rerank_after_the_index_finds_the_exact_rows() -> None:
    lengths = [4000]
    kv, index = slots(lengths, 2, 64, BF16)
    q = (2 * np.random.default_rng(3).standard_normal((1, 8, 64))).astype(np.float32)
    full, budget = np.array(lengths, np.int32), np.array([200], np.int32)
    exact, found = np.zeros((2, 1, 2, 200), np.int32)
    hk.select(q, kv, full, full, budget, exact)
    twice, total = np.zeros((1, 2, 400), np.int32), np.zeros((1, 8), np.float32)
    hk.select_indexed(q, index, full, full, 2 * budget, twice, log_rest=total)
    hk.rerank(q, kv, twice, 2 * budget, budget, found, elsewhere=total)
    for h in range(2):
        assert len(set(exact[0, h]) & set(found[0, h])) >= 199


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_rerank_of_a_bad_slot_keeps_the_newest(isa: str, poison: float) -> None:
    lengths = [50, 60]
    kv, _ = slots(lengths, 2, 32, FP32)
    rows, counts = candidates_of(lengths, 2, 0.5, 0)
    kv[1][0, 0, rows[1, 0, 7]] = poison
    q = np.ones((2, 4, 32), np.float32)
    for module in (hk, reference):
        kept = np.zeros((2, 2, 8), np.int32)
        budget = np.array([8, 8], np.int32)
        status = module.rerank(q, kv, rows, counts, budget, kept, sinks=2)
        np.testing.assert_array_equal(status, [0, 1])
        newest = rows[1, :, : counts[1]][:, [0, 1, *range(counts[1] - 6, counts[1])]]
        np.testing.assert_array_equal(kept[1], newest)


@pytest.mark.parametrize("values", ["random", "growing", "ties", "zeros"])
@pytest.mark.parametrize("n", [1, 31, 32, 33, 4097])
def test_top_k_equals_a_sort(isa: str, values: str, n: int) -> None:
    rng = np.random.default_rng(n)
    x = {
        "random": rng.random(n),
        "growing": np.arange(n) + rng.random(n),
        "ties": rng.integers(0, 4, n),
        "zeros": np.zeros(n) * rng.choice([-1, 1], n),
    }[values].astype(np.float32)
    for count in {0, 1, n // 20, n // 2, n}:
        np.testing.assert_array_equal(hk.top_k(x, count), reference.top_k(x, count))
    for bad in (-1.0, np.nan):
        x[n // 2] = bad
        with pytest.raises(ValueError, match="at least 0"):
            hk.top_k(x, 1)
