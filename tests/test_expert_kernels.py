"""The kernels of a mixture, interpreted, against what they stand for."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from herald_jax.models import expert_kernels, grouped, moe, moe_reference, routing_kernels
from herald_jax.models.assignments import assign
from herald_jax.models.config import ExpertsConfig
from herald_jax.models.expert_kernels import Tiling
from tests.precision import near
from tests.test_moe import LLADA2, SDAR, bias_of, mixture

WIDE = replace(LLADA2, count=64, per_token=8, groups=8, groups_per_token=4)


@pytest.mark.parametrize(
    ("config", "tied"),
    [
        (LLADA2, True),
        (WIDE, False),
        (replace(LLADA2, groups=1, groups_per_token=1), False),
        (replace(LLADA2, per_token=1), False),
        (replace(LLADA2, normalizes=False), False),
        (SDAR, True),
        (replace(SDAR, normalizes=False), False),
        (replace(SDAR, scale=0.5), False),
    ],
)
def test_choice_is_that_of_the_router(config: ExpertsConfig, tied: bool) -> None:
    rng = np.random.default_rng(config.count + config.groups)
    logits = rng.standard_normal((37, config.count)).astype(np.float32)
    bias = bias_of(rng, config.count)
    if tied:
        logits, bias = np.zeros_like(logits), np.round(bias * 2) / 2
    if config.router == "sigmoid":
        wanted = moe_reference.route_sigmoid(logits, bias, config)
    else:
        wanted = moe_reference.route_softmax(logits, config)
    found = routing_kernels.choose(logits, bias, config)
    np.testing.assert_array_equal(found[1], wanted[1])
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-5)


@pytest.mark.parametrize("config", [LLADA2, SDAR])
def test_scores_that_are_not_numbers_still_choose_different_experts(config: ExpertsConfig) -> None:
    """Otherwise two assignments would go to one row, and some row would have none."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((20, config.count)).astype(np.float32)
    bias = bias_of(rng, config.count)
    clean = routing_kernels.choose(logits, bias, config)
    logits[7] = np.nan
    logits[9, :3] = np.nan
    weights, ids = (np.asarray(part) for part in routing_kernels.choose(logits, bias, config))
    assert all(len(set(row)) == config.per_token for row in ids.tolist())
    assert ((ids >= 0) & (ids < config.count)).all()
    assert np.isnan(weights[7]).all()
    others = [n for n in range(20) if n not in (7, 9)]
    np.testing.assert_array_equal(ids[others], clean[1][jnp.array(others)])


@pytest.mark.parametrize(
    ("tokens", "experts", "k"), [(1, 16, 4), (31, 16, 1), (32, 64, 8), (33, 16, 16), (100, 32, 3)]
)
def test_places_are_those_of_a_sort(tokens: int, experts: int, k: int) -> None:
    rng = np.random.default_rng(tokens)
    ids = np.stack([rng.permutation(experts)[:k] for _ in range(tokens)]).astype(np.int32)
    for found, wanted in zip(
        routing_kernels.place(ids, experts), assign(ids, experts), strict=True
    ):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("height", [16, 64])
def test_tiles_cover_every_row_once(height: int) -> None:
    rng = np.random.default_rng(height)
    # Most tokens on few experts, so that some have several tiles and many have none.
    ids = np.stack([rng.permutation(16 if n % 3 else 4)[:3] for n in range(90)]).astype(np.int32)
    taken = assign(ids, 16)
    cut = expert_kernels.tiles(taken, height)
    sizes, starts = np.asarray(taken.sizes), np.asarray(taken.starts)
    rows = []
    for expert, start, count in zip(*(np.asarray(part) for part in cut), strict=True):
        assert count <= height
        if count:
            assert starts[expert] <= start
            assert start + count <= starts[expert] + sizes[expert]
        rows += range(start, start + count)
    assert sorted(rows) == list(range(270))


def products(tiling: Tiling, *arguments: np.ndarray) -> np.ndarray:
    """``grouped.run`` over the kernels with one tiling."""

    def rows(x, taken, gate, up, down):
        inner = expert_kernels.inner_rows(x, taken, gate, up, tiling)
        return expert_kernels.outer_rows(inner, taken, down, tiling)

    run = jax.jit(lambda *parts: grouped.run(rows, routing_kernels.place, *parts))
    return np.asarray(run(*arguments))


@pytest.mark.parametrize(
    "tiling", [Tiling(16, 16, 64, 64, 4, 2), Tiling(64, 16, 128, 32, 4, 2)], ids=["low", "high"]
)
@pytest.mark.parametrize(("tokens", "k"), [(1, 2), (17, 1), (40, 4)])
def test_products_are_those_of_the_reference(tiling: Tiling, tokens: int, k: int) -> None:
    arguments = mixture(np.random.default_rng(tokens), tokens, 16, k, hidden=128, inner=128)
    if tokens == 40:  # One expert takes every token, one takes none.
        ids = arguments[2]
        ids[:] = np.stack(
            [[5, *np.random.default_rng(n).permutation(5)[: k - 1]] for n in range(40)]
        )
    found = products(tiling, *arguments)
    np.testing.assert_allclose(found, moe_reference.mix(*arguments), atol=near(1e-5), rtol=0)


def test_nan_of_a_token_stays_with_it_in_the_kernels() -> None:
    arguments = mixture(np.random.default_rng(3), 40, 16, 2, hidden=128, inner=128)
    arguments[0][7] = np.nan
    bad = np.isnan(products(Tiling(64, 16, 128, 64, 4, 2), *arguments)).any(-1)
    assert bad[7]
    assert bad.sum() == 1


@pytest.mark.parametrize("mean_rows", [1, 20, 21, 48, 49, 4096])
def test_there_are_tilings_for_every_load(mean_rows: int) -> None:
    for tiling in expert_kernels.tilings(mean_rows * 256, 256):
        assert tiling.heights[-1] == tiling.lowest >= 16
        assert expert_kernels.WIDTH_STEP % tiling.columns == 0
        assert expert_kernels.WIDTH_STEP % tiling.depth == 0


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a CUDA device")
@pytest.mark.parametrize("tokens", [1, 32, 300, 1500, 3000])
def test_kernels_on_the_device_stay_near_float32(tokens: int) -> None:
    arguments = mixture(np.random.default_rng(tokens), tokens, 32, 4, hidden=256, inner=128)
    rounded = [jnp.asarray(part, jnp.bfloat16) for part in arguments]
    rounded[1:3] = arguments[1:3]
    out = np.asarray(
        jax.jit(moe.mix, static_argnames="implementation")(*rounded, implementation="kernels")
    ).astype(np.float64)
    wanted = moe_reference.mix(
        *(
            np.asarray(part).astype(np.float32) if part.dtype != np.int32 else part
            for part in rounded
        )
    )
    assert np.linalg.norm(out - wanted) / np.linalg.norm(wanted) < 0.01
