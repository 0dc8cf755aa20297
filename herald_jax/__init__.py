"""herald_jax: long-context block-diffusion LLM inference in JAX, KV cache in host memory."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from herald_jax.engine.config import EngineConfig, GenerationConfig
    from herald_jax.engine.engine import Engine
    from herald_jax.engine.errors import EngineError
    from herald_jax.engine.request import Delta, Result
    from herald_jax.kv.budget import Budget

__all__ = [
    "Budget",
    "Delta",
    "Engine",
    "EngineConfig",
    "EngineError",
    "GenerationConfig",
    "Result",
]

_HOMES = {
    "Budget": "herald_jax.kv.budget",
    "Delta": "herald_jax.engine.request",
    "Engine": "herald_jax.engine.engine",
    "EngineConfig": "herald_jax.engine.config",
    "EngineError": "herald_jax.engine.errors",
    "GenerationConfig": "herald_jax.engine.config",
    "Result": "herald_jax.engine.request",
}


def __getattr__(name: str) -> Any:
    """Imports a public name on first use: `herald --help` must not wait for JAX."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
