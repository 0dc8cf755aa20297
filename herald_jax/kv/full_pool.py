"""The full pool: the KV of every committed block of the sparse layers, in host memory."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

import host_kernels
from herald_jax.kv.host_memory import format_bytes


class PoolFull(Exception):
    """There is no room for a booking now; it may fit once others are released."""


@dataclass(eq=False)
class Booking:
    """One request's part of the pool, reserved to its longest length.

    Attributes:
      owner: the request's id, for messages.
      offset, nbytes: the byte range in the arena.
      extents: one array per sparse layer, [H_kv, 2, rows, D]: each head has its K rows, then its V
        rows, so that a scan of keys alone reads whole pages.
      live: False once released; a stale booking is refused by every user of it.
    """

    owner: str
    offset: int
    nbytes: int
    extents: list[np.ndarray] = field(repr=False)
    live: bool = True

    @property
    def rows(self) -> int:
        """Positions reserved."""
        return int(self.extents[0].shape[2]) if self.extents else 0


class FullPool:
    """An arena of host memory from which requests book contiguous byte ranges.

    Bookings are first-fit over a sorted list of free ranges; neighbours are merged on release. Not
    thread-safe: only the block loop books and releases. The rows of a live booking are written by
    ``host_kernels.store`` and read by the scans; the block loop orders the two.
    """

    ALIGNMENT = 4096

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: np.dtype,
        nbytes: int,
        threads: int | None = None,
    ) -> None:
        """Reserves and touches ``nbytes`` of memory.

        Args:
          layers: sparse layers; ``kv_heads``, ``head_dim``, ``dtype``: shape of one entry.
          nbytes: arena size in bytes, rounded up to the alignment.
          threads: workers that touch the pages; None for the pool's default.

        Raises:
          MemoryError: the operating system refuses the memory.
        """
        self.layers, self.kv_heads, self.head_dim = layers, kv_heads, head_dim
        self.dtype = np.dtype(dtype)
        self.nbytes = -(-nbytes // self.ALIGNMENT) * self.ALIGNMENT
        self._arena = host_kernels.Arena(self.nbytes, threads=threads) if self.nbytes else None
        self._free: list[tuple[int, int]] = [(0, self.nbytes)] if self.nbytes else []
        self._bookings: list[Booking] = []

    @property
    def huge_pages(self) -> bool:
        """Whether the arena was granted huge pages, as far as can be told."""
        return bool(self._arena is not None and self._arena.huge_pages)

    def bytes_for(self, rows: int) -> int:
        """Bytes a booking of ``rows`` positions takes."""
        entry = 2 * self.head_dim * self.dtype.itemsize
        exact = self.layers * self.kv_heads * rows * entry
        return -(-exact // self.ALIGNMENT) * self.ALIGNMENT

    @property
    def used(self) -> int:
        """Bytes booked."""
        return sum(booking.nbytes for booking in self._bookings)

    @property
    def free(self) -> int:
        """Bytes not booked."""
        return sum(size for _, size in self._free)

    def book(self, owner: str, rows: int) -> Booking:
        """Reserves room for ``rows`` positions of one request.

        Raises:
          PoolFull: no free range is large enough at present.
        """
        need = self.bytes_for(rows)
        for index, (offset, size) in enumerate(self._free):
            if size >= need:
                rest = [(offset + need, size - need)] if size > need else []
                self._free[index : index + 1] = rest
                booking = Booking(owner, offset, need, self._extents(offset, rows))
                self._bookings.append(booking)
                return booking
        raise PoolFull(
            f"the host KV pool has {format_bytes(self.free)} of {format_bytes(self.nbytes)} free, "
            f"request {owner} needs {format_bytes(need)}"
        )

    def _extents(self, offset: int, rows: int) -> list[np.ndarray]:
        if self._arena is None:
            return []
        shape = (self.layers, self.kv_heads, 2, rows, self.head_dim)
        count = int(np.prod(shape)) * self.dtype.itemsize
        flat = self._arena.buffer[offset : offset + count]
        return list(flat.view(self.dtype).reshape(shape))

    def release(self, booking: Booking) -> None:
        """Returns a booking's range; its extents must not be used afterwards.

        Raises:
          ValueError: the booking was released before.
        """
        if not booking.live:
            raise ValueError(f"the KV of request {booking.owner} was released twice")
        booking.live = False
        booking.extents = []
        self._bookings.remove(booking)
        if booking.nbytes:
            self._free.append((booking.offset, booking.nbytes))
            self._free.sort()
            merged = [self._free[0]]
            for offset, size in self._free[1:]:
                last_offset, last_size = merged[-1]
                if last_offset + last_size == offset:
                    merged[-1] = (last_offset, last_size + size)
                else:
                    merged.append((offset, size))
            self._free = merged

    def check_integrity(self) -> None:
        """Asserts that free and booked ranges tile the arena without gap or overlap."""
        ranges = self._free + [(b.offset, b.nbytes) for b in self._bookings if b.nbytes]
        at = 0
        for offset, size in sorted(ranges):
            assert offset == at, f"gap or overlap at byte {at} of the full pool"
            at = offset + size
        assert at == self.nbytes, f"the full pool ends at {at}, not at {self.nbytes}"
        assert self.free + self.used == self.nbytes
