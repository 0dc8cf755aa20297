"""Ways to estimate which rows a block will attend: pure functions on arrays.

P counts the rows that may be selected, K the budgets that are compared, H the KV heads.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from herald_jax.models import attention
from herald_jax.models.config import ModelConfig
from herald_jax.models.rope import rotary_angles, rotate
from herald_jax.selection.job import SINKS


@jax.jit
def importance(q: jax.Array, keys: jax.Array, length: ArrayLike, voters: ArrayLike) -> jax.Array:
    """Importance of every row: mean over voting positions of softmax mass, summed over G heads.

    Args:
      q: [S, H_q, D]; ``voters``: bool [S].
      keys: [R, H, D]; ``length``: how many of them are attended.

    Returns:
      float32 [H, R], zero beyond ``length``.
    """
    lengths, votes = jnp.asarray(length)[None], jnp.asarray(voters)[None]
    return attention.importance(q[None], keys[None], lengths, votes)[0]


@jax.jit
def probabilities(q: jax.Array, keys: jax.Array, length: ArrayLike) -> jax.Array:
    """Softmax of every query over ``keys[:length]``: float32 [H, S * G, R], positions outermost."""
    packed = attention.pack(q[None], keys.shape[1])[0]
    scores = jnp.einsum(
        "shd,rhd->hsr",
        packed.astype(jnp.float32),
        keys.astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    )
    scores = scores * keys.shape[-1] ** -0.5
    return jax.nn.softmax(jnp.where(jnp.arange(keys.shape[0]) < length, scores, -jnp.inf))


@jax.jit
def merge(q: jax.Array, voters: ArrayLike) -> jax.Array:
    """Mean query over the voting positions: [S, H_q, D], bool [S] -> float32 [1, H_q, D]."""
    votes = jnp.asarray(voters, jnp.float32)[:, None, None]
    return ((q.astype(jnp.float32) * votes).sum(0) / votes.sum(0))[None]


def merge_parts(q: jax.Array, parts: int) -> jax.Array:
    """Mean query of each of ``parts`` consecutive parts: [S, H_q, D] -> float32 [parts, H_q, D]."""
    return q.astype(jnp.float32).reshape(parts, -1, *q.shape[1:]).mean(1)


def advance(q: jax.Array, positions: int, config: ModelConfig) -> jax.Array:
    """Moves post-RoPE queries [S, H_q, D] by ``positions``, as if they stood there."""
    return rotate(q, rotary_angles(jnp.array([positions]), config))


def ranks(scores: np.ndarray, sinks: int = SINKS) -> np.ndarray:
    """Rank of every row [..., P] in descending order; sinks lead, ties go to the lower row."""
    scores = np.array(scores, np.float32)
    scores[..., :sinks] = np.inf
    order = np.argsort(-scores, axis=-1, kind="stable")
    result = np.empty(order.shape, np.int32)
    places = np.broadcast_to(np.arange(order.shape[-1], dtype=np.int32), order.shape)
    np.put_along_axis(result, order, places, axis=-1)
    return result


def top(scores: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The ``counts`` [K] best rows of scores [H, P] or [K, H, P]: bool [K, H, P]."""
    return ranks(scores) < counts[:, None, None]


def rerank(scores: np.ndarray, candidates: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The ``counts`` [K] best of the candidates bool [K, H, P] by scores [H, P] or [K, H, P]."""
    return top(np.where(candidates, scores, -np.inf), counts)


def refine(attended: np.ndarray, candidates: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Keeps the best candidates by queries that attend candidates, tail and own block alone.

    Restricting a softmax divides it by what is left of it, so no score is computed again.

    Args:
      attended: float32 [H, V, R], probabilities of the voting queries over everything; the rows
        beyond P (tail and own block) are always attended.
      candidates: bool [K, H, P].
      counts: int [K], how many are kept.

    Returns:
      bool [K, H, P].
    """
    rows = candidates.shape[-1]
    prefix, rest = attended[..., :rows], attended[..., rows:].sum(-1)
    left = prefix @ candidates.transpose(1, 2, 0).astype(np.float32) + rest[..., None]
    scores = (1 / np.maximum(left, 1e-30)).transpose(0, 2, 1) @ prefix
    return rerank(scores.transpose(1, 0, 2), candidates, counts)


def share(mass: np.ndarray, group: int) -> np.ndarray:
    """Mean attention of the queries behind ``mass`` on all P rows that may be selected.

    Args:
      mass: float32 [T, H, P], importance for each reference: summed over ``group`` query heads.

    Returns:
      float32 [T, H], 0 to 1; the rest is on rows that are attended in any case.
    """
    return np.asarray(mass.sum(-1) / group)


def judge(
    chosen: np.ndarray, wanted: np.ndarray, mass: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """How much of each reference's set, and of its attention, each selection holds.

    Args:
      chosen: bool [E, K, H, P], E selections.
      wanted: bool [T, K, H, P], the sets of T references.
      mass: float32 [T, H, P], importance for each reference.

    Returns:
      recall |A & R| / |R| and mass, attention on A over attention on R: float32 [E, T, K, H].
    """
    sets = chosen.transpose(1, 2, 0, 3).astype(np.float32)
    targets = wanted.transpose(1, 2, 3, 0).astype(np.float32)
    weights = mass.transpose(1, 2, 0)[None]
    recall = sets @ targets / targets.sum(2)[:, :, None]
    captured = sets @ weights / np.maximum((targets * weights).sum(2)[:, :, None], 1e-30)
    back = (2, 3, 0, 1)
    return recall.transpose(back), captured.transpose(back)
