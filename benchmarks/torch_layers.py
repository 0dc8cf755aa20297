"""The tuned network of the PyTorch baseline, in pieces that are compiled once for all layers.

A piece takes tensors, not modules: layers of one shape then share what was compiled. Attention and
grouped products stand between the pieces.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from benchmarks.torch_denoise import accept, propose
from benchmarks.torch_experts import combine, route, sort_by_expert
from herald_jax.models.config import ExpertsConfig


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last axis with fp32 statistics."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE on the leading channels of x [N, B, heads, D]; cos, sin float32 [N, B, 1, half]."""
    half = cos.shape[-1]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([turned.to(x.dtype), x[..., 2 * half :]], dim=-1)


def project(
    x: torch.Tensor,
    norm: torch.Tensor,
    qkv: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Queries of a layer, packed [N, H_kv, B * G, D]; writes ``keys``, ``values`` [N, B, H_kv, D].

    Args:
      x: [N, B, hidden]; weights as ``Layer``; ``cos``, ``sin`` as ``rotate``.
    """
    batch, size, kv_heads, dim = keys.shape
    heads = F.linear(rms_norm(x, norm, eps), qkv).view(batch, size, -1, dim)
    q, k, v = heads.split([heads.shape[2] - 2 * kv_heads, kv_heads, kv_heads], dim=2)
    keys.copy_(rotate(rms_norm(k, k_norm, eps), cos, sin))
    values.copy_(v)
    q = rotate(rms_norm(q, q_norm, eps), cos, sin)
    return q.unflatten(2, (kv_heads, -1)).transpose(1, 2).reshape(batch, kv_heads, -1, dim)


def after_attention(
    x: torch.Tensor, attended: torch.Tensor, o: torch.Tensor, norm: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Residual stream and input of the MLP, [N, B, hidden]; ``attended`` packed as queries."""
    batch, size, _ = x.shape
    group = attended.shape[2] // size
    heads = attended.transpose(1, 2).unflatten(1, (size, group)).transpose(2, 3)
    x = x + F.linear(heads.reshape(batch, size, -1), o)
    return x, rms_norm(x, norm, eps)


def gated(both: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [..., 2 * inner]."""
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate) * up


def finish(
    x: torch.Tensor,
    attended: torch.Tensor,
    o: torch.Tensor,
    norm: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """The rest of a layer with a plain MLP, [N, B, hidden]."""
    x, y = after_attention(x, attended, o, norm, eps)
    return x + F.linear(gated(F.linear(y, gate_up)), down)


def dispatch(
    x: torch.Tensor,
    y: torch.Tensor,
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    shared_gate_up: torch.Tensor | None,
    shared_down: torch.Tensor | None,
    config: ExpertsConfig,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sends tokens to their experts, and all of them through the shared one.

    Args:
      x, y: of ``after_attention``; ``logits`` float32 [T, E] of the router.
      bias: float32 [E] or None; the shared expert's weights, or None twice.
      config: the mixture.

    Returns:
      x with the shared expert; rows, row and ends of ``sort_by_expert``; weights float32 [T, k].
    """
    weights, ids = route(logits, bias, config, x.dtype)
    rows, row, ends = sort_by_expert(y.flatten(0, 1), ids, config.count)
    if shared_gate_up is not None and shared_down is not None:
        x = x + F.linear(gated(F.linear(y, shared_gate_up)), shared_down)
    return x, rows, row, ends, weights


def gather(
    x: torch.Tensor, rows: torch.Tensor, row: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """A layer from the outputs of its experts, [N, B, hidden]."""
    return x + combine(rows, row, weights).view_as(x)


def choose(
    x: torch.Tensor,
    norm: torch.Tensor,
    head: torch.Tensor,
    tokens: torch.Tensor,
    masked: torch.Tensor,
    due: torch.Tensor,
    mask_token: int,
    eps: float,
) -> None:
    """Logits, proposals and acceptance, in place; compiled, no fp32 logits are stored."""
    logits = F.linear(rms_norm(x, norm, eps), head)
    accept(tokens, masked, due, *propose(logits, mask_token))


#: Every piece by its name.
PIECES = {
    made.__name__: made
    for made in (project, finish, after_attention, dispatch, gated, gather, choose)
}
