"""Attention against plain NumPy loops."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from precision import product_precisions

from herald_jax.models import attention, attention_parts, registry
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
    out, mass = attention_parts.attend_parts(packed, *others, parts, "xla")
    known = [np.nan_to_num(part) for part in (k, v)]
    whole = attention.attend(*map(jnp.asarray, (q, *known, lengths)), "xla")
    np.testing.assert_allclose(attention.unpack(out, hq), whole, atol=1e-5)
    scores = np.einsum("nshd,nrhd->nshr", packed, known[0]) / np.sqrt(d)
    scores = np.where(np.arange(rows) < lengths[:, None, None, None], scores, -np.inf)
    np.testing.assert_allclose(mass, np.logaddexp.reduce(scores, axis=-1), atol=1e-5)


def test_the_mass_of_parts_is_single_precision():
    q, k, v, lengths = (jnp.asarray(part) for part in draw(SHAPES[1], 7))
    packed = attention.pack(q.astype(jnp.bfloat16), SHAPES[1][3])
    rounded = packed, k.astype(jnp.bfloat16), v.astype(jnp.bfloat16)
    for parts in (1, 3):
        out, mass = attention_parts.attend_parts(*rounded, lengths, parts, "xla")
        assert (out.dtype, mass.dtype) == (jnp.bfloat16, jnp.float32)


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a CUDA device")
@pytest.mark.parametrize("parts", [2, 8])
def test_parts_on_the_device_are_as_near_float32_as_a_whole(parts):
    """A mass of three digits would weigh parts wrong by percents, and none of it be seen."""
    q, k, v, _ = draw((2, 8, 16, 4, 128, 1600), 7)
    lengths = jnp.array([1600, 1300])
    full = [jnp.asarray(part, jnp.bfloat16) for part in (4 * q, k, v)]
    wanted = attention.attend(*(part.astype(jnp.float32) for part in full), lengths, "xla")
    whole = jax.nn.dot_product_attention(
        attention.pack(full[0], 4), *full[1:], key_value_seq_lengths=lengths, implementation="cudnn"
    )
    attend = jax.jit(attention_parts.attend_parts, static_argnums=(4, 5))
    cut, _ = attend(attention.pack(full[0], 4), *full[1:], lengths, parts, "cudnn")

    def error(out):
        ours = attention.unpack(out, 16).astype(jnp.float32)
        return float(jnp.sqrt(((ours - wanted) ** 2).mean()))

    assert error(cut) < 2 * error(whole)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("alone", [0, 1])
def test_rows_beside_a_buffer_are_attended_as_rows_of_it(shape, alone):
    n, s, hq, hkv, d, _ = shape
    alone = min(alone, s)
    q, k, v, lengths = draw(shape, 8)
    _, own_k, own_v, _ = draw((n, s, hq, hkv, d, s), 9)
    q, k, v, own_k, own_v, lengths = map(jnp.asarray, (q, k, v, own_k, own_v, lengths))
    ours = attention.attend_beside(q, k, v, lengths, (own_k, own_v), alone, "xla")
    first = alone * hq // hkv
    sides = attention_parts.attend_sides(
        attention.pack(q, hkv), k, v, lengths, (own_k, own_v), first, "xla"
    )
    buffers = [
        jnp.concatenate([buffer, jnp.zeros_like(own)], axis=1)
        for buffer, own in ((k, own_k), (v, own_v))
    ]
    for slot, length in enumerate(lengths.tolist()):
        buffers = [
            buffer.at[slot, length : length + s].set(own[slot])
            for buffer, own in zip(buffers, (own_k, own_v), strict=True)
        ]
    whole = attention.attend(q, *buffers, lengths + s, "xla")
    whole = whole.at[:, :alone].set(attention.attend(q[:, :alone], k, v, lengths, "xla"))
    np.testing.assert_allclose(ours, whole, atol=1e-5)
    np.testing.assert_allclose(attention.unpack(sides, hq), whole, atol=1e-5)


def test_parts_fill_the_device():
    """Few long slots are cut, many are not, and short or indivisible buffers are left whole."""
    assert attention_parts.attended_in_parts(40, 66048) == 3
    assert attention_parts.attended_in_parts(124, 33184) == 1
    assert attention_parts.attended_in_parts(176, 16800) > 1
    assert attention_parts.attended_in_parts(4, 600) == 1
    assert attention_parts.attended_in_parts(4, 1021 * 3) == 3


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


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a CUDA device")
def test_importance_by_the_mass_that_attention_found_is_that_by_its_own():
    """cuDNN's log of the mass must be as good as the kernel's, whole and in parts."""
    q, k, v, _ = draw((4, 8, 16, 4, 128, 1600), 11)
    lengths = jnp.array([1600, 1300, 64, 801])
    full = [jnp.asarray(part, jnp.bfloat16) for part in (4 * q, k, v)]
    voters = jnp.ones((4, 8), bool)
    out, mass = jax.jit(attention.attend_with_mass)(*full, lengths)
    assert mass is not None
    np.testing.assert_allclose(out, jax.jit(attention.attend)(*full, lengths), atol=2e-2)
    given = jax.jit(attention.importance)(*full[:2], lengths, voters, mass)
    own = jax.jit(attention.importance)(*full[:2], lengths, voters)
    np.testing.assert_allclose(given, own, rtol=2e-3, atol=1e-6)
