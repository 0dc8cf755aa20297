"""Small random Hugging Face checkpoint folders, written by the safetensors library."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import published
from safetensors.numpy import save_file

from herald_jax import checkpoint
from herald_jax.models import registry
from herald_jax.models.decoder import Decoder

CONFIG: dict[str, Any] = {
    "model_type": "sdar",
    "architectures": ["SDARForCausalLM"],
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "intermediate_size": 20,
    "vocab_size": 40,
    "rope_theta": 1e6,
    "rope_scaling": None,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "max_position_embeddings": 64,
    "block_size": 4,
    "mask_token_id": 39,
    "herald": {"stop_token_ids": [38, 37]},
}


def tensors(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Random fp32 tensors under the names and in the shapes that the family publishes."""
    draw = np.random.default_rng(seed)
    return {
        name: draw.normal(size=shape).astype(np.float32)
        for name, shape in published.shapes(config).items()
    }


def write(
    folder: Path,
    weights: dict[str, np.ndarray] | None = None,
    *,
    bf16: bool = False,
    shards: int = 1,
    config: dict[str, Any] = CONFIG,
    **changes: Any,
) -> dict[str, np.ndarray]:
    """Writes a folder and returns its tensors.

    Args:
      folder: made if needed.
      weights: tensors to store; random ones that fit the configuration, if not given.
      bf16: store bfloat16.
      shards: files to spread the tensors over, with an index if more than one.
      config: what config.json says.
      changes: entries of it that differ.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {**config, **changes}
    stored = dict(tensors(config) if weights is None else weights)
    if bf16:
        stored = {name: value.astype(ml_dtypes.bfloat16) for name, value in stored.items()}
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(stored, folder / "model.safetensors", {"format": "pt"})
        return stored
    where = {name: f"model-{i % shards + 1:05d}.safetensors" for i, name in enumerate(stored)}
    for file in set(where.values()):
        part = {name: value for name, value in stored.items() if where[name] == file}
        save_file(part, folder / file, {"format": "pt"})
    index = {"metadata": {"total_size": 0}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return stored


def edit_header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Rewrites the header of a safetensors file; the tensors' bytes stay as they are."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


def parameters_of(path: Path, dtype: str | None = None) -> dict[str, np.ndarray]:
    """Every parameter of a checkpoint, loaded, by dotted path."""
    _, model = checkpoint.load(path, dtype=dtype)
    return {name: np.asarray(value) for name, value in registry.parameters(model).items()}


def bits(array: np.ndarray) -> np.ndarray:
    """A float array as integers of its bits, so that equal means equal."""
    return np.ascontiguousarray(array).view(np.uint16 if array.dtype.itemsize == 2 else np.uint32)


def tensors_of(model: Decoder) -> dict[str, np.ndarray]:
    """The tensors of a network under its family's names, experts one by one."""
    family = registry.family_of(model.config)
    whole: dict[str, np.ndarray] = {}
    parts: dict[str, dict[int, np.ndarray]] = {}
    for path, value in registry.parameters(model).items():
        layer, (way, *_) = family.stored(model.config, path)
        array = np.asarray(value)
        for name, one in zip(way.names(layer), array if way.stacked else [array], strict=True):
            turned = np.swapaxes(one, -1, -2) if way.transposed else one
            if way.rows is None:
                whole[name] = np.ascontiguousarray(turned)
            else:
                parts.setdefault(name, {})[way.rows[0]] = turned
    for name, rows in parts.items():
        # In C order: safetensors stores the bytes as they lie.
        whole[name] = np.ascontiguousarray(np.concatenate([rows[first] for first in sorted(rows)]))
    return whole
