"""The memory plan: what an engine will hold on the device and on the host, before it holds it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from herald_jax.kv.budget import Budget
from herald_jax.kv.device_cache import CacheShape, Transfer
from herald_jax.kv.full_pool import index_bytes, row_bytes
from herald_jax.models import attention_parts, head_kernel
from herald_jax.models.config import EXPERT_ROWS, ModelConfig
from host_kernels import IndexKind

LOGIT_COPIES = 2
SCORE_COPIES = 3
BATCH_CEILING = 4096


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by purpose.

    Attributes:
      weights: parameters on the device.
      exact, pools: KV of the exact layers; active sparse pool, and what is on its way to the next:
        changes, an idle pool or, for selectors that read whole layers, some layers' KV;
        and the part of all keys that some choose by.
      prefill: what reading a prompt needs beyond what decoding holds, see ``plan``.
      workspace: a step's activations and its logits, in float32.
      host_pool: K and V rows of the full pool for all slots; ``key_index``: the index of its keys,
        where there is one.
      staging: host buffers of what is on its way to the device: changes, an idle pool or
        whole layers' KV.
    """

    weights: int
    exact: int
    pools: int
    prefill: int
    workspace: int
    host_pool: int
    key_index: int
    staging: int

    @property
    def device_bytes(self) -> int:
        """Everything on the device at its peak."""
        return self.weights + self.exact + self.pools + self.prefill + self.workspace

    @property
    def device_kv_bytes(self) -> int:
        """KV that stays on the device while decoding."""
        return self.exact + self.pools

    @property
    def host_bytes(self) -> int:
        """Everything in host memory."""
        return self.booked + self.staging

    @property
    def booked(self) -> int:
        """What all slots book of the full pool: rows and their index."""
        return self.host_pool + self.key_index


