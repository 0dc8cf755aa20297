"""The full pool: the KV of every committed block of the sparse layers, in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

import host_kernels
from herald_jax.kv.host_memory import format_bytes
from host_kernels import IndexKind


class PoolFull(Exception):
    """There is no room for a booking now; it may fit once others are released."""


def row_bytes(kv_heads: int, head_dim: int, dtype: np.dtype, rows: int) -> int:
    """Bytes of the K and V rows of one request in one layer."""
    return 2 * kv_heads * rows * head_dim * np.dtype(dtype).itemsize


def index_bytes(kv_heads: int, head_dim: int, rows: int, kind: IndexKind | None) -> int:
    """Bytes of the key index of one request in one layer, 0 where none is kept."""
    if kind is None:
        return 0
    return int(np.prod(host_kernels.index_shape(kv_heads, rows, head_dim, kind)))


@dataclass(eq=False)
class Booking:
    """One request's part of the pool, reserved to its longest length.

    Attributes:
      owner: the request's id, for messages.
      pieces: (offset, bytes) in the arena, one piece per sparse layer.
      extents: one array per sparse layer, [H_kv, 2, rows, D]: each head has its K rows, then its V
        rows, so that a scan of keys alone reads whole pages.
      index: one uint8 array of ``host_kernels.index_shape`` per sparse layer, the key index of its
        extent; empty where the pool keeps none.
      live: False once released; a stale booking is refused by every user of it.
    """

    owner: str
    pieces: list[tuple[int, int]]
    extents: list[np.ndarray] = field(repr=False)
    index: list[np.ndarray] = field(repr=False)
    live: bool = True

    @property
    def nbytes(self) -> int:
        """Bytes reserved, 0 once released."""
        return sum(size for _, size in self.pieces)

    @property
    def rows(self) -> int:
        """Positions reserved."""
        return int(self.extents[0].shape[2]) if self.extents else 0


def layer_extents(
    bookings: Sequence[Booking | None], layer: int, nothing: np.ndarray
) -> list[np.ndarray]:
    """Every slot's extent of a sparse layer; ``nothing`` [H_kv, 2, 0, D] without a booking."""
    return [nothing if booking is None else booking.extents[layer] for booking in bookings]


