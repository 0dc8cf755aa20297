"""KV on the device: full buffers of the exact layers, the active sparse pool of the others."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from host_kernels import IndexKind

Buffer = tuple[jax.Array, jax.Array]
#: How selected rows come to the device: all of them copied, or those that it lacks, or all of them
#: read by the device itself.
Transfer = Literal["full", "changes", "direct"]


@dataclass(frozen=True)
class CacheShape:
    """Sizes of the device's KV for one engine.

    Attributes:
      slots: N; ``rows``: positions of an exact buffer (the longest request, whole blocks).
      exact_layers, sparse_layers: how the network's layers are split.
      selected: K's capacity; ``candidates``: C's capacity, rows fetched per block.
      block_size, kv_heads, head_dim, dtype: of the network.
      whole_layers: layers whose whole KV is on the device, or on its way there, at once; no idle
        pool is fetched then. 0 for methods that never fetch whole layers.
      within_step: no idle pool is fetched either, but a block's pool while its step 0 runs, in the
        place of the pool before it.
      partial_channels: P, channels of every key that stay on the device to choose by.
      key_index: the index of its keys that the full pool keeps, or None.
      transfer: how the rows of the next block come to the device.
      masks: of the next block, those that step 1 carries along beside the draft; more than one
        attend together with it.
    """

    slots: int
    rows: int
    exact_layers: int
    sparse_layers: int
    selected: int
    candidates: int
    block_size: int
    kv_heads: int
    head_dim: int
    dtype: np.dtype
    whole_layers: int = 0
    within_step: bool = False
    partial_channels: int = 0
    key_index: IndexKind | None = None
    transfer: Transfer = "full"
    masks: int = 1

    @property
    def nothing(self) -> np.ndarray:
        """The extent [H_kv, 2, 0, D] of a slot that takes no part in a selection."""
        return np.zeros((self.kv_heads, 2, 0, self.head_dim), self.dtype)

    @property
    def pool_rows(self) -> int:
        """Rows of a pool at a block boundary: own block, tail, candidates."""
        return 2 * self.block_size + self.candidates

    def buffer_shape(self, rows: int, slots: int | None = None) -> tuple[int, int, int, int]:
        """[N, rows, H_kv, D]."""
        return (slots or self.slots, rows, self.kv_heads, self.head_dim)

    def layer_bytes(self, rows: int, slots: int | None = None) -> int:
        """Bytes of one layer's K and V with ``rows`` rows a slot."""
        return 2 * int(np.prod(self.buffer_shape(rows, slots))) * self.dtype.itemsize

    @property
    def exact_bytes(self) -> int:
        """Bytes of the exact layers' buffers."""
        return self.exact_layers * self.layer_bytes(self.rows)

    @property
    def pool_bytes(self) -> int:
        """Bytes of the active sparse pool."""
        return self.sparse_layers * self.layer_bytes(self.pool_rows) if self.sparse_layers else 0

    @property
    def refines(self) -> bool:
        """Whether step 0 keeps K of C candidates."""
        return self.candidates > self.selected

    @property
    def keeps_candidates(self) -> bool:
        """Whether what step 0 chose from stays until the boundary."""
        return self.refines and self.transfer != "full"

    @property
    def resting_bytes(self) -> int:
        """Bytes of pools and partial keys between two blocks."""
        if self.transfer != "direct":
            return self.pool_bytes + self.partial_bytes
        idle = 0 if self.refines else self.pool_bytes
        return self.pool_bytes + idle + self.named_bytes // self.sparse_layers

    @property
    def refined_bytes(self) -> int:
        """Bytes of what step 0 keeps, where the candidates stay for the next block's changes."""
        if not (self.transfer == "changes" and self.refines):
            return 0
        return self.sparse_layers * self.layer_bytes(2 * self.block_size + self.selected)

    @property
    def active_bytes(self) -> int:
        """Bytes of the pool that a block attends, at the peak of the block.

        Where step 0 refines it, the candidates of a layer go as soon as the best of them are kept,
        and all of them before anything of the next pool arrives; with direct transfers they are the
        idle pool from then on.
        """
        if self.transfer == "changes" or not self.refines:
            return self.pool_bytes + self.refined_bytes
        return self.sparse_layers * self.layer_bytes(2 * self.block_size + self.selected)

    @property
    def change_bytes(self) -> int:
        """Bytes of one layer's changes where every row is new: int32 sources, K and V rows."""
        rows = self.slots * self.kv_heads * self.candidates
        return rows * (4 + 2 * self.head_dim * self.dtype.itemsize)

    @property
    def named_bytes(self) -> int:
        """Bytes of the rows of all layers by number, int32, where the device reads them itself."""
        return self.sparse_layers * self.slots * self.kv_heads * self.candidates * 4

    @property
    def changes_room(self) -> int:
        """Bytes of changes that may be on the device at once: 7/8 of all, but a whole layer.

        Layers that find no room are copied at the block boundary, where that is not hidden.
        """
        return max(8, 7 * self.sparse_layers) * self.change_bytes // 8

    @property
    def incoming_bytes(self) -> int:
        """Bytes on the device of what is on its way there: changes, idle pool or whole layers.

        At the boundary changes make a layer's new pool beside its old one.
        """
        if self.whole_layers:
            return self.whole_layers * self.layer_bytes(self.rows)
        if self.within_step:
            return 0
        if self.transfer == "changes":
            return self.changes_room + self.layer_bytes(self.pool_rows)
        if self.transfer == "direct":
            return self.pool_bytes + self.named_bytes // self.sparse_layers
        return self.pool_bytes

    @property
    def staging_bytes(self) -> int:
        """Bytes on the host of what is on its way to the device, or of which rows it shall read."""
        if self.transfer == "changes":
            return self.sparse_layers * self.change_bytes
        if self.transfer == "direct":
            return self.named_bytes + self.layer_bytes(self.pool_rows)
        return self.pool_bytes if self.within_step else self.incoming_bytes

    @property
    def partial_bytes(self) -> int:
        """Bytes of partial keys and, in float32, of what turns keys into them."""
        keys = self.rows * self.dtype.itemsize + self.head_dim * 4
        return self.sparse_layers * self.slots * self.kv_heads * self.partial_channels * keys

    @property
    def device_bytes(self) -> int:
        """Bytes of KV held on the device: exact buffers, active pool, what is on its way, part of
        the keys."""
        pools = self.active_bytes + self.incoming_bytes
        return self.exact_bytes + pools + self.partial_bytes


