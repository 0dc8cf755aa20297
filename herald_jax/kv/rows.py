"""Writing rows to the full pool: the only way in, so that no key index is ever stale."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

import host_kernels
from herald_jax.kv.full_pool import Booking, layer_extents


def store_rows(
    bookings: Sequence[Booking | None],
    layer: int,
    start: np.ndarray,
    counts: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
) -> None:
    """Writes K and V of one sparse layer and, where bookings have one, their key index.

    Args:
      bookings: one a slot; nothing is written for None or a released one.
      layer: index among the sparse layers.
      start: int32 [N], first row; ``counts``: int32 [N], rows to write, 0 for none.
      k, v: [N, S, H_kv, D] of the pool's dtype.

    Raises:
      TypeError, ValueError: an argument does not fit; nothing has been written then.
    """
    live = [booking if booking is not None and booking.live else None for booking in bookings]
    counts = np.where([booking is not None for booking in live], counts, 0).astype(np.int32)
    if not counts.any():
        return
    heads, dim = k.shape[2:]
    nothing = np.zeros((heads, 2, 0, dim), k.dtype)
    extents = layer_extents(live, layer, nothing)
    host_kernels.store(extents, start, counts, k, v)
    kept = next((booking.index for booking in live if booking is not None), [])
    if kept:
        # Of the kind that the others are.
        unindexed = kept[layer][:, :0]
        index = [unindexed if booking is None else booking.index[layer] for booking in live]
        host_kernels.index_rows(extents, index, start, counts)
