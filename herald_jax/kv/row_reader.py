"""Selected rows on their way from the full pool into buffers that the device holds.

Either the device reads them itself, which takes some of its multiprocessors from whatever else it
runs, or the host gathers them for a copy, which takes time of its cores.
"""

from __future__ import annotations

import abc
import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np

import host_kernels
from herald_jax.kv.device_cache import Buffer

#: Returns once the call says so, and raises, naming what it waited for, if that takes too long.
Wait = Callable[[Callable[[], bool], str], None]


@dataclass(frozen=True)
class RowOrder:
    """Rows of slots [first, first + n) that a buffer shall hold.

    ``buffer[0][first + i, row_offset + j, h] = extents[i][h, 0, indices[i, h, j]]`` for
    ``j < counts[i]``, and ``buffer[1]`` likewise from ``extents[i][h, 1]``.

    Attributes:
      extents: n of [H_kv, 2, rows, D], in the full pool.
      indices: int32 [n, H_kv, C]; ``counts``: int32 [n].
      buffer: (k, v) [N, R, H_kv, D] on the device, ready.
    """

    first: int
    extents: Sequence[np.ndarray]
    indices: np.ndarray
    counts: np.ndarray
    buffer: Buffer
    row_offset: int

    @property
    def slots(self) -> slice:
        """Those of the buffer."""
        return slice(self.first, self.first + len(self.extents))

    def gather(self, keys: np.ndarray, values: np.ndarray) -> None:
        """Gathers the rows into arrays of the buffer's shape on the host."""
        host_kernels.gather(
            self.extents,
            self.indices,
            self.counts,
            keys[self.slots],
            values[self.slots],
            row_offset=self.row_offset,
        )


class RowReader(abc.ABC):
    """Writes rows into buffers behind JAX's back: nothing may use them until they are read."""

    @abc.abstractmethod
    def read(self, layer: int, order: RowOrder) -> None:
        """Starts to read; may return before the rows are there.

        Args:
          layer: which must have been read before it is asked for again.
        """

    @abc.abstractmethod
    def copy(self, order: RowOrder, wait: Wait) -> None:
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

    def read(self, layer: int, order: RowOrder) -> None:
        """See ``RowReader.read``."""
        del layer
        order.gather(*map(_memory, order.buffer))

    def copy(self, order: RowOrder, wait: Wait) -> None:
        """See ``RowReader.copy``."""
        del wait
        self.read(0, order)

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
