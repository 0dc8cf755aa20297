"""Routers and mixture of experts in NumPy, one token and one expert at a time: what is right."""

from __future__ import annotations

import numpy as np

from herald_jax.models.config import ExpertsConfig


def route_sigmoid(
    logits: np.ndarray, bias: np.ndarray, config: ExpertsConfig
) -> tuple[np.ndarray, np.ndarray]:
    """LLaDA2's router; arguments and results as ``moe.route_sigmoid``."""
    weights, ids = _empty(len(logits), config.per_token)
    size = config.count // config.groups
    for token, row in enumerate(logits.astype(np.float32)):
        scores = 1 / (1 + np.exp(-row))
        choice = scores + bias
        allowed = list(range(config.count))
        if config.groups > 1:
            strengths = [
                np.sort(choice[group * size : (group + 1) * size])[-2:].sum()
                for group in range(config.groups)
            ]
            kept = _largest(strengths, config.groups_per_token)
            allowed = [expert for expert in allowed if expert // size in kept]
        ids[token] = [allowed[i] for i in _largest(choice[allowed], config.per_token)]
        weights[token] = scores[ids[token]]
        if config.normalizes and config.per_token > 1:
            weights[token] /= weights[token].sum() + np.float32(1e-20)
    return weights * np.float32(config.scale), ids


def route_softmax(logits: np.ndarray, config: ExpertsConfig) -> tuple[np.ndarray, np.ndarray]:
    """SDAR-MoE's router; arguments and results as ``moe.route_softmax``."""
    weights, ids = _empty(len(logits), config.per_token)
    for token, row in enumerate(logits.astype(np.float32)):
        powers = np.exp(row - row.max())
        shares = powers / powers.sum()
        ids[token] = _largest(shares, config.per_token)
        weights[token] = shares[ids[token]]
        if config.normalizes:
            weights[token] /= weights[token].sum()
    return weights * np.float32(config.scale), ids


def mix(
    x: np.ndarray,
    weights: np.ndarray,
    ids: np.ndarray,
    gate: np.ndarray,
    up: np.ndarray,
    down: np.ndarray,
) -> np.ndarray:
    """Weighted sum of the chosen experts' outputs in float64; arguments as ``moe.mix``."""
    x, gate, up, down = (array.astype(np.float64) for array in (x, gate, up, down))
    out = np.zeros_like(x)
    for token in range(len(x)):
        for weight, expert in zip(weights[token], ids[token], strict=True):
            opened = x[token] @ gate[expert]
            inner = opened / (1 + np.exp(-opened)) * (x[token] @ up[expert])
            out[token] += weight * (inner @ down[expert])
    return out


def _empty(tokens: int, per_token: int) -> tuple[np.ndarray, np.ndarray]:
    return np.empty((tokens, per_token), np.float32), np.empty((tokens, per_token), np.int32)


def _largest(values: list[float] | np.ndarray, count: int) -> list[int]:
    """Positions of the largest values, largest first; equal values by position."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]
