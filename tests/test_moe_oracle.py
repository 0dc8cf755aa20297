"""Mixtures of experts against transformers' modules with the same weights, and in bfloat16."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from herald_jax.models import grouped, moe
from herald_jax.models.config import ExpertsConfig
from tests.precision import near

pytestmark = pytest.mark.oracle
torch = pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.17")

HIDDEN, INNER, TOKENS = 48, 20, 37
LLADA2 = ExpertsConfig(
    count=16,
    per_token=4,
    intermediate_size=INNER,
    router="sigmoid",
    groups=4,
    groups_per_token=2,
    scale=2.5,
    shared_size=INNER,
)
SDAR = ExpertsConfig(count=16, per_token=4, intermediate_size=INNER, router="softmax")


def layer_of(config: ExpertsConfig, dtype: jnp.dtype = jnp.float32) -> moe.MixtureOfExperts:
    """A layer with a router that spreads, and a bias that is mostly negative."""
    layer = moe.MixtureOfExperts(HIDDEN, config, dtype, nnx.Rngs(0))
    if config.router == "sigmoid":
        bias = np.random.default_rng(1).normal(-1, 0.8, config.count)
        layer.router.bias[...] = jnp.asarray(bias, jnp.float32)
    return layer


def tensor(array: jax.Array) -> torch.Tensor:
    return torch.tensor(np.array(array, np.float32))


def fused_experts(layer: moe.MixtureOfExperts) -> dict[str, torch.Tensor]:
    """Parameters of the router and the experts under transformers' names and layouts."""
    gate, up, down = (getattr(layer.experts, name)[...] for name in ("gate", "up", "down"))
    return {
        "gate.weight": tensor(layer.router.kernel[...].T),
        "experts.gate_up_proj": tensor(jnp.concatenate([gate, up], -1).swapaxes(1, 2)),
        "experts.down_proj": tensor(down.swapaxes(1, 2)),
    }


def glm4(layer: moe.MixtureOfExperts) -> torch.nn.Module:
    from transformers.models.glm4_moe.configuration_glm4_moe import Glm4MoeConfig
    from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeMoE

    module = Glm4MoeMoE(
        Glm4MoeConfig(
            hidden_size=HIDDEN,
            moe_intermediate_size=INNER,
            n_routed_experts=LLADA2.count,
            n_shared_experts=1,
            num_experts_per_tok=LLADA2.per_token,
            n_group=LLADA2.groups,
            topk_group=LLADA2.groups_per_token,
            norm_topk_prob=True,
            routed_scaling_factor=LLADA2.scale,
        )
    )
    shared = {
        f"shared_experts.{name}_proj.weight": tensor(getattr(layer.shared, name).kernel[...].T)
        for name in ("gate", "up", "down")
    }
    bias = {"gate.e_score_correction_bias": tensor(layer.router.bias[...])}
    module.load_state_dict(fused_experts(layer) | shared | bias, strict=True)
    return module.eval()


def qwen3(layer: moe.MixtureOfExperts) -> torch.nn.Module:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    module = Qwen3MoeSparseMoeBlock(
        Qwen3MoeConfig(
            hidden_size=HIDDEN,
            moe_intermediate_size=INNER,
            num_experts=SDAR.count,
            num_experts_per_tok=SDAR.per_token,
            norm_topk_prob=True,
        )
    )
    module.load_state_dict(fused_experts(layer), strict=True)
    return module.eval()


def inputs(seed: int = 2) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((2, TOKENS, HIDDEN)).astype(np.float32)


@pytest.mark.parametrize("way", ["reference", "grouped", "padded"])
@pytest.mark.parametrize(
    ("config", "oracle"), [(LLADA2, glm4), (SDAR, qwen3)], ids=["glm4", "qwen3"]
)
def test_layer_is_that_of_transformers(config, oracle, way, monkeypatch) -> None:
    if way == "padded":  # What an accelerator takes for "grouped".
        monkeypatch.setattr(grouped, "tiled", grouped.padded)
    layer = layer_of(config)
    with torch.no_grad():
        wanted = oracle(layer)(torch.tensor(inputs()))
    wanted = (wanted[0] if isinstance(wanted, tuple) else wanted).numpy()
    implementation = "grouped" if way == "padded" else way
    out = jax.jit(lambda x: layer(x, implementation=implementation))(inputs())
    np.testing.assert_allclose(out, wanted, atol=near(1e-5), rtol=0)


def test_choice_of_llada2_is_that_of_transformers() -> None:
    """The router alone: which experts, and how much each counts."""
    layer = layer_of(LLADA2)
    module = glm4(layer)
    tokens = inputs(3).reshape(-1, HIDDEN)
    with torch.no_grad():
        answer = module.gate(torch.tensor(tokens))
        if isinstance(answer, tuple):
            *_, wanted, wanted_ids = answer
        else:  # The module gives logits, and the layer chooses.
            wanted_ids, wanted = module.route_tokens_to_experts(answer)
    wanted, wanted_ids = wanted.numpy(), wanted_ids.numpy()
    weights, ids = layer.router(jnp.asarray(tokens))
    order, wanted_order = np.argsort(ids, -1), np.argsort(wanted_ids, -1)
    np.testing.assert_array_equal(
        np.take_along_axis(np.asarray(ids), order, -1),
        np.take_along_axis(wanted_ids, wanted_order, -1),
    )
    np.testing.assert_allclose(
        np.take_along_axis(np.asarray(weights), order, -1),
        np.take_along_axis(wanted, wanted_order, -1),
        rtol=1e-5,
    )


@pytest.mark.parametrize("way", ["reference", "grouped"])
@pytest.mark.parametrize("config", [LLADA2, SDAR], ids=["llada2", "sdar"])
def test_half_precision(config: ExpertsConfig, way: str) -> None:
    """How far bfloat16 is from fp32 with the same, rounded, weights; printed with ``-s``."""
    half = layer_of(config, jnp.bfloat16)
    full = layer_of(config)
    nnx.update(full, jax.tree.map(lambda leaf: leaf.astype(jnp.float32), nnx.state(half)))
    x = jnp.asarray(inputs(4), jnp.bfloat16)
    tokens = x.reshape(-1, HIDDEN)
    ids, full_ids = half.router(tokens)[1], full.router(tokens.astype(jnp.float32))[1]
    kept = np.mean((np.sort(ids) == np.sort(full_ids)).all(-1))
    out = np.asarray(half(x, implementation=way), np.float64)
    wanted = np.asarray(full(x.astype(jnp.float32), implementation="reference"), np.float64)
    same = (np.sort(ids) == np.sort(full_ids)).all(-1).reshape(x.shape[:2])
    error = np.linalg.norm((out - wanted)[same]) / np.linalg.norm(wanted[same])
    print(
        f"{config.router} {way}: relative error {error:.4f} where the experts agree, "
        f"tokens with other experts {1 - kept:.2%}"
    )
    assert error < 0.015
    # LLaDA2's router computes in fp32 whatever the dtype; SDAR-MoE's rounds its logits.
    assert kept == 1 if config.router == "sigmoid" else kept > 0.8
