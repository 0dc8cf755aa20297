"""Rows of the full pool over the link: a kernel reads them, or what was gathered is copied."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

import host_kernels
from herald_jax.kv.cuda_driver import Context, CudaError, Kernel, Mark
from herald_jax.kv.device_cache import Buffer, CacheShape, zeros
from herald_jax.kv.row_reader import RowOrder, RowReader, Wait

SOURCE = Path(__file__).with_name("read_rows.cu")
#: Of the kernel: enough reads under way for the link, on few multiprocessors. Rows of K and of V
#: that a thread has under way, and slots of one launch at most.
BLOCKS, THREADS, ROWS, SLOTS = 4, 512, 8, 128
#: Bytes that a thread reads at once.
LANE_BYTES = 16


class _Slot(ctypes.Structure):
    _fields_ = [("rows", ctypes.c_uint64), ("span", ctypes.c_int), ("count", ctypes.c_int)]


class _Slots(ctypes.Structure):
    _fields_ = [("at", _Slot * SLOTS)]


class CudaReader(RowReader):
    """A kernel beside the programs of XLA reads rows as they lie, or gathered ones are copied."""

    def __init__(self, shape: CacheShape, pool: np.ndarray, device: jax.Device) -> None:
        """Maps the full pool for the device.

        Args:
          pool: all bytes of the full pool.

        Raises:
          CudaError: the driver refuses, or the kernel cannot be compiled.
          MemoryError: the host refuses the memory for indices.
        """
        size = (shape.slots, shape.kv_heads, shape.candidates)
        self.shape = shape
        self._lanes = shape.head_dim * shape.dtype.itemsize // LANE_BYTES
        self._context = Context(device.local_hardware_id or 0)
        options = [f"-DROWS={ROWS}", f"-DSLOTS={SLOTS}", f"-DTHREADS={THREADS}"]
        self._kernel = Kernel(self._context, SOURCE, "read_rows", options)
        self._lock = threading.Lock()
        self._mapped: list[np.ndarray] = []
        self._end = weakref.finalize(self, _release, self._context, self._kernel, self._mapped)
        # The end of the process frees everything, and the driver may be gone by then.
        self._end.atexit = False
        try:
            self._allocate(pool, size, device)
        except BaseException:
            self.close()
            raise

    def _allocate(self, pool: np.ndarray, size: tuple[int, ...], device: jax.Device) -> None:
        shape = self.shape
        # A layer's are written once those of the block before are no longer needed.
        self._orders = host_kernels.Arena(shape.sparse_layers * int(np.prod(size)) * 4)
        self._indices = self._orders.buffer.view(np.int32).reshape(-1, *size)
        # The kernel finds a layer's indices here, whatever else was queued before.
        self._wanted = jax.device_put(np.zeros(size, np.int32), device)
        # One layer, gathered; and when the copies of the slots from a first one on have ended.
        self._staging = host_kernels.Arena(shape.layer_bytes(shape.pool_rows))
        pair = self._staging.buffer.view(shape.dtype)
        self._keys, self._values = pair.reshape(2, *shape.buffer_shape(shape.pool_rows))
        self._copied: dict[int, Mark] = {}
        for each in (self._orders.buffer, self._staging.buffer, pool):
            self._context.map(each)
            self._mapped.append(each)
        self._wanted.block_until_ready()

    def read(self, layer: int, order: RowOrder) -> None:
        """See ``RowReader.read``."""
        self._indices[layer, order.slots] = order.indices
        for begin in range(0, len(order.extents), SLOTS):
            self._launch(layer, order, begin)

    def _launch(self, layer: int, order: RowOrder, begin: int) -> None:
        """Reads for ``SLOTS`` of an order's slots, from its ``begin``-th on."""
        shape, first, rows = self.shape, order.first + begin, order.buffer[0].shape[1]
        extents = order.extents[begin : begin + SLOTS]
        slots, count = _Slots(), len(extents)
        for n, extent in enumerate(extents):
            slots.at[n] = _Slot(extent.ctypes.data, extent.shape[2], int(order.counts[begin + n]))
        wanted = self._indices[layer, first : first + count]
        place = self._wanted.unsafe_buffer_pointer() + first * wanted[0].nbytes
        arguments: list[Any] = [
            slots,
            ctypes.c_uint64(place),
            *map(ctypes.c_int, (count, shape.kv_heads, shape.candidates, self._lanes)),
            *map(ctypes.c_uint64, self._places(order.buffer, first)),
            *map(ctypes.c_int, (rows, order.row_offset)),
        ]
        with self._open():
            self._kernel.copy(wanted, place)
            self._kernel.launch(BLOCKS, THREADS, arguments)

    @contextlib.contextmanager
    def _open(self) -> Iterator[None]:
        """Nothing is queued once the reader is closed, by a thread that was given up."""
        with self._lock:
            if not self._end.alive:
                raise CudaError("what reads rows is closed")
            yield

    def _places(self, buffer: Buffer, first: int) -> list[int]:
        """Where on the device a slot begins in K and in V."""
        return [
            array.unsafe_buffer_pointer() + first * (array.nbytes // array.shape[0])
            for array in buffer
        ]

    def copy(self, order: RowOrder, wait: Wait) -> None:
        """See ``RowReader.copy``."""
        first, slots = order.first, order.slots
        if (copied := self._copied.get(first)) is not None:
            wait(copied.passed, "the copy of gathered rows")
        order.gather(self._keys, self._values)
        places = self._places(order.buffer, first)
        with self._open():
            for gathered, place in zip((self._keys, self._values), places, strict=True):
                self._kernel.copy(gathered[slots], place)
            self._copied[first] = self._kernel.mark()

    def clear(self, slot: int) -> None:
        """See ``RowReader.clear``."""
        self._keys[slot] = 0
        self._values[slot] = 0

    def done(self) -> bool:
        """See ``RowReader.done``."""
        with self._lock:
            return not self._end.alive or self._kernel.done()

    @property
    def nbytes(self) -> int:
        """See ``RowReader.nbytes``."""
        return int(self._orders.buffer.nbytes + self._staging.buffer.nbytes)

    def close(self) -> None:
        """See ``RowReader.close``."""
        with self._lock:
            self._end()


#: Kernels that may still run, and the memory that they may still read.
_UNENDED: list[tuple[Any, ...]] = []


def _release(context: Context, kernel: Kernel, mapped: list[np.ndarray]) -> None:
    with contextlib.suppress(CudaError):
        if kernel.done():
            kernel.close()
            while mapped:
                context.unmap(mapped.pop())
            return
    _UNENDED.append((kernel, mapped))


def read_rate(device: jax.Device, seconds: float = 10.0) -> float:
    """GB/s (1e9 bytes) at which a device reads rows of 256 bytes out of host memory.

    Args:
      seconds: that it may take.

    Raises:
      CudaError: it cannot, or does not end in time.
      MemoryError: the host refuses the memory.
    """
    slots, heads, rows, count, dim = 4, 4, 1 << 14, 1 << 12, 64
    shape = CacheShape(slots, rows, 0, 1, count, count, 0, heads, dim, np.dtype(np.float32))
    pool = host_kernels.Arena(slots * heads * 2 * rows * dim * 4).buffer
    extents = list(pool.view(np.float32).reshape(slots, heads, 2, rows, dim))
    indices = np.arange(0, rows, rows // count, dtype=np.int32)
    indices = np.ascontiguousarray(np.broadcast_to(indices, (slots, heads, count)))
    counts = np.full(slots, count, np.int32)
    (buffer,) = zeros(1, shape.buffer_shape(count), shape.dtype, device)
    jax.block_until_ready(buffer)
    order = RowOrder(0, extents, indices, counts, buffer, 0)
    reader = CudaReader(shape, pool, device)
    times = []
    try:
        for _ in range(3):
            began = time.perf_counter()
            reader.read(0, order)
            while not reader.done():
                if time.perf_counter() - began > seconds:
                    _UNENDED.append(buffer)
                    raise CudaError(
                        f"waited {seconds:g} s for the device to read rows of host memory"
                    )
            times.append(time.perf_counter() - began)
    finally:
        reader.close()
    return shape.layer_bytes(count) / min(times) / 1e9
