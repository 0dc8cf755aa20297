"""What one block's retrieval works on: which rows may be selected, and what was selected."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

import host_kernels

SINKS = 4


@dataclass
class SelectionJob:
    """Selection for the next block of every slot, over the sparse layers.

    NumPy arrays only: the body of a callback reads and writes this object.

    Attributes:
      extents: per sparse layer, per slot: [H_kv, 2, rows, D] of the full pool, or an empty
        [H_kv, 2, 0, D] array for a slot that does not take part.
      index: the same of their key indexes, uint8 of ``host_kernels.index_shape``; None where
        the keys themselves are scanned.
      start: int32 [N], first position of the block being denoised; rows before it are committed.
      attend_len: int32 [N], rows that enter the softmax (committed rows, then the draft's).
      select_len: int32 [N], rows that may be selected; 0 for a slot that does not take part.
      budget: int32 [N], K_r of each slot, sinks included.
      candidates: int32 [N], rows to fetch (K_r <= C <= select_len); equals ``budget`` where the
        selector does not refine on the device.
      seeds: uint32 [N], one per request, for selectors that draw.
      indices: int32 [L, N, H_kv, C_cap], selected rows in ascending order, then -1.
      status: int32 [N], 0 or the kernel's code for a slot whose scores were not finite.
      selected: per layer, set once its indices are there.
      error: what went wrong inside a callback, if anything did.
    """

    extents: Sequence[Sequence[np.ndarray]]
    index: Sequence[Sequence[np.ndarray]] | None
    start: np.ndarray
    attend_len: np.ndarray
    select_len: np.ndarray
    budget: np.ndarray
    candidates: np.ndarray
    seeds: np.ndarray
    indices: np.ndarray
    status: np.ndarray
    sinks: int = SINKS
    selected: list[threading.Event] = field(init=False)
    error: BaseException | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.selected = [threading.Event() for _ in self.extents]

    @property
    def active(self) -> np.ndarray:
        """bool [N], the slots that select."""
        return self.select_len > 0

    def scan_keys(
        self, layer: int, q: np.ndarray, attend_len: np.ndarray, elsewhere: np.ndarray | None
    ) -> np.ndarray:
        """Selects rows of one layer into ``indices[layer]`` by keys alone, or by their index.

        Args:
          q: float32 [N, H_q, D]; ``attend_len``: int32 [N], rows that enter the softmax.
          elsewhere: float32 [N, H_q], log of the mass attended outside the full pool, or None.

        Returns:
          status int32 [N] of this scan, see ``status``.
        """
        rows = attend_len, self.select_len, self.candidates, self.indices[layer]
        if self.index is None:
            keys = self.extents[layer]
            return host_kernels.select(q, keys, *rows, sinks=self.sinks, elsewhere=elsewhere)
        return host_kernels.select_indexed(
            q, self.index[layer], *rows, sinks=self.sinks, elsewhere=elsewhere
        )

    def part(self, first: int, last: int) -> SelectionJob:
        """The slots [first, last) as views, so that half-batches can run side by side."""
        cut = slice(first, last)
        return SelectionJob(
            [layer[cut] for layer in self.extents],
            None if self.index is None else [layer[cut] for layer in self.index],
            self.start[cut],
            self.attend_len[cut],
            self.select_len[cut],
            self.budget[cut],
            self.candidates[cut],
            self.seeds[cut],
            self.indices[:, cut],
            self.status[cut],
            self.sinks,
        )
