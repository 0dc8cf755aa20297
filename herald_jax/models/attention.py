"""Attention of a block over a buffer of keys and values with valid lengths.

The network does not know whether a buffer is the dense cache or a sparse pool: softmax is
permutation-invariant and the keys already carry RoPE, so only the valid length matters.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from herald_jax.models import attention_kernel, importance_kernel
from herald_jax.models.attention_parts import (
    Implementation,
    attend_parts,
    attend_sides,
    attended_in_parts,
)


def pack(q: jax.Array, kv_heads: int) -> jax.Array:
    """Packs a KV head's G query heads with the positions: [N, S, Hq, D] -> [N, S*G, Hkv, D]."""
    n, s, hq, d = q.shape
    group = hq // kv_heads
    return q.reshape(n, s, kv_heads, group, d).swapaxes(2, 3).reshape(n, s * group, kv_heads, d)


def unpack(out: jax.Array, heads: int) -> jax.Array:
    """Inverse of ``pack``: [N, S*G, Hkv, D] -> [N, S, Hq, D]."""
    n, rows, kv_heads, d = out.shape
    group = heads // kv_heads
    return out.reshape(n, rows // group, group, kv_heads, d).swapaxes(2, 3).reshape(n, -1, heads, d)


def default_implementation(dtype: jnp.dtype, head_dim: int) -> Implementation:
    """cuDNN where it applies (half precision on a CUDA device), plain XLA elsewhere."""
    half = dtype in (jnp.bfloat16, jnp.float16)
    return "cudnn" if half and head_dim % 8 == 0 and jax.default_backend() == "gpu" else "xla"


def _exponentials(packed: jax.Array, k: jax.Array, valid: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Softmax before its division: float32 weights [N, Hkv, S*G, R] and their sums [..., 1].

    Rows that are not ``valid`` weigh nothing; a query without any gets zeros, and a sum of one.
    """
    # Heads first: a plain batch of matrix products, which XLA's CPU backend runs 1.5 times faster.
    scores = jnp.einsum(
        "nhsd,nhrd->nhsr",
        packed.swapaxes(1, 2),
        k.swapaxes(1, 2),
        precision=_precision(k.dtype),
        preferred_element_type=jnp.float32,
    )
    scores = jnp.where(valid, scores / math.sqrt(k.shape[-1]), -jnp.inf)
    peak = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(peak), peak, 0.0))
    total = weights.sum(axis=-1, keepdims=True)
    return weights, jnp.where(total > 0, total, 1.0)


def _precision(dtype: jnp.dtype) -> jax.lax.Precision | None:
    """fp32 products never drop to TF32."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


def _attend(packed: jax.Array, k: jax.Array, v: jax.Array, valid: jax.Array) -> jax.Array:
    weights, total = _exponentials(packed, k, valid)
    out = jnp.einsum(
        "nhsr,nhrd->nhsd",
        weights.astype(v.dtype),
        v.swapaxes(1, 2),
        precision=_precision(v.dtype),
        preferred_element_type=jnp.float32,
    )
    return (out / total).astype(v.dtype).swapaxes(1, 2)


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lengths: jax.Array,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Every query of a slot attends rows [0, lengths) of its buffer.

    Args:
      q: [N, S, H_q, D] with RoPE applied.
      k, v: [N, R, H_kv, D], the buffer.
      lengths: int32 [N], valid rows.
      implementation: "xla", "cudnn", or None for the best that applies.

    Returns:
      [N, S, H_q, D] in the dtype of ``v``.
    """
    packed = pack(q, k.shape[2])
    implementation = implementation or default_implementation(k.dtype, k.shape[-1])
    parts = attended_in_parts(k.shape[0] * k.shape[2], k.shape[1])
    if implementation == "cudnn" and parts > 1:
        out, _ = attend_parts(packed, k, v, lengths, parts, implementation)
    elif implementation == "cudnn":
        out = jax.nn.dot_product_attention(
            packed, k, v, key_value_seq_lengths=lengths, implementation="cudnn"
        )
    else:
        valid = (jnp.arange(k.shape[1]) < lengths[:, None])[:, None, None, :]
        out = _attend(packed, k, v, valid)
    return unpack(out, q.shape[2])


def attend_with_mass(
    q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """As ``attend``, with the log of every query's mass where attention finds it anyway.

    Args:
      lengths: int32 [N], at least 1.

    Returns:
      [N, S, H_q, D], and the log of sums of exponentials float32 [N, S*G, H_kv], see ``pack``, or
      None.
    """
    implementation = default_implementation(k.dtype, k.shape[-1])
    if implementation == "xla":
        return attend(q, k, v, lengths, implementation), None
    parts = attended_in_parts(k.shape[0] * k.shape[2], k.shape[1])
    packed = pack(q, k.shape[2])
    out, mass = attend_parts(packed, k, v, lengths, parts, implementation)
    return unpack(out, q.shape[2]), mass


def attend_beside(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lengths: jax.Array,
    own: tuple[jax.Array, jax.Array],
    alone: int = 0,
    implementation: Implementation | None = None,
) -> jax.Array:
    """As ``attend``, of rows [0, lengths) and of all rows of another buffer beside them.

    Args:
      own: (k, v) [N, S', H_kv, D].
      alone: the first so many queries attend rows [0, lengths) only.

    Returns:
      [N, S, H_q, D] in the dtype of ``v``.
    """
    implementation = implementation or default_implementation(k.dtype, k.shape[-1])
    if implementation == "xla":
        # What is valid of the buffer are its first rows.
        keys, values = (jnp.concatenate(pair, axis=1) for pair in zip(own, (k, v), strict=True))
        more = lengths + own[0].shape[1]
        beside = attend(q[:, alone:], keys, values, more, implementation)
        return jnp.concatenate([attend(q[:, :alone], k, v, lengths, implementation), beside], 1)
    packed = pack(q, k.shape[2])
    first = alone * (q.shape[2] // k.shape[2])
    return unpack(attend_sides(packed, k, v, lengths, own, first, implementation), q.shape[2])


def attend_blocks(
    q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array, block_size: int
) -> jax.Array:
    """Block-causal attention over a buffer whose row r holds position r.

    Args:
      q: [N, S, H_q, D].
      k, v: [N, R, H_kv, D].
      positions: int32 [N, S]; the query at position i attends row j iff j // B <= i // B.
      block_size: B.

    Returns:
      [N, S, H_q, D].
    """
    group = q.shape[2] // k.shape[2]
    last = (jnp.repeat(positions, group, axis=1) // block_size + 1) * block_size
    if attention_kernel.applies(k.dtype, k.shape[-1]):
        ends = jnp.minimum(last, k.shape[1]).astype(jnp.int32)
        return unpack(attention_kernel.attend_to_ends(pack(q, k.shape[2]), k, v, ends), q.shape[2])
    valid = (jnp.arange(k.shape[1]) < last[..., None])[:, None]
    return unpack(_attend(pack(q, k.shape[2]), k, v, valid), q.shape[2])


def importance(
    q: jax.Array,
    k: jax.Array,
    lengths: jax.Array,
    voters: jax.Array,
    mass: jax.Array | None = None,
) -> jax.Array:
    """Importance of every row for every KV head: mean over voters of summed softmax mass.

    With one voter this is the paper's sum over the G query heads (section IV-B4).

    Args:
      q: [N, S, H_q, D]; ``voters``: bool [N, S], the positions that vote.
      k: [N, R, H_kv, D]; ``lengths``: int32 [N], rows that enter the softmax.
      mass: what ``attend_with_mass`` found of these queries, keys and lengths, if it did.

    Returns:
      float32 [N, H_kv, R], zero outside the valid rows.
    """
    group = q.shape[2] // k.shape[2]
    votes = jnp.repeat(voters, group, axis=1).astype(jnp.float32)
    count = jnp.maximum(voters.sum(axis=1), 1).astype(jnp.float32)
    if attention_kernel.applies(k.dtype, k.shape[-1]):
        packed, share = pack(q, k.shape[2]), votes / count[:, None]
        return importance_kernel.importance_of_rows(packed, k, lengths, share, mass)
    valid = (jnp.arange(k.shape[1]) < lengths[:, None])[:, None, None, :]
    weights, total = _exponentials(pack(q, k.shape[2]), k, valid)
    return jnp.einsum("nhsr,ns->nhr", weights / total, votes) / count[:, None, None]
