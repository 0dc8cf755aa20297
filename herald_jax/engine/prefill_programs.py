"""The compiled programs of prefill: block-causal chunks, then selection by the first block."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from herald_jax.diffusion.sampling import ban, greedy
from herald_jax.engine.choice import best_rows, pool_of
from herald_jax.engine.step_programs import Buffer, write_rows
from herald_jax.models.attention import attend, attend_blocks, importance
from herald_jax.models.config import ModelConfig


@dataclass(frozen=True)
class PrefillPrograms:
    """Bodies of the prefill programs; buffers are [1, R, H_kv, D] with position r in row r.

    Attributes:
      sinks: leading positions always selected; ``selected``: K's capacity.
    """

    config: ModelConfig
    sinks: int
    selected: int

    @property
    def block(self) -> int:
        """B."""
        return self.config.block_size

    def chunk(
        self, layers: Sequence[Any], buffers: Sequence[Buffer], x: jax.Array, start: jax.Array
    ) -> tuple[jax.Array, list[Buffer], jax.Array]:
        """A chunk x [1, C, hidden] of whole blocks from position ``start`` (int32 []).

        Returns:
          x, buffers, and the chunk's rows [layers, 2, 1, C, H_kv, D], keys then values; one array,
          because many small copies to the host are slow.
        """
        x, result, rows = self._chunk(layers, buffers, x, start)
        return x, result, jnp.stack([jnp.stack(pair) for pair in rows])

    def exact_chunk(
        self, layers: Sequence[Any], buffers: Sequence[Buffer], x: jax.Array, start: jax.Array
    ) -> tuple[jax.Array, list[Buffer]]:
        """The same through exact layers, whose rows stay on the device."""
        x, result, _ = self._chunk(layers, buffers, x, start)
        return x, result

    def _chunk(
        self, layers: Sequence[Any], buffers: Sequence[Buffer], x: jax.Array, start: jax.Array
    ) -> tuple[jax.Array, list[Buffer], list[Buffer]]:
        positions = (start + jnp.arange(x.shape[1], dtype=jnp.int32))[None]
        result, rows = [], []
        for layer, (keys, values) in zip(layers, buffers, strict=True):
            q, k, v = layer.pre(x, positions)
            keys = jax.lax.dynamic_update_slice_in_dim(keys, k, start, axis=1)
            values = jax.lax.dynamic_update_slice_in_dim(values, v, start, axis=1)
            x = layer.post(x, attend_blocks(q, keys, values, positions, self.block))
            result.append((keys, values))
            rows.append((k, v))
        return x, result, rows

    def following(self, shell: Any, x: jax.Array, row: jax.Array) -> jax.Array:
        """The greedy token int32 [] after row ``row`` (int32 []) of x [1, C, hidden]."""
        logits = shell.head(jax.lax.dynamic_slice_in_dim(x, row, 1, axis=1))
        return greedy(ban(logits, self.config.mask_token_id))[0][0, 0]

    def first_block_exact(
        self, layers: Sequence[Any], buffers: Sequence[Buffer], x: jax.Array, start: jax.Array
    ) -> jax.Array:
        """The first generated block through exact layers; its KV is not kept."""
        x, _ = self.exact_chunk(layers, buffers, x, start)
        return x

    def first_block(
        self,
        layers: Sequence[Any],
        buffers: Sequence[Buffer],
        x: jax.Array,
        start: jax.Array,
        masked: jax.Array,
        select_len: jax.Array,
        scores: jax.Array | None,
    ) -> tuple[jax.Array, list[Buffer]]:
        """Selects for the first generated block x [1, B, hidden] by its masked rows' attention.

        Args:
          start: int32 [], the block's first position; ``masked``: bool [1, B], the voters.
          select_len: int32 [], rows that may be selected (all whole blocks but the newest).
          scores: float32 [layers, H_kv, R] in place of importance, or None.

        Returns:
          x and each layer's pool rows [1, 2B + K, H_kv, D], see ``pool_of``.
        """
        b = self.block
        positions = start + jnp.arange(b, dtype=jnp.int32)[None]
        length = (start + b)[None]
        pools = []
        for index, (layer, (keys, values)) in enumerate(zip(layers, buffers, strict=True)):
            q, k, v = layer.pre(x, positions)
            keys = write_rows(keys, k, start[None])
            values = write_rows(values, v, start[None])
            x = layer.post(x, attend(q, keys, values, length))
            mass = importance(q, keys, length, masked)[0] if scores is None else scores[index]
            count = min(self.selected, keys.shape[1])
            best = best_rows(mass, select_len, count, sinks=self.sinks)[None]
            pools.append(
                (
                    pool_of(keys, k, start[None], best, self.selected),
                    pool_of(values, v, start[None], best, self.selected),
                )
            )
        return x, pools


@functools.partial(jax.jit, donate_argnums=0)
def place(buffers: Sequence[Buffer], rows: Sequence[Buffer], slot: jax.Array) -> list[Buffer]:
    """Copies one request's rows [1, r, H_kv, D] into a slot of [N, R, H_kv, D], r <= R."""

    def at(buffer: jax.Array, part: jax.Array) -> jax.Array:
        part = part[:, : buffer.shape[1]]
        return jax.lax.dynamic_update_slice(buffer, part, (slot, 0, 0, 0))

    return [
        (at(k, part_k), at(v, part_v))
        for (k, v), (part_k, part_v) in zip(buffers, rows, strict=True)
    ]
