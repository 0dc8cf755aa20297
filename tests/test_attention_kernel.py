"""The attention kernel, interpreted, against a plain softmax."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from herald_jax.models import attention_kernel
from herald_jax.models.attention import attend_blocks, pack, unpack
from herald_jax.models.attention_kernel import Tiling, attend_to_ends
from tests.precision import near

SMALL = Tiling(16, 32, 4, 1)


def case(slots: int, rows: int, keys: int, heads: int = 2, dim: int = 16):
    """q, k, v drawn at random."""
    rng = np.random.default_rng(rows + keys)
    shapes = [(slots, rows, heads, dim)] + [(slots, keys, heads, dim)] * 2
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def plain(q: np.ndarray, k: np.ndarray, v: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Row by row, in float64."""
    out = np.zeros(q.shape)
    for n, s, h in np.ndindex(q.shape[:3]):
        end = ends[n, s]
        if end:
            scores = k[n, :end, h].astype(np.float64) @ q[n, s, h] / np.sqrt(q.shape[-1])
            weights = np.exp(scores - scores.max())
            out[n, s, h] = weights / weights.sum() @ v[n, :end, h]
    return out


@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (15, 31), (16, 32), (17, 33), (40, 100)])
def test_rows_attend_up_to_their_ends(rows: int, keys: int) -> None:
    q, k, v = case(2, rows, keys)
    ends = np.random.default_rng(rows).integers(0, keys + 1, (2, rows)).astype(np.int32)
    ends[0, 0], ends[1, -1] = keys, 0
    found = attend_to_ends(q, k, v, ends, SMALL)
    np.testing.assert_allclose(found, plain(q, k, v, ends), atol=near(1e-5), rtol=0)


def test_rows_beyond_every_end_may_hold_anything() -> None:
    q, k, v = case(1, 20, 64)
    ends = np.full((1, 20), 37, np.int32)
    wanted = plain(q, k, v, ends)
    k[:, 37:], v[:, 37:] = np.nan, np.inf
    found = attend_to_ends(q, k, v, ends, SMALL)
    np.testing.assert_allclose(found, wanted, atol=near(1e-5), rtol=0)


@pytest.mark.parametrize(("start", "block"), [(0, 8), (40, 8), (12, 4)])
def test_chunks_attend_block_by_block(start: int, block: int) -> None:
    """The way prefill takes on a CUDA device and the plain one."""
    rng = np.random.default_rng(start)
    q = rng.standard_normal((1, 24, 4, 16)).astype(np.float32)
    k, v = (rng.standard_normal((1, 96, 2, 16)).astype(np.float32) for _ in range(2))
    positions = start + np.arange(24, dtype=np.int32)[None]
    wanted = attend_blocks(q, k, v, positions, block)
    ends = (np.repeat(positions, 2, axis=1) // block + 1) * block
    found = unpack(attend_to_ends(pack(jnp.asarray(q), 2), k, v, ends, SMALL), 4)
    np.testing.assert_allclose(found, wanted, atol=near(1e-5), rtol=0)


def test_only_half_precision_on_cuda_takes_the_kernel() -> None:
    assert not attention_kernel.applies(jnp.float32, 128)
    on_cuda = jax.default_backend() == "gpu"
    assert attention_kernel.applies(jnp.bfloat16, 128) == on_cuda
    assert not attention_kernel.applies(jnp.bfloat16, 96)
