"""Between two blocks most selected rows stay the same: only the others come from the host.

A layer's new pool is made on the device from the rows that it holds already and from flat arrays of
those that the previous selection lacked, so it is bit for bit the pool of a full transfer.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

import host_kernels
from herald_jax.kv.device_cache import Buffer, CacheShape, DeviceCache
from herald_jax.kv.pool_transfer import PoolTransfer, own_rows
from herald_jax.kv.transfer import Copies, RegisteredArrays, fetched, put

#: Shares of a layer's rows that may be copied: the smallest that holds the new ones is. Each is a
#: program of its own, so they are few.
SHARES = (0.25, 0.5, 0.75, 1.0)
Parts = tuple[tuple[int, int], ...]
#: Sources int32 [N, H_kv, C], and for every part its new rows (k, v) [F, D].
Arrived = tuple[jax.Array, tuple[Buffer, ...]]


@dataclass
class Changes:
    """One layer's changes.

    Attributes:
      size: which of the capacities holds them.
      copies: on their way to the device, or None while there is no room for them.
    """

    size: int
    copies: Arrived | None


def capacities(shape: CacheShape, parts: Parts) -> list[tuple[int, ...]]:
    """Rows copied for each part-batch, by size; the last holds every row."""
    rows = [(last - first) * shape.kv_heads * shape.candidates for first, last in parts]
    sizes = [tuple(math.ceil(share * count) for count in rows) for share in SHARES]
    return list(dict.fromkeys(sizes))


class ChangesTransfer(PoolTransfer[Changes]):
    """Gathers and copies the rows that the new selection has and the previous one lacked.

    At most ``CacheShape.changes_room`` bytes of them are on the device at once. Layers beyond that
    stay in staging until the boundary, where room is made layer by layer.
    """

    def __init__(
        self,
        shape: CacheShape,
        parts: Sequence[tuple[int, int]],
        device: jax.Device,
        wait: Callable[[jax.Array], None],
    ) -> None:
        """Allocates staging and compiles the programs of the boundary.

        Args:
          wait: returns once an array is ready, and raises if that takes too long.

        Raises:
          MemoryError: the host refuses staging.
        """
        super().__init__(shape, parts)
        self.device, self._wait = device, wait
        layers, heads = shape.sparse_layers, shape.kv_heads
        row = shape.head_dim
        sources = ((shape.slots, heads, shape.candidates), np.dtype(np.int32))
        rows = ((shape.slots * heads * shape.candidates, row), shape.dtype)
        self._memory = RegisteredArrays([sources, rows, rows] * layers, device)
        arrays = self._memory.arrays
        self._sources = arrays[::3]
        cuts = [slice(*(n * heads * shape.candidates for n in part)) for part in self.parts]
        self._rows = [
            [(k[cut], v[cut]) for cut in cuts]
            for k, v in zip(arrays[1::3], arrays[2::3], strict=True)
        ]
        self._missing = np.zeros((layers, len(self.parts)), np.int64)
        self._copies = Copies(layers)
        self._flying = [0] * layers
        self._held = np.full((layers, *sources[0]), -1, np.int32)
        self._held_counts = np.zeros(shape.slots, np.int32)
        self._capacities = capacities(shape, self.parts)
        # Sizes that the program does not depend on shall not compile it again.
        same = replace(shape, rows=0, exact_layers=0, sparse_layers=0)
        self._programs = [_renewal(same, self.parts, size, device) for size in self._capacities]

    @property
    def nbytes(self) -> int:
        """See ``PoolTransfer.nbytes``."""
        return self._memory.nbytes

    def gather(
        self,
        layer: int,
        part: int,
        extents: Sequence[np.ndarray],
        indices: np.ndarray,
        counts: np.ndarray,
    ) -> int:
        """See ``PoolTransfer.gather``; only new rows are gathered."""
        cut = slice(*self.parts[part])
        self._reclaim(layer)
        missing = host_kernels.gather_changes(
            extents,
            indices,
            counts,
            self._held[layer, cut],
            self._held_counts[cut],
            self._sources[layer][cut],
            *self._rows[layer][part],
        )
        self._missing[layer, part] = missing
        return missing

    def skip(self, layer: int, part: int) -> None:
        """See ``PoolTransfer.skip``."""
        self._reclaim(layer)
        # Any row that is there will do.
        self._sources[layer][slice(*self.parts[part])] = 0
        self._missing[layer, part] = 0

    def send(self, layer: int) -> Changes:
        """See ``PoolTransfer.send``; without room for it on the device, the layer has to wait."""
        size = next(
            index
            for index, capacity in enumerate(self._capacities)
            if (self._missing[layer] <= capacity).all()
        )
        return Changes(size, self._copy(layer, size) if self._fits(size) else None)

    def swap(
        self, cache: DeviceCache, sent: list[Changes], indices: np.ndarray, counts: np.ndarray
    ) -> jax.Array:
        """See ``PoolTransfer.swap``; every layer's pool is made anew, one after the other."""
        committed = fetched(own_rows(cache.pool, self.shape.block_size))
        layers = range(len(sent))
        late = deque(layer for layer in layers if sent[layer].copies is None)
        for layer in sorted(layers, key=lambda layer: layer in late):
            while late and self._fits(sent[late[0]].size):
                waiting = sent[late[0]]
                waiting.copies = self._copy(late.popleft(), waiting.size)
            changes = sent[layer]
            assert changes.copies is not None, "there is room for a layer when no other is there"
            source, rows = changes.copies
            for array in (source, *itertools.chain(*rows)):
                self._wait(array)
            active = cache.pool[layer]
            held = cache.candidates[layer] if cache.candidates else active
            cache.pool[layer] = self._programs[changes.size](held, active, source, rows)
            # No name may keep what the device is to reuse for the next layers.
            if cache.candidates:
                cache.candidates[layer] = cache.pool[layer]
            changes.copies = None
            del source, rows, array, active, held
            self._reclaim(layer)
        cache.candidates = []
        sent.clear()
        self._held[:] = indices
        self._held_counts[:] = counts
        return committed

    def forget(self, slot: int | None = None) -> None:
        """See ``PoolTransfer.forget``; all of their next rows are new."""
        self._held_counts[slot if slot is not None else slice(None)] = 0

    def clear(self, slot: int) -> None:
        """See ``PoolTransfer.clear``; of staging only rows just gathered are ever used."""
        self.forget(slot)

    def close(self) -> None:
        """See ``PoolTransfer.close``."""
        self._memory.close()
        self._sources, self._rows = [], []

    def _bytes(self, size: int) -> int:
        shape = self.shape
        rows = sum(self._capacities[size]) * 2 * shape.head_dim * shape.dtype.itemsize
        return rows + 4 * shape.slots * shape.kv_heads * shape.candidates

    def _fits(self, size: int) -> bool:
        return sum(self._flying) + self._bytes(size) <= self.shape.changes_room

    def _copy(self, layer: int, size: int) -> Arrived:
        source = put(self._sources[layer], self.device)
        rows = tuple(
            (put(k[:count], self.device), put(v[:count], self.device))
            for (k, v), count in zip(self._rows[layer], self._capacities[size], strict=True)
        )
        self._copies.started(layer, [source, *itertools.chain(*rows)])
        self._flying[layer] = self._bytes(size)
        return source, rows

    def _reclaim(self, layer: int) -> None:
        self._copies.reclaim(layer)
        self._flying[layer] = 0


