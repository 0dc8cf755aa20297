"""Prefill: reads one prompt in chunks, fills the full pool, selects for the first block."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from herald_jax.engine.block_selection import BlockSelection
from herald_jax.engine.prefill_programs import PrefillPrograms, place
from herald_jax.engine.request import Request, Result, Slot
from herald_jax.engine.stack import LayerGroup, LayerStack
from herald_jax.engine.timeline import Timeline
from herald_jax.engine.wait import wait_ready
from herald_jax.kv.budget import Budget
from herald_jax.kv.device_cache import Buffer, DeviceCache, zeros
from herald_jax.kv.plan import prefill_rows
from herald_jax.kv.rows import store_rows
from herald_jax.kv.transfer import fetched
from herald_jax.selection import Selector


class Prefill:
    """Prepares a slot for its first generated block.

    The prompt's whole blocks run block-causally in chunks of fixed size over a buffer of one
    request; each sparse layer's KV goes to the full pool while the next chunk computes. Then the
    first generated block runs once as it will be decoded, and its masked rows select, unless the
    block will select for itself.
    """

    def __init__(
        self,
        stack: LayerStack,
        programs: PrefillPrograms,
        cache: DeviceCache,
        *,
        selector: Selector | None,
        current: BlockSelection | None = None,
        budget: Budget,
        chunk: int,
        layer_group: int | None,
        timeout: float,
        timeline: Timeline,
    ) -> None:
        self.stack, self.programs, self.cache = stack, programs, cache
        self.selector, self.current, self.budget = selector, current, budget
        self.timeout, self.timeline = timeout, timeline
        shape, block = cache.shape, programs.block
        self.chunk = max(1, min(chunk, shape.rows) // block) * block
        exact = shape.exact_layers
        self.exact_groups = stack.groups(0, exact, layer_group)
        self.sparse_groups = stack.groups(exact, len(stack), layer_group)

    def buffer_rows(self, need: int) -> int:
        """Rows of the request's buffer: the chunk size doubled until ``need`` fits, or the most."""
        return prefill_rows(need, self.cache.shape.rows, self.chunk)

    def rows_for(self, prompt: int) -> int:
        """Rows of the buffer for a prompt of so many tokens; 0 where nothing is read ahead."""
        block = self.programs.block
        whole = prompt // block * block
        return self.buffer_rows(whole + block) if whole else 0

    def rehearse(self, rows: int) -> None:
        """Runs every program of a prompt whose buffer has ``rows`` rows, over a chunk of zeros.

        It leaves slot 0 of the device's cache with rows that mean nothing.
        """
        length = min(self.chunk, rows - self.programs.block)
        request = Request("warm-up", np.zeros(length, np.int32), 1)
        self.run(0, Slot(request, None, Result(request.id)), rows=rows)

    def run(self, index: int, slot: Slot, *, rows: int | None = None) -> None:
        """Fills slot ``index`` of the device's cache and the slot's booking.

        Sets ``slot.start`` to the first generated block, ``slot.selected`` to the number of rows
        its pool holds and, where logits are shifted, ``slot.lead``. ``rows``: of the buffer,
        instead of those that the prompt needs.

        Raises:
          WaitTimeout: a device program did not end in time.
        """
        block = self.programs.block
        prompt = slot.request.prompt_ids
        whole = len(prompt) // block * block
        slot.start, slot.selected = whole, 0
        if whole == 0:
            if self.current is not None:
                self.current.prefilled(index, slot, [])
            return
        with self.timeline.span("main", "prefill"):
            buffers = self._read(prompt[:whole], slot, rows or self.rows_for(len(prompt)))
            exact = self.cache.shape.exact_layers
            at = np.int32(index)
            self.cache.exact = place(self.cache.exact, buffers[:exact], at)
            if self.cache.shape.sparse_layers:
                select_len = whole - block
                slot.selected = self.budget.entries(select_len)
                if self.current is not None:
                    self.current.prefilled(index, slot, buffers)
                else:
                    pools = self._select(slot, buffers, select_len)
                    self.cache.pool = place(self.cache.pool, pools, at)
            # Prefill time must not pass for decoding time.
            for k, _ in self.cache.exact[-1:] + self.cache.pool[-1:]:
                wait_ready(k, self.timeout, f"prefill of request {slot.request.id}")

    def _read(self, tokens: np.ndarray, slot: Slot, rows: int) -> list[Buffer]:
        shape = self.cache.shape
        buffers = zeros(
            len(self.stack), shape.buffer_shape(rows, 1), shape.dtype, self.cache.device
        )
        pending: tuple[int, list[jax.Array]] | None = None
        for start in range(0, len(tokens), self.chunk):
            part = np.zeros((1, self.chunk), np.int32)
            part[0, : len(tokens) - start] = tokens[start : start + self.chunk]
            x = self.stack.embed(part)
            fresh: list[jax.Array] = []
            for group in self.exact_groups:
                program = self.stack.on_layers(self.programs.exact_chunk, group, donate=[0])
                cut = slice(group.first, group.last)
                x, buffers[cut] = program(buffers[cut], x, np.int32(start))
            for group in self.sparse_groups:
                program = self.stack.on_layers(self.programs.chunk, group, donate=[0])
                cut = slice(group.first, group.last)
                x, buffers[cut], written = program(buffers[cut], x, np.int32(start))
                fresh.append(fetched(written))
            if self.programs.config.shifts_logits and start + self.chunk >= len(tokens):
                program = self.stack.on_shell(self.programs.following)
                lead = program(x, np.int32(len(tokens) - 1 - start))
                wait_ready(lead, self.timeout, f"prefill of request {slot.request.id}")
                slot.lead = int(lead)
            if pending is not None:
                self._store(slot, len(tokens), *pending)
            pending = start, fresh
        if pending is not None:
            self._store(slot, len(tokens), *pending)
        return buffers

    def _store(self, slot: Slot, length: int, start: int, groups: Sequence[jax.Array]) -> None:
        """Writes one chunk's KV of the sparse layers to the slot's booking."""
        count = np.array([min(self.chunk, length - start)], np.int32)
        at = np.array([start], np.int32)
        layer = 0
        for group in groups:
            wait_ready(group, self.timeout, f"prefill of request {slot.request.id}")
            for k, v in np.asarray(group):
                store_rows([slot.booking], layer, at, count, k, v)
                layer += 1

    def _select(self, slot: Slot, buffers: Sequence[Buffer], select_len: int) -> list[Buffer]:
        shape, block = self.cache.shape, self.programs.block
        tokens, masked = slot.block(block, self.programs.config.mask_token_id)
        start = np.int32(slot.start)
        x = self.stack.embed(tokens[None])
        for group in self.exact_groups:
            program = self.stack.on_layers(self.programs.first_block_exact, group)
            x = program(buffers[group.first : group.last], x, start)
        pools: list[Buffer] = []
        for group in self.sparse_groups:
            program = self.stack.on_layers(self.programs.first_block, group)
            rows = buffers[group.first][0].shape[1]
            x, fresh = program(
                buffers[group.first : group.last],
                x,
                start,
                masked[None],
                np.int32(select_len),
                self._scores(group, rows, select_len, slot.seed),
            )
            pools += fresh
        assert len(pools) == shape.sparse_layers
        return pools

    def _scores(
        self, group: LayerGroup, rows: int, select_len: int, seed: int
    ) -> np.ndarray | None:
        shape = self.cache.shape
        assert self.selector is not None
        parts = []
        for layer in range(group.first - shape.exact_layers, group.last - shape.exact_layers):
            part = self.selector.prefill_scores(layer, shape.kv_heads, rows, select_len, seed)
            if part is None:
                return None
            parts.append(part)
        return np.stack(parts)
