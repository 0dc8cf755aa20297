"""The slots of a batch, as the arrays that programs and selections take."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import jax
import numpy as np

import host_kernels
from herald_jax.diffusion.block import Limits
from herald_jax.diffusion.edit import Editing
from herald_jax.diffusion.rules import Rule
from herald_jax.diffusion.sampling import Sampling
from herald_jax.engine.request import Slot
from herald_jax.engine.step_programs import BlockState, Decoding
from herald_jax.kv.budget import Budget
from herald_jax.kv.device_cache import CacheShape
from herald_jax.kv.full_pool import Booking, layer_extents
from herald_jax.selection import SelectionJob


class Batch:
    """N slots that share denoising steps; every per-request quantity is an array over them."""

    def __init__(
        self, shape: CacheShape, mask_id: int, budget: Budget, sinks: int, device: jax.Device
    ) -> None:
        self.shape, self.mask_id, self.budget, self.sinks = shape, mask_id, budget, sinks
        self.device = device
        self.slots: list[Slot | None] = [None] * shape.slots
        self._indices: np.ndarray | None = None

    def active(self) -> Iterator[tuple[int, Slot]]:
        """Slots that hold a request, with their index."""
        return ((n, slot) for n, slot in enumerate(self.slots) if slot is not None)

    def free(self) -> list[int]:
        """Indices of empty slots."""
        return [n for n, slot in enumerate(self.slots) if slot is None]

    def bookings(self) -> list[Booking | None]:
        """Every slot's part of the full pool."""
        return [None if slot is None else slot.booking for slot in self.slots]

    def per_slot(self, value: Callable[[Slot], int], empty: int = 0) -> np.ndarray:
        """int32 [N] of a quantity of each slot."""
        return np.array([empty if s is None else value(s) for s in self.slots], np.int32)

    def state(self, edits: bool) -> BlockState:
        """Every slot's block before its first step; empty slots hold [MASK]s at position 0.

        Args:
          edits: the rule edits, so what is known already must be remembered.
        """
        block, size = self.shape.block_size, self.shape.slots
        tokens = np.full((size, block), self.mask_id, np.int32)
        masked = np.zeros((size, block), bool)
        for n, slot in self.active():
            tokens[n], masked[n] = slot.block(block, self.mask_id)
        start = self.per_slot(lambda slot: slot.start)
        positions = start[:, None] + np.arange(block, dtype=np.int32)
        broken = np.zeros(size, bool)
        arrays = (tokens, masked, positions, start, broken)
        state = BlockState(*jax.device_put(arrays, self.device))
        if not edits:
            return state
        memory = (~masked, np.zeros(size, np.int32), broken)
        return state._replace(editing=Editing(*jax.device_put(memory, self.device)))

    def pool_rows(self) -> np.ndarray:
        """int32 [N], pool rows in use at step 0: the own block alone where there is no prefix."""
        block = self.shape.block_size
        return self.per_slot(
            lambda slot: 2 * block + slot.selected if slot.start else block, empty=block
        )

    def kept_rows(self) -> np.ndarray:
        """int32 [N], pool rows in use once step 0 has refined the candidates."""
        block = self.shape.block_size
        return self.per_slot(
            lambda slot: 2 * block + min(slot.selected, self._kept(slot)) if slot.start else block,
            empty=block,
        )

    def _kept(self, slot: Slot) -> int:
        return self.budget.entries(max(0, slot.start - self.shape.block_size))

    def kept_budget(self) -> np.ndarray:
        """int32 [N], K_r of the block being denoised."""
        return self.per_slot(self._kept)

    def decoding(self, rule: Rule) -> Decoding:
        """The rule's numbers as arrays over slots; a request's own options come before it."""

        def array(name: str, dtype: type[np.generic], empty: float | None = None) -> np.ndarray:
            common = getattr(rule, name) if empty is None else empty
            own = [None if s is None else getattr(s.request.own, name, None) for s in self.slots]
            return np.array([common if value is None else value for value in own], dtype)

        limits = (
            array("threshold", np.float32),
            array("steps", np.int32, rule.steps or self.shape.block_size),
            array("edit_threshold", np.float32, rule.edit_threshold or 0.0),
            array("max_post_steps", np.int32),
            array("entropy_bound", np.float32),
        )
        sampling = (
            array("temperature", np.float32),
            array("top_k", np.int32),
            array("top_p", np.float32),
            self._seeds(),
        )
        limits, sampling = jax.device_put((limits, sampling), self.device)
        return Decoding(Limits(*limits), Sampling(*sampling))

    def _seeds(self) -> np.ndarray:
        return np.array([0 if slot is None else slot.seed for slot in self.slots], np.uint32)

    def continues(self) -> bool:
        """Whether some slot has a block after the current one, and needs a selection for it."""
        return any(self._taking_part())

    def _taking_part(self) -> list[bool]:
        block = self.shape.block_size
        return [
            slot is not None and slot.booking is not None and not slot.is_last(block)
            for slot in self.slots
        ]

    def job(self, candidates_ratio: float, attends_draft: bool) -> SelectionJob:
        """Selection for the block after the current one.

        Finished, empty and last-block slots take no part. Rows before the current block are
        committed and may be selected; the draft's rows enter the softmax only.
        """
        shape, block = self.shape, self.shape.block_size
        start = self.per_slot(lambda slot: slot.start)
        select_len = np.where(self._taking_part(), start, 0).astype(np.int32)
        budget = np.array([self.budget.entries(int(n)) for n in select_len], np.int32)
        fetched = np.minimum(np.ceil(budget * candidates_ratio), select_len).astype(np.int32)
        drafted = block if attends_draft else 0
        bookings = [
            slot.booking if slot is not None and n else None
            for slot, n in zip(self.slots, select_len, strict=True)
        ]
        layers = range(shape.sparse_layers)
        extents = [layer_extents(bookings, at, shape.nothing) for at in layers]
        index = None
        if shape.key_index is not None:
            empty = np.zeros(
                host_kernels.index_shape(shape.kv_heads, 0, shape.head_dim, shape.key_index),
                np.uint8,
            )
            index = [[empty if b is None else b.index[at] for b in bookings] for at in layers]
        rows = (shape.sparse_layers, shape.slots, shape.kv_heads, max(shape.candidates, 1))
        if self._indices is None:
            # Of use until the next pool is there, and too large to be made anew for every block:
            # the device would wait while its pages are touched.
            self._indices = np.full(rows, -1, np.int32)
        return SelectionJob(
            extents=extents,
            index=index,
            start=start,
            attend_len=np.where(select_len > 0, start + drafted, 0).astype(np.int32),
            select_len=select_len,
            budget=budget,
            candidates=fetched,
            seeds=self._seeds(),
            indices=self._indices,
            status=np.zeros(shape.slots, np.int32),
            sinks=self.sinks,
        )

    def forget_indices(self) -> None:
        """The next job gets an array of its own: somebody may still write to that of the last."""
        self._indices = None
