"""Selected rows go straight into the idle pool, which stays on the device.

The host gathers them for a copy, as in a full transfer but through the staging of one layer, while
it is well in time. When it is not, the device reads the rows out of the full pool itself: that
takes hardly any time of the host's cores, which then scan, and rows cross the memory of the host
once instead of three times; but the device's steps take longer meanwhile.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence

import jax
import numpy as np

from herald_jax.kv.cuda_driver import CudaError
from herald_jax.kv.device_cache import Buffer, DeviceCache, cleared, zeros
from herald_jax.kv.pool_transfer import PoolTransfer, own_rows, with_tails
from herald_jax.kv.row_reader import RowOrder, RowReader, Wait
from herald_jax.kv.transfer import fetched

#: The share of the time that the last block's retrieval had in which one shall end.
IN_TIME = 0.9
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
        wait: Wait,
    ) -> None:
        """Allocates the idle pool, where the cache does not keep it.

        Args:
          parts: the slots [first, last) of each part-batch.
          reader: brings rows into the idle pool.
          wait: waits for the device; what it raises is what ``gather`` and ``settle`` raise.
        """
        super().__init__(cache.shape, parts)
        self.cache, self.reader, self._wait = cache, reader, wait
        # When this block's retrieval began, and the seconds that the last one had.
        self._begun, self._window = 0.0, 0.0
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
            self._wait(array.is_ready, "the end of the steps that attend the idle pool")  # type: ignore[attr-defined]
        first, _ = self.parts[part]
        order = RowOrder(first, extents, indices, counts, buffer, 2 * self.shape.block_size)
        if self._in_time(layer):
            self.reader.copy(order, self._wait)
        else:
            self.reader.read(layer, order)
        return int(counts.sum()) * self.shape.kv_heads

    def _in_time(self, layer: int) -> bool:
        """Whether all layers would be there well before they are awaited, at the pace so far."""
        elapsed = time.perf_counter() - self._begun
        return elapsed * self.shape.sparse_layers <= IN_TIME * self._window * (layer + 1)

    def begins(self) -> None:
        """See ``PoolTransfer.begins``."""
        self._begun = time.perf_counter()

    def awaited(self) -> None:
        """See ``PoolTransfer.awaited``."""
        self._window = time.perf_counter() - self._begun

    def send(self, layer: int) -> int:
        """See ``PoolTransfer.send``; all is under way already."""
        return layer

    def swap(
        self, cache: DeviceCache, sent: list[int], indices: np.ndarray, counts: np.ndarray
    ) -> jax.Array:
        """See ``PoolTransfer.swap``; two pools change places."""
        del indices, counts
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
        self._wait(self.reader.done, "selected rows on their way to the device")

    def forget(self, slot: int | None = None) -> None:
        """See ``PoolTransfer.forget``; a block without retrieval tells nothing of the next one."""
        if slot is None:
            self._window = 0.0

    def clear(self, slot: int) -> None:
        """See ``PoolTransfer.clear``."""
        self.reader.clear(slot)
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
