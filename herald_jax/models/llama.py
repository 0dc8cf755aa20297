"""Llama networks decoding by blocks: no QK-norm, and generation constants of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from herald_jax.models import sdar
from herald_jax.models.family import Family, Verified


def read(hf: Mapping[str, Any]) -> dict[str, Any]:
    """As SDAR, without QK-norm."""
    return sdar.read(hf) | {"qk_norm": False}


LLAMA = Family(
    "llama",
    "Llama decoding by blocks",
    ("llama",),
    ("LlamaForCausalLM",),
    read,
    sdar.write,
    sdar.tensors,
    Verified("transformers LlamaForCausalLM", 1e-4),
)
