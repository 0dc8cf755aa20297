"""What infinigen knows at step 0 of a block: queries by the layer before, turned keys in part."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.trajectories import Block, Cache, Network, Trajectory
from herald_jax.engine.speculation import CALIBRATION
from herald_jax.models.attention import attend_blocks
from herald_jax.selection import LayerAheadSelector, make_selector


class Speculated(NamedTuple):
    """Of every layer: ``queries`` float32 [H_q, D], the block's mean one by the input of the layer
    before, and ``projections`` float32 [H, D, P]."""

    queries: list[np.ndarray]
    projections: list[np.ndarray]


def speculated(network: Network, trajectory: Trajectory, block: Block) -> Speculated:
    """What chooses for a block at its step 0, as ``infinigen`` does it.

    Args:
      network, trajectory: as decoded.
      block: whose masked rows ask.
    """
    first, size = trajectory.blocks[0], network.config.block_size
    tokens = np.concatenate([trajectory.prompt[: first.start], _masked(network, first)])
    begin = max(0, len(tokens) - max(1, CALIBRATION // size) * size)
    made = network.forward(trajectory.cache, tokens[begin:], begin, begin)
    selector = make_selector("infinigen")
    assert isinstance(selector, LayerAheadSelector)
    projections = [
        selector.projection(np.asarray(q), np.asarray(k))
        for q, k in zip(made.queries, made.keys, strict=True)
    ]
    asked = _queries(
        network.graph, network.state, trajectory.cache, _masked(network, block), block.start
    )
    voters = block.masked[0]
    return Speculated([np.asarray(q, np.float32)[voters].mean(0) for q in asked], projections)


def _masked(network: Network, block: Block) -> np.ndarray:
    """int32 [B], the block's tokens before step 0."""
    tokens = np.where(block.masked[0], network.config.mask_token_id, block.tokens)
    return np.asarray(tokens, np.int32)


@partial(jax.jit, static_argnames="graph")
def _queries(
    graph: Any, state: Any, cache: Cache, tokens: jax.Array, start: int
) -> list[jax.Array]:
    """For every layer [B, H_q, D] of its own projection of the layer before's attention input."""
    model = nnx.merge(graph, state)
    positions = (start + jnp.arange(tokens.shape[0]))[None]
    x, result = model.embed(tokens[None]), []
    normed = model.layers[0].input_norm(x)
    for layer, (old_k, old_v) in zip(model.layers, cache, strict=True):
        result.append(layer.attention.qkv(normed, positions)[0][0])
        normed = layer.input_norm(x)
        q, k, v = layer.attention.qkv(normed, positions)
        whole_k = jax.lax.dynamic_update_slice_in_dim(old_k, k, start, axis=1)
        whole_v = jax.lax.dynamic_update_slice_in_dim(old_v, v, start, axis=1)
        x = layer.post(x, attend_blocks(q, whole_k, whole_v, positions, model.config.block_size))
    return result
