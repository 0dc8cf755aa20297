"""The benchmark's session of random caches: slots that differ, and an index that is their keys'."""

from __future__ import annotations

import numpy as np
import pytest

import host_kernels
from benchmarks.random_session import RandomSession
from benchmarks.shapes import SHAPES, random_stack
from herald_jax import EngineConfig
from herald_jax.engine.sizing import Sizing


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_slots_have_random_keys_of_their_own_and_the_index_is_theirs(kind):
    config = SHAPES["tiny"]
    sizing = Sizing(config, EngineConfig(max_batch=2, key_index=kind), np.dtype(np.float32))
    stack = random_stack(config, "float32")
    made = RandomSession(sizing, stack, "herald-merged", context=1024, blocks=2, steps=2)
    try:
        first, second = (slot.booking for _, slot in made.session.batch.active())
        for layer in range(made.shape.sparse_layers):
            extents = [first.extents[layer], second.extents[layer]]
            assert not np.array_equal(*extents)
            assert 0.9 < np.std(extents[0]) < 1.1
            wanted = [np.zeros_like(booking.index[layer]) for booking in (first, second)]
            rows = np.full(2, extents[0].shape[2], np.int32)
            host_kernels.index_rows(extents, wanted, np.zeros(2, np.int32), rows)
            for booking, index in zip((first, second), wanted, strict=True):
                np.testing.assert_array_equal(booking.index[layer], index)
        assert made.run(1).tokens_per_second > 0
    finally:
        made.close()
