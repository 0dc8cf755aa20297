"""herald_jax: long-context block-diffusion LLM inference in JAX, KV cache in host memory."""

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
