"""Denoising a block in PyTorch by the static rule: what both baselines share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass
class Block:
    """The block of every slot; its tensors stay where they are, as CUDA graphs need it.

    Attributes:
      tokens: int64 [N, B]; ``masked``: bool [N, B].
      due: int64 [1], positions that a step accepts.
      mask_token: id of [MASK].
    """

    tokens: torch.Tensor
    masked: torch.Tensor
    due: torch.Tensor
    mask_token: int

    @classmethod
    def empty(cls, batch: int, size: int, mask_token: int, device: torch.device) -> Block:
        """A block of masks."""
        tokens = torch.full((batch, size), mask_token, device=device)
        masked = torch.ones_like(tokens, dtype=torch.bool)
        return cls(tokens, masked, torch.ones(1, dtype=torch.int64, device=device), mask_token)


class Network(Protocol):
    """A network over a cache, at work on one block."""

    block: Block

    def step(self) -> None:
        """One forward pass; positions accept."""

    def commit(self) -> None:
        """One forward pass that leaves the keys and values of the block as it is."""


def quotas(size: int, steps: int) -> list[int]:
    """Positions due in each step: B // T, the remainder on the first steps, at least one."""
    return [max(1, size // steps + (step < size % steps)) for step in range(min(steps, size))]


def propose(logits: torch.Tensor, mask_token: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest token but [MASK] and its probability: [..., V] -> int64, float32 [...]."""
    banned = torch.arange(logits.shape[-1], device=logits.device) == mask_token
    scores = logits.float().masked_fill(banned, -torch.inf)
    best, tokens = scores.max(-1)
    return tokens, torch.exp(best - scores.logsumexp(-1))


def accept(
    tokens: torch.Tensor,
    masked: torch.Tensor,
    due: torch.Tensor,
    proposed: torch.Tensor,
    confidence: torch.Tensor,
) -> None:
    """The ``due`` most confident masked positions take their proposal, in place.

    Arguments as ``Block`` and ``propose``. A position's rank is the number of those before it
    (ties go to the lower index): a comparison of B x B numbers, cheaper on a GPU than sorting.
    """
    score = confidence.masked_fill(~masked, -torch.inf)
    other, own = score[:, None, :], score[:, :, None]
    index = torch.arange(score.shape[1], device=score.device)
    earlier = index[None, :] < index[:, None]
    rank = ((other > own) | ((other == own) & earlier)).sum(-1)
    taken = masked & (rank < due)
    tokens.copy_(torch.where(taken, proposed, tokens))
    masked.copy_(masked & ~taken)


def denoise(network: Network, due: list[int]) -> torch.Tensor:
    """A block from masks to committed tokens, int64 [N, B] on the host.

    Args:
      network: what to run.
      due: of ``quotas``.
    """
    block = network.block
    block.tokens.fill_(block.mask_token)
    block.masked.fill_(True)
    for count in due:
        block.due.fill_(count)
        network.step()
    network.commit()
    return block.tokens.cpu()
