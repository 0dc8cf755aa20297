"""How the rows that were selected for the next block become the active pool."""

from __future__ import annotations

import abc
import functools
from collections.abc import Sequence
from typing import Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

import host_kernels
from herald_jax.kv.device_cache import Buffer, CacheShape, DeviceCache
from herald_jax.kv.transfer import Staging, fetched

#: What a layer's ``send`` returns and ``swap`` takes.
Sent = TypeVar("Sent")


class PoolTransfer(abc.ABC, Generic[Sent]):
    """Rows on their way from the full pool to the pools of the sparse layers.

    Part-batches ``gather`` a layer's rows into staging, each on its own thread. Once all have, the
    layer is sent. At the block boundary ``swap`` makes what was sent the active pool, whose rows of
    a slot are ``[own block (B) | tail (B) | selected, ascending by position]``.

    Attributes:
      parts: the slots [first, last) of each part-batch.
    """

    def __init__(self, shape: CacheShape, parts: Sequence[tuple[int, int]]) -> None:
        self.shape, self.parts = shape, tuple(parts)

    @property
    @abc.abstractmethod
    def nbytes(self) -> int:
        """Bytes of staging."""

    @abc.abstractmethod
    def gather(
        self,
        layer: int,
        part: int,
        extents: Sequence[np.ndarray],
        indices: np.ndarray,
        counts: np.ndarray,
    ) -> int:
        """Gathers a part's rows of one layer, once earlier copies of its staging are done.

        Args:
          extents: per slot of the part [H_kv, 2, rows, D].
          indices: int32 [n, H_kv, C_cap], ascending; ``counts``: int32 [n], those in use.

        Returns:
          How many rows (of a position and KV head) were gathered.
        """

    def skip(self, layer: int, part: int) -> None:
        """Instead of ``gather``, for a part whose slots have failed: their rows mean nothing."""

    @abc.abstractmethod
    def send(self, layer: int) -> Sent:
        """Starts a layer's copies to the device, after all parts gathered or skipped it."""

    @abc.abstractmethod
    def swap(
        self, cache: DeviceCache, sent: list[Sent], indices: np.ndarray, counts: np.ndarray
    ) -> jax.Array:
        """Makes what was sent the active pool, with the committed block as its tail.

        Args:
          sent: of every sparse layer; emptied.
          indices: int32 [L, N, H_kv, C_cap] and ``counts``: int32 [N], as gathered.

        Returns:
          the committed block's rows [L, 2, N, B, H_kv, D], keys then values, on their way to the
          host.
        """

    def begins(self) -> None:
        """Says that a block's retrieval begins."""

    def awaited(self) -> None:
        """Says that the main stream waits from now on for what was begun."""

    def settle(self) -> None:
        """Waits until no row is under way to a place that will not wait for it."""

    def forget(self, slot: int | None = None) -> None:
        """Says that a slot's rows on the device (None: all slots') are not those of ``swap``."""

    @abc.abstractmethod
    def clear(self, slot: int) -> None:
        """Forgets a slot's rows that may not be finite numbers."""

    @abc.abstractmethod
    def close(self) -> None:
        """Gives staging back."""


class FullTransfer(PoolTransfer[Buffer]):
    """Every selected row is gathered and copied, to an idle pool that becomes the active one."""

    def __init__(
        self, shape: CacheShape, parts: Sequence[tuple[int, int]], device: jax.Device
    ) -> None:
        """Allocates staging for an idle pool.

        Raises:
          MemoryError: the host refuses it.
        """
        super().__init__(shape, parts)
        rows = shape.buffer_shape(shape.pool_rows)
        self.staging = Staging(shape.sparse_layers, rows, shape.dtype, device)

    @property
    def nbytes(self) -> int:
        """See ``PoolTransfer.nbytes``."""
        return self.staging.nbytes

    def gather(
        self,
        layer: int,
        part: int,
        extents: Sequence[np.ndarray],
        indices: np.ndarray,
        counts: np.ndarray,
    ) -> int:
        """See ``PoolTransfer.gather``."""
        first, last = self.parts[part]
        self.staging.reclaim(layer)
        host_kernels.gather(
            extents,
            indices,
            counts,
            self.staging.keys[layer][first:last],
            self.staging.values[layer][first:last],
            row_offset=2 * self.shape.block_size,
        )
        return int(counts.sum()) * self.shape.kv_heads

    def send(self, layer: int) -> Buffer:
        """See ``PoolTransfer.send``."""
        return self.staging.send(layer)

    def swap(
        self, cache: DeviceCache, sent: list[Buffer], indices: np.ndarray, counts: np.ndarray
    ) -> jax.Array:
        """See ``PoolTransfer.swap``; two references are exchanged."""
        del indices, counts
        cache.pool, committed = _swapped(list(sent), cache.pool, self.shape.block_size)
        sent.clear()
        return fetched(committed)

    def clear(self, slot: int) -> None:
        """See ``PoolTransfer.clear``."""
        self.staging.clear(slot)

    def close(self) -> None:
        """See ``PoolTransfer.close``."""
        self.staging.close()


@functools.partial(jax.jit, static_argnums=1)
def own_rows(pool: Sequence[Buffer], block: int) -> jax.Array:
    """The rows of the block just denoised [L, 2, N, B, H_kv, D], keys then values."""
    return jnp.stack([jnp.stack([k[:, :block], v[:, :block]]) for k, v in pool])


@functools.partial(jax.jit, donate_argnums=0, static_argnums=2)
def _swapped(
    idle: list[Buffer], active: list[Buffer], block: int
) -> tuple[list[Buffer], jax.Array]:
    """The idle pool with the committed block as its tail, and the committed rows."""
    return with_tails(idle, active, block), own_rows(active, block)


def with_tails(idle: list[Buffer], active: list[Buffer], block: int) -> list[Buffer]:
    """The idle pool with the committed block, the active one's own rows, as its tail."""

    def with_tail(buffer: jax.Array, own: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(buffer, own[:, :block], (0, block, 0, 0))

    return [
        (with_tail(k, own_k), with_tail(v, own_v))
        for (k, v), (own_k, own_v) in zip(idle, active, strict=True)
    ]
