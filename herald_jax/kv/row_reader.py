"""Selected rows on their way from the full pool into buffers that the device holds.

Either the device reads them itself, which takes some of its multiprocessors from whatever else it
runs, or the host gathers them for a copy, which takes time of its cores.
"""

from __future__ import annotations

import abc
import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import host_kernels
from herald_jax.kv.cuda_driver import Context, Kernel, Mark
from herald_jax.kv.device_cache import Buffer, CacheShape

#: Returns once the call says so, and raises, naming what it waited for, if that takes too long.
Wait = Callable[[Callable[[], bool], str], None]

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
    def copy(
        self,
        first: int,
        extents: Sequence[np.ndarray],
        indices: np.ndarray,
        counts: np.ndarray,
        buffer: Buffer,
        row_offset: int,
        wait: Wait,
    ) -> None:
        """As ``read``, but gathers the rows now and starts to copy them.

        What else the buffer holds of these slots is overwritten by finite numbers.

        Args:
          wait: for the copy before of the same slots.
        """

    @abc.abstractmethod
    def clear(self, slot: int) -> None:
        """Forgets what was copied of a slot, which may not be finite; nothing may be under way."""

    @abc.abstractmethod
    def done(self) -> bool:
        """Whether all rows are there.

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

    def copy(
        self,
        first: int,
        extents: Sequence[np.ndarray],
        indices: np.ndarray,
        counts: np.ndarray,
        buffer: Buffer,
        row_offset: int,
        wait: Wait,
    ) -> None:
        """See ``RowReader.copy``."""
        del wait
        self.read(0, first, extents, indices, counts, buffer, row_offset)

    def clear(self, slot: int) -> None:
        """See ``RowReader.clear``."""

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
          MemoryError: the host refuses the memory for indices.
        """
        size = (shape.slots, shape.kv_heads, shape.candidates)
        self.shape = shape
        self._lanes = shape.head_dim * shape.dtype.itemsize // LANE_BYTES
        self._context = Context(device.local_hardware_id or 0)
        options = [f"-DROWS={ROWS}", f"-DSLOTS={SLOTS}"]
        self._kernel = Kernel(self._context, SOURCE, "read_rows", options)
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
        self._mapped: list[np.ndarray] = []
        for each in (self._orders.buffer, self._staging.buffer, pool):
            self._context.map(each)
            self._mapped.append(each)
        self._wanted.block_until_ready()

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
        self._indices[layer, first : first + len(extents)] = indices
        for begin in range(0, len(extents), SLOTS):
            some = slice(begin, begin + SLOTS)
            self._launch(layer, first + begin, extents[some], counts[some], buffer, row_offset)

    def _launch(
        self,
        layer: int,
        first: int,
        extents: Sequence[np.ndarray],
        counts: np.ndarray,
        buffer: Buffer,
        row_offset: int,
    ) -> None:
        shape, count, rows = self.shape, len(extents), buffer[0].shape[1]
        slots = _Slots()
        for n, extent in enumerate(extents):
            slots.at[n] = _Slot(extent.ctypes.data, extent.shape[2], int(counts[n]))
        wanted = self._indices[layer, first : first + count]
        place = self._wanted.unsafe_buffer_pointer() + first * wanted[0].nbytes
        self._kernel.copy(wanted, place)
        arguments: list[Any] = [
            slots,
            ctypes.c_uint64(place),
            *map(ctypes.c_int, (count, shape.kv_heads, shape.candidates, self._lanes)),
            *map(ctypes.c_uint64, self._places(buffer, first)),
            *map(ctypes.c_int, (rows, row_offset)),
        ]
        self._kernel.launch(BLOCKS, THREADS, arguments)

    def _places(self, buffer: Buffer, first: int) -> list[int]:
        """Where on the device a slot begins in K and in V."""
        return [
            array.unsafe_buffer_pointer() + first * (array.nbytes // array.shape[0])
            for array in buffer
        ]

    def copy(
        self,
        first: int,
        extents: Sequence[np.ndarray],
        indices: np.ndarray,
        counts: np.ndarray,
        buffer: Buffer,
        row_offset: int,
        wait: Wait,
    ) -> None:
        """See ``RowReader.copy``."""
        if (copied := self._copied.get(first)) is not None:
            wait(copied.passed, "the copy of gathered rows")
        cut = slice(first, first + len(extents))
        keys, values = self._keys[cut], self._values[cut]
        host_kernels.gather(extents, indices, counts, keys, values, row_offset=row_offset)
        for gathered, place in zip((keys, values), self._places(buffer, first), strict=True):
            self._kernel.copy(gathered, place)
        self._copied[first] = self._kernel.mark()

    def clear(self, slot: int) -> None:
        """See ``RowReader.clear``."""
        self._keys[slot] = 0
        self._values[slot] = 0

    def done(self) -> bool:
        """See ``RowReader.done``."""
        return self._kernel.done()

    @property
    def nbytes(self) -> int:
        """See ``RowReader.nbytes``."""
        return int(self._orders.buffer.nbytes + self._staging.buffer.nbytes)

    def close(self) -> None:
        """See ``RowReader.close``."""
        self._copied = {}
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
