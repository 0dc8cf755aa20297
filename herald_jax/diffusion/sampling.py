"""From logits to a proposed token and its confidence at every position."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from herald_jax.diffusion.rules import Confidence


class Sampling(NamedTuple):
    """Per-slot sampling parameters, arrays over the N slots.

    Attributes:
      temperature: float32 [N]; 0 is greedy.
      top_k: int32 [N]; 0 is off.
      top_p: float32 [N]; 1 is off.
      seed: uint32 [N]; a slot's draws depend on its own seed, block and step only.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    seed: jax.Array


def filter_logits(logits: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """Top-k (ties at the k-th kept), then top-p (the token that crosses p kept).

    Args:
      logits: float32 [N, B, V], after temperature.
      top_k: int32 [N], 0 = off; ``top_p``: float32 [N], 1 = off.

    Returns:
      float32 [N, B, V] with the removed tokens at -inf.
    """
    vocab = logits.shape[-1]
    descending = -jnp.sort(-logits, axis=-1)
    kth = jnp.clip(jnp.where(top_k > 0, top_k, vocab), 1, vocab) - 1
    floor = jnp.take_along_axis(descending, kth[:, None, None], axis=-1)
    logits = jnp.where(logits < floor, -jnp.inf, logits)
    descending = jnp.where(descending < floor, -jnp.inf, descending)
    probability = jax.nn.softmax(descending, axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    # Rounding lets the running sum reach 1 early, so p = 1 is off by name.
    p = jnp.where(top_p < 1, top_p, jnp.inf)[:, None, None]
    kept = (before < p).at[..., 0].set(True)
    floor = jnp.min(jnp.where(kept, descending, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits < floor, -jnp.inf, logits)


def ban(logits: jax.Array, token_id: int) -> jax.Array:
    """Removes one token (the [MASK] id) from the candidates of every position."""
    return logits.at[..., token_id].set(-jnp.inf)


def _confidence_of(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    picked = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    return jnp.exp(picked - jax.nn.logsumexp(logits, axis=-1))


def greedy(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Argmax token int32 [N, B] and its softmax probability float32 [N, B]."""
    tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return tokens, _confidence_of(logits, tokens)


def entropy(logits: jax.Array) -> jax.Array:
    """Entropy float32 [N, B] in nats of the softmax of logits [N, B, V]; -inf counts nothing."""
    log = jax.nn.log_softmax(logits, axis=-1)
    probability = jnp.exp(log)
    return -jnp.where(probability > 0, probability * log, 0.0).sum(axis=-1)


def _tempered(logits: jax.Array, sampling: Sampling) -> jax.Array:
    warm = sampling.temperature > 0
    return logits / jnp.where(warm, sampling.temperature, 1.0)[:, None, None]


def measured(logits: jax.Array, sampling: Sampling, confidence: Confidence) -> jax.Array:
    """The logits [N, B, V] whose softmax ``sample`` takes its confidence from.

    Those of a slot with temperature 0 are as they came.
    """
    scaled = _tempered(logits, sampling)
    if confidence == "unfiltered":
        return scaled
    filtered = filter_logits(scaled, sampling.top_k, sampling.top_p)
    return jnp.where((sampling.temperature > 0)[:, None, None], filtered, logits)


def sample(
    logits: jax.Array,
    sampling: Sampling,
    block: jax.Array,
    step: jax.Array,
    confidence: Confidence = "unfiltered",
) -> tuple[jax.Array, jax.Array]:
    """Temperature, top-k, top-p, then one draw per position.

    Args:
      logits: float32 [N, B, V].
      sampling: parameters over slots; a slot with temperature 0 is decoded greedily.
      block: int32 [N], the block index of each slot; ``step``: int32 scalar.
      confidence: probability of the draw before ("unfiltered") or after filtering.

    Returns:
      tokens int32 [N, B] and confidence float32 [N, B].
    """
    best, best_confidence = greedy(logits)
    scaled = _tempered(logits, sampling)
    filtered = filter_logits(scaled, sampling.top_k, sampling.top_p)

    def draw(seed: jax.Array, index: jax.Array, rows: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), index), step)
        return jax.random.categorical(key, rows, axis=-1)

    drawn = jax.vmap(draw)(sampling.seed, block, filtered).astype(jnp.int32)
    drawn_confidence = _confidence_of(filtered if confidence == "filtered" else scaled, drawn)
    pick = (sampling.temperature > 0)[:, None]
    return jnp.where(pick, drawn, best), jnp.where(pick, drawn_confidence, best_confidence)
