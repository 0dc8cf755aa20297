"""Attention over rows that were chosen before and those behind the selectable ones."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import host_kernels as hk
from host_kernels import reference

BF16 = np.dtype(ml_dtypes.bfloat16)
LENGTHS = [0, 1, 17, 33, 64, 200, 9000]


@pytest.fixture(params=hk.cpu_info()["available"])
def isa(request):
    before = hk.cpu_info()["isa"]
    hk.set_isa(request.param)
    yield request.param
    hk.set_isa(before)


def draw(dim, group, dtype, *, heads=2, with_self=False, seed=0):
    """Slots of all lengths: what is chosen, where the tail begins, and unread rows of NaN."""
    rng = np.random.default_rng(seed)
    attend = np.array(LENGTHS, np.int32)
    select = np.maximum(attend - rng.integers(0, 40, len(attend)), 0).astype(np.int32)
    counts = (select * rng.uniform(0, 1, len(attend))).astype(np.int32)
    indices = np.full((len(attend), heads, max(1, int(counts.max()))), -1, np.int32)
    kv = []
    for n, rows in enumerate(LENGTHS):
        extent = rng.standard_normal((heads, 2, rows + 3, dim))
        read = np.zeros((heads, rows + 3), bool)
        read[:, select[n] : attend[n]] = True
        for h in range(heads):
            picked = np.sort(rng.permutation(select[n])[: counts[n]])
            indices[n, h, : counts[n]] = picked
            read[h, picked] = True
        kv.append(np.where(read[:, None, :, None], extent, np.nan).astype(dtype))
    q = (2 * rng.standard_normal((len(attend), heads * group, dim))).astype(BF16).astype(np.float32)
    own = rng.standard_normal((2, len(attend), heads, dim)).astype(np.float32)
    selves = dict(zip(("self_k", "self_v"), own, strict=True)) if with_self else {}
    return (q, kv, indices, counts, select, attend), selves


@pytest.mark.parametrize("dtype", [BF16, np.dtype(np.float32)])
@pytest.mark.parametrize(("dim", "group"), [(16, 1), (64, 4), (128, 3)])
@pytest.mark.parametrize("with_self", [False, True])
def test_it_is_attention_over_those_rows(isa, dtype, dim, group, with_self):
    call, own = draw(dim, group, dtype, with_self=with_self, seed=dim + group)
    out, status = hk.attend_rows(*call, **own, threads=3)
    want, want_status = reference.attend_rows(*call, **own)
    np.testing.assert_array_equal(status, want_status)
    assert not status.any()
    np.testing.assert_allclose(out, want, atol=2e-5, rtol=2e-5)


def test_all_rows_chosen_is_plain_attention(isa):
    rng = np.random.default_rng(1)
    kv = [rng.standard_normal((2, 2, rows, 32)).astype(BF16) for rows in (50, 5000)]
    q = rng.standard_normal((2, 8, 32)).astype(BF16).astype(np.float32)
    attend = np.array([50, 5000], np.int32)
    select = attend - 20
    indices = np.tile(np.arange(5000, dtype=np.int32), (2, 2, 1))
    out, status = hk.attend_rows(q, kv, indices, select, select, attend)
    nothing = np.zeros((2, 2, 1), np.int32)
    whole, _ = hk.attend_select(q, kv, attend, select, select * 0, nothing)
    assert not status.any()
    np.testing.assert_allclose(out, whole, atol=2e-5, rtol=2e-5)


def test_a_number_that_is_none_fails_its_slot_alone(isa):
    call, _ = draw(64, 4, BF16, seed=3)
    q, kv, indices, counts, _, _ = call
    clean, _ = hk.attend_rows(*call)
    assert counts[5] > 0
    kv[5][1, 1, indices[5, 1, 0], 7] = np.nan
    out, status = hk.attend_rows(*call)
    np.testing.assert_array_equal(status, [0, 0, 0, 0, 0, 1, 0])
    assert not out[5].any()
    np.testing.assert_array_equal(np.delete(out, 5, 0), np.delete(clean, 5, 0))
    q[0] = np.inf
    # Nothing is attended there.
    assert hk.attend_rows(*call)[1][0] == 0


def test_a_row_outside_its_extent_is_refused():
    call, _ = draw(64, 4, BF16)
    call[2][4, 1, 0] = 9001
    with pytest.raises(ValueError, match=r"indices\[4, 1, 0\] is 9001"):
        hk.attend_rows(*call)
