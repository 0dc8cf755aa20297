"""Hugging Face safetensors checkpoints to checkpoints of herald_jax, streaming."""

from checkpoints_convert.convert import ConversionError, ConversionReport, convert, memory_bound

__all__ = ["ConversionError", "ConversionReport", "convert", "memory_bound"]