def zeros(layers: int, shape: tuple[int, ...], dtype: np.dtype, device: jax.Device) -> list[Buffer]:
    """Zeroed K and V for ``layers`` layers, made on the device."""
    buffers: list[Buffer] = _filler(layers, shape, np.dtype(dtype), device)()
    return buffers


@functools.lru_cache
def _filler(
    layers: int, shape: tuple[int, ...], dtype: np.dtype, device: jax.Device
) -> Callable[[], list[Buffer]]:
    def fill() -> list[Buffer]:
        return [(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(layers)]

    return jax.jit(fill, out_shardings=SingleDeviceSharding(device))


class DeviceCache:
    """The buffers the main stream owns; programs donate and replace them.

    Attributes:
      exact: the exact layers' buffers; ``pool``: the active sparse pool.
      candidates: the pool as it was at the boundary, where step 0 refined it and the transfer
        keeps it: changes need all of its rows, and direct ones its room; empty otherwise.
    """

    def __init__(self, shape: CacheShape, device: jax.Device) -> None:
        self.shape, self.device = shape, device
        self.exact: list[Buffer] = []
        self.pool: list[Buffer] = []
        self.candidates: list[Buffer] = []
        self.reset()

    def reset(self) -> None:
        """Empty buffers; nothing refers to the old ones while the new ones are made."""
        shape = self.shape
        self.exact, self.pool = [], []
        rows = shape.buffer_shape(shape.rows)
        self.exact = zeros(shape.exact_layers, rows, shape.dtype, self.device)
        self.reset_pool()

    def clear(self, slot: int) -> None:
        """Forgets a slot's rows, which numbers that are not finite would outlive.

        Rows beyond a request's length weigh nothing, but nothing times NaN is NaN.
        """
        self.exact = cleared(self.exact, np.int32(slot))
        self.pool = cleared(self.pool, np.int32(slot))

    def reset_pool(self) -> None:
        """An empty active pool, for when nothing was retrieved for the coming block."""
        shape = self.shape
        # Nothing refers to the old one while the new one is made.
        self.candidates, self.pool = [], []
        self.pool = zeros(
            shape.sparse_layers, shape.buffer_shape(shape.pool_rows), shape.dtype, self.device
        )


@functools.partial(jax.jit, donate_argnums=0)
def cleared(buffers: list[Buffer], slot: jax.Array) -> list[Buffer]:
    """The same with zeros for a slot."""
    return [(k.at[slot].set(0), v.at[slot].set(0)) for k, v in buffers]
