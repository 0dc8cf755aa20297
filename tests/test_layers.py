"""Attention against plain NumPy loops."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from precision import product_precisions

from herald_jax.models import attention, registry
from herald_jax.models.config import ModelConfig

SHAPES = [  # N, S, H_q, H_kv, D, R
    (1, 1, 1, 1, 2, 1),
    (2, 4, 4, 4, 8, 12),
    (3, 5, 6, 2, 6, 9),
    (2, 8, 4, 1, 16, 33),
]
# Into how many parts buffers are cut: each with one shape, with all of them only at length.
PARTS = (1, 2, 3, 8)


def draw(shape: tuple[int, ...], seed: int) -> np.ndarray:
    n, s, hq, hkv, d, r = shape
    rng = np.random.default_rng(seed)
    return (
        rng.normal(size=(n, s, hq, d)).astype(np.float32),
        rng.normal(size=(n, r, hkv, d)).astype(np.float32),
        rng.normal(size=(n, r, hkv, d)).astype(np.float32),
        rng.integers(1, r + 1, n).astype(np.int32),
    )


def softmax(q: np.ndarray, keys: np.ndarray) -> np.ndarray:
    scores = keys.astype(np.float64) @ q.astype(np.float64) / np.sqrt(len(q))
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


@pytest.mark.parametrize("shape", SHAPES)
def test_attend_equals_a_loop(shape):
    q, k, v, lengths = draw(shape, 1)
    group = shape[2] // shape[3]
    ours = attention.attend(*map(jnp.asarray, (q, k, v, lengths)), "xla")
    theirs = np.empty(q.shape)
    for n, s, h in np.ndindex(*q.shape[:3]):
        rows = slice(0, lengths[n])
        weights = softmax(q[n, s, h], k[n, rows, h // group])
        theirs[n, s, h] = weights @ v[n, rows, h // group]
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "parts"),
    [
        pytest.param(shape, parts, marks=() if parts == own else pytest.mark.slow)
        for shape, own in zip(SHAPES, (2, 8, 3, 1), strict=True)
        for parts in PARTS
    ],
)
def test_parts_of_a_buffer_attend_as_one(shape, parts):
    """Parts that are full, cut short and empty; what stands in empty ones may be anything."""
    n, s, hq, hkv, d, _ = shape
    rows = 24
    q, k, v, _ = draw((n, s, hq, hkv, d, rows), 7)
    lengths = np.resize([rows, 1, 13, 3], n).astype(np.int32)
    for at, length in enumerate(lengths):
        empty = -(-length // (rows // parts)) * (rows // parts)
        k[at, empty:] = v[at, empty:] = np.nan
    packed, *others = (attention.pack(jnp.asarray(q), hkv), *map(jnp.asarray, (k, v, lengths)))
    ours = attention.unpack(attention.attend_parts(packed, *others, parts, "xla"), hq)
    known = [np.nan_to_num(part) for part in (k, v)]
    whole = attention.attend(*map(jnp.asarray, (q, *known, lengths)), "xla")
    np.testing.assert_allclose(ours, whole, atol=1e-5)


def test_parts_fill_the_device():
    """Few long slots are cut, many are not, and short or indivisible buffers are left whole."""
    assert attention.attended_in_parts(40, 66048) == 3
    assert attention.attended_in_parts(124, 33184) == 1
    assert attention.attended_in_parts(176, 16800) > 1
    assert attention.attended_in_parts(4, 600) == 1
    assert attention.attended_in_parts(4, 1021 * 3) == 3


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("block", [1, 3, 4])
def test_attend_blocks_equals_a_loop(shape, block):
    q, k, v, _ = draw(shape, 2)
    group, rows = shape[2] // shape[3], shape[5]
    positions = np.random.default_rng(3).integers(0, rows, q.shape[:2]).astype(np.int32)
    ours = attention.attend_blocks(*map(jnp.asarray, (q, k, v, positions)), block)
    theirs = np.empty(q.shape)
    for n, s, h in np.ndindex(*q.shape[:3]):
        seen = np.arange(rows) // block <= positions[n, s] // block
        weights = softmax(q[n, s, h], k[n, seen, h // group])
        theirs[n, s, h] = weights @ v[n, seen, h // group]
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_importance_equals_a_loop(shape):
    q, k, _, lengths = draw(shape, 4)
    group = shape[2] // shape[3]
    voters = np.random.default_rng(5).integers(0, 2, q.shape[:2]).astype(bool)
    voters[0] = False
    ours = attention.importance(*map(jnp.asarray, (q, k, lengths, voters)))
    theirs = np.zeros((shape[0], shape[3], shape[5]))
    for n, s, h in np.ndindex(*q.shape[:3]):
        if voters[n, s]:
            weights = softmax(q[n, s, h], k[n, : lengths[n], h // group])
            theirs[n, h // group, : lengths[n]] += weights / voters[n].sum()
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_nothing_valid_gives_zeros_and_not_nan():
    q, k, v, _ = draw(SHAPES[1], 6)
    lengths = np.array([0, 3], np.int32)
    out = attention.attend(*map(jnp.asarray, (q, k, v, lengths)), "xla")
    assert not np.asarray(out[0]).any()
    assert np.isfinite(out).all()


def test_invalid_rows_do_not_matter():
    """Whatever lies behind the valid length, even NaN-free garbage of any size, is not read."""
    q, k, v, _ = draw(SHAPES[3], 7)
    lengths = np.array([5, 20], np.int32)
    clean = attention.attend(*map(jnp.asarray, (q, k, v, lengths)), "xla")
    for n, length in enumerate(lengths):
        k[n, length:], v[n, length:] = 1e30, -1e30
    np.testing.assert_array_equal(
        attention.attend(*map(jnp.asarray, (q, k, v, lengths)), "xla"), clean
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_pack_and_unpack_are_inverse(shape):
    q = draw(shape, 8)[0]
    packed = attention.pack(jnp.asarray(q), shape[3])
    assert packed.shape == (shape[0], shape[1] * shape[2] // shape[3], shape[3], shape[4])
    np.testing.assert_array_equal(attention.unpack(packed, shape[2]), q)


@pytest.mark.parametrize("tied", [True, False])
def test_single_precision_never_drops_to_tf32(tied):
    """A GPU multiplies fp32 with ten bits of mantissa unless every product asks for more."""
    config = ModelConfig("sdar", 11, 8, 2, 2, 1, 4, 8, tie_word_embeddings=tied)
    graph, state = nnx.split(registry.abstract(config, jnp.float32))
    tokens = jnp.zeros((1, 4), jnp.int32)
    asked = product_precisions(lambda state: nnx.merge(graph, state)(tokens), state)
    assert asked == [(jax.lax.Precision.HIGHEST,) * 2] * (2 * (7 + 2) + 1)
