"""Plain NumPy loops for every decoding rule: the definition of right, one block at a time."""

from __future__ import annotations

import numpy as np

from herald_jax.diffusion.accept import AcceptRule


def quota_reference(steps: int, block_size: int) -> list[int]:
    """The quota of every step: B // T each, the remainder on the first ones."""
    base, rest = divmod(block_size, steps)
    return [max(1, base + (1 if step < rest else 0)) for step in range(steps)]


def accept_reference(
    masked: np.ndarray, confidence: np.ndarray, due: int, threshold: float, rule: AcceptRule
) -> np.ndarray:
    """``accept`` for one slot: bool [B], float32 [B] -> bool [B]."""
    positions = [i for i in range(len(masked)) if masked[i]]
    by_confidence = sorted(positions, key=lambda i: (-confidence[i], i))

    def passes(value: float) -> bool:
        return value >= threshold if rule.compare == "ge" else value > threshold

    chosen = by_confidence[:due]
    if rule.strategy == "dynamic":
        passing = [i for i in positions if passes(confidence[i])]
        if len(passing) >= due:
            chosen = passing
        elif rule.fallback == "leftmost":
            chosen = positions[:due]
    result = np.zeros(len(masked), bool)
    result[chosen] = True
    return result


def filter_reference(logits: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    """``filter_logits`` for one position: float32 [V] -> float32 [V] with -inf where removed."""
    kept = logits.astype(np.float64)
    if top_k:
        kth = np.sort(kept)[::-1][min(top_k, len(kept)) - 1]
        kept = np.where(kept < kth, -np.inf, kept)
    order = np.argsort(-kept, kind="stable")
    weights = np.exp(kept[order] - np.max(kept))
    before = np.cumsum(weights / weights.sum()) - weights / weights.sum()
    last = max(1, int((before < top_p).sum()))
    return np.where(kept < kept[order[last - 1]], -np.inf, kept)
