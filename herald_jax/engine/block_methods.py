"""Which selectors select for the block that is being denoised, and what runs them."""

from __future__ import annotations

from herald_jax.engine.block_selection import BlockSelection
from herald_jax.engine.config import EngineConfig
from herald_jax.engine.current_block import CurrentBlock, CurrentBlockPrograms
from herald_jax.engine.host_block import HostBlock, HostBlockPrograms
from herald_jax.engine.speculation import Speculation
from herald_jax.engine.speculation_programs import SpeculationPrograms
from herald_jax.engine.stack import LayerStack
from herald_jax.engine.step_programs import StepPrograms
from herald_jax.engine.timeline import Timeline
from herald_jax.kv.device_cache import DeviceCache
from herald_jax.selection import (
    CurrentBlockSelector,
    HostBlockSelector,
    LayerAheadSelector,
    Selector,
)


def block_selection(
    selector: Selector | None,
    stack: LayerStack,
    steps: StepPrograms,
    cache: DeviceCache,
    config: EngineConfig,
    timeline: Timeline,
) -> BlockSelection | None:
    """What runs a selector within the main stream; None where a retrieval stream does, or none.

    Raises:
      MemoryError: the host refuses staging.
    """
    model, selected = steps.config, cache.shape.selected
    if isinstance(selector, CurrentBlockSelector):
        return CurrentBlock(
            selector,
            stack,
            CurrentBlockPrograms(model, config.sinks, selected, selector.every_step),
            cache,
            timeout=config.timeout,
            timeline=timeline,
        )
    if isinstance(selector, HostBlockSelector):
        return HostBlock(
            selector,
            stack,
            HostBlockPrograms(model),
            cache,
            budget=config.budget,
            sinks=config.sinks,
            timeout=config.timeout,
            timeline=timeline,
        )
    if isinstance(selector, LayerAheadSelector):
        return Speculation(
            selector,
            stack,
            SpeculationPrograms(model, config.sinks, selected),
            steps,
            cache,
            budget=config.budget,
            chunk=config.chunk(cache.device.platform),
            timeout=config.timeout,
            timeline=timeline,
        )
    return None
