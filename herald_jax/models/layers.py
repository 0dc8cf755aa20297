"""Building blocks of a decoder layer: projections, norms and the gated MLP."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from herald_jax.models.config import ModelConfig
from herald_jax.models.rope import rotary_angles, rotate


def linear(
    features_in: int, features_out: int, dtype: jnp.dtype, rngs: nnx.Rngs, bias: bool = False
) -> nnx.Linear:
    """A projection whose fp32 form never drops to TF32."""
    precision = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
    return nnx.Linear(
        features_in,
        features_out,
        use_bias=bias,
        dtype=dtype,
        param_dtype=dtype,
        precision=precision,
        rngs=rngs,
    )


def rms_norm(dim: int, eps: float, dtype: jnp.dtype, rngs: nnx.Rngs) -> nnx.RMSNorm:
    """RMSNorm with fp32 statistics."""
    return nnx.RMSNorm(dim, epsilon=eps, dtype=dtype, param_dtype=dtype, rngs=rngs)


class GatedMlp(nnx.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden: int, inner: int, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.gate = linear(hidden, inner, dtype, rngs)
        self.up = linear(hidden, inner, dtype, rngs)
        self.down = linear(inner, hidden, dtype, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [..., hidden] to [..., hidden]."""
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Projections(nnx.Module):
    """Query, key, value and output projections of one attention layer."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.config = config
        hidden, dim = config.hidden_size, config.head_dim
        bias = config.attention_bias
        self.q = linear(hidden, config.num_heads * dim, dtype, rngs, bias)
        self.k = linear(hidden, config.num_kv_heads * dim, dtype, rngs, bias)
        self.v = linear(hidden, config.num_kv_heads * dim, dtype, rngs, bias)
        self.o = linear(config.num_heads * dim, hidden, dtype, rngs)
        if config.qk_norm:
            self.q_norm = rms_norm(dim, config.rms_norm_eps, dtype, rngs)
            self.k_norm = rms_norm(dim, config.rms_norm_eps, dtype, rngs)

    def qkv(self, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Projects, normalises per head, then rotates.

        Args:
          x: [N, S, hidden].
          positions: int32 [N, S].

        Returns:
          q [N, S, H_q, D] and k, v [N, S, H_kv, D]; q and k carry RoPE.
        """
        config = self.config
        heads = (*x.shape[:-1], -1, config.head_dim)
        q, k, v = self.q(x).reshape(heads), self.k(x).reshape(heads), self.v(x).reshape(heads)
        if config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        angles = rotary_angles(positions, config)
        scale = 1.0 if config.yarn is None else config.yarn.attention_factor
        return rotate(q, angles, scale), rotate(k, angles, scale), v
