"""The full pool: pieces never overlap, nothing leaks, and no room is lost but what must be."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from herald_jax.kv.full_pool import FullPool, PoolFull
from host_kernels import index_shape

HEADS, DIM = 2, 16


def pool_of(nbytes: int, layers: int = 3, **options) -> FullPool:
    return FullPool(
        layers=layers, kv_heads=HEADS, head_dim=DIM, dtype=np.float32, nbytes=nbytes, **options
    )


def arrays(booking):
    return [*booking.extents, *booking.index]


@settings(max_examples=60, deadline=None)
@given(
    layers=st.integers(1, 5),
    key_index=st.sampled_from([None, "int8", "int4"]),
    # Positive: book so many rows; otherwise release one of the bookings.
    moves=st.lists(st.integers(-40, 120), min_size=1, max_size=60),
)
def test_any_mix_of_bookings_keeps_the_books(layers, key_index, moves):
    """openxla/xla PR#20633: the pool is our own memory, not XLA's capped pinned pool."""
    pool = pool_of(100_000, layers, key_index=key_index)
    held, marks = [], 0
    for move in moves:
        if move > 0:
            piece, ranges = pool.piece_bytes(move), pool.free_ranges
            assert pool.bytes_for(move) == layers * piece
            promised = pool.free >= pool.bytes_for(move) + ranges * piece
            before = (pool.free, pool.used, ranges)
            try:
                booking = pool.book("x", move)
            except PoolFull:
                assert not promised
                assert before == (pool.free, pool.used, pool.free_ranges)
                continue
            assert booking.nbytes == pool.bytes_for(move)
            assert booking.nbytes == sum(part.nbytes for part in arrays(booking))
            assert [e.shape for e in booking.extents] == [(HEADS, 2, move, DIM)] * layers
            shape = index_shape(HEADS, move, DIM, key_index) if key_index else None
            wanted = [shape] * layers if key_index else []
            assert [part.shape for part in booking.index] == wanted
            assert all(part.ctypes.data % 64 == 0 for part in arrays(booking))
            marks = (marks + 1) % 250
            for part in arrays(booking):
                part[:] = marks
            held.append((booking, marks))
        elif held:
            booking, mark = held.pop(-move % len(held))
            assert all((part == mark).all() for part in arrays(booking))
            pool.release(booking)
            assert not arrays(booking)
            assert booking.nbytes == 0
        pool.check_integrity()
    for booking, _ in held:
        pool.release(booking)
    assert pool.free == pool.nbytes
    assert pool.free_ranges == 1


def test_scattered_room_is_used():
    """Every other booking released: no hole holds a longer request, all of them together do."""
    short, long = 8, 16
    pool = pool_of(pool_of(0).bytes_for(short) * 8)
    bookings = [pool.book(str(n), short) for n in range(8)]
    assert pool.free == 0
    for booking in bookings[::2]:
        pool.release(booking)
    assert pool.free_ranges == 4
    # Three pieces of the short ones side by side hold one of the long: half a piece is lost.
    assert pool.bytes_for(long) > pool.bytes_for(short)
    pool.book("long", long)
    pool.check_integrity()
    with pytest.raises(PoolFull) as caught:
        pool.book("late", long)
    assert "request late needs 3 times" in str(caught.value)
    assert f"{pool.free_ranges} parts" in str(caught.value)
    pool.check_integrity()


def test_what_cannot_be_booked_or_released():
    pool = pool_of(1 << 16)
    with pytest.raises(ValueError, match="0 rows"):
        pool.book("x", 0)
    booking = pool.book("x", 8)
    pool.release(booking)
    with pytest.raises(ValueError, match="twice"):
        pool.release(booking)
