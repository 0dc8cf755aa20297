"""The key indexes in plain NumPy: the definition of right."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from host_kernels.arguments import check_elsewhere, check_index_rows, check_indexed, check_rest
from host_kernels.checks import (
    TILE,
    Extents,
    Indexes,
    IndexKind,
    code_bytes,
    kind_of,
)
from host_kernels.reference.attend import mass_of, pick, softmax_of

SMALLEST = np.float32(2.0**-100)
"""Vectors without a component of at least this size are stored as zeros."""


MOST: dict[IndexKind, int] = {"int8": 127, "int4": 7}
"""The largest code of a key; what is added to a stored one is one more."""


def rotation_width(dim: int) -> int:
    """Dimensions that an int4 index rotates together: the largest power of two that divides all."""
    return dim & -dim


def rotated(rows: NDArray[Any]) -> NDArray[np.float32]:
    """Walsh-Hadamard transform of vectors ``[..., D]`` in groups of ``rotation_width(D)``.

    It is not normalised: products of two rotated vectors are ``rotation_width`` times theirs.
    Additions are in float32 and in this order, which the native code follows bit for bit.
    """
    values = np.asarray(rows, np.float32)
    width = rotation_width(values.shape[-1])
    groups = values.shape[-1] // width
    now = values.reshape(*values.shape[:-1], groups, width)
    with np.errstate(invalid="ignore", over="ignore"):
        for _ in range(width.bit_length() - 1):
            even, odd = now[..., ::2], now[..., 1::2]
            now = np.concatenate([even + odd, even - odd], axis=-1)
    return now.reshape(values.shape)


def quantise(rows: NDArray[Any], most: int = 127) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Symmetric codes ``[..., D]`` and float32 scales ``[...]`` of vectors ``[..., D]``.

    ``scale = max|x| / most`` and ``code = x * (most / max|x|)``, both in float32, rounded half to
    even. A vector with a number that is not finite has codes 0 and the scale NaN.
    """
    values = np.asarray(rows, np.float32)
    largest = np.abs(values).max(axis=-1)
    with np.errstate(invalid="ignore", over="ignore"):
        usable = np.isfinite(largest) & (largest >= SMALLEST)
        inverse = np.where(usable, np.float32(most) / np.where(usable, largest, 1), 0)
        codes = np.rint(
            np.where(usable[..., None], values, 0) * inverse.astype(np.float32)[..., None]
        )
        scale = np.where(usable, largest / np.float32(most), 0).astype(np.float32)
    scale[~np.isfinite(largest)] = np.nan
    return codes.astype(np.int8), scale


def quantise_keys(
    keys: NDArray[Any], kind: IndexKind
) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Codes ``[..., D]`` and scales ``[...]`` of keys as an index of that kind has them."""
    if kind == "int8":
        return quantise(keys)
    codes, scales = quantise(rotated(keys), MOST[kind])
    # A power of two: products come out as those of the keys themselves.
    return codes, scales / np.float32(rotation_width(keys.shape[-1]))


def quantise_queries(
    q: NDArray[np.float32], kind: IndexKind
) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Codes ``[..., D]`` and scales ``[...]`` of queries of an index of that kind."""
    return quantise(q if kind == "int8" else rotated(q))


