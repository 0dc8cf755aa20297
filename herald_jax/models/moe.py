"""Mixture of experts: routers in fp32, and the sum over the experts that a token takes."""

from __future__ import annotations

import functools
import os
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx

from herald_jax.models import expert_kernels, grouped, routing_kernels
from herald_jax.models.assignments import assign
from herald_jax.models.config import ExpertsConfig
from herald_jax.models.layers import GatedMlp
from herald_jax.models.pallas_call import power_of_two

Implementation = Literal["reference", "grouped", "kernels"]


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
        by_group = choice.reshape(len(choice), config.groups, -1)
        strength = jax.lax.top_k(by_group, 2)[0].sum(-1)
        kept = jax.lax.top_k(strength, config.groups_per_token)[1]
        usable = (kept[..., None] == jnp.arange(config.groups)).any(1)
        # Minus infinity, not zero: biased scores may be negative.
        choice = jnp.where(usable[..., None], by_group, -jnp.inf).reshape(choice.shape)
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
        config, kernel = self.config, self.kernel[...]
        exact = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
        sigmoid = config.router == "sigmoid"
        # LLaDA2's logits are fp32: products of bfloat16 are exact, and their sums are fp32 anyway.
        # SDAR-MoE rounds its logits, and then the weights, to the model's dtype.
        kind = jnp.float32 if sigmoid else x.dtype
        logits = jnp.dot(x, kernel, precision=exact, preferred_element_type=kind)
        logits = logits.astype(jnp.float32)
        bias = self.bias[...] if sigmoid else None
        if routing_kernels.applies(config, x.dtype):
            weights, ids = routing_kernels.choose(logits, bias, config)
        elif bias is not None:
            weights, ids = route_sigmoid(logits, bias, config)
        else:
            weights, ids = route_softmax(logits, config)
        return weights if sigmoid else weights.astype(x.dtype).astype(jnp.float32), ids


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

    def __call__(self, x: jax.Array, *, implementation: Implementation | None = None) -> jax.Array:
        """Maps [..., hidden] to [..., hidden]; ``implementation`` as ``mix``."""
        tokens = x.reshape(-1, x.shape[-1])
        weights, ids = self.router(tokens)
        gate, up, down = (getattr(self.experts, name)[...] for name in ("gate", "up", "down"))
        out = mix(tokens, weights, ids, gate, up, down, implementation=implementation)
        out = out.reshape(x.shape)
        return out + self.shared(x) if hasattr(self, "shared") else out


def mix(
    x: jax.Array,
    weights: jax.Array,
    ids: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
    *,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Weighted sum of the chosen experts' outputs, accumulated in fp32.

    Args:
      x: [T, hidden].
      weights: float32 [T, k]; ``ids``: int32 [T, k], no expert twice for a token.
      gate, up: [E, hidden, inner]; ``down``: [E, inner, hidden].
      implementation: "reference" computes every expert for every token; "grouped" runs anywhere
        and computes what is taken; "kernels" is the fastest on a CUDA device, in bfloat16. None
        takes ``default_implementation``.

    Returns:
      [T, hidden] in the dtype of ``x``.

    Raises:
      ValueError: the implementation is unknown or does not apply here.
    """
    count, hidden, inner = gate.shape
    if implementation is None:
        implementation, _ = default_implementation(x.dtype, None, count, hidden, inner)
    elif reason := obstacle(implementation, x.dtype, None, count, hidden, inner):
        raise ValueError(f"experts cannot use {implementation}: {reason}")
    if implementation == "reference":
        return _everywhere(x, weights, ids, gate, up, down)
    arguments = {"weights": weights, "ids": ids, "gate": gate, "up": up, "down": down}
    if implementation == "kernels":
        return grouped.run(expert_kernels.expert_rows, routing_kernels.place, x, **arguments)
    return jax.lax.platform_dependent(
        x,
        cpu=functools.partial(grouped.run, grouped.tiled, assign, **arguments),
        default=functools.partial(grouped.run, grouped.padded, assign, **arguments),
    )


def default_implementation(
    dtype: jnp.dtype,
    platform: str | None = None,
    count: int = 256,
    hidden: int = 2048,
    inner: int = 512,
) -> tuple[Implementation, str]:
    """The implementation that ``mix`` takes when it is left the choice.

    Args:
      dtype: of the weights.
      platform: of the device, as ``jax.Device.platform``; None for the default device.
      count: experts of a layer; ``hidden``, ``inner``: widths of the network and of one expert.

    Returns:
      its name and, in a few words, why it is that one.

    Raises:
      ValueError: the environment variable HERALD_EXPERTS names what is unknown or cannot be used.
    """
    forced = os.environ.get("HERALD_EXPERTS")
    if forced:
        if reason := obstacle(forced, dtype, platform, count, hidden, inner):
            raise ValueError(f"HERALD_EXPERTS: experts cannot use {forced}: {reason}")
        return forced, "HERALD_EXPERTS"  # type: ignore[return-value]
    reason = obstacle("kernels", dtype, platform, count, hidden, inner)
    return ("grouped", reason) if reason else ("kernels", "bfloat16 on a CUDA device")


def obstacle(
    implementation: str,
    dtype: jnp.dtype,
    platform: str | None,
    count: int,
    hidden: int,
    inner: int,
) -> str | None:
    """Why an implementation cannot be used, in a few words; None where it can.

    Arguments as ``default_implementation``.
    """
    if implementation not in get_args(Implementation):
        return f"there are only {', '.join(get_args(Implementation))}"
    if implementation != "kernels":
        return None
    if (platform or jax.default_backend()) not in ("gpu", "cuda"):
        return "the device is not a CUDA GPU"
    if dtype != jnp.bfloat16:
        return f"the kernels multiply bfloat16, not {jnp.dtype(dtype).name}"
    step = expert_kernels.WIDTH_STEP
    if hidden % step or inner % step:
        return f"the kernels need widths in steps of {step}, not {hidden} and {inner}"
    fewest = routing_kernels.FEWEST
    if not power_of_two(count, fewest):
        return f"the kernels need a power of two of at least {fewest} experts, not {count}"
    return None


def _everywhere(
    x: jax.Array,
    weights: jax.Array,
    ids: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
) -> jax.Array:
    """Every expert for every token, one expert after the other."""
    share = jnp.zeros((len(x), len(gate)), jnp.float32)
    share = share.at[jnp.arange(len(x))[:, None], ids].add(weights)

    def one(total: jax.Array, expert: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        counts, *matrices = expert
        out = grouped.gated_mlp(x, *matrices).astype(jnp.float32)
        return total + counts[:, None] * out, None

    return jax.lax.scan(one, jnp.zeros(x.shape, jnp.float32), (share.T, gate, up, down))[0].astype(
        x.dtype
    )
