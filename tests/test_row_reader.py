"""The device reading selected rows itself, against the gather on the host."""

from __future__ import annotations

import gc
import time

import fake_cuda
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import host_kernels
from herald_jax.kv import cuda_driver
from herald_jax.kv.cuda_driver import CudaError
from herald_jax.kv.cuda_row_reader import CudaReader, read_rate
from herald_jax.kv.device_cache import CacheShape
from herald_jax.kv.row_reader import HostReader, RowOrder


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
        "emulated",
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
def test_rows_are_those_of_a_gather(
    monkeypatch, platform, how, dtype, slots, heads, dim, candidates
):
    """Extents of several lengths, and slots that want nothing.

    What is read leaves all other rows alone; what is copied leaves finite numbers there.
    """
    shape = shape_of(slots, heads, dim, candidates, dtype)
    if platform == "emulated":
        fake_cuda.install(monkeypatch)
    device = jax.devices("cpu" if platform == "emulated" else platform)[0]
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
    reader = HostReader() if platform == "cpu" else CudaReader(shape, pool, device)
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
                order = RowOrder(first, *given)
                if how == "read":
                    reader.read(layer, order)
                else:
                    reader.copy(order, wait)
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


def test_what_was_mapped_is_unmapped_when_not_all_is_granted(monkeypatch):
    """So that the next attempt does not meet the leavings of this one."""
    fake = fake_cuda.install(monkeypatch)
    shape, pool = shape_of(2, 2, 16, 4, np.float32), host_kernels.Arena(1 << 16).buffer
    for granted in (0, 1, 2):
        fake.maps = granted
        with pytest.raises(CudaError, match="could not be mapped for the device: status 2"):
            CudaReader(shape, pool, jax.devices("cpu")[0])
        assert not fake.mapped
    fake.maps = 3
    reader = CudaReader(shape, pool, jax.devices("cpu")[0])
    assert len(fake.mapped) == 3
    assert sum(fake.mapped.values()) == shape.staging_bytes + pool.nbytes
    del reader
    gc.collect()
    assert not fake.mapped


def test_a_closed_reader_queues_nothing(monkeypatch):
    """A thread that was given up may come back at any time."""
    fake_cuda.install(monkeypatch)
    shape, pool = shape_of(1, 1, 16, 4, np.float32), host_kernels.Arena(1 << 12).buffer
    reader = CudaReader(shape, pool, jax.devices("cpu")[0])
    reader.close()
    assert reader.done()
    extent = pool[: 2 * 8 * 64].view(np.float32).reshape(1, 2, 8, 16)
    told = [extent], np.zeros((1, 1, 4), np.int32), np.ones(1, np.int32)
    buffer = jnp.zeros((1, 20, 1, 16)), jnp.zeros((1, 20, 1, 16))
    order = RowOrder(0, *told, buffer, 16)
    for start in (lambda: reader.read(0, order), lambda: reader.copy(order, wait)):
        with pytest.raises(CudaError, match="closed"):
            start()


def test_the_rate_of_reading_is_measured(monkeypatch):
    fake = fake_cuda.install(monkeypatch)
    assert read_rate(jax.devices("cpu")[0]) > 0
    assert fake.kernels == 3
    assert not fake.mapped


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="here the driver is there")
def test_a_machine_without_the_driver_is_told_so():
    cuda_driver.driver.cache_clear()
    with pytest.raises(CudaError, match=r"NVIDIA's driver could not be (loaded|started)"):
        cuda_driver.driver()
