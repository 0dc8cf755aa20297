"""Plain NumPy loops for every decoding rule: the definition of right, one block at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from herald_jax.diffusion.accept import NEAR, AcceptRule
from herald_jax.diffusion.rules import Rule


def quota_reference(steps: int, block_size: int) -> list[int]:
    """The quota of every step: B // T each, the remainder on the first ones."""
    base, rest = divmod(block_size, steps)
    return [max(1, base + (1 if step < rest else 0)) for step in range(steps)]


def accept_reference(
    masked: np.ndarray,
    confidence: np.ndarray,
    due: int,
    threshold: float,
    rule: AcceptRule,
    entropy: np.ndarray | None = None,
    bound: float = 0.0,
) -> np.ndarray:
    """``accept`` for one slot: bool [B], float32 [B], float32 [B] -> bool [B]."""
    size = len(masked)
    result = np.zeros(size, bool)
    positions = [i for i in range(size) if masked[i]]
    if not positions:
        return result
    if rule.small_block is not None:
        part = positions[0] // rule.small_block
        positions = [i for i in positions if i // rule.small_block == part]
    if rule.strategy == "entropy_bounded":
        assert entropy is not None, "an entropy-bounded rule needs the entropy of each position"
        total = np.float32(0)
        for i in sorted(positions, key=lambda i: (entropy[i], i)):
            total += np.float32(entropy[i])
            if result.any() and not total < np.float32(bound):
                break
            result[i] = True
        return result
    others = [i for i in range(size) if i not in positions]
    by_confidence = sorted(positions, key=lambda i: (-confidence[i], i))
    if rule.strategy == "sequential":
        order = [i for i in range(positions[0], size)]
        chosen = [i for i in order[:due] if i in positions or not rule.clamp_quota]
        result[chosen] = True
        return result
    filling = positions if rule.fallback == "leftmost" else by_confidence
    if rule.strategy == "static":
        filling = by_confidence
    if not rule.clamp_quota:
        filling = filling + others
    chosen = filling[:due]
    if rule.strategy == "dynamic":
        passing = [i for i in positions if _passes(i, positions, confidence, threshold, rule)]
        if len(passing) >= due:
            chosen = passing
    result[chosen] = True
    return result


def _passes(
    position: int,
    positions: Sequence[int],
    confidence: np.ndarray,
    threshold: float,
    rule: AcceptRule,
) -> bool:
    value, limit = np.float32(confidence[position]), np.float32(threshold)
    if rule.compare == "gt":
        return bool(value > limit)
    if rule.compare == "near":
        best = np.float32(max(confidence[i] for i in positions))
        limit = min(best - np.float32(NEAR), limit)
    return bool(value >= limit)


def edit_reference(
    tokens: np.ndarray,
    masked: np.ndarray,
    fixed: np.ndarray,
    proposal: np.ndarray,
    confidence: np.ndarray,
    threshold: float,
) -> np.ndarray:
    """``choose_edits`` for one slot that may be edited: bool [B]."""
    result = np.zeros(len(tokens), bool)
    for i in range(len(tokens)):
        sure = np.float32(confidence[i]) > np.float32(threshold)
        result[i] = not masked[i] and not fixed[i] and proposal[i] != tokens[i] and sure
    return result


def block_reference(
    tokens: np.ndarray,
    masked: np.ndarray,
    propose: Callable[[int, np.ndarray], tuple[np.ndarray, np.ndarray, np.ndarray | None]],
    rule: Rule,
    mask_id: int,
) -> tuple[np.ndarray, np.ndarray, int]:
    """One whole block of one slot, as the authors' loops do it.

    Args:
      tokens: int32 [B] and ``masked``: bool [B], before the first step.
      propose: from the step and the tokens to proposals int32 [B], confidences float32 [B] and
        entropies float32 [B] (None where the rule has no use for them); called once a step.
      rule: with all options.
      mask_id: of [MASK]; a position that takes it while it is not banned is masked (again).

    Returns:
      the final tokens, what is left masked, and the number of steps. A step after these, or the
      last one if it began without masks, has the KV of the final tokens.
    """
    size, accept = len(tokens), AcceptRule.of(rule)
    tokens, masked, fixed = tokens.copy(), masked.copy(), ~masked
    due = quota_reference(rule.steps or size, size)
    post = 0
    for step in range(accept.rounds(size, rule.steps or size, rule.max_post_steps)):
        clean = not masked.any()
        if clean and rule.edit_threshold is None:
            return tokens, masked, step
        post += clean
        if post > rule.max_post_steps:
            return tokens, masked, step
        proposal, confidence, entropy = propose(step, tokens)
        now = due[step] if step < len(due) else due[-1]
        written = accept_reference(
            masked, confidence, now, rule.threshold, accept, entropy, rule.entropy_bound
        )
        if rule.edit_threshold is not None:
            written |= edit_reference(
                tokens, masked, fixed, proposal, confidence, rule.edit_threshold
            )
        for i in range(size):
            if written[i]:
                tokens[i] = proposal[i]
                masked[i] = not rule.ban_mask and proposal[i] == mask_id
        if clean and not written.any():
            return tokens, masked, step + 1
    return tokens, masked, accept.rounds(size, rule.steps or size, rule.max_post_steps)


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


def shift_reference(logits: np.ndarray) -> np.ndarray:
    """Logits [B, V] of a network that predicts the next token, by the position they are for."""
    return np.stack([logits[max(i - 1, 0)] for i in range(len(logits))])


def entropy_reference(logits: np.ndarray) -> float:
    """Entropy in nats of the softmax of logits [V], -inf allowed."""
    weights = np.exp(logits.astype(np.float64) - np.max(logits))
    probability = weights[weights > 0] / weights.sum()
    return float(-(probability * np.log(probability)).sum())
