"""The next block's masked queries over the draft: with every row to attend, or block n's pool."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks import estimators
from benchmarks.trajectories import Cache, Network, Trajectory
from herald_jax.diffusion.draft import spaced_masks
from herald_jax.kv.budget import Budget
from herald_jax.models.attention import pack, unpack
from herald_jax.selection.herald_merged import HeraldMerged


class Drafted(NamedTuple):
    """Of every layer: ``queries`` [L, A, H_q, D] of the masks, ``keys`` [L, B + A, H, D] of draft
    and masks."""

    queries: jax.Array
    keys: jax.Array


def pool_rows(
    network: Network, trajectory: Trajectory, number: int, fraction: float | None
) -> np.ndarray:
    """What block n may attend before itself: bool [L, H, start].

    Args:
      network, trajectory: as decoded.
      number: index of block n among the decoded ones.
      fraction: budget of the pool, chosen by block n's own masked queries at step 0, beside its
        tail; None for every row.
    """
    config, now = network.config, trajectory.blocks[number]
    visible = np.ones((config.num_layers, config.num_kv_heads, now.start), bool)
    limit = now.start - config.block_size
    if fraction is None or limit <= 0:
        return visible
    count = np.array([Budget(fraction).entries(limit)])
    for layer in range(config.exact_layers, config.num_layers):
        keys = jax.lax.dynamic_update_slice_in_dim(
            trajectory.cache[layer][0][0], now.keys[0][layer], now.start, 0
        )
        mass = estimators.importance(
            now.queries[0][layer], keys, now.start + config.block_size, now.masked[0]
        )
        visible[layer, :, :limit] = estimators.top(np.asarray(mass)[:, :limit], count)[0]
    return visible


def drafted(
    network: Network,
    trajectory: Trajectory,
    number: int,
    fraction: float | None,
    spacing: int = HeraldMerged.spacing,
) -> Drafted:
    """A pass over block n's draft and masks after it, as ``herald-merged`` runs it.

    Args:
      network, trajectory, number, fraction: as of ``pool_rows``.
      spacing: one in so many of the next block's masks takes part.
    """
    config, now = network.config, trajectory.blocks[number]
    rows = trajectory.cache[0][0].shape[1]
    visible = np.zeros((config.num_layers, config.num_kv_heads, rows), bool)
    visible[..., : now.start] = pool_rows(network, trajectory, number, fraction)
    block = config.block_size
    places = np.array(spaced_masks(block, spacing), np.int32)
    masks = np.full(len(places), config.mask_token_id, np.int32)
    tokens = jnp.asarray(np.concatenate([now.draft, masks]))
    positions = now.start + jnp.concatenate([jnp.arange(block), block + places])
    cache, start = trajectory.cache, now.start
    return _pass(
        network.graph, network.state, cache, tokens, positions, start, jnp.asarray(visible)
    )


@partial(jax.jit, static_argnames="graph")
def _pass(
    graph: Any,
    state: Any,
    cache: Cache,
    tokens: jax.Array,
    positions: jax.Array,
    start: int,
    visible: jax.Array,
) -> Drafted:
    model = nnx.merge(graph, state)
    block, count = model.config.block_size, tokens.shape[0]
    positions = positions[None]
    rows = cache[0][0].shape[1]
    # Row r of draft and masks is seen by block-causal order, rows before them by the pool.
    own = jnp.arange(rows) - start
    later = (own >= 0) & (own < count)
    later = later & (own[None] // block <= jnp.arange(count)[:, None] // block)
    x, queries, keys = model.embed(tokens[None]), [], []
    for layer, (old_k, old_v), seen in zip(model.layers, cache, visible, strict=True):
        q, k, v = layer.pre(x, positions)
        whole_k = jax.lax.dynamic_update_slice_in_dim(old_k, k, start, axis=1)[0]
        whole_v = jax.lax.dynamic_update_slice_in_dim(old_v, v, start, axis=1)[0]
        packed = pack(q, k.shape[2])[0]
        group = packed.shape[0] // count
        scores = jnp.einsum("shd,rhd->hsr", packed, whole_k) * k.shape[-1] ** -0.5
        allowed = seen[:, None] | jnp.repeat(later, group, axis=0)[None]
        weights = jax.nn.softmax(jnp.where(allowed, scores.astype(jnp.float32), -jnp.inf))
        mixed = jnp.einsum("hsr,rhd->shd", weights.astype(whole_v.dtype), whole_v)
        x = layer.post(x, unpack(mixed[None], q.shape[2]))
        queries.append(q[0, block:])
        keys.append(k[0])
    return Drafted(jnp.stack(queries), jnp.stack(keys))
