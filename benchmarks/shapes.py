"""Published network shapes with random weights, made on the device."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from herald_jax.engine.stack import LayerStack
from herald_jax.models import registry
from herald_jax.models.config import ExpertsConfig, ModelConfig

SHAPES = {
    "sdar-8b": ModelConfig(
        family="sdar",
        vocab_size=151936,
        hidden_size=4096,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=12288,
        max_position_embeddings=1 << 20,
        block_size=32,
        mask_token_id=151669,
        exact_layers=2,
    ),
    "llada2.0-mini": ModelConfig(
        family="llada2",
        vocab_size=157184,
        hidden_size=2048,
        num_layers=20,
        num_heads=16,
        num_kv_heads=4,
        head_dim=128,
        intermediate_size=5120,
        rope_theta=6e5,
        rotary_dim=64,
        max_position_embeddings=1 << 20,
        block_size=32,
        mask_token_id=156895,
        exact_layers=2,
        rule="llada2.0",
        experts=ExpertsConfig(
            count=256,
            per_token=8,
            intermediate_size=512,
            router="sigmoid",
            groups=8,
            groups_per_token=4,
            scale=2.5,
            shared_size=512,
            dense_layers=(0,),
        ),
    ),
    "tiny": ModelConfig(
        family="sdar",
        vocab_size=1024,
        hidden_size=128,
        num_layers=6,
        num_heads=8,
        num_kv_heads=2,
        head_dim=32,
        intermediate_size=256,
        max_position_embeddings=1 << 20,
        block_size=32,
        mask_token_id=1023,
        exact_layers=2,
    ),
}

SHAPES["tiny-experts"] = dataclasses.replace(
    SHAPES["tiny"],
    family="sdar_moe",
    experts=ExpertsConfig(count=16, per_token=4, intermediate_size=64, router="softmax"),
)


def random_model(config: ModelConfig, dtype: str, seed: int = 0) -> Any:
    """A network with normal weights of variance 1 / fan-in, layer norms at one."""
    kind = jnp.dtype(dtype)
    abstract = registry.abstract(config, kind)
    graph, state = nnx.split(abstract)
    leaves, tree = jax.tree.flatten(state)
    filled = []
    for index, leaf in enumerate(leaves):
        key = jax.random.fold_in(jax.random.key(seed), index)
        filled.append(random_array(key, leaf.shape, leaf.dtype))
    return nnx.merge(graph, jax.tree.unflatten(tree, filled))


def random_stack(config: ModelConfig, dtype: str) -> LayerStack:
    """The same, taken apart on the first device: what engines over one network share."""
    return LayerStack(random_model(config, dtype), jax.devices()[0])


@functools.partial(jax.jit, static_argnums=(1, 2))
def random_array(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """Normal numbers of variance 1 / fan-in, the last axis but one; ones for a vector."""
    if len(shape) == 1:
        return jnp.ones(shape, dtype)
    return (jax.random.normal(key, shape, dtype) * shape[-2] ** -0.5).astype(dtype)


def random_cache(buffers: list[Any], seed: int = 0) -> list[Any]:
    """Standard normal numbers in place of every K and V of a cache, other ones for every slot.

    The cache may be all that the device holds: each array goes before the one for it comes, which
    is made slot by slot.
    """
    made = []
    for index, pair in enumerate(buffers):
        keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), index), 2)
        shapes = [(part.shape, part.dtype) for part in pair]
        (device,) = pair[0].devices()
        for part in pair:
            part.delete()
        filled = (_random_slots(k, *s) for k, s in zip(keys, shapes, strict=True))
        # Bound to the device as what they replace was: programs would be compiled anew for others.
        made.append(tuple(jax.device_put(part, device) for part in filled))
    return made


@functools.partial(jax.jit, static_argnums=(1, 2))
def _random_slots(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    # Slots that were alike would all take the same experts, and read fewer of them.
    def fill(slot: jax.Array, made: jax.Array) -> jax.Array:
        return made.at[slot].set(jax.random.normal(jax.random.fold_in(key, slot), shape[1:], dtype))

    return jax.lax.fori_loop(0, shape[0], fill, jnp.zeros(shape, dtype))


def random_prompts(config: ModelConfig, count: int, length: int, seed: int = 0) -> list[list[int]]:
    """Uniform token ids without the mask token."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, config.mask_token_id, (count, length)).tolist()
