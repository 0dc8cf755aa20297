"""The device reads the selected rows out of the full pool itself: nothing is gathered on the host.

That takes no staging and hardly any time of the host's cores, which scan meanwhile, and rows cross
the memory of the host once instead of three times.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import numpy as np

from herald_jax.kv.cuda_driver import CudaError
from herald_jax.kv.device_cache import Buffer, DeviceCache, cleared, zeros
from herald_jax.kv.pool_transfer import PoolTransfer, own_rows, with_tails
from herald_jax.kv.row_reader import RowReader
from herald_jax.kv.transfer import fetched

#: What the device may still read must stay where it is until the process ends.
_UNENDED: list[DirectTransfer] = []


class DirectTransfer(PoolTransfer[int]):
    """Two pools on the device that change places; rows are read into the one that is idle.

    Where step 0 refines, the candidates that it chose from are the idle pool until the boundary.
    """

    def __init__(
        self,
        cache: DeviceCache,
        parts: Sequence[tuple[int, int]],
        reader: RowReader,
        *,
        ready: Callable[[jax.Array], None],
        read: Callable[[Callable[[], bool]], None],
    ) -> None:
        """Allocates the idle pool, where the cache does not keep it.

        Args:
          ready: returns once an array is ready; ``read``: once the call says so. Both raise if that
            takes too long.
        """
        super().__init__(cache.shape, parts)
        self.cache, self.reader, self._ready, self._read = cache, reader, ready, read
        self._idle: list[Buffer] = []
        if not cache.shape.refines:
            rows = self.shape.buffer_shape(self.shape.pool_rows)
            self._idle = zeros(self.shape.sparse_layers, rows, self.shape.dtype, cache.device)

    @property
    def nbytes(self) -> int:
        """See ``PoolTransfer.nbytes``."""
        return self.reader.nbytes

    def gather(
        self,
        layer: int,
        part: int,
        extents: Sequence[np.ndarray],
        indices: np.ndarray,
        counts: np.ndarray,
    ) -> int:
        """See ``PoolTransfer.gather``; the rows are under way when it returns."""
        buffer = self._buffers()[layer]
        # What still attends these rows must have ended.
        for array in buffer:
            self._ready(array)
        first, _ = self.parts[part]
        offset = 2 * self.shape.block_size
        self.reader.read(layer, first, extents, indices, counts, buffer, offset)
        return int(counts.sum()) * self.shape.kv_heads

    def send(self, layer: int) -> int:
        """See ``PoolTransfer.send``; all is under way already."""
        return layer

    def swap(
        self, cache: DeviceCache, sent: list[int], indices: np.ndarray, counts: np.ndarray
    ) -> jax.Array:
        """See ``PoolTransfer.swap``; waits for the last rows, then two pools change places."""
        del indices, counts
        self._read(self.reader.done)
        sent.clear()
        idle = self._buffers()
        cache.candidates = []
        cache.pool, before, committed = _exchanged(idle, cache.pool, self.shape.block_size)
        if not self.shape.refines:
            self._idle = before
        return fetched(committed)

    def _buffers(self) -> list[Buffer]:
        return self.cache.candidates if self.shape.refines else self._idle

    def settle(self) -> None:
        """See ``PoolTransfer.settle``."""
        self._read(self.reader.done)

    def clear(self, slot: int) -> None:
        """See ``PoolTransfer.clear``."""
        if self._idle:
            self._idle = cleared(self._idle, np.int32(slot))

    def close(self) -> None:
        """See ``PoolTransfer.close``."""
        try:
            ended = self.reader.done()
        except CudaError:
            ended = False
        if not ended:
            _UNENDED.append(self)
            return
        self.reader.close()
        self._idle = []


@functools.partial(jax.jit, donate_argnums=(0, 1), static_argnums=2)
def _exchanged(
    idle: list[Buffer], active: list[Buffer], block: int
) -> tuple[list[Buffer], list[Buffer], jax.Array]:
    """The idle pool with the committed block as its tail, the active one, and committed rows."""
    return with_tails(idle, active, block), active, own_rows(active, block)
