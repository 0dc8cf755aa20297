"""Mixture of experts: routers in fp32, and the sum over the experts that a token takes."""

from __future__ import annotations

import functools
import os
import sys
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx

from herald_jax.models import grouped
from herald_jax.models.config import ExpertsConfig
from herald_jax.models.layers import GatedMlp

Implementation = Literal["reference", "grouped", "tokamax"]

#: Widths that the tiles of tokamax's kernel divide: hidden sizes, and inner widths of an expert.
HIDDEN_STEP, INNER_STEP = 128, 128

PYTHON = sys.version_info[:2]


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
        and computes what is taken; "tokamax" is the fastest on a CUDA device, in bfloat16. None
        takes ``default_implementation``.

    Returns:
      [T, hidden] in the dtype of ``x``.

    Raises:
      ValueError: the implementation is unknown or does not apply here.
    """
    if implementation is None:
        implementation, _ = default_implementation(x.dtype, None, gate.shape[1], gate.shape[2])
    elif reason := obstacle(implementation, x.dtype, None, gate.shape[1], gate.shape[2]):
        raise ValueError(f"experts cannot use {implementation}: {reason}")
    if implementation == "reference":
        return _everywhere(x, weights, ids, gate, up, down)
    run = functools.partial(grouped.run, weights=weights, ids=ids, gate=gate, up=up, down=down)
    if implementation == "tokamax":
        return run(grouped.ragged, x)
    return jax.lax.platform_dependent(
        x,
        cpu=functools.partial(run, grouped.tiled),
        default=functools.partial(run, grouped.padded),
    )


def default_implementation(
    dtype: jnp.dtype, platform: str | None = None, hidden: int = 2048, inner: int = 512
) -> tuple[Implementation, str]:
    """The implementation that ``mix`` takes when it is left the choice.

    Args:
      dtype: of the weights.
      platform: of the device, as ``jax.Device.platform``; None for the default device.
      hidden, inner: widths of the network and of one expert.

    Returns:
      its name and, in a few words, why it is that one.

    Raises:
      ValueError: the environment variable HERALD_EXPERTS names what is unknown or cannot be used.
    """
    forced = os.environ.get("HERALD_EXPERTS")
    if forced:
        if reason := obstacle(forced, dtype, platform, hidden, inner):
            raise ValueError(f"HERALD_EXPERTS: experts cannot use {forced}: {reason}")
        return forced, "HERALD_EXPERTS"  # type: ignore[return-value]
    reason = obstacle("tokamax", dtype, platform, hidden, inner)
    return ("grouped", reason) if reason else ("tokamax", "bfloat16 on a CUDA device")


def obstacle(
    implementation: str, dtype: jnp.dtype, platform: str | None, hidden: int, inner: int
) -> str | None:
    """Why an implementation cannot be used, in a few words; None where it can.

    Arguments as ``default_implementation``.
    """
    if implementation not in get_args(Implementation):
        return f"there are only {', '.join(get_args(Implementation))}"
    if implementation != "tokamax":
        return None
    if (platform or jax.default_backend()) not in ("gpu", "cuda"):
        return "the device is not a CUDA GPU"
    if dtype != jnp.bfloat16:
        return f"tokamax multiplies bfloat16, not {jnp.dtype(dtype).name}"
    if hidden % HIDDEN_STEP or inner % INNER_STEP:
        return (
            f"tokamax needs widths in steps of {HIDDEN_STEP} (hidden) and {INNER_STEP} (inner), "
            f"not {hidden} and {inner}"
        )
    return tokamax_obstacle()


@functools.cache
def tokamax_obstacle() -> str | None:
    """Whether tokamax imports and has a kernel for this device, asked once a process."""
    if PYTHON < (3, 12):
        return "tokamax needs Python 3.12"
    try:
        import tokamax  # noqa: F401
    except ModuleNotFoundError as error:
        missing = f" ({error.name} is missing)" if error.name != "tokamax" else ""
        return f"tokamax is not installed{missing}: pip install 'herald-jax[cuda-moe]'"
    except Exception as error:  # Made for another version of JAX it fails in any way.
        return f"tokamax does not import: {_first_line(error)}"

    def probe() -> jax.Array:
        x, wide = jnp.zeros((8, 128), jnp.bfloat16), jnp.zeros((1, 128, 128), jnp.bfloat16)
        return grouped.ragged(x, grouped.assign(jnp.zeros((8, 1), jnp.int32), 1), wide, wide, wide)

    try:
        jax.eval_shape(probe)
    except Exception as error:  # Kernels refuse a device as they like.
        return f"tokamax refuses this device: {_first_line(error)}"
    return None


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


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