def index_rows(
    kv: Extents,
    index: Indexes,
    start: NDArray[np.int32],
    counts: NDArray[np.int32],
    *,
    threads: int | None = None,
) -> None:
    """See ``host_kernels.index_rows``."""
    shape = check_index_rows(kv, index, start, counts)
    for n, (extent, tiles) in enumerate(zip(kv, index, strict=True)):
        rows = np.arange(int(start[n]), int(start[n]) + int(counts[n]))
        kind = kind_of(tiles, shape.dim)
        codes, scales = quantise_keys(extent[:, 0, rows], kind)
        parts = (codes.astype(np.int16) + MOST[kind] + 1).astype(np.uint8)
        if kind == "int4":
            fours = parts.reshape(shape.heads, len(rows), shape.dim // 8, 2, 4)
            parts = np.bitwise_or(fours[..., 0, :], fours[..., 1, :] << np.uint8(4))
        size = code_bytes(shape.dim, kind)
        body = tiles[:, :, : TILE * size].reshape(shape.heads, -1, size // 4, TILE, 4)
        parts = parts.reshape(shape.heads, len(rows), size // 4, 4)
        tail = tiles[:, :, TILE * size :]
        for h in range(shape.heads):
            for j, row in enumerate(rows):
                body[h, row // TILE, :, row % TILE] = parts[h, j]
                at = 4 * (row % TILE)
                tail[h, row // TILE, at : at + 4] = scales[h, j : j + 1].view(np.uint8)
        tiles[:, :, : TILE * size] = body.reshape(shape.heads, -1, TILE * size)


def unpack(tiles: NDArray[np.uint8], dim: int) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Codes ``[H_kv, rows, D]`` and scales ``[H_kv, rows]`` of an index, whole tiles."""
    heads, count, _ = tiles.shape
    kind = kind_of(tiles, dim)
    size = code_bytes(dim, kind)
    body = tiles[:, :, : TILE * size].reshape(heads, count, size // 4, TILE, 4)
    codes = body.transpose(0, 1, 3, 2, 4)
    if kind == "int4":
        codes = np.stack([codes & 15, codes >> 4], axis=-2)
    signed = (codes.astype(np.int16) - (MOST[kind] + 1)).astype(np.int8)
    scales = np.ascontiguousarray(tiles[:, :, TILE * size :]).view(np.float32)
    return signed.reshape(heads, count * TILE, dim), scales.reshape(heads, count * TILE)


def index_scores(
    q: NDArray[np.float32], tiles: NDArray[np.uint8], length: int, scale: float
) -> NDArray[np.float64]:
    """Scaled dot products ``[H_q, length]`` of int8 queries with the first keys of an index."""
    dim = q.shape[-1]
    codes, scales = unpack(tiles, dim)
    heads = len(codes)
    q_codes, q_scales = quantise_queries(q, kind_of(tiles, dim))
    grouped = q_codes.reshape(heads, -1, dim).astype(np.int64)
    products = np.einsum("hgd,hrd->hgr", grouped, codes[:, :length].astype(np.int64))
    result = products * scales[:, None, :length].astype(np.float64)
    return result.reshape(len(q), length) * q_scales[:, None].astype(np.float64) * scale


def select_indexed(
    q: NDArray[np.float32],
    index: Indexes,
    attend_len: NDArray[np.int32],
    select_len: NDArray[np.int32],
    budget: NDArray[np.int32],
    indices: NDArray[np.int32],
    *,
    sinks: int = 4,
    recent: int = 0,
    elsewhere: NDArray[np.float32] | None = None,
    log_rest: NDArray[np.float32] | None = None,
    scale: float | None = None,
    threads: int | None = None,
) -> NDArray[np.int32]:
    """See ``host_kernels.select_indexed``."""
    shape = check_indexed(q, index, attend_len, select_len, budget, indices, sinks, recent, scale)
    check_elsewhere(elsewhere, q)
    check_rest(log_rest, q, shape)
    status = np.zeros(shape.slots, np.int32)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    indices[:] = -1
    for n, tiles in enumerate(index):
        with np.errstate(invalid="ignore"):
            s = index_scores(q[n], tiles, int(attend_len[n]), factor)
        weights, total = softmax_of(s, None if elsewhere is None else elsewhere[n])
        status[n] = 0 if np.isfinite(weights).all() else 1
        mass = mass_of(weights, shape.heads)
        pick(mass, int(select_len[n]), int(budget[n]), sinks, recent, bool(status[n]), indices[n])
        if log_rest is not None:
            log_rest[n] = 0 if status[n] else rest_of(weights, total, indices[n], int(budget[n]))
    return status


def rest_of(
    weights: NDArray[np.float64], total: NDArray[np.float64], rows: NDArray[np.int32], count: int
) -> NDArray[np.float64]:
    """Log of the mass of each query ``[H_q]`` that does not lie on its head's selected rows.

    Args:
        weights: probabilities ``[H_q, rows]``; ``total``: log of what they were divided by.
        rows: selected ones ``[H_kv, K_cap]``, the first ``count`` of each.
    """
    group = len(weights) // len(rows)
    chosen = np.repeat(rows[:, :count], group, axis=0)
    selected = np.take_along_axis(weights, chosen, axis=1).sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(selected < 1, total + np.log1p(-np.minimum(selected, 1)), -np.inf)
