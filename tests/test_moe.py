"""Routers and the implementations of a mixture against NumPy, token by token."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from herald_jax.models import grouped, moe, moe_reference
from herald_jax.models.assignments import assign
from herald_jax.models.config import ExpertsConfig
from tests.precision import near, product_precisions

LLADA2 = ExpertsConfig(
    count=16,
    per_token=4,
    intermediate_size=24,
    router="sigmoid",
    groups=4,
    groups_per_token=2,
    scale=2.5,
    shared_size=24,
)
SDAR = ExpertsConfig(count=16, per_token=4, intermediate_size=24, router="softmax")
WAYS = {"tiled": grouped.tiled, "padded": grouped.padded}


def bias_of(rng: np.random.Generator, count: int) -> np.ndarray:
    """Mostly negative, so that a group shut out must fall below and not to zero."""
    return rng.normal(-1, 0.8, count).astype(np.float32)


def mixture(
    rng: np.random.Generator, tokens: int, experts: int, k: int, hidden: int = 32, inner: int = 24
) -> tuple[np.ndarray, ...]:
    """x, weights, ids, gate, up and down with a routing drawn at random."""
    ids = np.stack([rng.permutation(experts)[:k] for _ in range(tokens)]).astype(np.int32)
    return (
        rng.standard_normal((tokens, hidden)).astype(np.float32),
        rng.random((tokens, k)).astype(np.float32),
        ids,
        *(
            (rng.standard_normal(shape) * shape[1] ** -0.5).astype(np.float32)
            for shape in ((experts, hidden, inner), (experts, hidden, inner))
        ),
        (rng.standard_normal((experts, inner, hidden)) * inner**-0.5).astype(np.float32),
    )


def run(way: str, *arguments: np.ndarray) -> np.ndarray:
    """One implementation, compiled."""
    if way in WAYS:
        return np.asarray(
            jax.jit(grouped.run, static_argnums=(0, 1))(WAYS[way], assign, *arguments)
        )
    return np.asarray(
        jax.jit(moe.mix, static_argnames="implementation")(*arguments, implementation=way)
    )


# --- Routers


@pytest.mark.parametrize(
    "config",
    [
        LLADA2,
        replace(LLADA2, groups=8, groups_per_token=3, per_token=6),
        replace(LLADA2, groups=1, groups_per_token=1),
        replace(LLADA2, per_token=1),
        replace(LLADA2, normalizes=False),
        replace(LLADA2, count=256, per_token=8, groups=8, groups_per_token=4),
    ],
)
@pytest.mark.parametrize("tied", [False, True])
def test_sigmoid_router_is_that_of_the_reference(config: ExpertsConfig, tied: bool) -> None:
    rng = np.random.default_rng(config.count + config.groups)
    logits = rng.standard_normal((200, config.count)).astype(np.float32)
    bias = bias_of(rng, config.count)
    if tied:  # Values whose sums fp32 holds exactly: equal in any order of operations.
        logits, bias = np.zeros_like(logits), np.round(bias * 2) / 2
    weights, ids = jax.jit(moe.route_sigmoid, static_argnums=2)(logits, bias, config)
    wanted, wanted_ids = moe_reference.route_sigmoid(logits, bias, config)
    np.testing.assert_array_equal(ids, wanted_ids)
    np.testing.assert_allclose(weights, wanted, rtol=1e-5)
    assert weights.dtype == jnp.float32
    assert ids.dtype == jnp.int32


def test_random_scores_tell_minus_infinity_from_zero() -> None:
    """The comparison above would notice experts taken from groups that were shut out."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((200, 16)).astype(np.float32)
    bias = bias_of(rng, 16)
    _, ids = moe_reference.route_sigmoid(logits, bias, LLADA2)
    choice = (1 / (1 + np.exp(-logits)) + bias).reshape(200, 4, 4)
    strength = np.sort(choice, -1)[..., -2:].sum(-1)
    kept = np.argsort(-strength, -1, kind="stable")[:, :2]
    zeroed = np.where((kept[..., None] == np.arange(4)).any(1)[..., None], choice, 0).reshape(
        200, 16
    )
    wrong = np.argsort(-zeroed, -1, kind="stable")[:, :4]
    assert (np.sort(wrong) != np.sort(ids)).any(-1).mean() > 0.5
    assert all(set(row // 4) <= set(groups) for row, groups in zip(ids, kept, strict=True))


@pytest.mark.parametrize(
    "config", [SDAR, replace(SDAR, normalizes=False), replace(SDAR, scale=0.5)]
)
@pytest.mark.parametrize("tied", [False, True])
def test_softmax_router_is_that_of_the_reference(config: ExpertsConfig, tied: bool) -> None:
    logits = np.random.default_rng(1).standard_normal((200, 16)).astype(np.float32) * 3
    logits = np.round(logits) if tied else logits
    weights, ids = jax.jit(moe.route_softmax, static_argnums=1)(logits, config)
    wanted, wanted_ids = moe_reference.route_softmax(logits, config)
    np.testing.assert_array_equal(ids, wanted_ids)
    np.testing.assert_allclose(weights, wanted, rtol=1e-5)


def test_router_adds_its_bias_in_float32() -> None:
    """Two experts that only a rounded bias would swap, in a network of half precision."""
    config = replace(LLADA2, count=2, per_token=1, groups=1, groups_per_token=1)
    router = moe.Router(8, config, jnp.bfloat16, nnx.Rngs(0))
    router.kernel[...] = jnp.zeros((8, 2), jnp.bfloat16)
    router.bias[...] = jnp.asarray([1.0, 1.0 + 2.0**-12], jnp.float32)
    assert router(jnp.ones((3, 8), jnp.bfloat16))[1].tolist() == [[1]] * 3


# --- The sum over the experts


@pytest.mark.parametrize("way", ["reference", "grouped", "tiled", "padded"])
@pytest.mark.parametrize(
    ("tokens", "experts", "k"),
    [(1, 16, 4), (7, 16, 1), (8, 4, 4), (9, 3, 2), (33, 64, 8), (70, 1, 1), (200, 5, 2)],
)
def test_mixture_is_that_of_the_reference(way: str, tokens: int, experts: int, k: int) -> None:
    arguments = mixture(np.random.default_rng(tokens), tokens, experts, k)
    wanted = moe_reference.mix(*arguments)
    np.testing.assert_allclose(run(way, *arguments), wanted, atol=near(1e-5), rtol=0)


@pytest.mark.parametrize("way", ["grouped", "tiled", "padded"])
@pytest.mark.parametrize("chosen", [[0, 1], [14, 15], [3, 9]])
def test_all_tokens_on_few_experts(way: str, chosen: list[int]) -> None:
    """First, last and scattered experts take everything; all others are empty."""
    x, weights, _, *matrices = mixture(np.random.default_rng(2), 150, 16, 2)
    arguments = (x, weights, np.tile(np.int32(chosen), (150, 1)), *matrices)
    wanted = moe_reference.mix(*arguments)
    np.testing.assert_allclose(run(way, *arguments), wanted, atol=near(1e-5), rtol=0)


@pytest.mark.parametrize("way", ["reference", "grouped", "tiled", "padded"])
def test_nan_of_a_token_stays_with_it(way: str) -> None:
    arguments = mixture(np.random.default_rng(3), 40, 4, 2)
    arguments[0][7] = np.nan
    bad = np.isnan(run(way, *arguments)).any(-1)
    assert bad[7]
    assert bad.sum() == 1


@pytest.mark.parametrize("way", ["tiled", "padded"])
def test_token_gets_the_same_alone_and_among_others(way: str) -> None:
    """Bit for bit, in fp32: neighbours, order and number of tokens change nothing."""
    x, weights, ids, *matrices = mixture(np.random.default_rng(4), 65, 8, 2, hidden=96, inner=40)
    together = run(way, x, weights, ids, *matrices)
    order = np.random.default_rng(5).permutation(65)
    shuffled = run(way, x[order], weights[order], ids[order], *matrices)
    np.testing.assert_array_equal(shuffled, together[order])
    for part in (slice(0, 1), slice(64, 65), slice(3, 36)):
        alone = run(way, x[part], weights[part], ids[part], *matrices)
        np.testing.assert_array_equal(alone, together[part])


@pytest.mark.parametrize("way", ["reference", "grouped", "tiled", "padded"])
def test_half_precision_stays_near_float32(way: str) -> None:
    arguments = mixture(np.random.default_rng(6), 64, 16, 4, hidden=128, inner=64)
    rounded = [np.asarray(jnp.asarray(array, jnp.bfloat16)) for array in arguments]
    rounded[1:3] = arguments[1:3]
    out = run(way, *rounded)
    wanted = moe_reference.mix(*(array.astype(np.float32) for array in rounded[:2]), *rounded[2:])
    error = np.linalg.norm(out.astype(np.float64) - wanted) / np.linalg.norm(wanted)
    assert out.dtype == jnp.bfloat16
    assert error < 0.01


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="tiles are for the CPU")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_grouped_memory_does_not_grow_with_the_experts(dtype: str) -> None:
    """No product of every token with every expert, and no second copy of the weights."""
    tokens, experts, hidden, inner = 64, 64, 64, 256
    shapes = [(experts, hidden, inner)] * 2 + [(experts, inner, hidden)]
    types_of = [jax.ShapeDtypeStruct(shape, dtype) for shape in [(tokens, hidden), *shapes]]
    routing = [
        jax.ShapeDtypeStruct((tokens, 2), jnp.float32),
        jax.ShapeDtypeStruct((tokens, 2), jnp.int32),
    ]
    program = jax.jit(grouped.run, static_argnums=(0, 1)).lower(
        grouped.tiled, assign, types_of[0], *routing, *types_of[1:]
    )
    analysis = program.compile().memory_analysis()
    assert analysis.temp_size_in_bytes < experts * hidden * inner * 4 / 4


@pytest.mark.parametrize("way", ["reference", "padded"])
def test_float32_asks_for_full_precision(way: str) -> None:
    arguments = mixture(np.random.default_rng(7), 5, 4, 2)

    def compute(*arrays: jax.Array) -> jax.Array:
        if way == "reference":
            return moe.mix(*arrays, implementation="reference")
        return grouped.run(grouped.padded, assign, *arrays)

    precisions = product_precisions(compute, *arguments)
    assert len(precisions) == 3
    assert all(str(each).count("HIGHEST") == 2 for each in precisions)


def test_whole_mixture_is_router_experts_and_shared_expert() -> None:
    layer = moe.MixtureOfExperts(32, LLADA2, jnp.float32, nnx.Rngs(0))
    rng = np.random.default_rng(8)
    layer.router.bias[...] = jnp.asarray(bias_of(rng, 16))
    x = rng.standard_normal((2, 9, 32)).astype(np.float32)
    tokens = x.reshape(18, 32)
    routing = moe_reference.route_sigmoid(
        tokens @ np.asarray(layer.router.kernel[...]), np.asarray(layer.router.bias[...]), LLADA2
    )
    matrices = [np.asarray(getattr(layer.experts, name)[...]) for name in ("gate", "up", "down")]
    wanted = moe_reference.mix(tokens, *routing, *matrices).reshape(x.shape) + layer.shared(x)
    compute = nnx.jit(lambda layer, x, way: layer(x, implementation=way), static_argnums=2)
    for way in ("reference", "grouped", None):
        np.testing.assert_allclose(compute(layer, x, way), wanted, atol=near(2e-5), rtol=0)


# --- Which implementation


def test_choice_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HERALD_EXPERTS", raising=False)
    name, reason = moe.default_implementation(jnp.bfloat16, "cpu")
    assert (name, reason) == ("grouped", "the device is not a CUDA GPU")
    name, reason = moe.default_implementation(jnp.float32, "gpu")
    assert (name, reason) == ("grouped", "the kernels multiply bfloat16, not float32")
    name, reason = moe.default_implementation(jnp.bfloat16, "gpu", hidden=48, inner=16)
    assert name == "grouped"
    assert "not 48 and 16" in reason
    assert "not 24" in moe.default_implementation(jnp.bfloat16, "gpu", count=24)[1]
    assert moe.default_implementation(jnp.bfloat16, "gpu")[0] == "kernels"


def test_environment_names_the_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERALD_EXPERTS", "reference")
    assert moe.default_implementation(jnp.bfloat16) == ("reference", "HERALD_EXPERTS")
    arguments = mixture(np.random.default_rng(9), 3, 4, 2)
    monkeypatch.setenv("HERALD_EXPERTS", "fastest")
    with pytest.raises(ValueError, match=r"HERALD_EXPERTS.*fastest.*only reference, grouped"):
        moe.mix(*arguments)
    monkeypatch.setenv("HERALD_EXPERTS", "kernels")
    with pytest.raises(ValueError, match="HERALD_EXPERTS: experts cannot use kernels"):
        moe.mix(*arguments)
    with pytest.raises(ValueError, match="experts cannot use kernels: "):
        moe.mix(*arguments, implementation="kernels")