class FullPool:
    """An arena of host memory from which requests book a piece for each sparse layer.

    A piece holds a layer's K and V rows of all heads and, where it is kept, their key index. Each
    is placed in the first free range that holds it; neighbouring free ranges are merged on release.
    All pieces of a booking are of one size, so each free range loses less than one of them: a
    booking of n bytes succeeds whenever n bytes and one piece for each free range are free, and an
    empty pool is one range.

    Sizes need no rounding: D is a multiple of 16, as the kernels ask, so that all of them are whole
    cache lines and every array starts on one.

    Not thread-safe: only the block loop books and releases. The rows of a live booking are written
    by ``store_rows`` and read by the scans; the block loop orders the two.
    """

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: np.dtype,
        nbytes: int,
        key_index: IndexKind | None = None,
        threads: int | None = None,
    ) -> None:
        """Reserves and touches ``nbytes`` of memory.

        Args:
          layers: sparse layers; ``kv_heads``, ``head_dim``, ``dtype``: shape of one entry.
          nbytes: arena size in bytes.
          key_index: the index of their keys that bookings have, or None.
          threads: workers that touch the pages; None for the pool's default.

        Raises:
          MemoryError: the operating system refuses the memory.
        """
        self.layers, self.kv_heads, self.head_dim = layers, kv_heads, head_dim
        self.dtype, self.key_index = np.dtype(dtype), key_index
        self.nbytes = nbytes
        self._arena = host_kernels.Arena(self.nbytes, threads=threads) if self.nbytes else None
        self._free: list[tuple[int, int]] = [(0, self.nbytes)] if self.nbytes else []
        self._bookings: list[Booking] = []

    @property
    def huge_pages(self) -> bool:
        """Whether the arena was granted huge pages, as far as can be told."""
        return bool(self._arena is not None and self._arena.huge_pages)

    @property
    def buffer(self) -> np.ndarray:
        """All bytes, booked and free: uint8 [nbytes]."""
        return np.zeros(0, np.uint8) if self._arena is None else self._arena.buffer

    @property
    def used(self) -> int:
        """Bytes booked."""
        return sum(booking.nbytes for booking in self._bookings)

    @property
    def free(self) -> int:
        """Bytes not booked."""
        return sum(size for _, size in self._free)

    @property
    def free_ranges(self) -> int:
        """Ranges that the free bytes lie in."""
        return len(self._free)

    def piece_bytes(self, rows: int) -> int:
        """Bytes of one layer of a booking of ``rows`` positions."""
        index = index_bytes(self.kv_heads, self.head_dim, rows, self.key_index)
        return row_bytes(self.kv_heads, self.head_dim, self.dtype, rows) + index

    def bytes_for(self, rows: int) -> int:
        """Bytes a booking of ``rows`` positions takes."""
        return self.layers * self.piece_bytes(rows)

    def book(self, owner: str, rows: int) -> Booking:
        """Reserves room for ``rows`` positions of one request, at least 1.

        Raises:
          PoolFull: the free ranges do not hold every piece at present; nothing has changed.
          ValueError: ``rows`` is not positive.
        """
        if rows < 1:
            raise ValueError(f"request {owner} books {rows} rows of the full pool: give 1 or more")
        piece = self.piece_bytes(rows)
        # Pieces of one size: how many fit does not depend on where the first of them go.
        if sum(size // piece for _, size in self._free) < self.layers:
            raise PoolFull(
                f"the host KV pool has {format_bytes(self.free)} of {format_bytes(self.nbytes)} "
                f"free in {self.free_ranges} parts, request {owner} needs {self.layers} times "
                f"{format_bytes(piece)}"
            )
        pieces = [(self._take(piece), piece) for _ in range(self.layers)]
        extents = [self._extent(offset, rows) for offset, _ in pieces]
        index = []
        if self.key_index is not None:
            index = [self._index(offset, rows, self.key_index) for offset, _ in pieces]
        booking = Booking(owner, pieces, extents, index)
        self._bookings.append(booking)
        return booking

    def _take(self, piece: int) -> int:
        """Cuts a piece off the first free range that holds it; returns its offset."""
        at = next(at for at, (_, size) in enumerate(self._free) if size >= piece)
        offset, size = self._free[at]
        self._free[at : at + 1] = [(offset + piece, size - piece)] if size > piece else []
        return offset

    def _extent(self, offset: int, rows: int) -> np.ndarray:
        """The K and V rows of a piece."""
        count = row_bytes(self.kv_heads, self.head_dim, self.dtype, rows)
        extent = self.buffer[offset : offset + count].view(self.dtype)
        return extent.reshape(self.kv_heads, 2, rows, self.head_dim)

    def _index(self, offset: int, rows: int, kind: IndexKind) -> np.ndarray:
        """The key index of a piece, behind its rows."""
        start = offset + row_bytes(self.kv_heads, self.head_dim, self.dtype, rows)
        shape = host_kernels.index_shape(self.kv_heads, rows, self.head_dim, kind)
        return self.buffer[start : start + int(np.prod(shape))].reshape(shape)

    def release(self, booking: Booking) -> None:
        """Returns a booking's pieces; its arrays must not be used afterwards.

        Raises:
          ValueError: the booking was released before.
        """
        if not booking.live:
            raise ValueError(f"the KV of request {booking.owner} was released twice")
        self._bookings.remove(booking)
        self._free = _merged(self._free + booking.pieces)
        booking.live = False
        booking.pieces, booking.extents, booking.index = [], [], []

    def check_integrity(self) -> None:
        """Asserts that free and booked ranges tile the arena without gap or overlap."""
        at = 0
        for offset, size in sorted(self._free + [p for b in self._bookings for p in b.pieces]):
            assert offset == at, f"gap or overlap at byte {at} of the full pool"
            at = offset + size
        assert at == self.nbytes, f"the full pool ends at {at}, not at {self.nbytes}"
        assert self._free == _merged(self._free), "neighbouring free ranges are not merged"
        assert self.free + self.used == self.nbytes


def _merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges (offset, bytes) in order, neighbours as one."""
    merged: list[tuple[int, int]] = []
    for offset, size in sorted(ranges):
        if merged and sum(merged[-1]) == offset:
            merged[-1] = (merged[-1][0], merged[-1][1] + size)
        else:
            merged.append((offset, size))
    return merged
