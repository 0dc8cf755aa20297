"""What an engine would hold: method, cache sizes and memory plan, decided before it holds it."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np

from herald_jax.diffusion.draft import spaced_masks
from herald_jax.engine.config import EngineConfig, KeyIndex
from herald_jax.engine.errors import EngineError
from herald_jax.kv.device_cache import CacheShape, Transfer
from herald_jax.kv.host_memory import format_bytes, host_memory_room
from herald_jax.kv.plan import MemoryPlan, cache_shape, largest_batch, plan
from herald_jax.models import attention_kernel, head_kernel
from herald_jax.models.config import ModelConfig
from herald_jax.selection import (
    BEYOND_DENSE,
    CurrentBlockSelector,
    HostBlockSelector,
    LayerAheadSelector,
    QueryOnceSelector,
    Selector,
    make_selector,
)


class Sizing:
    """Answers for one network and one engine configuration; needs no weights."""

    def __init__(self, model: ModelConfig, config: EngineConfig, dtype: np.dtype) -> None:
        """Checks the method.

        Raises:
          ValueError: the method is unknown or leaves it no sparse layer.
        """
        self.model, self.config, self.dtype = model, config, np.dtype(dtype)
        if config.method != "auto":
            self.exact_layers(config.method)

    def exact_layers(self, method: str) -> int:
        """Leading layers whose full KV stays on the device; all of them for "dense".

        Raises:
          ValueError: the method is unknown, or no sparse layer is left.
        """
        if method == "dense":
            return self.model.num_layers
        make_selector(method)
        asked = self.config.exact_layers
        exact = self.model.exact_layers if asked is None else asked
        if exact >= self.model.num_layers:
            raise ValueError(
                f"--exact-layers {exact} leaves no sparse layer of {self.model.num_layers} for "
                f"{method}: give at most {self.model.num_layers - 1}, or use --method dense"
            )
        return exact

    def selector(self, method: str) -> Selector | None:
        """The selector of a method, with the asked C / K if it refines; None for "dense".

        Raises:
          ValueError: the method is unknown.
        """
        if method == "dense":
            return None
        own = make_selector(method)
        return make_selector(method, self.config.candidates_ratio) if own.refines else own

    def candidates_ratio(self, method: str | None) -> float | None:
        """C / K of a method that refines; None for others, and before one was chosen."""
        selector = None if method is None else self.selector(method)
        return selector.candidates_ratio if selector is not None and selector.refines else None

    def key_index(self, method: str | None) -> KeyIndex | None:
        """What a method's scan reads in place of keys; None for methods that have no index."""
        selector = None if method is None else self.selector(method)
        return self.config.key_index if selector is not None and selector.indexed else None

    def transfer(self, method: str | None) -> Transfer | None:
        """How selected rows come to the device; None for methods that send none between blocks."""
        selector = None if method is None else self.selector(method)
        return self.config.transfer if selector is not None and selector.between_blocks else None

    def shape(self, method: str, max_context: int) -> CacheShape:
        """Cache sizes of a method for requests of at most ``max_context`` tokens."""
        selector, kept = self.selector(method), self.key_index(method)
        return cache_shape(
            self.model,
            slots=self.config.max_batch,
            max_context=max_context,
            exact_layers=self.exact_layers(method),
            budget=self.config.budget,
            candidates_ratio=1.0 if selector is None else selector.candidates_ratio,
            dtype=self.dtype,
            whole_layers=selector.in_flight if isinstance(selector, CurrentBlockSelector) else 0,
            within_step=isinstance(selector, HostBlockSelector | LayerAheadSelector),
            partial_channels=(
                selector.channels(self.model.head_dim)
                if isinstance(selector, LayerAheadSelector)
                else 0
            ),
            key_index=None if kept == "none" else kept,
            transfer=self.config.transfer,
            masks=self._masks(selector),
        )

    def _masks(self, selector: Selector | None) -> int:
        if isinstance(selector, QueryOnceSelector) and selector.drafted:
            return len(spaced_masks(self.model.block_size, selector.spacing))
        return 1

    def plan(self, shape: CacheShape, sampled: bool = False) -> MemoryPlan:
        """The memory plan of a cache; ``sampled``: some request has a temperature."""
        model = self.model
        return plan(
            model,
            shape,
            prefill_chunk=self.config.chunk(jax.default_backend()),
            fused=attention_kernel.applies(self.dtype, model.head_dim)
            and head_kernel.applies(self.dtype, model.hidden_size),
            sampled=sampled,
        )

    @property
    def device_memory(self) -> int:
        """Bytes the device may hold: the option, what the device reports, or the host's room."""
        if self.config.device_memory is not None:
            return self.config.device_memory
        limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
        return int(limit) if limit else host_memory_room()

    @property
    def host_memory(self) -> int:
        """Bytes the host may hold for KV: the option, or what leaves a reserve."""
        asked = self.config.host_memory
        return host_memory_room() if asked is None else asked

    def largest_batch(self, method: str, max_context: int) -> int:
        """Most slots whose plan fits both memories."""
        shape = self.shape(method, max_context)
        # Staging and every booking come out of the same host memory.
        return largest_batch(
            shape, self.plan, device_memory=self.device_memory, host_memory=self.host_memory
        )

    def choose(self, max_context: int) -> tuple[str, str]:
        """The method for requests of this length and why.

        "auto" is dense while its cache fits the device and ``BEYOND_DENSE`` beyond, which may not
        fit either.
        """
        asked = self.config.method
        if asked != "auto":
            return asked, "asked for"
        room, host = self.device_memory, self.host_memory
        need = self.plan(self.shape("dense", max_context)).device_bytes
        text = f"the device: {format_bytes(need)} of {format_bytes(room)}"
        if need <= room:
            return "dense", f"dense fits {text}"
        reason = f"dense does not fit {text}"
        sparse = self.plan(self.shape(BEYOND_DENSE, max_context))
        if sparse.device_bytes > room:
            need = sparse.device_bytes
            reason += f"; {BEYOND_DENSE} does not either: {format_bytes(need)}"
        elif sparse.host_bytes > host:
            # Requests wait for one another then, unless not even one has room.
            reason += (
                f"; {BEYOND_DENSE} keeps {format_bytes(sparse.device_bytes)} there and has "
                f"{format_bytes(host)} of the {format_bytes(sparse.host_bytes)} of host memory "
                "that all requests at once would take"
            )
        else:
            reason += f"; {BEYOND_DENSE} keeps {format_bytes(sparse.device_bytes)} there"
        return BEYOND_DENSE, reason

    def host_pool_bytes(self, method: str, shape: CacheShape, sampled: bool = False) -> int:
        """Bytes to reserve for the full pool: room for all slots, or as much as there is.

        Args:
          sampled: some request has a temperature.

        Raises:
          EngineError: the device cannot hold the cache, or the host not even one request.
        """
        made = self.plan(shape, sampled)
        if made.device_bytes > self.device_memory:
            raise EngineError(
                f"{method} needs {format_bytes(made.device_bytes)} on the device for batch "
                f"{shape.slots} at {shape.rows} tokens and has {format_bytes(self.device_memory)}: "
                "lower --max-batch, --max-context or --budget, or raise --device-memory"
            )
        one = self.plan(replace(shape, slots=1)).booked
        room = self.host_memory - made.staging
        if one > room:
            raise EngineError(
                f"{method} needs {format_bytes(one + made.staging)} of host memory for one request "
                f"of {shape.rows} tokens and has {format_bytes(self.host_memory)}: raise "
                "--host-memory, or lower --max-context or --max-batch"
            )
        return min(made.booked, room)
