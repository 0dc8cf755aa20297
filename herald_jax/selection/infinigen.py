"""infinigen: rows chosen by a proxy of the query and part of the key, once for each block."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from herald_jax.selection.selector import LayerAheadSelector


class Infinigen(LayerAheadSelector):
    """InfiniGen's speculation (OSDI 2024) at the pace of blocks, as HERALD's authors compare it.

    Queries and keys of a KV head are skewed by an orthogonal matrix, the right singular vectors of
    its queries, which leaves scores as they are and gathers their magnitude in few channels. Of
    those, the ones that weigh most in scores are kept.
    """

    name: ClassVar[str] = "infinigen"
    summary: ClassVar[str] = "baseline: step 0 chooses a layer ahead by part of the keys' channels"
    kept_share: ClassVar[float] = 0.3

    def channels(self, head_dim: int) -> int:
        """See ``LayerAheadSelector.channels``; whole eights, so that products stay fast."""
        return min(head_dim, -(-int(np.ceil(self.kept_share * head_dim)) // 8) * 8)

    def projection(self, q: np.ndarray, k: np.ndarray) -> np.ndarray:
        """See ``LayerAheadSelector.projection``.

        What is not a finite number counts as zero: that request fails by its output.
        """
        q, k = (np.where(np.isfinite(part), part, 0).astype(np.float64) for part in (q, k))
        heads, dim = k.shape[1:]
        # [T, H_kv, G, D] -> [H_kv, T * G, D]: the queries of a group share their key.
        grouped = q.reshape(len(q), heads, -1, dim)
        queries = grouped.swapaxes(0, 1).reshape(heads, -1, dim)
        keys = k.swapaxes(0, 1)
        skew = right_singular_vectors(queries)
        magnitude = np.abs(queries @ skew).mean(1) * np.abs(keys @ skew).mean(1)
        kept = np.argsort(-magnitude, axis=-1, kind="stable")[:, : self.channels(dim)]
        return np.take_along_axis(skew, kept[:, None], axis=2).astype(np.float32)


def right_singular_vectors(x: np.ndarray) -> np.ndarray:
    """Of matrices float64 [..., T, D]: orthogonal [..., D, D], columns by falling singular value.

    Vectors and their opposites serve alike. There are D of them however few rows there are.
    """
    _, vectors = np.linalg.eigh(x.swapaxes(-1, -2) @ x)
    return np.asarray(vectors[..., ::-1])


def partial_importance(
    q: np.ndarray, keys: np.ndarray, projection: np.ndarray, length: int
) -> np.ndarray:
    """What the device computes for one slot, by the definition: importance in the kept channels.

    Args:
      q: [H_q, D], the proxy query; ``keys``: [R, H_kv, D].
      projection: [H_kv, D, P]; ``length``: rows that enter the softmax.

    Returns:
      float64 [H_kv, R], the softmax mass of each row summed over a KV head's G queries, zero from
      ``length`` on.
    """
    heads, dim = keys.shape[1:]
    result = np.zeros((heads, len(keys)))
    grouped = np.asarray(q, np.float64).reshape(heads, -1, dim)
    for head in range(heads):
        turned = projection[head].astype(np.float64)
        partial = keys[:length, head].astype(np.float64) @ turned
        for query in grouped[head] @ turned:
            scores = partial @ query / np.sqrt(dim)
            weights = np.exp(scores - scores.max(initial=-np.inf))
            result[head, :length] += weights / weights.sum()
    return result
