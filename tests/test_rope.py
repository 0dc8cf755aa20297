"""RoPE against plain NumPy loops: rotation, partial heads, YaRN."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest
from networks import TINY

from herald_jax.models import hf_config
from herald_jax.models.config import YarnConfig
from herald_jax.models.rope import frequencies, rotary_angles, rotate


def config(rotary: int, theta: float = 1e4, yarn: YarnConfig | None = None, head_dim: int = 16):
    return dataclasses.replace(
        TINY, head_dim=head_dim, rotary_dim=rotary, rope_theta=theta, yarn=yarn
    )


def test_rotate_turns_pairs_half_a_rotation_apart():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 3, 4, 10)).astype(np.float32)
    positions = rng.integers(0, 1000, (2, 3))
    angles = rotary_angles(jnp.asarray(positions), config(6, 100.0, head_dim=10))
    ours = rotate(jnp.asarray(x), angles, 1.5)
    theirs = x.astype(np.float64)
    for n, s, h, c in np.ndindex(2, 3, 4, 3):
        angle = positions[n, s] * 100.0 ** (-2 * c / 6)
        a, b = x[n, s, h, c], x[n, s, h, c + 3]
        theirs[n, s, h, c] = 1.5 * (a * np.cos(angle) - b * np.sin(angle))
        theirs[n, s, h, c + 3] = 1.5 * (b * np.cos(angle) + a * np.sin(angle))
    np.testing.assert_allclose(ours, theirs, atol=1e-3)
    np.testing.assert_array_equal(ours[..., 6:], x[..., 6:])


@pytest.mark.parametrize("block", [1, 4, 32])
@pytest.mark.parametrize("rotary", [8, 16])
def test_rotations_compose(block, rotary):
    """Turning by p and then by B is turning by p + B: queries can be moved on by a block."""
    rng = np.random.default_rng(block)
    x = jnp.asarray(rng.normal(size=(2, 5, 3, 16)), jnp.float32)
    positions = jnp.asarray(rng.integers(0, 500, (2, 5)))
    turned = config(rotary)
    once = rotate(x, rotary_angles(positions + block, turned))
    step = rotary_angles(jnp.full((2, 5), block), turned)
    twice = rotate(rotate(x, rotary_angles(positions, turned)), step)
    np.testing.assert_allclose(once, twice, atol=2e-4)
    assert np.abs(once - x).max() > 0.1


def stretched(theta: float, dim: int, yarn: YarnConfig) -> list[float]:
    """The paper's ramp (arXiv:2309.00071, section 3.2), pair by pair, over numbers of turns."""
    result = []

    def pair(turns: float) -> float:
        return dim * math.log(yarn.original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair(yarn.beta_fast), pair(yarn.beta_slow)
    if yarn.truncates:
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, dim - 1.0)
    for i in range(dim // 2):
        frequency = theta ** (-2 * i / dim)
        share = min(1.0, max(0.0, (i - low) / (high - low)))
        result.append(frequency * (1 - share) + frequency / yarn.factor * share)
    return result


@pytest.mark.parametrize("truncates", [True, False])
@pytest.mark.parametrize(("factor", "original"), [(2.0, 32768), (4.0, 4096), (32.0, 8192)])
def test_yarn_keeps_fast_pairs_and_slows_slow_ones(factor, original, truncates):
    yarn = YarnConfig(factor, original, 32.0, 1.0, 1.0, truncates)
    ours = frequencies(config(64, 6e5, yarn, head_dim=128))
    np.testing.assert_allclose(ours, stretched(6e5, 64, yarn), rtol=1e-12)
    plain = frequencies(config(64, 6e5, head_dim=128))
    assert ours[0] == plain[0]
    np.testing.assert_allclose(ours[-1], plain[-1] / factor)


def test_yarn_is_read_with_the_defaults_of_transformers():
    rope = {"rope_type": "yarn", "factor": 4.0}
    read = hf_config.yarn({"rope_scaling": rope, "max_position_embeddings": 1000})
    assert read == YarnConfig(4.0, 1000, 32.0, 1.0, 0.1 * math.log(4.0) + 1.0)
    newer = rope | {"original_max_position_embeddings": 64, "beta_fast": 16, "truncate": False}
    read = hf_config.yarn({"rope_parameters": newer | {"mscale": 2.0, "mscale_all_dim": 1.0}})
    assert read is not None
    assert (read.original_length, read.beta_fast, read.truncates) == (64, 16.0, False)
    wanted = (0.2 * math.log(4.0) + 1.0) / (0.1 * math.log(4.0) + 1.0)
    assert read.attention_factor == pytest.approx(wanted)
    assert hf_config.yarn({"rope_scaling": read and hf_config.yarn_to_hf(read)}) == read
    assert hf_config.yarn({"rope_scaling": None}) is None
