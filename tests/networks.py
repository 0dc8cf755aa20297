"""Tiny random networks that exercise everything, and engines over them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from herald_jax import Budget, Engine, EngineConfig
from herald_jax.models.config import ModelConfig
from herald_jax.models.decoder import Decoder

TINY = ModelConfig(
    family="sdar",
    vocab_size=97,
    hidden_size=48,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=96,
    rope_theta=1e4,
    block_size=8,
    mask_token_id=96,
    stop_token_ids=(5,),
    max_position_embeddings=4096,
    exact_layers=2,
)


@functools.cache
def tiny_model(config: ModelConfig = TINY, seed: int = 0) -> Decoder:
    """The network that tests share; they must not change it."""
    return make_model(config, seed)


def make_model(config: ModelConfig, seed: int) -> Decoder:
    """Random weights, sharp enough that attention and confidence differ between positions."""
    model = Decoder(config, dtype=jnp.float32, rngs=nnx.Rngs(seed))
    keys = iter(jax.random.split(jax.random.key(seed), 1000))

    def sharpen(path, leaf):
        noise = jax.random.normal(next(keys), leaf.shape, leaf.dtype)
        if "router" in str(path) and leaf.ndim == 1:
            return 0.8 * noise - 1
        if leaf.ndim == 1:
            return 1 + 0.3 * noise
        return 0.5 * noise if "embedding" in str(path) else noise * (1.5 / leaf.shape[-2] ** 0.5)

    graph, state = nnx.split(model)
    return nnx.merge(graph, jax.tree_util.tree_map_with_path(sharpen, state))


@functools.cache
def _pass_program(config: ModelConfig) -> Callable[..., list[tuple[jax.Array, ...]]]:
    graph, state = nnx.split(tiny_model(config))

    def plain_pass(state, tokens, places):
        model = nnx.merge(graph, state)
        x, found = model.embed(tokens), []
        blocks = places[0] // config.block_size
        seen = blocks[:, None] >= blocks
        for layer in model.layers:
            q, k, v = layer.pre(x, places)
            found.append((q[0], k[0], v[0]))
            grouped = q[0].reshape(q.shape[1], k.shape[2], -1, k.shape[3])
            scores = jnp.einsum("shgd,rhd->shgr", grouped, k[0]) * k.shape[3] ** -0.5
            weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -jnp.inf))
            x = layer.post(x, jnp.einsum("shgr,rhd->shgd", weights, v[0]).reshape(q.shape))
        return found

    return functools.partial(jax.jit(plain_pass), state)


def plain_pass(
    tokens: list[int], config: ModelConfig = TINY, places: list[int] | None = None
) -> list[tuple[np.ndarray, ...]]:
    """q [S, H_q, D], k and v [S, H_kv, D] of every layer, from tokens alone in one full pass.

    ``places`` are their positions, one after the other unless given. Padding keeps it to one
    compiled shape; it stands in later blocks, which nothing here attends.
    """
    padded = np.zeros((2, 1, -(-len(tokens) // 192) * 192), np.int32)
    padded[1] = 1 << 16
    padded[0, 0, : len(tokens)] = tokens
    padded[1, 0, : len(tokens)] = range(len(tokens)) if places is None else places
    return [
        tuple(np.asarray(part)[: len(tokens)] for part in layer)
        for layer in _pass_program(config)(*padded)
    ]


#: Selectors that differ from another one in a flag or in who scores, and not in how they run.
VARIANTS = ("merged", "merged-unrotated", "merged-late", "centre", "window", "random")


def unless_variant(method: str, *values: object) -> object:
    """Parameters of a test that shows nothing new of a variant, which then runs only at length."""
    marks = pytest.mark.slow if method in VARIANTS else ()
    return pytest.param(method, *values, marks=marks)


def prompts(lengths, config: ModelConfig = TINY, seed: int = 0) -> list[list[int]]:
    """Random prompts without mask or stop tokens."""
    rng = np.random.default_rng(seed)
    return [rng.integers(6, config.mask_token_id, n).tolist() for n in lengths]


OPEN: list[Engine] = []


@functools.cache
def _base(config: ModelConfig) -> Engine:
    """Shared by all engines of a network, so that what is compiled is compiled once."""
    return Engine(config, tiny_model(config))


def engine(method: str, budget: float = 1.0, config: ModelConfig = TINY, **options) -> Engine:
    """An engine over the tiny network."""
    settings = {"max_batch": 3, "prefill_chunk": 64, "max_context": 192, "timeout": 60.0}
    # Most tests run a part of what a warm-up would compile.
    settings |= {"budget": Budget(budget), "warm_up": False} | options
    made = _base(config).with_config(EngineConfig(method=method, **settings))
    OPEN.append(made)
    return made


def answers(made: Engine, given, generation) -> dict[str, list[int]]:
    """Token ids by request id; any error fails the test."""
    results = list(made.generate(given, generation))
    assert not [r.error for r in results if r.error], results
    return {result.id: result.token_ids for result in results}
