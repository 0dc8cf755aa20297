"""Hugging Face safetensors to a checkpoint of this project, one layer at a time.

Host memory: the peak above what the process held before is at most ``memory_bound`` bytes,
whatever the size of the network: a few copies of the largest Orbax item (one layer, the embedding,
or the head), never the network.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from checkpoints_convert.shards import Inventory, StoredTensor, take_inventory
from herald_jax import checkpoint
from herald_jax.checkpoint import CheckpointError
from herald_jax.checkpoint_folder import check_apart, check_target
from herald_jax.models import registry
from herald_jax.models.config import ModelConfig

#: Called with items done, items in all, and the item just written.
Progress = Callable[[int, int, str], None]
_TILE = 128
_PIECE = 1 << 18
#: Bytes of a float -> an integer type of that size, and the bits that NaN and infinity have all.
_EXPONENTS = {2: (np.uint16, np.uint16(0x7F80)), 4: (np.uint32, np.uint32(0x7F800000))}
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


class ConversionError(ValueError):
    """The tensors of a checkpoint are not those of its configuration.

    Attributes:
      missing, unexpected: tensor names.
      misshaped: "name: stored shape, expected shape".
      problems: what is wrong with the files themselves, or with the values in them.
    """

    def __init__(
        self,
        source: Path,
        missing: list[str],
        unexpected: list[str],
        misshaped: list[str],
        problems: list[str],
    ) -> None:
        self.missing, self.unexpected = missing, unexpected
        self.misshaped, self.problems = misshaped, problems
        groups = {
            "missing": missing,
            "unexpected": unexpected,
            "mis-shaped": misshaped,
            "unusable": problems,
        }
        counts = ", ".join(f"{len(group)} {name}" for name, group in groups.items() if group)
        lines = [f"{source} does not match its config.json: {counts}"]
        lines += [f"  {name}: {entry}" for name, group in groups.items() for entry in group]
        super().__init__("\n".join(lines))


@dataclass(frozen=True)
class ConversionReport:
    """What a conversion did.

    Attributes:
      tensors: tensors read; ``parameters``: numbers written; ``nbytes``: their bytes.
      memory_bound: bytes of host memory the conversion may have added at its peak.
      notes: what was decided where the checkpoint contradicts itself.
    """

    source: str
    out: str
    config: ModelConfig
    dtype: str
    tensors: int
    parameters: int
    nbytes: int
    memory_bound: int
    seconds: float
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class _Source:
    """Where a parameter comes from."""

    name: str
    tensor: StoredTensor
    transpose: bool

    def read(self, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        """The parameter in its final layout; a view of the file if nothing has to change."""
        values = self.tensor.view().astype(dtype, copy=False)
        return _transposed(values) if self.transpose else values


def convert(
    src: str | Path,
    out: str | Path,
    *,
    dtype: str = "bfloat16",
    block_size: int | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> ConversionReport:
    """Converts a Hugging Face checkpoint folder.

    The folder's ``config.json`` is read as data; code that it names (``auto_map``) is neither
    run nor copied. Tokenizer files and chat template are copied beside the arrays.

    Args:
      src: a folder with ``config.json`` and one or more safetensors files.
      out: the checkpoint directory to create.
      dtype: "bfloat16" or "float32", of the written arrays; bfloat16 sources are kept bit by bit.
      block_size: B to decode with, instead of the checkpoint's own.
      force: replace a checkpoint at ``out``.
      progress: called after every item.

    Raises:
      CheckpointError: ``src`` cannot be read, ``out`` cannot be written, or ``dtype`` is unknown.
      ValueError: the network is of no supported family or kind.
      ConversionError: all missing, unexpected, mis-shaped and unreadable tensors, at once; else
        all that have values which are not finite.
    """
    start = time.monotonic()
    for name, given in (("SRC", src), ("OUT", out)):
        if not str(given):
            raise CheckpointError(f"{name} is empty; name a directory")
    src, out = Path(src), Path(out)
    checkpoint.check_dtype(dtype)
    hf = _read_config(src)
    check_target(out, force=force)
    check_apart(src, out)
    config = registry.from_hf(hf, block_size=block_size)
    try:
        inventory = take_inventory(src)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot convert: {error}") from error
    config, notes = _settle_head(config, inventory)
    kind = jnp.dtype(dtype)
    sources = _match(src, config, kind, inventory)
    items = checkpoint.by_item(sources)
    sizes = [
        sum(math.prod(sources[path].tensor.shape) for path in paths) * kind.itemsize
        for paths in items.values()
    ]
    with checkpoint.writing(out, force=force, needed_bytes=sum(sizes)) as writer:
        problems: list[str] = []
        for done, (item, paths) in enumerate(items.items(), start=1):
            arrays = {path: sources[path].read(kind) for path in paths}
            problems += [
                f"{sources[path].name}: has values that are not finite in {dtype}"
                for path, array in arrays.items()
                if not is_finite(array)
            ]
            # After a bad tensor the others are only looked at, for one report of them all.
            if not problems:
                writer.put(item, arrays)
            if progress:
                progress(done, len(items), item)
        if problems:
            raise ConversionError(src, [], [], [], problems)
        writer.describe(config, _settled(hf, config), dtype, src)
    return ConversionReport(
        source=str(src),
        out=str(out),
        config=config,
        dtype=dtype,
        tensors=len(sources),
        parameters=sum(sizes) // kind.itemsize,
        nbytes=sum(sizes),
        memory_bound=memory_bound(sizes),
        seconds=round(time.monotonic() - start, 3),
        notes=notes,
    )


def memory_bound(sizes: Iterable[int]) -> int:
    """Bytes of host memory that a conversion adds at most: four of the largest item, and 64 MiB.

    The item lies there in its final layout, as views of the source file (one tensor at a time, if
    it is not what is written) and, partly compressed, in the array store's buffers.

    Args:
      sizes: bytes of every item, as written.
    """
    return 4 * max(sizes) + (64 << 20)


def is_finite(array: np.ndarray[Any, Any]) -> bool:
    """Whether a contiguous bfloat16 or float32 array has neither NaN nor infinity.

    Looks at exponents, a piece at a time: fast, and no second array as large as the first.
    """
    word, exponent = _EXPONENTS[array.dtype.itemsize]
    flat = array.reshape(-1).view(word)
    return not any(
        ((flat[at : at + _PIECE] & exponent) == exponent).any()
        for at in range(0, flat.size, _PIECE)
    )


def _transposed(matrix: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A contiguous transpose, by tiles that stay in cache (four times as fast as all at once)."""
    rows, columns = matrix.shape
    out = np.empty((columns, rows), matrix.dtype)
    for row in range(0, rows, _TILE):
        for column in range(0, columns, _TILE):
            tile = matrix[row : row + _TILE, column : column + _TILE]
            out[column : column + _TILE, row : row + _TILE] = tile.T
    return out


