"""Runs a network of herald_jax the ways the engine does, keeping what every layer gives."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from herald_jax.models.attention import attend, attend_blocks
from herald_jax.models.decoder import Decoder

TOLERANCE = 1e-4
_Buffers = list[tuple[jax.Array, jax.Array]]


def uncached(model: Decoder, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Hidden states [layers + 1, N, S, H] and logits of one pass over everything."""
    return cached(model, tokens, tokens.shape[1], tokens.shape[1])


def cached(
    model: Decoder, tokens: np.ndarray, prompt: int, chunk: int
) -> tuple[np.ndarray, np.ndarray]:
    """The same through a buffer of keys and values.

    The prompt's whole blocks (everything, if the prompt is everything) go in by chunks of
    ``chunk`` positions with ``attend_blocks``; what follows, the prompt's remainder first, goes
    in one block at a time with ``attend``.
    """
    config = model.config
    block, (batch, length) = config.block_size, tokens.shape
    shape = (batch, length, config.num_kv_heads, config.head_dim)
    buffers = [(jnp.zeros(shape), jnp.zeros(shape)) for _ in model.layers]
    whole = prompt if prompt == length else prompt // block * block
    spans = [(start, min(start + chunk, whole)) for start in range(0, whole, chunk)]
    spans += [(start, start + block) for start in range(whole, length, block)]
    graph, state = nnx.split(model)
    states, logits = [], []
    for start, stop in spans:
        hidden, scores, buffers = _forward(
            graph, state, buffers, jnp.asarray(tokens[:, start:stop]), start, stop > whole
        )
        states.append(hidden)
        logits.append(scores)
    return np.concatenate(states, axis=2), np.concatenate(logits, axis=1)


@partial(jax.jit, static_argnums=(0, 5))
def _forward(
    graph: nnx.GraphDef[Decoder],
    state: nnx.State,
    buffers: _Buffers,
    tokens: jax.Array,
    start: jax.Array,
    denoise: bool,
) -> tuple[jax.Array, jax.Array, _Buffers]:
    model = nnx.merge(graph, state)
    batch, rows = tokens.shape
    positions = jnp.broadcast_to(start + jnp.arange(rows), tokens.shape)
    x = model.embed(tokens)
    hidden, filled = [x], []
    for layer, buffer in zip(model.layers, buffers, strict=True):
        q, *new = layer.pre(x, positions)
        k, v = (
            jax.lax.dynamic_update_slice(old, rows_, (0, start, 0, 0))
            for old, rows_ in zip(buffer, new, strict=True)
        )
        filled.append((k, v))
        if denoise:
            out = attend(q, k, v, jnp.full(batch, start + rows), "xla")
        else:
            out = attend_blocks(q, k, v, positions, model.config.block_size)
        x = layer.post(x, out)
        hidden.append(x)
    return jnp.stack(hidden), model.head(x), filled


def prompt_lengths(block: int, length: int) -> list[int]:
    """Prompts of length mod B = 0, 1 and B - 1, and shorter than a block."""
    return sorted({0, 1, block - 1, block, block + 1, 2 * block - 1, length - block})
