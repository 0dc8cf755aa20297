"""Mixtures of experts in PyTorch: routers, and products grouped by expert."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from herald_jax.models.config import ExpertsConfig

#: Whether products of bfloat16 can leave their float32 sums as they are.
KEEPS_SUMS = "dtype" in torch.ops.aten.mm.overloads()


def router_logits(x: torch.Tensor, router: torch.Tensor, config: ExpertsConfig) -> torch.Tensor:
    """float32 [T, E] of x [T, hidden] and the router [E, hidden]."""
    if config.router == "softmax":
        return F.linear(x, router).float()
    if x.is_cuda and x.dtype == torch.bfloat16 and KEEPS_SUMS:
        # Products of bfloat16 are exact in float32: tensor cores give what a slow product would.
        return torch.mm(x, router.T, out_dtype=torch.float32)
    return F.linear(x.float(), router.float())


def route(
    logits: torch.Tensor, bias: torch.Tensor | None, config: ExpertsConfig, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses experts as ``herald_jax.models.moe.Router`` does.

    Args:
      logits: float32 [T, E]; ``bias``: float32 [E], for the sigmoid router.
      config: the mixture; ``dtype``: of the network.

    Returns:
      weights float32 [T, k] and ids int64 [T, k].
    """
    if config.router == "softmax":
        weights, ids = logits.softmax(-1).topk(config.per_token, dim=-1)
        if config.normalizes:
            weights = weights / weights.sum(-1, keepdim=True)
        return (weights * config.scale).to(dtype).float(), ids
    scores = logits.sigmoid()
    choice = scores if bias is None else scores + bias
    if config.groups > 1:
        choice = _within_groups(choice, config)
    ids = choice.topk(config.per_token, dim=-1).indices
    weights = scores.gather(-1, ids)
    if config.normalizes and config.per_token > 1:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * config.scale, ids


def _within_groups(choice: torch.Tensor, config: ExpertsConfig) -> torch.Tensor:
    """float32 [T, E] with minus infinity outside the groups that a token may use.

    Maxima and comparisons instead of ``topk``, so that a compiler makes few kernels of it.
    """
    grouped = choice.unflatten(-1, (config.groups, -1))
    best = grouped.argmax(-1, keepdim=True)
    member = torch.arange(grouped.shape[-1], device=choice.device)
    second = grouped.masked_fill(member == best, -torch.inf).amax(-1)
    strength = grouped.amax(-1) + second
    other, own = strength[:, None, :], strength[:, :, None]
    group = torch.arange(config.groups, device=choice.device)
    earlier = group[None, :] < group[:, None]
    rank = ((other > own) | ((other == own) & earlier)).sum(-1)
    return grouped.masked_fill((rank >= config.groups_per_token)[..., None], -torch.inf).flatten(1)


def sort_by_expert(
    x: torch.Tensor, ids: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Copies every token once for each of its experts, ordered by expert.

    Args:
      x: [T, hidden]; ``ids``: int64 [T, k].
      count: E.

    Returns:
      rows [T * k, hidden]; int64 [T * k], the row of each (token, slot); int32 [E], where the rows
      of each expert end.
    """
    # Short keys: a radix sort takes as many passes as they have bytes.
    experts, order = ids.flatten().to(torch.int16).sort(stable=True)
    row = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    each = torch.arange(count, dtype=torch.int16, device=x.device)
    ends = torch.searchsorted(experts, each, right=True).to(torch.int32)
    return x[order // ids.shape[1]], row, ends


def combine(rows: torch.Tensor, row: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted sum over a token's experts, in fp32.

    Args:
      rows: [T * k, hidden]; ``row`` as of ``sort_by_expert``; ``weights``: float32 [T, k].

    Returns:
      [T, hidden] in the dtype of ``rows``.
    """
    taken = rows[row].unflatten(0, weights.shape).float()
    return (taken * weights[..., None]).sum(1).to(rows.dtype)


def product_name(device: torch.device, dtype: torch.dtype) -> str:
    """The way ``product`` takes: a grouped kernel of PyTorch's, or a loop over experts."""
    if device.type == "cuda" and dtype == torch.bfloat16:
        if hasattr(F, "grouped_mm"):
            return "torch.nn.functional.grouped_mm"
        if hasattr(torch, "_grouped_mm"):
            return "torch._grouped_mm"
    return "loop"


def product(
    rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor, name: str
) -> torch.Tensor:
    """Every row times the matrix of its expert.

    Args:
      rows: [A, in], sorted by expert; ``ends``: int32 [E].
      weights: [E, out, in]; seen as [E, in, out] they are column-major, the layout that every
        version of the grouped kernel takes.
      name: of ``product_name``.

    Returns:
      [A, out].
    """
    if name == "torch.nn.functional.grouped_mm":
        return F.grouped_mm(rows, weights.mT, offs=ends)
    if name == "torch._grouped_mm":
        return torch._grouped_mm(rows, weights.mT, offs=ends)
    out = rows.new_empty(len(rows), weights.shape[1])
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            torch.mm(rows[start:end], weights[expert].T, out=out[start:end])
        start = end
    return out