def _read_config(src: Path) -> dict[str, Any]:
    path = src / "config.json"
    if not src.is_dir():
        raise CheckpointError(f"{src} is not a folder; download the checkpoint first")
    try:
        hf = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{src} has no config.json, so it is no checkpoint") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(hf, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return hf


def _settle_head(config: ModelConfig, inventory: Inventory) -> tuple[ModelConfig, tuple[str, ...]]:
    """Lets the stored tensors decide whether the head is tied, where config.json says it is."""
    head, embedding = inventory.tensors.get(_HEAD), inventory.tensors.get(_EMBEDDING)
    if not config.tie_word_embeddings or head is None or embedding is None:
        return config, ()
    if _equal(head, embedding):
        del inventory.tensors[_HEAD]
        return config, (f"{_HEAD} equals the embedding: kept tied, stored once",)
    note = f"config.json ties the head but {_HEAD} differs from the embedding: kept untied"
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


def _settled(hf: Mapping[str, Any], config: ModelConfig) -> dict[str, Any]:
    """config.json as converted: what was decided here, and no reference to code."""
    kept = {key: value for key, value in hf.items() if key != "auto_map"}
    if isinstance(kept.get("herald"), dict):
        kept["herald"] = {k: v for k, v in kept["herald"].items() if k != "block_size"}
    return kept | {
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "tie_word_embeddings": config.tie_word_embeddings,
    }


def _match(
    src: Path, config: ModelConfig, kind: jnp.dtype, inventory: Inventory
) -> dict[str, _Source]:
    """Finds the tensor of every parameter.

    Raises:
      ConversionError: with everything that does not match.
    """
    family = registry.family_of(config)
    sources: dict[str, _Source] = {}
    missing, misshaped, expected = [], [], set()
    for path, shape in registry.parameters(registry.abstract(config, kind)).items():
        name, transpose = family.tensor_name(path)
        expected.add(name)
        wanted = tuple(reversed(shape.shape)) if transpose else shape.shape
        tensor = inventory.tensors.get(name)
        if tensor is None:
            if name not in inventory.unreadable:
                missing.append(name)
        elif tensor.shape != wanted:
            misshaped.append(f"{name}: has shape {list(tensor.shape)}, needs {list(wanted)}")
        else:
            sources[path] = _Source(name, tensor, transpose)
    unexpected = sorted(set(inventory.tensors) - expected - inventory.unreadable)
    if missing or unexpected or misshaped or inventory.problems:
        raise ConversionError(src, missing, unexpected, misshaped, inventory.problems)
    return sources
