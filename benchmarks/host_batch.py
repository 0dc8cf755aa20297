"""A batch whose retrieval is measured: its memory on the host, and the stages of a block."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

import host_kernels
from benchmarks.kernel_memory import random_rows, random_tiles, repeat
from benchmarks.shapes import SHAPES
from herald_jax.kv.device_cache import CacheShape
from herald_jax.kv.full_pool import FullPool, index_bytes, row_bytes
from herald_jax.kv.transfer import Staging, put
from herald_jax.selection.job import SINKS


class Host:
    """The host's side of a batch: full pool, key indexes, queries, and what is selected."""

    def __init__(self, options: Any, shape: CacheShape) -> None:
        """Maps and fills the memory."""
        config = SHAPES[options.shape]
        rng = np.random.default_rng(options.seed)
        self.options, self.shape, self.rng = options, shape, rng
        layers, slots, heads = shape.sparse_layers, shape.slots, shape.kv_heads
        pool_bytes, _ = request_bytes(shape)
        self.pool = FullPool(
            layers=layers,
            kv_heads=heads,
            head_dim=shape.head_dim,
            dtype=shape.dtype,
            nbytes=slots * pool_bytes,
            key_index="int8",
            threads=options.threads,
        )
        bookings = [self.pool.book(str(slot), shape.rows) for slot in range(slots)]
        pattern = random_rows(rng, bookings[0].extents[0].size)
        tiles = random_tiles(rng, shape.head_dim, "int8")
        for booking in bookings:
            for extent, index in zip(booking.extents, booking.index, strict=True):
                repeat(extent.reshape(-1), pattern)
                repeat(index.reshape(-1), tiles)
        self.extents = [[booking.extents[at] for booking in bookings] for at in range(layers)]
        self.indexes = [[booking.index[at] for booking in bookings] for at in range(layers)]
        self.queries = rng.standard_normal(
            (layers, slots, config.num_heads, shape.head_dim), np.float32
        )
        self.length = np.full(slots, options.context, np.int32)
        self.counts = np.full(slots, shape.candidates, np.int32)
        self.indices = np.zeros((layers, slots, heads, shape.candidates), np.int32)

    def previous(self, share: float) -> NDArray[np.int32]:
        """A selection that lacks this share of every head's present one."""
        count, rows = self.shape.candidates, self.options.context
        new = min(max(1, round(share * count)), rows - count)
        made = np.empty_like(self.indices)
        for at in np.ndindex(made.shape[:3]):
            chosen = np.zeros(rows, bool)
            chosen[self.indices[at]] = True
            others = self.rng.choice(np.flatnonzero(~chosen), new, replace=False)
            kept = self.rng.permutation(self.indices[at])[new:]
            made[at] = np.sort(np.concatenate([kept, others]))
        return made


class Part:
    """A range of slots, which one thread serves from staging of its own."""

    def __init__(
        self, host: Host, first: int, last: int, previous: NDArray[np.int32] | None
    ) -> None:
        """``previous``: as ``Host.indices``, or None to gather all candidates."""
        shape, device = host.shape, jax.devices()[0]
        self.host, self.cut = host, slice(first, last)
        self.previous = None if previous is None else np.ascontiguousarray(previous[:, self.cut])
        self.layers = shape.sparse_layers
        rows = shape.buffer_shape(shape.pool_rows, last - first)
        if self.previous is not None:
            self.source = np.zeros_like(self.previous)
            news = [self._missing(layer) for layer in range(self.layers)]
            rows = (1, max(1, *news), 1, shape.head_dim)
        self.staging = Staging(self.layers, rows, shape.dtype, device)
        self.copies: list[jax.Array] = []

    def _missing(self, layer: int) -> int:
        """How many rows of a layer are new."""
        nothing = np.empty((0, self.host.shape.head_dim), self.host.shape.dtype)
        return self._gather_changes(layer, nothing, nothing)

    def scan(self, layer: int) -> None:
        """Selects candidates."""
        host, cut = self.host, self.cut
        length, counts = host.length[cut], host.counts[cut]
        host_kernels.select_indexed(
            host.queries[layer, cut], host.indexes[layer][cut], length, length, counts,
            host.indices[layer, cut], sinks=SINKS, threads=host.options.threads,
        )  # fmt: skip

    def gather(self, layer: int) -> None:
        """Gathers candidates, or those that are new, into staging."""
        host, cut, staging = self.host, self.cut, self.staging
        staging.reclaim(layer)
        keys, values = staging.keys[layer], staging.values[layer]
        if self.previous is None:
            host_kernels.gather(
                host.extents[layer][cut], host.indices[layer, cut], host.counts[cut],
                keys, values, row_offset=2 * host.shape.block_size, threads=host.options.threads,
            )  # fmt: skip
        else:
            self._gather_changes(layer, keys[0, :, 0], values[0, :, 0])

    def _gather_changes(self, layer: int, keys: NDArray[Any], values: NDArray[Any]) -> int:
        host, cut = self.host, self.cut
        assert self.previous is not None
        return host_kernels.gather_changes(
            host.extents[layer][cut], host.indices[layer, cut], host.counts[cut],
            self.previous[layer], host.counts[cut], self.source[layer], keys, values,
            threads=host.options.threads,
        )  # fmt: skip

    def copy(self, layer: int) -> None:
        """Starts the copies to the device."""
        self.copies += self.staging.send(layer)
        if self.previous is not None:
            self.copies.append(put(self.source[layer], self.staging.device))

    def finish(self) -> None:
        """Waits for the copies and drops them."""
        for array in self.copies:
            array.block_until_ready()
        self.copies = []

    @property
    def copied_bytes(self) -> int:
        """Bytes that go to the device."""
        arrays = [*self.staging.keys, *self.staging.values]
        return sum(a.nbytes for a in arrays) + (0 if self.previous is None else self.source.nbytes)


def request_bytes(shape: CacheShape) -> tuple[int, int]:
    """Bytes of one request: in the full pool with its key indexes, in staging and on the device."""
    heads, dim = shape.kv_heads, shape.head_dim
    piece = row_bytes(heads, dim, shape.dtype, shape.rows) + index_bytes(
        heads, dim, shape.rows, "int8"
    )
    return shape.sparse_layers * piece, 2 * shape.pool_bytes // shape.slots


#: What is done for each layer, in order.
STAGES = {"scan": Part.scan, "gather": Part.gather, "copy": Part.copy}
