"""Rotary position embedding: plain, over part of a head, or stretched by YaRN."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from herald_jax.models.config import ModelConfig, YarnConfig


def frequencies(config: ModelConfig) -> np.ndarray:
    """Radians per position of every rotated pair: float64 [rotary_dim / 2]."""
    dim = config.rotary_dim or config.head_dim
    plain = config.rope_theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    return plain if config.yarn is None else _stretched(plain, dim, config.rope_theta, config.yarn)


def _stretched(plain: np.ndarray, dim: int, theta: float, yarn: YarnConfig) -> np.ndarray:
    """YaRN: fast pairs keep their frequency, slow ones are divided by the factor (section 3.2)."""

    def pair_of(turns: float) -> float:
        """The pair that makes so many turns within the original length."""
        wavelength = yarn.original_length / (turns * 2 * math.pi)
        return dim * math.log(wavelength) / (2 * math.log(theta))

    low, high = pair_of(yarn.beta_fast), pair_of(yarn.beta_slow)
    if yarn.truncates:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high = high + 0.001 if high == low else high
    slow = np.clip((np.arange(dim // 2) - low) / (high - low), 0, 1)
    return plain * (1 - slow) + plain / yarn.factor * slow


def rotary_angles(positions: jax.Array, config: ModelConfig) -> jax.Array:
    """RoPE angles for the half-split layout, in fp32.

    Args:
      positions: int32 [...], absolute positions.
      config: whose base, rotated channels and YaRN count.

    Returns:
      float32 [..., rotary_dim / 2].
    """
    per_position = jnp.asarray(frequencies(config), jnp.float32)
    return positions[..., None].astype(jnp.float32) * per_position


def rotate(x: jax.Array, angles: jax.Array, scale: float = 1.0) -> jax.Array:
    """Applies RoPE: channel c pairs with channel c + dim / 2; further channels pass through.

    Rotations compose, so rotating a rotated vector by B positions more moves it B positions on.

    Args:
      x: [..., heads, D].
      angles: float32 [..., dim / 2] with dim <= D, broadcast over heads.
      scale: factor on the rotated channels (YaRN's attention factor).

    Returns:
      Array like ``x``.
    """
    half = angles.shape[-1]
    cos, sin = jnp.cos(angles)[..., None, :] * scale, jnp.sin(angles)[..., None, :] * scale
    first, second = x[..., :half].astype(jnp.float32), x[..., half : 2 * half].astype(jnp.float32)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return jnp.concatenate([turned.astype(x.dtype), x[..., 2 * half :]], axis=-1)
