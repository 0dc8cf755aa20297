"""The device reading selected rows itself, against the gather on the host."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import host_kernels
from herald_jax.engine.transfers import row_reader
from herald_jax.kv.device_cache import CacheShape


def shape_of(slots: int, heads: int, dim: int, candidates: int, dtype: type) -> CacheShape:
    return CacheShape(
        slots=slots,
        rows=128,
        exact_layers=0,
        sparse_layers=2,
        selected=candidates,
        candidates=candidates,
        block_size=8,
        kv_heads=heads,
        head_dim=dim,
        dtype=np.dtype(dtype),
        transfer="direct",
    )


def wait(done, what="rows"):
    deadline = time.monotonic() + 30
    while not done():
        assert time.monotonic() < deadline, what
        time.sleep(1e-4)


@pytest.mark.parametrize(
    "platform",
    [
        "cpu",
        pytest.param(
            "gpu",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a CUDA device"),
            ],
        ),
    ],
)
@pytest.mark.parametrize("how", ["read", "copied"])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize(
    ("slots", "heads", "dim", "candidates"),
    [(1, 1, 16, 1), (3, 2, 16, 7), (2, 4, 128, 65), (5, 8, 80, 33), (20, 4, 128, 96)],
)
def test_rows_are_those_of_a_gather(platform, how, dtype, slots, heads, dim, candidates):
    """Extents of several lengths, and slots that want nothing.

    What is read leaves all other rows alone; what is copied leaves finite numbers there.
    """
    shape = shape_of(slots, heads, dim, candidates, dtype)
    device = jax.devices(platform)[0]
    rng = np.random.default_rng(slots)
    rows = [candidates + 3 * n for n in range(slots)]
    sizes = [heads * 2 * each * dim for each in rows]
    pool = host_kernels.Arena(2 * sum(sizes) * np.dtype(dtype).itemsize).buffer
    numbers = pool.view(dtype)
    numbers[:] = rng.standard_normal(numbers.shape).astype(dtype)
    ends = np.cumsum([0, *sizes * 2])
    extents = [
        [
            numbers[ends[layer * slots + n] : ends[layer * slots + n + 1]].reshape(
                heads, 2, rows[n], dim
            )
            for n in range(slots)
        ]
        for layer in range(2)
    ]
    reader = row_reader(shape, pool, device)
    parts = [(0, slots)] if slots == 1 else [(0, slots // 2), (slots // 2, slots)]
    with jax.default_device(device):
        for layer in range(2):
            counts = rng.integers(0, candidates + 1, slots).astype(np.int32)
            counts[0] = candidates
            indices = np.full((slots, heads, candidates), -1, np.int32)
            for n in range(slots):
                for head in range(heads):
                    chosen = rng.choice(rows[n], counts[n], replace=False)
                    indices[n, head, : counts[n]] = np.sort(chosen)
            size = (slots, 16 + candidates, heads, dim)
            before = [rng.standard_normal(size).astype(dtype) for _ in range(2)]
            buffer = tuple(jnp.array(part) + 0 for part in before)
            jax.block_until_ready(buffer)
            for first, last in parts:
                cut = slice(first, last)
                given = extents[layer][cut], indices[cut], counts[cut], buffer, 16
                if how == "read":
                    reader.read(layer, first, *given)
                else:
                    reader.copy(first, *given, wait)
            wait(reader.done)
            host_kernels.gather(extents[layer], indices, counts, *before, row_offset=16)
            for found, wanted in zip(map(np.asarray, buffer), before, strict=True):
                if how == "read":
                    np.testing.assert_array_equal(found, wanted)
                assert np.isfinite(found.astype(np.float32)).all()
                for n, count in enumerate(counts):
                    used = slice(16, 16 + count)
                    np.testing.assert_array_equal(found[n, used], wanted[n, used])
    reader.close()
