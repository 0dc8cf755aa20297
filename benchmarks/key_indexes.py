"""Which rows a scan of rounded keys chooses, and what re-ranking by exact keys makes of them.

"int8 token" and "int4 rotated" are the product's own. The others are what an index of that kind
would do: the product's scan over keys and queries that were rounded and are exact numbers again.

P counts the rows that may be selected, H the KV heads, E pairs of K and C.
"""

from __future__ import annotations

from typing import Literal

import ml_dtypes
import numpy as np

import host_kernels
from herald_jax.selection.job import SINKS
from host_kernels import reference
from host_kernels.reference.attend import softmax_of
from host_kernels.reference.index import rest_of

Index = Literal[
    "exact", "bf16", "int8 token", "int4 channel", "int4 centred", "int4 rotated", "int4 token"
]
INDEXES: tuple[Index, ...] = (
    "bf16", "int8 token", "int4 channel", "int4 centred", "int4 rotated", "int4 token"
)  # fmt: skip
#: Those that the product has, by its own names.
PRODUCT: dict[Index, host_kernels.IndexKind] = {"int8 token": "int8", "int4 rotated": "int4"}
#: Tokens that share a channel's scale in the per-channel index.
GROUP = 32


def key_bytes(index: Index, dim: int) -> float:
    """Bytes of one key of an index; scales are float32 for a key, 16 bits for a channel."""
    if index == "exact":
        return 4 * dim
    if index == "bf16":
        return 2 * dim
    if index == "int8 token":
        return dim + 4
    # Scale and zero point of every channel, shared by a group.
    return dim / 2 + (4 * dim / GROUP if index == "int4 channel" else 4)


