"""A Hugging Face checkpoint folder, opened: its configuration, and every parameter's tensors.

Both ways to a network begin here: ``convert`` writes the parameters down, ``checkpoint.load`` puts
them on the device. Opening reads the JSON files and the headers, no weights (but for a head that
config.json says is tied); parameters are read one at a time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from checkpoints_convert.names import configure
from checkpoints_convert.parameter import Parameter
from checkpoints_convert.report import ConversionError
from checkpoints_convert.shards import Inventory, StoredTensor, take_inventory
from herald_jax.checkpoint_folder import CheckpointError
from herald_jax.models import registry
from herald_jax.models.config import ModelConfig
from herald_jax.models.stored import Stored


@dataclass(frozen=True)
class Source:
    """A folder whose tensors are all there.

    Attributes:
      hf: its config.json.
      config: the network; ``dtype``: of its weights as they are read.
      parameters: by dotted path, in module order.
      notes: what the folder's name decided, and what was decided where it contradicts itself.
    """

    folder: Path
    hf: Mapping[str, Any]
    config: ModelConfig
    dtype: str
    parameters: Mapping[str, Parameter]
    notes: tuple[str, ...]


def open_folder(
    folder: Path,
    *,
    dtype: str | None = None,
    block_size: int | None = None,
    rule: str | None = None,
) -> Source:
    """Opens a folder and finds every parameter in it.

    ``config.json`` is read as data; code that it names (``auto_map``) is not run.

    Args:
      folder: a folder with ``config.json`` and one or more safetensors files.
      dtype: "bfloat16" or "float32", of the weights; routers' biases stay float32. None takes
        float32 if every tensor is stored so, else bfloat16.
      block_size, rule: how to decode, instead of what the checkpoint and its name say.

    Raises:
      CheckpointError: the folder cannot be read, or its weights are quantised.
      ValueError: the network is of no supported family or kind.
      ConversionError: all missing, unexpected, mis-shaped and unreadable tensors, at once.
    """
    hf = read_hf_config(folder)
    config, named = configure(hf, folder, block_size=block_size, rule=rule)
    try:
        inventory = take_inventory(folder)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {folder}: {error}") from error
    if inventory.quantised:
        raise CheckpointError(
            f"{folder} has {sum(inventory.quantised.values())} tensors of dtype "
            f"{', '.join(inventory.quantised)}: quantised checkpoints are not supported; use the "
            "bfloat16 one"
        )
    if dtype is None:
        single = all(tensor.dtype == "F32" for tensor in inventory.tensors.values())
        dtype = "float32" if single else "bfloat16"
    config, settled = _settle_head(config, inventory)
    parameters = _match(folder, config, dtype, inventory)
    return Source(folder, hf, config, dtype, parameters, (*named, *settled))


def read_hf_config(folder: Path) -> dict[str, Any]:
    """The config.json of a folder, parsed.

    Raises:
      CheckpointError: there is none, or it is no JSON object.
    """
    path = folder / "config.json"
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; download the checkpoint first")
    try:
        hf = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no config.json, so it is no checkpoint") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(hf, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return hf


def _settle_head(config: ModelConfig, inventory: Inventory) -> tuple[ModelConfig, tuple[str, ...]]:
    """Lets the stored tensors decide whether the head is tied, where config.json says it is."""
    family = registry.family_of(config)
    (head_name,), (embedding_name,) = (
        family.stored(config, path)[1][0].names("")
        for path in ("lm_head.kernel", "embedding.embedding")
    )
    head, embedding = inventory.tensors.get(head_name), inventory.tensors.get(embedding_name)
    if not config.tie_word_embeddings or head is None or embedding is None:
        return config, ()
    if _equal(head, embedding):
        del inventory.tensors[head_name]
        return config, (f"{head_name} equals the embedding: kept tied, stored once",)
    note = f"config.json ties the head but {head_name} differs from the embedding: kept untied"
    return replace(config, tie_word_embeddings=False), (note,)


def _equal(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two tensors hold the same numbers, a few rows at a time."""
    if one.shape != other.shape:
        return False
    rows = max(1, (16 << 20) // max(1, one.nbytes // one.shape[0]))
    return all(
        np.array_equal(one.view()[row : row + rows], other.view()[row : row + rows])
        for row in range(0, one.shape[0], rows)
    )


def _match(
    folder: Path, config: ModelConfig, dtype: str, inventory: Inventory
) -> dict[str, Parameter]:
    """Finds the tensors of every parameter.

    Raises:
      ConversionError: with everything that does not match.
    """
    family = registry.family_of(config)
    known = inventory.tensors.keys() | inventory.unreadable
    parameters: dict[str, Parameter] = {}
    missing: list[str] = []
    misshaped: list[str] = []
    expected: set[str] = set()
    for path, wanted in registry.parameters(registry.abstract(config, jnp.dtype(dtype))).items():
        layer, ways = family.stored(config, path)
        way = _choose(ways, layer, known)
        names, shape = way.names(layer), way.shape(wanted.shape)
        expected.update(names)
        absent = [name for name in names if name not in known]
        if len(absent) > 1 and len(absent) == len(names):
            # All experts of a layer: not a line for each.
            pattern = way.name.replace("{i}", layer).replace("{e}", f"0..{len(names) - 1}")
            absent = [f"{pattern} ({len(names)} tensors)"]
        missing += absent
        tensors = [inventory.tensors[name] for name in names if name in inventory.tensors]
        misshaped += [
            f"{name}: has shape {list(inventory.tensors[name].shape)}, needs {list(shape)}"
            for name in names
            if name in inventory.tensors and inventory.tensors[name].shape != shape
        ]
        parameters[path] = Parameter(
            names, tuple(tensors), way, wanted.shape, np.dtype(wanted.dtype)
        )
    unexpected = sorted(set(inventory.tensors) - expected - inventory.unreadable)
    if missing or unexpected or misshaped or inventory.problems:
        raise ConversionError(
            folder,
            missing=missing,
            unexpected=unexpected,
            misshaped=misshaped,
            problems=inventory.problems,
        )
    return parameters


def _choose(ways: tuple[Stored, ...], layer: str, known: set[str]) -> Stored:
    """The way with the largest share of its tensors there, the usual one first among equals."""

    def share(way: Stored) -> float:
        names = way.names(layer)
        return sum(name in known for name in names) / len(names)

    return max(ways, key=share)
