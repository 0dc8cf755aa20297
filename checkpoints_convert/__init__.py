"""Hugging Face safetensors checkpoints to checkpoints of herald_jax, streaming."""

from checkpoints_convert.convert import convert, memory_bound
from checkpoints_convert.report import ConversionError, ConversionReport

__all__ = ["ConversionError", "ConversionReport", "convert", "memory_bound"]