@functools.lru_cache
def _renewal(
    shape: CacheShape, parts: Parts, capacity: tuple[int, ...], device: jax.Device
) -> Callable[..., Buffer]:
    """``_renewed``, compiled ahead for one size of changes: no block should meet a new one."""
    sharding = SingleDeviceSharding(device)

    def like(dims: tuple[int, ...], dtype: Any = shape.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)

    kept = shape.selected if shape.refines else shape.candidates
    held = like(shape.buffer_shape(shape.pool_rows))
    own = like(shape.buffer_shape(2 * shape.block_size + kept))
    source = like((shape.slots, shape.kv_heads, shape.candidates), np.int32)
    rows = tuple((like((n, shape.head_dim)),) * 2 for n in capacity)
    program = jax.jit(functools.partial(_renewed, parts, shape.block_size))
    return program.lower((held,) * 2, (own,) * 2, source, rows).compile()


def _renewed(
    parts: Parts,
    block: int,
    held: Buffer,
    own: Buffer,
    source: jax.Array,
    arrived: Sequence[Buffer],
) -> Buffer:
    """One layer's new pool.

    Args:
      held: [N, 2B + C, H_kv, D], the rows of the previous selection after the first 2B.
      own: [N, 2B + K or C, H_kv, D], the block just denoised before all others.
      source: int32 [N, H_kv, C]: a place in the previous selection, or -1 - f for row f of
        what arrived for the slot's part-batch.
      arrived: for every part-batch the new rows [F, D].
    """
    index = source.swapaxes(1, 2)
    places, fresh = jnp.maximum(index, 0) + 2 * block, jnp.maximum(-1 - index, 0)

    def renew(held: jax.Array, own: jax.Array, arrived: Sequence[jax.Array]) -> jax.Array:
        stay = jnp.take_along_axis(held, places[..., None], axis=1, mode="clip")
        come = jnp.concatenate(
            [
                rows.at[fresh[first:last]].get(mode="clip")
                for (first, last), rows in zip(parts, arrived, strict=True)
            ]
        )
        selected = jnp.where((index < 0)[..., None], come, stay)
        # The own rows are written before anything attends them.
        return jnp.concatenate([own[:, :block], own[:, :block], selected], axis=1)

    k, v = (renew(held[which], own[which], [rows[which] for rows in arrived]) for which in (0, 1))
    return k, v
