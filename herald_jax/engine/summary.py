"""What an engine did, as the object that ``--json`` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from herald_jax.engine.engine import Engine


def summarize(engine: Engine, seconds: float) -> dict[str, Any]:
    """The summary of what was generated in ``seconds``; delivered tokens only."""
    timeline, sizing, method = engine.timeline, engine.sizing, engine.method
    moved = timeline.rows_moved_fraction
    return {
        "method": method,
        "method_reason": engine.method_reason,
        "budget": None if method == "dense" else str(engine.engine_config.budget),
        "candidates_ratio": sizing.candidates_ratio(method),
        "key_index": sizing.key_index(method),
        "transfer": sizing.transfer(method),
        "model": engine.config.family,
        "rule": engine.rule,
        "device": engine.device.device_kind,
        "batch": engine.engine_config.max_batch,
        "blocks": timeline.blocks,
        "steps": timeline.steps,
        "seconds": round(seconds, 4),
        "tokens": timeline.tokens,
        "tokens_per_second": round(timeline.tokens / seconds, 3) if seconds else 0.0,
        "stall_fraction": round(timeline.stall_fraction, 4),
        "warm_up_seconds": round(timeline.warm_up_seconds, 4),
        "prefill_seconds": round(timeline.prefill_seconds, 4),
        "retrieval_seconds": round(timeline.retrieval_seconds, 4),
        "rows_moved_fraction": None if moved is None else round(moved, 4),
        "device_kv_bytes": engine.device_kv_bytes,
        "host_kv_bytes": engine.host_kv_peak,
        **_device_bytes(engine),
    }


def _device_bytes(engine: Engine) -> dict[str, int | None]:
    """What was planned for the newest session beside what the compiler and the device tell.

    The peak is that of the process, whatever else ran in it.
    """
    plan, stats = engine.plan, engine.device.memory_stats() or {}
    return {
        "device_bytes_planned": None if plan is None else plan.device_bytes,
        "device_bytes_peak": stats.get("peak_bytes_in_use"),
        "workspace_bytes_planned": None if plan is None else plan.workspace,
        "workspace_bytes_compiled": engine.scratch,
    }
