"""Rows of one block on their way from the device to the full pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np

from herald_jax.kv.device_cache import CacheShape
from herald_jax.kv.full_pool import Booking
from herald_jax.kv.rows import store_rows


@dataclass
class BlockRows:
    """A committed block, or a draft.

    Attributes:
      bookings: per slot, where the rows go; None for a slot that does not take part.
      start: int32 [N], first position of the block.
      groups: arrays on the device that follow the sparse layers, [layers, 2, N, B, H_kv, D] each,
        keys then values.
    """

    bookings: Sequence[Booking | None]
    start: np.ndarray
    groups: Sequence[jax.Array]

    def store(self, shape: CacheShape, first: int, last: int) -> None:
        """Writes the rows of slots [first, last) whose booking is still live; waits for them."""
        bookings = self.bookings[first:last]
        live = [booking is not None and booking.live for booking in bookings]
        counts = np.array([shape.block_size if alive else 0 for alive in live], np.int32)
        if not counts.any():
            return
        start = self.start[first:last]
        layers = (layer for group in self.groups for layer in np.asarray(group))
        for index, (keys, values) in enumerate(layers):
            store_rows(bookings, index, start, counts, keys[first:last], values[first:last])
