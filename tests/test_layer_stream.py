"""Whole layers that are on their way to the device while an earlier one computes."""

from __future__ import annotations

import time

import jax
import numpy as np
import pytest

from herald_jax.engine.errors import EngineError, WaitTimeout
from herald_jax.engine.layer_stream import LayerStream
from herald_jax.engine.timeline import Timeline
from herald_jax.kv.device_cache import CacheShape, DeviceCache
from herald_jax.kv.full_pool import FullPool

LAYERS, SLOTS, HEADS, ROWS, DIM = 5, 3, 2, 40, 16


class Streamed:
    """A stream over a full pool of random rows; slot 1 is empty."""

    def __init__(self, places: int, timeout: float = 30.0) -> None:
        dtype = np.dtype(np.float32)
        shape = CacheShape(SLOTS, ROWS, 1, LAYERS, 4, 4, 8, HEADS, DIM, dtype, whole_layers=places)
        size = 2 * LAYERS * HEADS * ROWS * DIM * 4
        pool = FullPool(
            layers=LAYERS, kv_heads=HEADS, head_dim=DIM, dtype=dtype, nbytes=SLOTS * size
        )
        self.bookings = [pool.book("a", ROWS), None, pool.book("b", ROWS)]
        rng = np.random.default_rng(places)
        for booking in filter(None, self.bookings):
            for extent in booking.extents:
                extent[:] = rng.normal(size=extent.shape)
        cache = DeviceCache(shape, jax.devices()[0])
        self.stream = LayerStream(cache, timeout=timeout, timeline=Timeline())
        self.sent: list[int] = []
        load = self.stream._load

        def watch(made, layer):
            self.sent.append(layer)
            return load(made, layer)

        self.stream._load = watch

    def wait(self, count: int) -> None:
        """Until so many layers were started; no more may be within a moment."""
        end = time.monotonic() + 30
        while len(self.sent) < count and time.monotonic() < end:
            time.sleep(0.001)
        time.sleep(0.05)
        assert self.sent == list(range(count))


@pytest.mark.parametrize("places", [1, 2, 3])
def test_layers_arrive_in_order_and_run_ahead_as_far_as_there_is_room(places):
    """Two passes, the second over fewer rows: what the first left in its places is zero again."""
    made = Streamed(places)
    for start in (np.array([33, 0, 16], np.int32), np.array([8, 0, 24], np.int32)):
        made.sent.clear()
        made.stream.begin(made.bookings, start)
        for layer in range(LAYERS):
            made.wait(min(LAYERS, layer + places))
            pair = made.stream.take(layer)
            # Staging may change as soon as a layer has arrived.
            made.wait(min(LAYERS, layer + places))
            for which, got in enumerate(map(np.asarray, pair)):
                for slot, booking in enumerate(made.bookings):
                    rows = start[slot]
                    assert not got[slot, rows:].any()
                    if booking is not None:
                        want = booking.extents[layer][:, which, :rows].swapaxes(0, 1)
                        np.testing.assert_array_equal(got[slot, :rows], want)
            made.stream.computed(layer)
        assert not made.stream.busy
    made.stream.close()


def test_a_pass_may_end_early_and_another_begin():
    made = Streamed(2)
    start = np.full(SLOTS, 8, np.int32)
    start[1] = 0
    made.stream.begin(made.bookings, start)
    made.stream.take(0)
    made.stream.stop()
    assert not made.stream.busy
    made.sent.clear()
    made.stream.begin(made.bookings, start)
    for layer in range(LAYERS):
        (keys, _), extent = made.stream.take(layer), made.bookings[2].extents[layer]
        np.testing.assert_array_equal(keys[2, :8], extent[:, 0, :8].swapaxes(0, 1))
        made.stream.computed(layer)
    made.stream.close()


def test_what_cannot_be_fetched_is_said_and_nothing_hangs():
    made = Streamed(2, timeout=0.2)
    beyond = np.array([ROWS + 1, 0, 8], np.int32)
    made.stream.begin(made.bookings, beyond)
    with pytest.raises(EngineError, match="sparse layer 0 could not be fetched"):
        made.stream.take(0)
    made.stream.begin(made.bookings, np.array([8, 0, 8], np.int32))
    made.stream.take(0), made.stream.take(1)
    # Nobody said that a layer was computed, so there is no room for the next one.
    with pytest.raises(WaitTimeout, match="sparse layer 2"):
        made.stream.take(2)
    made.stream.close()
