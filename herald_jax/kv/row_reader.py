"""Selected rows on their way from the full pool into buffers that the device holds.

Either the device reads them itself, which takes some of its multiprocessors from whatever else it
runs, or the host gathers them for a copy, which takes time of its cores.
"""

from __future__ import annotations

import abc
import ctypes
from collections.abc import Callable, Sequence

import jax
import numpy as np

import host_kernels
from herald_jax.kv.device_cache import Buffer

#: Returns once the call says so, and raises, naming what it waited for, if that takes too long.
Wait = Callable[[Callable[[], bool], str], None]


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
        """Gives back what the device knows of host memory, unless rows are under way for ever.

        From then on ``read`` and ``copy`` are refused, and all is ``done``.
        """


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


def _memory(array: jax.Array) -> np.ndarray:
    """The memory of an array on the CPU, to be written."""
    kind = ctypes.c_uint8 * array.nbytes
    raw = np.ctypeslib.as_array(kind.from_address(array.unsafe_buffer_pointer()))
    return raw.view(array.dtype).reshape(array.shape)
