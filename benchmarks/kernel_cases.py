"""The kernels as the benchmark calls them: arguments, and the bytes and keys that are counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import host_kernels
from benchmarks.kernel_memory import BF16, HEADS, Memory

#: Rows of a run in ``gather_runs``, and rows that ``store`` writes for a slot at a time.
RUN, STORED = 16, 512
#: MAGE's queries, one for each position of a block; parts of a block that are merged apart.
BLOCK, PARTS = 32, 4
#: Samples of compute-bound kernels are cut to this share, so that they take as long as others.
MANY_SHARE = 8
#: What share of a selection the previous one lacked.
NEW_SHARES = (0.1, 0.3, 1.0)


@dataclass(frozen=True)
class Point:
    """One shape of the problem.

    Attributes:
      context: keys of a KV head; ``head_dim``: D; ``group``: G, query heads of a KV head.
      topk_fraction: share of the keys that is selected.
      queries: positions of the block that have a query of their own, each with G heads.
    """

    context: int = 32768
    head_dim: int = 128
    group: int = 4
    topk_fraction: float = 0.05
    queries: int = 1

    @property
    def selected(self) -> int:
        """Rows to select for a KV head."""
        return max(1, round(self.topk_fraction * self.context))


@dataclass(frozen=True)
class Work:
    """One kernel at one point.

    Attributes:
      run: ``run(i, threads)`` does sample i; samples go round memory that is far larger.
      nbytes: bytes a sample must read or, for the kernels that move rows, copies.
      keys: keys scanned, rows moved, or rows looked up in a sample.
      operations: floating point operations of its products; 0 where nothing is computed.
      more: what a row says beside the keys that all rows have.
    """

    run: Callable[[int, int], object]
    nbytes: int
    keys: int
    operations: int
    more: dict[str, Any]


class Cases:
    """Makes the work of a kernel over a memory."""

    def __init__(self, memory: Memory, sample_bytes: int) -> None:
        """``sample_bytes``: bytes of keys that a sample covers, at most half of the memory."""
        self.memory, self.sample_bytes = memory, sample_bytes

    def make(self, kernel: str, point: Point) -> list[Work]:
        """The work of ``kernel``, a variant each."""
        if kernel == "changes":
            return [self._changes(point, share) for share in NEW_SHARES]
        return [getattr(self, f"_{kernel}")(point)]

    def _turns(self, slots: list[NDArray[Any]], nbytes: int, share: int = 1) -> list[list[Any]]:
        """``slots`` in equal parts, a sample each; ``nbytes`` is a slot's."""
        most = max(1, len(slots) // 2)
        count = min(most, max(1, self.sample_bytes // nbytes // share))
        return [slots[at : at + count] for at in range(0, len(slots) - count + 1, count)]

    def _extents(self, point: Point, share: int = 1) -> list[list[Any]]:
        memory, shape = self.memory, (point.context, point.head_dim)
        return self._turns(memory.extents(*shape), memory.slot_bytes(*shape), share)

    def _indexes(self, point: Point, kind: host_kernels.IndexKind = "int8") -> list[list[Any]]:
        memory, shape = self.memory, (point.context, point.head_dim)
        # As many slots as a sample of the other kernels has.
        return self._turns(memory.indexes(*shape, kind), memory.slot_bytes(*shape))

    def _queries(self, slots: int, point: Point) -> NDArray[np.float32]:
        shape = (slots, HEADS * point.queries * point.group, point.head_dim)
        return self.memory.rng.standard_normal(shape, np.float32)

    def _rows(self, slots: int, point: Point, count: int, run: int = 1) -> NDArray[np.int32]:
        """``count`` different rows ``[slots, HEADS, count]``, ascending, in runs."""
        rng, cells = self.memory.rng, point.context // run
        rows = np.empty((slots, HEADS, count // run, run), np.int32)
        for part in rows.reshape(-1, count // run, run):
            firsts = np.sort(rng.permutation(cells)[: count // run])
            part[:] = run * firsts[:, None] + np.arange(run)
        return rows.reshape(slots, HEADS, -1)

    # -- scans ----------------------------------------------------------------------------------

    def _scan(
        self,
        kernel: Callable[..., Any],
        turns: list[list[Any]],
        point: Point,
        key_bytes: int,
        products: int = 1,
    ) -> Work:
        slots = len(turns[0])
        q = self._queries(slots, point)
        length = np.full(slots, point.context, np.int32)
        budget = np.full(slots, point.selected, np.int32)
        indices = np.empty((slots, HEADS, point.selected), np.int32)
        keys = slots * HEADS * point.context
        rows = point.queries * point.group
        return Work(
            lambda i, threads: kernel(
                q, turns[i % len(turns)], length, length, budget, indices, threads=threads
            ),
            keys * key_bytes,
            keys,
            keys * rows * 2 * point.head_dim * products,
            {"queries": point.queries},
        )

    def _fused(self, point: Point) -> Work:
        each = 4 * point.head_dim
        return self._scan(host_kernels.attend_select, self._extents(point), point, each, 2)

    def _keys(self, point: Point) -> Work:
        share = MANY_SHARE if point.queries > PARTS else 1
        turns = self._extents(point, share)
        return self._scan(host_kernels.select, turns, point, 2 * point.head_dim)

    def _int8(self, point: Point) -> Work:
        turns = self._indexes(point)
        return self._scan(host_kernels.select_indexed, turns, point, point.head_dim + 4)

    def _int4(self, point: Point) -> Work:
        turns = self._indexes(point, "int4")
        return self._scan(host_kernels.select_indexed, turns, point, point.head_dim // 2 + 4)

    def _many(self, point: Point) -> Work:
        return self._keys(_with_queries(point, BLOCK))

    def _merged4_keys(self, point: Point) -> Work:
        return self._keys(_with_queries(point, PARTS))

    def _merged4_int8(self, point: Point) -> Work:
        return self._int8(_with_queries(point, PARTS))

    def _merged4_int4(self, point: Point) -> Work:
        return self._int4(_with_queries(point, PARTS))

    def _rerank(self, point: Point) -> Work:
        turns = self._extents(point)
        slots, count = len(turns[0]), min(2 * point.selected, point.context)
        q = self._queries(slots, point)
        candidates = self._rows(slots, point, count)
        counts = np.full(slots, count, np.int32)
        budget = np.full(slots, point.selected, np.int32)
        indices = np.empty((slots, HEADS, point.selected), np.int32)
        keys = slots * HEADS * count
        return Work(
            lambda i, threads: host_kernels.rerank(
                q, turns[i % len(turns)], candidates, counts, budget, indices, threads=threads
            ),
            keys * 2 * point.head_dim,
            keys,
            keys * point.group * 2 * point.head_dim,
            {},
        )

    # -- kernels that move rows -----------------------------------------------------------------

    def _targets(self, shape: tuple[int, ...], turns: int) -> list[tuple[Any, Any]]:
        """Pairs of arrays to gather into, a pair each turn as far as memory goes."""
        pair = 2 * int(np.prod(shape)) * BF16.itemsize
        count = min(turns, max(1, self.memory.key_bytes // 2 // pair))
        made = self.memory.results(*[shape] * (2 * count))
        return list(zip(made[::2], made[1::2], strict=True))

    def _gather(self, point: Point, run: int = 1) -> Work:
        turns = self._extents(point)
        slots, dim = len(turns[0]), point.head_dim
        count = max(run, point.selected // run * run)
        rows = self._rows(slots, point, count, run)
        counts = np.full(slots, count, np.int32)
        outs = self._targets((slots, count, HEADS, dim), len(turns))
        return Work(
            lambda i, threads: host_kernels.gather(
                turns[i % len(turns)], rows, counts, *outs[i % len(outs)], threads=threads
            ),
            rows.size * 4 * dim,
            rows.size,
            0,
            {"run": run},
        )

    def _gather_runs(self, point: Point) -> Work:
        return self._gather(point, RUN)

    def _changes(self, point: Point, share: float) -> Work:
        turns = self._extents(point)
        slots, dim, count = len(turns[0]), point.head_dim, point.selected
        new = min(max(1, round(share * count)), point.context - count)
        chosen = np.empty((slots, HEADS, count), np.int32)
        previous = np.empty_like(chosen)
        for slot, head in np.ndindex(slots, HEADS):
            order = self.memory.rng.permutation(point.context)[: count + new]
            chosen[slot, head] = np.sort(order[:count])
            previous[slot, head] = np.sort(order[new:])
        counts = np.full(slots, count, np.int32)
        source = np.empty_like(chosen)
        room = max(1, slots * HEADS * new)
        outs = self._targets((room, dim), len(turns))
        return Work(
            lambda i, threads: host_kernels.gather_changes(
                turns[i % len(turns)], chosen, counts, previous, counts, source,
                *outs[i % len(outs)], threads=threads,
            ),
            slots * HEADS * new * 4 * dim,
            chosen.size,
            0,
            {"new_share": share},
        )  # fmt: skip

    def _index_rows(self, point: Point) -> Work:
        extents, indexes = self._extents(point), self._indexes(point)
        slots = min(len(extents[0]), len(indexes[0]))
        start, counts = np.zeros(slots, np.int32), np.full(slots, point.context, np.int32)
        keys = slots * HEADS * point.context

        def run(i: int, threads: int) -> None:
            kv, index = extents[i % len(extents)][:slots], indexes[i % len(indexes)][:slots]
            host_kernels.index_rows(kv, index, start, counts, threads=threads)

        return Work(run, keys * 2 * point.head_dim, keys, 0, {})

    def _store(self, point: Point) -> Work:
        turns = self._extents(point)
        slots, rows = len(turns[0]), min(STORED, point.context)
        shape = (slots, rows, HEADS, point.head_dim)
        size = int(np.prod(shape))
        keys, values = self.memory.results(shape, shape)
        for at, part in enumerate((keys, values)):
            part[:] = self.memory.rows[at * size : (at + 1) * size].reshape(shape)
        counts = np.full(slots, rows, np.int32)
        places = point.context // rows

        def run(i: int, threads: int) -> None:
            start = np.full(slots, i // len(turns) % places * rows, np.int32)
            host_kernels.store(turns[i % len(turns)], start, counts, keys, values, threads=threads)

        return Work(run, 2 * size * 2, slots * rows * HEADS, 0, {})


def _with_queries(point: Point, queries: int) -> Point:
    return Point(point.context, point.head_dim, point.group, point.topk_fraction, queries)


#: Those that compute scores; cycles for each key are told of them.
SCANS = (
    "fused", "keys", "int8", "int4", "merged4_keys", "merged4_int8", "merged4_int4", "many",
    "rerank",
)  # fmt: skip
KERNELS = (*SCANS, "gather", "gather_runs", "changes", "index_rows", "store")
