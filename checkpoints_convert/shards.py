"""Reads safetensors files: the header as JSON, the tensors as views of the mapped file.

NumPy alone does not know bfloat16; with ``ml_dtypes`` a view has its own dtype and costs no copy.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

#: safetensors dtype -> NumPy dtype, for the dtypes that weights of a network can have here.
DTYPES: dict[str, np.dtype[Any]] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
}
#: How the names of dtypes begin that say nothing without scales beside them.
_QUANTISED = ("F8_", "F6_", "F4")
_LARGEST_HEADER = 100 << 20
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: a file, a byte offset, a shape and a safetensors dtype."""

    file: Path
    offset: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def view(self) -> np.ndarray[Any, Any]:
        """The tensor as a read-only view of the mapped file; unmapped when the view goes."""
        mapped = np.memmap(self.file, DTYPES[self.dtype], "r", self.offset, self.shape)
        return mapped.view(np.ndarray)


@dataclass
class Inventory:
    """What a checkpoint folder holds.

    Attributes:
      tensors: readable tensors by name.
      unreadable: names that the index or a header lists but that cannot be read.
      problems: one phrase for each thing wrong with the files.
      quantised: how many tensors are of each quantised dtype.
    """

    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    unreadable: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    quantised: Counter[str] = field(default_factory=Counter)


def take_inventory(source: Path) -> Inventory:
    """Lists the tensors of a folder: a sharded index, or one safetensors file.

    Every problem is collected; nothing is raised for a damaged file.

    Args:
      source: a folder with ``model.safetensors.index.json`` or a single ``*.safetensors``.

    Raises:
      FileNotFoundError: there are no safetensors files.
      ValueError: the index cannot be read, or several files lack one.
    """
    if (source / _INDEX).is_file():
        return _sharded(source, _weight_map(source / _INDEX))
    files = sorted(source.glob("*.safetensors"))
    if not files:
        done = "; it is converted already" if (source / "herald.json").is_file() else ""
        raise FileNotFoundError(f"{source} has no *.safetensors file{done}")
    if len(files) > 1:
        raise ValueError(f"{source} has {len(files)} safetensors files but no {_INDEX}")
    inventory = Inventory()
    _add_file(inventory, files[0])
    return inventory


def _sharded(source: Path, weight_map: Mapping[str, str]) -> Inventory:
    inventory = Inventory()
    for file in sorted(set(weight_map.values())):
        listed = {name for name, where in weight_map.items() if where == file}
        if Path(file).name != file or not (source / file).is_file():
            inventory.problems.append(f"{file}: no such file, {len(listed)} tensors lost")
            inventory.unreadable |= listed
            continue
        found = _add_file(inventory, source / file)
        if found is None:
            inventory.unreadable |= listed
            continue
        for name in sorted(listed - found):
            inventory.problems.append(f"{file}: lacks {name}, which the index says it holds")
            inventory.unreadable.add(name)
        for name in sorted(found - listed):
            inventory.problems.append(f"{file}: holds {name}, which the index does not list there")
            inventory.unreadable.add(name)
    return inventory


def _weight_map(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as a safetensors index") from error


def _add_file(inventory: Inventory, file: Path) -> set[str] | None:
    """Adds a file's tensors and problems; returns the names it lists, None if it is unreadable."""
    if not file.is_file():
        inventory.problems.append(f"{file.name}: is not a regular file")
        return None
    try:
        size = file.stat().st_size
        header, start = _header(file, size)
    except (OSError, ValueError) as error:
        inventory.problems.append(f"{file.name}: {error}")
        return None
    cut = []
    for name, entry in header.items():
        try:
            shape = tuple(_whole(n) for n in entry["shape"])
            begin, end = (_whole(n) for n in entry["data_offsets"])
            tensor = StoredTensor(file, start + begin, shape, str(entry["dtype"]))
        except (KeyError, TypeError, ValueError):
            inventory.problems.append(f"{file.name}: the header entry of {name} is malformed")
            inventory.unreadable.add(name)
            continue
        if tensor.dtype.startswith(_QUANTISED):
            inventory.quantised[tensor.dtype] += 1
            inventory.unreadable.add(name)
        elif tensor.dtype not in DTYPES:
            inventory.problems.append(
                f"{name}: dtype {tensor.dtype} is not supported ({', '.join(DTYPES)} are)"
            )
            inventory.unreadable.add(name)
        elif begin < 0 or min(shape, default=1) < 1 or end - begin != tensor.nbytes:
            inventory.problems.append(f"{name}: its byte range does not fit shape {list(shape)}")
            inventory.unreadable.add(name)
        elif start + end > size:
            cut.append(name)
            inventory.unreadable.add(name)
        else:
            inventory.tensors[name] = tensor
    if cut:
        inventory.problems.append(f"{file.name}: truncated, {len(cut)} tensors lost ({cut[0]} ...)")
    return set(header)


def _whole(number: object) -> int:
    """A number of a header as it is: JSON also has Infinity, and fractions."""
    if type(number) is not int:
        raise TypeError(f"{number!r} is not a whole number")
    return number


def _header(file: Path, size: int) -> tuple[dict[str, Any], int]:
    """The header's entries and the offset where tensor bytes begin."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, _LARGEST_HEADER):
            raise ValueError("truncated, or not a safetensors file")
        try:
            header = json.loads(stream.read(length))
        except (ValueError, RecursionError) as error:
            raise ValueError("the header is not JSON") from error
    if not isinstance(header, dict):
        raise ValueError("the header is not a JSON object")
    header.pop("__metadata__", None)
    return header, 8 + length
