"""Mixture of experts: routers in fp32, and the sum over the experts that a token takes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from herald_jax.models.config import ExpertsConfig
from herald_jax.models.layers import GatedMlp


def route_sigmoid(
    logits: jax.Array, bias: jax.Array, config: ExpertsConfig
) -> tuple[jax.Array, jax.Array]:
    """LLaDA2's router: the bias decides who is chosen, the plain scores how much each counts.

    Scores are sigmoids. The groups with the largest sums of their two best biased scores are
    kept, and among their experts the k best biased scores are chosen.

    Args:
      logits: float32 [T, E].
      bias: float32 [E].
      config: the mixture.

    Returns:
      weights float32 [T, k] and expert ids int32 [T, k]; ties go to the lower id.
    """
    scores = jax.nn.sigmoid(logits)
    choice = scores + bias
    if config.groups > 1:
        grouped = choice.reshape(len(choice), config.groups, -1)
        strength = jax.lax.top_k(grouped, 2)[0].sum(-1)
        kept = jax.lax.top_k(strength, config.groups_per_token)[1]
        usable = (kept[..., None] == jnp.arange(config.groups)).any(1)
        # Minus infinity, not zero: biased scores may be negative.
        choice = jnp.where(usable[..., None], grouped, -jnp.inf).reshape(choice.shape)
    ids = jax.lax.top_k(choice, config.per_token)[1]
    weights = jnp.take_along_axis(scores, ids, axis=-1)
    if config.normalizes and config.per_token > 1:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return weights * config.scale, ids


def route_softmax(logits: jax.Array, config: ExpertsConfig) -> tuple[jax.Array, jax.Array]:
    """SDAR-MoE's router: the k most probable experts, their probabilities divided by their sum.

    Args:
      logits: float32 [T, E].
      config: the mixture.

    Returns:
      weights float32 [T, k] and expert ids int32 [T, k]; ties go to the lower id.
    """
    weights, ids = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), config.per_token)
    if config.normalizes:
        weights = weights / weights.sum(-1, keepdims=True)
    return weights * config.scale, ids


class Router(nnx.Module):
    """Scores the experts for every token."""

    def __init__(
        self, hidden: int, config: ExpertsConfig, dtype: jnp.dtype, rngs: nnx.Rngs
    ) -> None:
        self.config = config
        initial = nnx.initializers.lecun_normal()
        self.kernel = nnx.Param(initial(rngs.params(), (hidden, config.count), dtype))
        if config.router == "sigmoid":
            # float32 in every checkpoint: rounding it would swap experts that score alike.
            self.bias = nnx.Param(jnp.zeros(config.count, jnp.float32))

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """x [T, hidden] -> weights float32 [T, k], ids int32 [T, k]."""
        kernel = self.kernel[...]
        if self.config.router == "sigmoid":
            logits = jnp.dot(
                x.astype(jnp.float32),
                kernel.astype(jnp.float32),
                precision=jax.lax.Precision.HIGHEST,
            )
            return route_sigmoid(logits, self.bias[...], self.config)
        # SDAR-MoE rounds its logits, and then the weights, to the model's dtype.
        precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
        logits = jnp.dot(x, kernel, precision=precision).astype(jnp.float32)
        weights, ids = route_softmax(logits, self.config)
        return weights.astype(x.dtype).astype(jnp.float32), ids


class Experts(nnx.Module):
    """The weights of E gated MLPs: gate and up [E, hidden, inner], down [E, inner, hidden]."""

    def __init__(
        self, hidden: int, config: ExpertsConfig, dtype: jnp.dtype, rngs: nnx.Rngs
    ) -> None:
        initial = nnx.initializers.lecun_normal(batch_axis=0)
        wide = (config.count, hidden, config.intermediate_size)
        self.gate = nnx.Param(initial(rngs.params(), wide, dtype))
        self.up = nnx.Param(initial(rngs.params(), wide, dtype))
        self.down = nnx.Param(initial(rngs.params(), (wide[0], wide[2], wide[1]), dtype))


class MixtureOfExperts(nnx.Module):
    """Routed experts, and one that every token takes where the family has it."""

    def __init__(
        self, hidden: int, config: ExpertsConfig, dtype: jnp.dtype, rngs: nnx.Rngs
    ) -> None:
        self.router = Router(hidden, config, dtype, rngs)
        self.experts = Experts(hidden, config, dtype, rngs)
        if config.shared_size:
            self.shared = GatedMlp(hidden, config.shared_size, dtype, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [..., hidden] to [..., hidden]."""
        tokens = x.reshape(-1, x.shape[-1])
        weights, ids = self.router(tokens)
        experts = self.experts
        out = mix(tokens, weights, ids, experts.gate[...], experts.up[...], experts.down[...])
        out = out.reshape(x.shape)
        return out + self.shared(x) if hasattr(self, "shared") else out


def mix(
    x: jax.Array,
    weights: jax.Array,
    ids: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
) -> jax.Array:
    """Weighted sum of the chosen experts' outputs, accumulated in fp32.

    Args:
      x: [T, hidden].
      weights: float32 [T, k]; ``ids``: int32 [T, k].
      gate, up: [E, hidden, inner]; ``down``: [E, inner, hidden].

    Returns:
      [T, hidden] in the dtype of ``x``.
    """
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    share = jnp.zeros((x.shape[0], gate.shape[0]), jnp.float32)
    share = share.at[jnp.arange(len(x))[:, None], ids].add(weights)
    inner = jax.nn.silu(jnp.einsum("th,ehi->tei", x, gate, precision=precision))
    inner = inner * jnp.einsum("th,ehi->tei", x, up, precision=precision)
    out = jnp.einsum("tei,eih->teh", inner, down, precision=precision).astype(jnp.float32)
    return jnp.einsum("teh,te->th", out, share, precision="highest").astype(x.dtype)
