"""Gather and store against the NumPy reference, on every instruction set of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import host_kernels as hk
from host_kernels import reference

DTYPES = [np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)]
ISAS = hk.cpu_info()["available"]


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test on each instruction set, then goes back to the one before."""
    before = hk.cpu_info()["isa"]
    hk.set_isa(request.param)
    yield request.param
    hk.set_isa(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 3])
def test_store_then_gather(isa: str, dtype: np.dtype[Any], threads: int) -> None:
    rng = np.random.default_rng(0)
    shapes = [(2, 2, 40, 48), (2, 2, 700, 48), (2, 2, 5, 48)]
    kv = [rng.standard_normal(shape).astype(dtype) for shape in shapes]
    twin = [extent.copy() for extent in kv]
    start, counts = np.array([7, 100, 99], np.int32), np.array([33, 300, 0], np.int32)
    k, v = rng.standard_normal((2, 3, 300, 2, 48)).astype(dtype)
    hk.store(kv, start, counts, k, v, threads=threads)
    reference.store(twin, start, counts, k, v)
    for extent, other in zip(kv, twin, strict=True):
        np.testing.assert_array_equal(extent, other)

    indices = np.full((3, 2, 310), -1, np.int32)
    for n, shape in enumerate(shapes):
        used = min(int(counts[n]), shape[2])
        indices[n, :, :used] = rng.integers(0, shape[2], (2, used))
    buffers = [np.full((3, 320, 2, 48), 9, dtype) for _ in range(4)]
    hk.gather(kv, indices, counts, *buffers[:2], row_offset=5, threads=threads)
    reference.gather(kv, indices, counts, *buffers[2:], row_offset=5)
    np.testing.assert_array_equal(buffers[0], buffers[2])
    np.testing.assert_array_equal(buffers[1], buffers[3])


@pytest.mark.parametrize("bad", [-1, 40, 2**31 - 1, -(2**31)])
def test_gather_refuses_an_index_before_writing(bad: int) -> None:
    kv = [np.ones((2, 2, 40, 16), np.float32)] * 2
    indices = np.zeros((2, 2, 8), np.int32)
    indices[1, 1, 5] = bad
    out_k, out_v = np.zeros((2, 2, 10, 2, 16), np.float32)
    for module in (hk, reference):
        with pytest.raises(ValueError, match=r"indices\[1"):
            module.gather(kv, indices, np.array([8, 8], np.int32), out_k, out_v)
    assert not out_k.any()
    # An entry past the count is not looked at.
    hk.gather(kv, indices, np.array([8, 5], np.int32), out_k, out_v)
    assert out_k[0, :8].all()
    assert not out_k[1, 5:].any()
