"""Selected rows of the full pool, read by the device itself into buffers that it holds."""

from __future__ import annotations

import abc
import ctypes
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

import host_kernels
from herald_jax.kv.cuda_driver import Context, Kernel
from herald_jax.kv.device_cache import Buffer, CacheShape

SOURCE = Path(__file__).with_name("read_rows.cu")
#: Of the kernel: enough reads under way for the link, on few multiprocessors.
BLOCKS, THREADS = 4, 512
#: Bytes a thread reads at once, and what the kernel knows of a slot in shared memory.
LANE_BYTES, SLOT_BYTES = 16, 24


class RowReader(abc.ABC):
    """Writes rows into buffers behind JAX's back: nothing may use them until they are read."""

    @abc.abstractmethod
    def read(
        self,
        layer: int,
        first: int,
        extents: Sequence[np.ndarray],
        indices: np.ndarray,
        counts: np.ndarray,
        buffer: Buffer,
        row_offset: int,
    ) -> None:
        """Starts to read rows of slots [first, first + n); may return before they are there.

        ``buffer[0][first + i, row_offset + j, h] = extents[i][h, 0, indices[i, h, j]]`` for
        ``j < counts[i]``, and ``buffer[1]`` likewise from ``extents[i][h, 1]``.

        Args:
          layer: which must have been read before it is asked for again.
          extents: n of [H_kv, 2, rows, D], in the full pool.
          indices: int32 [n, H_kv, C]; ``counts``: int32 [n].
          buffer: (k, v) [N, R, H_kv, D] on the device, ready.
        """

    @abc.abstractmethod
    def done(self) -> bool:
        """Whether all rows have been read.

        Raises:
          CudaError: the device failed.
        """

    @property
    @abc.abstractmethod
    def nbytes(self) -> int:
        """Bytes of host memory beside the full pool."""

    @abc.abstractmethod
    def close(self) -> None:
        """Gives back what the device knows of host memory; nothing may be under way."""


class HostReader(RowReader):
    """Where the device is the CPU: the rows are copied at once."""

    def read(
        self,
        layer: int,
        first: int,
        extents: Sequence[np.ndarray],
        indices: np.ndarray,
        counts: np.ndarray,
        buffer: Buffer,
        row_offset: int,
    ) -> None:
        """See ``RowReader.read``."""
        del layer
        last = first + len(extents)
        keys, values = (_memory(array)[first:last] for array in buffer)
        host_kernels.gather(extents, indices, counts, keys, values, row_offset=row_offset)

    def done(self) -> bool:
        """See ``RowReader.done``."""
        return True

    @property
    def nbytes(self) -> int:
        """See ``RowReader.nbytes``."""
        return 0

    def close(self) -> None:
        """See ``RowReader.close``."""


class CudaReader(RowReader):
    """A kernel beside the programs of XLA reads the rows over the link, as they lie."""

    def __init__(self, shape: CacheShape, pool: np.ndarray, device: jax.Device) -> None:
        """Maps the full pool for the device.

        Args:
          pool: all bytes of the full pool.

        Raises:
          CudaError: the driver refuses, or the kernel cannot be compiled.
          MemoryError: the host refuses the memory for orders.
        """
        layers, slots, heads = shape.sparse_layers, shape.slots, shape.kv_heads
        self.shape, self._pool = shape, pool
        self._lanes = shape.head_dim * shape.dtype.itemsize // LANE_BYTES
        self._context = Context(device.local_hardware_id or 0)
        self._kernel = Kernel(self._context, SOURCE, "read_rows")
        # What the kernel is told lies in mapped memory too, a place for each layer and slot.
        wide, size = layers * slots * 8, layers * slots * heads * shape.candidates * 4
        self._orders = host_kernels.Arena(2 * wide + layers * slots * 4 + size)
        whole = self._orders.buffer
        self._extents = whole[:wide].view(np.uint64).reshape(layers, slots)
        self._spans = whole[wide : 2 * wide].view(np.int64).reshape(layers, slots)
        rest = whole[2 * wide :].view(np.int32)
        self._counts = rest[: layers * slots].reshape(layers, slots)
        self._indices = rest[layers * slots :].reshape(layers, slots, heads, -1)
        self._mapped: list[np.ndarray] = []
        for each in (whole, pool):
            self._context.map(each)
            self._mapped.append(each)

    def read(
        self,
        layer: int,
        first: int,
        extents: Sequence[np.ndarray],
        indices: np.ndarray,
        counts: np.ndarray,
        buffer: Buffer,
        row_offset: int,
    ) -> None:
        """See ``RowReader.read``."""
        count, shape = len(extents), self.shape
        at = layer, slice(first, first + count)
        self._extents[at] = [extent.ctypes.data for extent in extents]
        self._spans[at] = [extent.shape[2] for extent in extents]
        self._counts[at] = counts
        self._indices[at] = indices
        told = (self._extents[at], self._spans[at], self._counts[at], self._indices[at])
        rows = buffer[0].shape[1]
        skipped = first * rows * shape.kv_heads * self._lanes * LANE_BYTES
        arguments = [
            *(ctypes.c_uint64(each.ctypes.data) for each in told),
            *map(ctypes.c_int, (count, shape.kv_heads, shape.candidates, self._lanes)),
            *(ctypes.c_uint64(array.unsafe_buffer_pointer() + skipped) for array in buffer),
            *map(ctypes.c_int, (rows, row_offset)),
        ]
        self._kernel.launch(BLOCKS, THREADS, count * SLOT_BYTES, arguments)

    def done(self) -> bool:
        """See ``RowReader.done``."""
        return self._kernel.done()

    @property
    def nbytes(self) -> int:
        """See ``RowReader.nbytes``."""
        return int(self._orders.buffer.nbytes)

    def close(self) -> None:
        """See ``RowReader.close``."""
        self._kernel.close()
        for each in self._mapped:
            self._context.unmap(each)
        self._mapped = []


def row_reader(shape: CacheShape, pool: np.ndarray, device: jax.Device) -> RowReader:
    """What reads rows for this device.

    Raises:
      CudaError: it cannot.
    """
    return HostReader() if device.platform == "cpu" else CudaReader(shape, pool, device)


def _memory(array: jax.Array) -> np.ndarray:
    """The memory of an array on the CPU, to be written."""
    kind = ctypes.c_uint8 * array.nbytes
    raw = np.ctypeslib.as_array(kind.from_address(array.unsafe_buffer_pointer()))
    return raw.view(array.dtype).reshape(array.shape)