def cache_shape(
    config: ModelConfig,
    *,
    slots: int,
    max_context: int,
    exact_layers: int,
    budget: Budget,
    candidates_ratio: float,
    dtype: np.dtype,
    whole_layers: int = 0,
    within_step: bool = False,
    partial_channels: int = 0,
    key_index: IndexKind | None = None,
    transfer: Transfer = "full",
    masks: int = 1,
) -> CacheShape:
    """Buffer sizes for ``slots`` requests of at most ``max_context`` tokens.

    ``exact_layers == num_layers`` is the dense method.
    """
    block = config.block_size
    rows = -(-max_context // block) * block
    sparse = config.num_layers - exact_layers
    # The last block selects from everything before its tail.
    prefix = max(0, rows - 2 * block)
    wanted = budget.capacity(prefix) if sparse else 0
    fetched = min(prefix, int(np.ceil(wanted * candidates_ratio)))
    selected, candidates = (min(prefix, _divisible(rows)) for rows in (wanted, fetched))
    if fetched > wanted and candidates == selected:
        # Step 0 must still find more than it keeps.
        selected = wanted
    return CacheShape(
        slots=slots,
        rows=rows,
        exact_layers=exact_layers,
        sparse_layers=sparse,
        selected=selected,
        candidates=candidates,
        block_size=block,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=np.dtype(dtype),
        whole_layers=min(whole_layers, sparse),
        within_step=within_step,
        partial_channels=partial_channels,
        key_index=key_index if sparse else None,
        transfer=transfer if candidates and not (whole_layers or within_step) else "full",
        masks=masks,
    )


def _divisible(rows: int) -> int:
    """Rows, a few more where there are many, so that attention can cut a pool into parts."""
    few, most = 2 * attention_parts.LEAST_ROWS, attention_parts.MOST_PARTS
    return rows if rows < few else -(-rows // most) * most


def prefill_rows(need: int, most: int, chunk: int) -> int:
    """Rows of a prefill buffer: ``chunk`` doubled until ``need`` fits, at most what fits ``most``.

    Few sizes mean few compilations.
    """
    rows = chunk
    while rows < need:
        rows *= 2
    return min(rows, -(-max(most, need) // chunk) * chunk)


def plan(
    config: ModelConfig,
    shape: CacheShape,
    *,
    prefill_chunk: int = 512,
    fused: bool = False,
    sampled: bool = True,
) -> MemoryPlan:
    """The memory plan of an engine with this cache.

    Prompts are read between blocks: the active pool and partial keys are there, and with direct
    transfers an idle pool that no candidates make room for; any other idle pool, changes and the
    workspace of a step are not, and what reads the prompt has their place. It takes
    one request's full KV, the rows of a chunk and of the one before on their way to the host, a
    chunk's activations and attention scores (float32), and the pool of one slot.

    Args:
      prefill_chunk: prompt tokens that are read together.
      fused: the device's kernels hold no scores and no padded experts and, unless ``sampled``, no
        logits.
    """
    itemsize = shape.dtype.itemsize
    block, slots = config.block_size, shape.slots
    pools = shape.device_bytes - shape.exact_bytes
    heads, dim, layers = config.num_kv_heads, config.head_dim, config.num_layers

    vocabulary = config.vocab_size
    if fused and not sampled:
        # Of every tile its peak, where that is, and a sum.
        vocabulary = -(-vocabulary // head_kernel.COLUMNS) * 3
    logits = LOGIT_COPIES * slots * block * vocabulary * 4
    workspace = (
        activation_bytes(config, slots * (2 * block + shape.masks), itemsize, fused) + logits
    )
    if fused:
        workspace += cut_bytes(config, shape)

    chunk = min(prefill_chunk, shape.rows)
    rows = prefill_rows(shape.rows, shape.rows, chunk)
    # The first block's importance needs its scores, whoever attends.
    scored = block if fused else chunk
    reading = (
        layers * row_bytes(heads, dim, shape.dtype, rows)
        + (layers + shape.sparse_layers) * row_bytes(heads, dim, shape.dtype, chunk)
        + activation_bytes(config, chunk, itemsize, fused)
        + SCORE_COPIES * config.num_heads * scored * rows * 4
        + shape.pool_bytes // slots
    )
    kept = slots * shape.sparse_layers
    return MemoryPlan(
        weights=config.parameter_count * itemsize,
        exact=shape.exact_bytes,
        pools=pools,
        prefill=max(0, reading - (pools - shape.resting_bytes) - workspace),
        workspace=workspace,
        host_pool=kept * row_bytes(heads, dim, shape.dtype, shape.rows),
        key_index=kept * index_bytes(heads, dim, shape.rows, shape.key_index),
        staging=shape.staging_bytes,
    )


def cut_bytes(config: ModelConfig, shape: CacheShape) -> int:
    """Bytes of queries and outputs where attention cuts a step's buffers into parts."""
    lengths = [shape.rows] if shape.exact_layers else []
    if shape.sparse_layers:
        lengths += [shape.pool_rows, 2 * shape.block_size + shape.selected]
    heads = shape.slots * shape.kv_heads
    parts = max(attention_parts.attended_in_parts(heads, rows) for rows in lengths)
    together = shape.block_size + (shape.masks if shape.masks > 1 else 0)
    rows = shape.slots * together * config.num_heads
    return 2 * parts * rows * shape.head_dim * shape.dtype.itemsize if parts > 1 else 0


def activation_bytes(config: ModelConfig, tokens: int, itemsize: int, fused: bool) -> int:
    """Bytes of a layer's activations for so many tokens."""
    width = 2 * config.intermediate_size
    fixed = 0
    if config.experts is not None:
        experts = config.experts
        each = 2 * config.hidden_size + 2 * experts.intermediate_size
        # Every chosen expert has its own copy of the token, its inner row and its answer.
        width = max(width, experts.per_token * each)
        if not fused:
            # Where no kernel takes ragged groups, every expert's batch is padded.
            fixed = experts.count * EXPERT_ROWS * each * itemsize
    return tokens * (4 * config.hidden_size + width) * itemsize + fixed


def largest_batch(
    shape: CacheShape,
    planned: Callable[[CacheShape], MemoryPlan],
    *,
    device_memory: int,
    host_memory: int,
) -> int:
    """Most slots whose plan fits both limits (0: not even one)."""

    def fits(slots: int) -> bool:
        made = planned(replace(shape, slots=slots))
        return made.device_bytes <= device_memory and made.host_bytes <= host_memory

    low, high = 0, 1
    while high <= BATCH_CEILING and fits(high):
        low, high = high, high * 2
    high = min(high, BATCH_CEILING + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