def rounded(index: Index, keys: np.ndarray, q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Keys [P, H, D] and queries [Q, D] as float32, as another index's scan sees them.

    "int4 token" has a scale for each key, symmetric. "int4 centred" has the same after subtracting
    each channel's mean and a Hadamard rotation (D a power of two); the query is rotated too. "int4
    channel" has a scale and a zero point per channel for each ``GROUP`` tokens (KIVI). Queries are
    int8 but for "exact" and "bf16".
    """
    keys, q = np.asarray(keys, np.float32), np.asarray(q, np.float32)
    if index == "exact":
        return keys, q
    if index == "bf16":
        return _as_bf16(keys), _as_bf16(q)
    assert index not in PRODUCT, "the product itself rounds for this index"
    if index == "int4 token":
        return _int4(keys), _int8(q)
    if index == "int4 centred":
        turn, mean = _hadamard(keys.shape[-1]), keys.mean(axis=0)
        return _int4((keys - mean) @ turn) @ turn.T + mean, _int8(q @ turn) @ turn.T
    return _int4_by_channel(keys), _int8(q)


def _int8(values: np.ndarray) -> np.ndarray:
    """Vectors [..., D] as the product rounds them, as float32."""
    codes, scales = reference.quantise(values)
    return codes * scales[..., None]


def _as_bf16(values: np.ndarray) -> np.ndarray:
    return values.astype(ml_dtypes.bfloat16).astype(np.float32)


def _int4(values: np.ndarray) -> np.ndarray:
    """Rounded to integers within +-7 of a scale per vector (last axis)."""
    scale = np.maximum(np.abs(values).max(-1, keepdims=True) / 7, 1e-12)
    return np.asarray(np.rint(values / scale) * scale)


def _int4_by_channel(keys: np.ndarray) -> np.ndarray:
    rows, heads, dim = keys.shape
    padded = np.pad(keys, ((0, -rows % GROUP), (0, 0), (0, 0)), mode="edge")
    groups = padded.reshape(-1, GROUP, heads, dim)
    low, high = groups.min(1, keepdims=True), groups.max(1, keepdims=True)
    scale = np.maximum((high - low) / 15, 1e-12)
    made = np.rint((groups - low) / scale) * scale + low
    return np.asarray(made.reshape(padded.shape)[:rows])


def _hadamard(dim: int) -> np.ndarray:
    """The orthogonal Hadamard matrix float32 [dim, dim] of a power of two."""
    made = np.ones((1, 1), np.float32)
    while len(made) < dim:
        made = np.block([[made, made], [made, -made]]) * np.float32(0.5**0.5)
    return made


def find(
    index: Index,
    q: np.ndarray,
    keys: np.ndarray,
    counts: np.ndarray,
    candidates: np.ndarray,
    elsewhere: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Scans an index for the C best rows and keeps the K best of them by exact keys.

    With C = K the scan alone decides. The exact scores are divided by the normaliser that the scan
    of the index found, since no more is known where candidates are re-ranked.

    Args:
      index: which.
      q: float32 [Q, D], the queries of a KV head together.
      keys: float32 [P, H, D].
      counts: int [E], K; ``candidates``: int [E], C of each, K to P.
      elsewhere: float32 [Q], log of each query's mass outside the P rows.

    Returns:
      The K rows that are kept and the C candidates, bool [E, H, P] each.
    """
    exact = _extent(keys)
    pairs, heads, rows = len(counts), len(exact), len(keys)
    counts, candidates = counts.astype(np.int32), candidates.astype(np.int32)
    queries = np.repeat(q[None].astype(np.float32), pairs, axis=0)
    outside = None if elsewhere is None else np.repeat(elsewhere[None], pairs, axis=0)
    lengths = np.full(pairs, rows, np.int32)
    scanned = np.empty((pairs, heads, int(candidates.max())), np.int32)
    if index in PRODUCT:
        shape = host_kernels.index_shape(heads, rows, keys.shape[-1], PRODUCT[index])
        tiles = np.zeros(shape, np.uint8)
        host_kernels.index_rows([exact], [tiles], np.zeros(1, np.int32), lengths[:1])
        rest = np.empty(queries.shape[:2], np.float32)
        status = host_kernels.select_indexed(
            queries, [tiles] * pairs, lengths, lengths, candidates, scanned,
            sinks=SINKS, elsewhere=outside, log_rest=rest,
        )  # fmt: skip
    else:
        seen, asked = rounded(index, keys, q)
        stored = _extent(seen)
        status = host_kernels.select(
            np.repeat(asked[None], pairs, axis=0), [stored] * pairs, lengths, lengths, candidates,
            scanned, sinks=SINKS, elsewhere=outside,
        )  # fmt: skip
        grouped = asked.reshape(heads, -1, keys.shape[-1]).astype(np.float64)
        scores = grouped @ stored[:, 0].swapaxes(1, 2) * keys.shape[-1] ** -0.5
        weights, total = softmax_of(scores.reshape(len(q), rows), elsewhere)
        each = [
            rest_of(weights, total, chosen, int(count))
            for chosen, count in zip(scanned, candidates, strict=True)
        ]
        rest = np.stack(each).astype(np.float32)
    kept = np.empty((pairs, heads, int(counts.max())), np.int32)
    status |= host_kernels.rerank(
        queries, [exact] * pairs, scanned, candidates, counts, kept,
        sinks=SINKS, elsewhere=rest,
    )  # fmt: skip
    assert not status.any(), "a score is not finite"
    return _as_sets(kept, rows), _as_sets(scanned, rows)


def _as_sets(chosen: np.ndarray, rows: int) -> np.ndarray:
    """int32 [E, H, capacity] -> bool [E, H, rows]."""
    made = np.zeros((*chosen.shape[:2], rows + 1), bool)
    # What is no row is -1, which falls on a place of its own.
    np.put_along_axis(made, chosen, True, axis=-1)
    return made[..., :rows]


def _extent(keys: np.ndarray) -> np.ndarray:
    """Keys [P, H, D] where the kernels look for them: float32 [H, 2, P, D]."""
    by_head = np.asarray(keys, np.float32).swapaxes(0, 1)
    return np.ascontiguousarray(np.stack([by_head, np.zeros_like(by_head)], axis=1))
