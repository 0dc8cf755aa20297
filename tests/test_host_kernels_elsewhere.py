"""Keys attended outside the extents: they take their share of the normaliser, query by query."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import host_kernels as hk
from host_kernels import reference

BF16 = np.dtype(ml_dtypes.bfloat16)
HEADS, DIM = 2, 32


@pytest.fixture(params=hk.cpu_info()["available"])
def isa(request):
    before = hk.cpu_info()["isa"]
    hk.set_isa(request.param)
    yield request.param
    hk.set_isa(before)


def chosen(module, q, kv, budget, elsewhere, **options):
    lengths = np.array([extent.shape[2] for extent in kv], np.int32)
    indices = np.full((len(kv), HEADS, int(budget.max())), 7, np.int32)
    status = module.select(
        q, kv, lengths, lengths, budget, indices, sinks=2, elsewhere=elsewhere, **options
    )
    return status, indices


@pytest.mark.parametrize("dtype", [BF16, np.dtype(np.float32)])
@pytest.mark.parametrize("queries", [1, 3, 4, 16])
def test_it_equals_keys_that_stand_outside(isa, queries, dtype):
    """The mass of an extent that is cut in two is that of the whole, whoever holds the rest."""
    rng = np.random.default_rng(queries)
    lengths, outside = [33, 64, 200, 4200], 48
    q = (3 * rng.standard_normal((4, HEADS * queries, DIM))).astype(BF16).astype(np.float32)
    kv = [rng.standard_normal((HEADS, 2, n, DIM)).astype(dtype) for n in lengths]
    rest = [rng.standard_normal((HEADS, 2, outside, DIM)).astype(dtype) for _ in lengths]
    elsewhere = np.stack(
        [
            np.logaddexp.reduce(reference.scores(q[n], rest[n][:, 0], DIM**-0.5), axis=1)
            for n in range(4)
        ]
    ).astype(np.float32)
    budget = np.array([10, 20, 60, 300], np.int32)
    status, indices = chosen(hk, q, kv, budget, elsewhere)
    assert not status.any()
    differs = False
    for n in range(4):
        whole = np.concatenate([kv[n], rest[n]], axis=2)
        mass = reference.importance(q[n], whole, lengths[n] + outside)[:, : lengths[n]]
        own = reference.importance(q[n], kv[n], lengths[n], elsewhere=elsewhere[n])
        np.testing.assert_allclose(own, mass, rtol=1e-5)
        alone = reference.importance(q[n], kv[n], lengths[n])
        for head in range(HEADS):
            rows = indices[n, head, : budget[n]]
            want = reference.top_rows(mass[head], int(budget[n]), 2)
            least = mass[head][want[2:]].min()
            # Equal up to rounding: what differs lies on the border.
            odd = np.setxor1d(rows, want)
            assert np.all(np.abs(mass[head][odd] - least) <= 1e-4 * least)
            differs |= not np.array_equal(want, reference.top_rows(alone[head], int(budget[n]), 2))
    assert differs == (queries > 1), "the share outside matters where queries are summed"


def test_threads_and_references_agree(isa):
    rng = np.random.default_rng(5)
    kv = [rng.standard_normal((HEADS, 2, 9000, DIM)).astype(BF16)]
    q = rng.standard_normal((1, HEADS * 8, DIM)).astype(BF16).astype(np.float32)
    elsewhere = rng.normal(5, 3, (1, HEADS * 8)).astype(np.float32)
    elsewhere[0, 3] = -np.inf
    budget = np.array([100], np.int32)
    runs = [chosen(hk, q, kv, budget, elsewhere, threads=n)[1] for n in (1, 2, 3)]
    np.testing.assert_array_equal(runs[0], runs[1])
    np.testing.assert_array_equal(runs[0], runs[2])
    _, want = chosen(reference, q, kv, budget, elsewhere)
    assert len(np.intersect1d(runs[0], want)) >= 0.99 * 2 * 100 - 2


def test_none_is_minus_infinity(isa):
    rng = np.random.default_rng(6)
    kv = [rng.standard_normal((HEADS, 2, 100, DIM)).astype(BF16)]
    q = rng.standard_normal((1, HEADS * 4, DIM)).astype(np.float32)
    budget = np.array([20], np.int32)
    nothing = np.full((1, HEADS * 4), -np.inf, np.float32)
    for module in (hk, reference):
        plain = chosen(module, q, kv, budget, None)[1]
        np.testing.assert_array_equal(plain, chosen(module, q, kv, budget, nothing)[1])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_share_that_is_no_number_is_reported(isa, bad):
    kv = [np.ones((HEADS, 2, 40, DIM), np.float32)]
    q = np.ones((1, HEADS, DIM), np.float32)
    elsewhere = np.array([[0, bad]], np.float32)
    for module in (hk, reference):
        status, indices = chosen(module, q, kv, np.array([5], np.int32), elsewhere)
        assert list(status) == [1]
        np.testing.assert_array_equal(indices[0, 0], [0, 1, 37, 38, 39])


@pytest.mark.parametrize(
    "bad", [np.zeros((1, 3), np.float32), np.zeros((1, HEADS), np.float64), [[0.0, 0.0]]]
)
def test_a_wrong_shape_is_refused(bad):
    kv = [np.ones((HEADS, 2, 40, DIM), np.float32)]
    q = np.ones((1, HEADS, DIM), np.float32)
    for module in (hk, reference):
        with pytest.raises((TypeError, ValueError), match="elsewhere"):
            chosen(module, q, kv, np.array([5], np.int32), bad)


@pytest.mark.parametrize("group", [16, 17, 48])
@pytest.mark.parametrize("rows", [500, 9000])
def test_many_queries_of_a_head_vote_together(isa, group, rows):
    """From 17 on, scores are computed twice instead of stored; heads are cut by chunks at 9,000."""
    rng = np.random.default_rng(group)
    kv = [rng.standard_normal((HEADS, 2, rows, 16)).astype(BF16)]
    q = rng.standard_normal((1, HEADS * group, 16)).astype(BF16).astype(np.float32)
    budget, length = np.array([rows // 10], np.int32), np.array([rows], np.int32)
    runs = []
    for threads in (1, 3):
        indices = np.full((1, HEADS, rows // 10), 7, np.int32)
        assert not hk.select(q, kv, length, length, budget, indices, threads=threads).any()
        runs.append(indices)
    np.testing.assert_array_equal(*runs)
    mass = reference.importance(q[0], kv[0], rows)
    for head in range(HEADS):
        chosen = np.zeros(rows, bool)
        chosen[runs[0][0, head]] = True
        free = slice(4, rows)
        assert (
            mass[head, free][chosen[free]].min() >= mass[head, free][~chosen[free]].max() * 0.9999
        )
