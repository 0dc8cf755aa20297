"""Memory that a kernel has to read from DRAM: keys, values and key indexes of many requests."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import psutil
from numpy.typing import NDArray

import host_kernels

BF16 = np.dtype(ml_dtypes.bfloat16)
#: KV heads of a slot.
HEADS = 4
#: Random numbers before they repeat; odd, so that no two heads are alike.
PERIOD = (1 << 24) + 1
#: Keys of an index before they repeat.
INDEX_PERIOD = 4096
#: Least and most bytes of keys, and bytes for each thread: far beyond the caches, unless the
#: machine is small.
LEAST, MOST, EACH = 5 << 28, 1 << 32, 1 << 28
#: Keys, values, key indexes and results take this many times the bytes of the keys, and leave half
#: of what is available to everything else.
SHARES, USABLE = 3.5, 0.5


def default_bytes(threads: int) -> int:
    """Bytes of keys: at least 1.25 GiB, more with many threads, less where memory is short."""
    wanted = min(MOST, max(LEAST, threads * EACH))
    return min(wanted, int(psutil.virtual_memory().available * USABLE / SHARES))


class Memory:
    """An arena of bf16 rows and one of key indexes, seen as slots of any shape.

    Slots are ``[HEADS, 2, context, D]`` extents and their indexes; whatever the shape, they cover
    the same bytes, which are normal numbers from a fixed seed.
    """

    def __init__(self, key_bytes: int, seed: int) -> None:
        """Maps and fills ``2 * key_bytes`` of rows and ``key_bytes`` of indexes."""
        self.key_bytes = key_bytes
        self.rng = np.random.default_rng(seed)
        self._rows = host_kernels.Arena(2 * key_bytes)
        self._indexes = host_kernels.Arena(key_bytes)
        self._results: host_kernels.Arena | None = None
        self._indexed: tuple[int, host_kernels.IndexKind] | None = None
        self.rows: NDArray[Any] = self._rows.buffer.view(BF16)
        repeat(self.rows, random_rows(self.rng, self.rows.size))

    @property
    def huge_pages(self) -> bool:
        """Whether huge pages back all of it, as far as the system tells."""
        return self._rows.huge_pages and self._indexes.huge_pages

    def slot_bytes(self, context: int, dim: int) -> int:
        """Bytes of the keys of a slot."""
        return HEADS * context * dim * BF16.itemsize

    def slots(self, context: int, dim: int) -> int:
        """How many slots there are.

        Raises:
          ValueError: not even one.
        """
        count = self.key_bytes // self.slot_bytes(context, dim)
        if not count:
            raise ValueError(
                f"--memory {self.key_bytes} is too little for {context} keys of {dim} in {HEADS} "
                f"heads: give at least {self.slot_bytes(context, dim)}"
            )
        return count

    def extents(self, context: int, dim: int) -> list[NDArray[Any]]:
        """``[HEADS, 2, context, dim]`` bfloat16 of every slot."""
        count = self.slots(context, dim)
        shape = (count, HEADS, 2, context, dim)
        return list(self.rows[: int(np.prod(shape))].reshape(shape))

    def indexes(
        self, context: int, dim: int, kind: host_kernels.IndexKind = "int8"
    ) -> list[NDArray[np.uint8]]:
        """Key indexes of every slot, as many as there is room for, at least one.

        Their codes and scales are those of normal keys, not of ``extents``. Indexes of another
        dimension or kind take the place of these.
        """
        shape = host_kernels.index_shape(HEADS, context, dim, kind)
        each = int(np.prod(shape))
        count = self._indexes.nbytes // each
        if not count:
            raise ValueError(
                f"--memory {self.key_bytes} is too little for the key index of {context} keys of "
                f"{dim} in {HEADS} heads: give at least {each}"
            )
        if self._indexed != (dim, kind):
            repeat(self._indexes.buffer, random_tiles(self.rng, dim, kind))
            self._indexed = dim, kind
        return list(self._indexes.buffer[: count * each].reshape(count, *shape))

    def results(self, *shapes: tuple[int, ...]) -> list[NDArray[Any]]:
        """bfloat16 arrays to write to; the next call gives the same memory again."""
        sizes = [int(np.prod(shape)) for shape in shapes]
        need = sum(sizes) * BF16.itemsize
        if self._results is None or self._results.nbytes < need:
            self._results = None
            self._results = host_kernels.Arena(need)
        parts, at = [], 0
        flat = self._results.buffer.view(BF16)
        for shape, size in zip(shapes, sizes, strict=True):
            parts.append(flat[at : at + size].reshape(shape))
            at += size
        return parts


def random_rows(rng: np.random.Generator, count: int) -> NDArray[Any]:
    """At most ``count`` bfloat16 normal numbers, enough to repeat."""
    return rng.standard_normal(min(PERIOD, count), np.float32).astype(BF16)


def random_tiles(
    rng: np.random.Generator, dim: int, kind: host_kernels.IndexKind
) -> NDArray[np.uint8]:
    """Tiles of a key index of normal keys of ``dim``, one after the other, to repeat."""
    keys = random_rows(rng, 2 * INDEX_PERIOD * dim).reshape(1, 2, INDEX_PERIOD, dim)
    tiles = np.zeros(host_kernels.index_shape(1, INDEX_PERIOD, dim, kind), np.uint8)
    start, counts = np.zeros(1, np.int32), np.full(1, INDEX_PERIOD, np.int32)
    host_kernels.index_rows([keys], [tiles], start, counts)
    return tiles.reshape(-1)


def repeat(target: NDArray[Any], pattern: NDArray[Any]) -> None:
    """Fills ``target`` with ``pattern``, over and over; both have one axis."""
    for at in range(0, len(target), len(pattern)):
        part = target[at : at + len(pattern)]
        part[:] = pattern[: len(part)]
