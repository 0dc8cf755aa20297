"""Greedy generation loops over torch networks, one for each family's own rule; no cache.

Written from what the published loops do, independently of herald_jax: answers are compared token
for token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from .torch_networks import logits


@dataclass(frozen=True)
class Task:
    """A prompt for a network, and what surrounds it.

    Attributes:
      new: tokens asked for. ``bans``: the mask is never predicted.
    """

    model: torch.nn.Module
    prompt: list[int]
    new: int
    block: int
    mask: int
    stops: tuple[int, ...]
    bans: bool = True

    @property
    def canvas(self) -> np.ndarray:
        """The prompt and masks up to the end of the last block."""
        length = -(-(len(self.prompt) + self.new) // self.block) * self.block
        row = np.full(length, self.mask)
        row[: len(self.prompt)] = self.prompt
        return row

    @property
    def first_block(self) -> int:
        """Where the first block that is not all prompt begins."""
        return len(self.prompt) // self.block * self.block

    def probabilities(self, row: np.ndarray, start: int, shift: int = 0) -> torch.Tensor:
        """Softmax for the block at ``start`` given everything up to its end, float64 [B, V]."""
        scores = logits(self.model, row[None, : start + self.block], self.block)[0].double()
        if self.bans:
            scores[:, self.mask] = -torch.inf
        rows = (np.arange(start, start + self.block) - shift).clip(0)
        return torch.softmax(scores[rows], dim=-1)

    def answer(self, row: np.ndarray) -> list[int]:
        """The tokens before the first stop token."""
        tokens = row[len(self.prompt) : len(self.prompt) + self.new].tolist()
        ends = [at for at, token in enumerate(tokens) if token in self.stops]
        return tokens[: ends[0]] if ends else tokens

    def stopped(self, row: np.ndarray, end: int) -> bool:
        """Whether a stop token stands between the prompt and ``end``."""
        return bool(np.isin(row[len(self.prompt) : end], self.stops).any())


def quotas(block: int, steps: int) -> list[int]:
    """How many positions each step is due."""
    return [block // steps + (step < block % steps) for step in range(steps)]


def llada20(task: Task, steps: int, threshold: float) -> list[int]:
    """LLaDA2.0: everything above the threshold, or as many as the step is due."""
    row = task.canvas
    for start in range(task.first_block, len(row), task.block):
        cut = slice(start, start + task.block)
        for due in quotas(task.block, steps):
            masked = torch.tensor(row[cut] == task.mask)
            if not masked.any():
                break
            sure, best = task.probabilities(row, start).max(-1)
            sure = torch.where(masked, sure, -torch.inf)
            high = sure > threshold
            if high.sum() < due:
                high = torch.zeros_like(high)
                high[sure.topk(min(due, int(masked.sum()))).indices] = True
            row[cut] = np.where(high, best, row[cut])
        if task.stopped(row, start + task.block):
            break
    return task.answer(row)


def llada21(task: Task, threshold: float, editing: float, post_steps: int) -> list[int]:
    """LLaDA2.1: masks become tokens and tokens become others, then rounds of edits only."""
    row = task.canvas
    for start in range(task.first_block, len(row), task.block):
        cut = slice(start, start + task.block)
        given = torch.arange(start, start + task.block) < len(task.prompt)
        post = 0
        # The published loop has no end where masks come back for ever; engines stop it here.
        for _ in range(task.block + post_steps + 1):
            masked = torch.tensor(row[cut] == task.mask)
            if not masked.any():
                post += 1
                if post > post_steps:
                    break
            sure, best = task.probabilities(row, start).max(-1)
            fresh = masked & (sure > threshold)
            if masked.any() and not fresh.any():
                fresh[torch.where(masked, sure, -torch.inf).argmax()] = True
            changed = ~masked & ~given & (sure > editing) & (best != torch.tensor(row[cut]))
            row[cut] = np.where(fresh | changed, best, row[cut])
            if not masked.any() and not changed.any():
                break
        if task.stopped(row, start + task.block):
            break
    return task.answer(row)


def sdar(
    task: Task, remasking: str, steps: int, threshold: float = 0.9, bound: float = 0.35
) -> list[int]:
    """SDAR: four ways to choose, until a step begins without masks."""
    row = task.canvas
    for start in range(task.first_block, len(row), task.block):
        cut = slice(start, start + task.block)
        for due in quotas(task.block, steps):
            masked = torch.tensor(row[cut] == task.mask)
            if not masked.any():
                break
            distribution = task.probabilities(row, start)
            sure, best = distribution.max(-1)
            sure = torch.where(masked, sure, -torch.inf)
            due = min(due, int(masked.sum()))
            if remasking == "sequential":
                chosen = masked.nonzero()[:due, 0]
            elif remasking == "entropy_bounded":
                entropy = torch.special.entr(distribution).sum(-1)
                order = torch.where(masked, entropy, torch.inf).argsort(stable=True)
                order = order[: int(masked.sum())]
                below = int((entropy[order].cumsum(0) < bound).sum())
                chosen = order[: max(1, below)]
            else:
                chosen = sure.topk(due).indices
                high = (sure > threshold).nonzero()[:, 0]
                if remasking == "low_confidence_dynamic" and len(high) >= due:
                    chosen = high
            row[start + chosen.numpy()] = best[chosen].numpy()
        if task.stopped(row, start + task.block):
            break
    return task.answer(row)


def fast_dllm_v2(task: Task, small: int, threshold: float) -> list[int]:
    """Fast-dLLM v2: a block's first token is the last logits' own; then small blocks in order."""
    row = task.canvas
    for start in range(task.first_block, len(row), task.block):
        if start >= len(task.prompt):
            scores = logits(task.model, row[None, :start], task.block)[0, -1]
            # A mask would be no first token at all.
            scores[task.mask] = -torch.inf
            row[start] = int(scores.argmax())
        for begin in range(start, start + task.block, small):
            while (row[begin : begin + small] == task.mask).any():
                sure, best = task.probabilities(row, start, shift=1).max(-1)
                part = slice(begin - start, begin - start + small)
                masked = torch.tensor(row[begin : begin + small] == task.mask)
                sure, best = torch.where(masked, sure[part], -torch.inf), best[part]
                high = sure > threshold
                high[sure.argmax()] = True
                row[begin : begin + small] = np.where(high, best, row[begin : begin + small])
        if task.stopped(row, start + task.block):
            break
    return task.answer(row)
