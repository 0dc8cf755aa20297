"""Shapes and the checks of arrays that all kernels share.

Every refusal names the argument and says what it must be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal, get_args

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Extents = Sequence[NDArray[Any]]
"""One array a slot, each ``[H_kv, 2, rows, D]``: a head's K rows, then its V rows."""

Indexes = Sequence[NDArray[np.uint8]]
"""One array a slot, each uint8 ``[H_kv, tiles, tile_bytes(D, kind)]``: an extent's key index."""

IndexKind = Literal["int8", "int4"]
"""What a key's components are rounded to."""

TILE = 32
"""Keys in one tile of the key index."""

MAX_DIM = 1024

ROW_DTYPES = (np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32))


@dataclass(frozen=True)
class RowShape:
    """What all extents of one call share."""

    slots: int
    heads: int
    dim: int
    dtype: np.dtype[Any]


def whole(name: str, value: object) -> int:
    """A whole number, Python's or NumPy's.

    Raises:
        TypeError: it is another thing, naming the argument.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be a whole number, not {value!r}")
    return int(value)


def check_scale(scale: object) -> None:
    """Refuses a softmax scale that is not a finite number; None stands for the default."""
    if scale is None:
        return
    if isinstance(scale, bool) or not isinstance(scale, Real):
        raise TypeError(f"scale must be a number, not {scale!r}")
    if not math.isfinite(scale):
        raise ValueError(f"scale must be finite, but is {scale}")


def check_array(
    name: str, array: object, dtype: np.dtype[Any], shape: tuple[int, ...], *, written: bool = False
) -> None:
    """Refuses anything but a C-contiguous ``dtype`` array of ``shape``."""
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{name} must be a NumPy array, not {type(array).__name__}")
    if array.dtype != dtype:
        raise TypeError(f"{name} must have dtype {dtype}, not {array.dtype}")
    if array.shape != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, not {list(array.shape)}")
    if not array.flags.c_contiguous:
        raise ValueError(f"{name} must be C-contiguous; pass np.ascontiguousarray({name})")
    if written and not array.flags.writeable:
        raise ValueError(f"{name} must be writeable")


def code_bytes(dim: int, kind: IndexKind) -> int:
    """Bytes of a key's codes, one or half a byte for each of an even number of dimensions."""
    return dim if kind == "int8" else dim // 2


def tile_bytes(dim: int, kind: IndexKind) -> int:
    """Bytes of one tile of a key index: codes and a float32 scale for each of 32 keys."""
    return TILE * (code_bytes(dim, kind) + 4)


def kind_of(tiles: NDArray[np.uint8], dim: int) -> IndexKind:
    """Which kind an index of ``dim`` dimensions is; its last axis tells them apart.

    Raises:
        ValueError: it is none of them.
    """
    sizes: dict[int, IndexKind] = {tile_bytes(dim, kind): kind for kind in get_args(IndexKind)}
    if tiles.shape[-1] not in sizes:
        known = " or ".join(f"{size} ({kind})" for size, kind in sizes.items())
        raise ValueError(
            f"the last axis of an index of {dim} dimensions must be {known} bytes, "
            f"not {tiles.shape[-1]}"
        )
    return sizes[tiles.shape[-1]]


def _check_dim(dim: int) -> None:
    if not 0 < dim <= MAX_DIM or dim % 16:
        raise ValueError(
            f"the head dimension must be a positive multiple of 16 up to {MAX_DIM}, not {dim}"
        )


def check_extents(kv: Extents, dim: int, *, written: bool = False) -> RowShape:
    """Refuses extents that are not of one dtype, head count and the head dimension ``dim``."""
    if isinstance(kv, np.ndarray):
        raise TypeError("kv must be a sequence of arrays, one a slot, not one array")
    if len(kv) == 0:
        return RowShape(0, 0, dim, ROW_DTYPES[1])
    first = kv[0]
    for slot, extent in enumerate(kv):
        if not isinstance(extent, np.ndarray):
            raise TypeError(f"kv[{slot}] must be a NumPy array, not {type(extent).__name__}")
        if extent.dtype not in ROW_DTYPES:
            raise TypeError(f"kv[{slot}] must be bfloat16 or float32, not {extent.dtype}")
        if extent.dtype != first.dtype:
            raise TypeError(f"kv[{slot}] has dtype {extent.dtype}, but kv[0] has {first.dtype}")
        if extent.ndim != 4 or extent.shape[::3] != (first.shape[0], dim) or extent.shape[1] != 2:
            heads = first.shape[0] if first.ndim == 4 else "H_kv"
            raise ValueError(
                f"kv[{slot}] must have shape [{heads}, 2, rows, {dim}], not {list(extent.shape)}"
            )
        if not extent.flags.c_contiguous:
            raise ValueError(f"kv[{slot}] must be C-contiguous")
        if written and not extent.flags.writeable:
            raise ValueError(f"kv[{slot}] must be writeable")
    heads = int(first.shape[0])
    if heads == 0:
        raise ValueError("kv[0] must have at least one KV head")
    _check_dim(dim)
    return RowShape(len(kv), heads, dim, first.dtype)


def check_index(index: Indexes, dim: int, *, written: bool = False) -> RowShape:
    """Refuses key indexes that are not of one kind, head count and the head dimension ``dim``."""
    if isinstance(index, np.ndarray):
        raise TypeError("index must be a sequence of arrays, one a slot, not one array")
    _check_dim(dim)
    if len(index) == 0:
        return RowShape(0, 0, dim, np.dtype(np.uint8))
    heads = 0
    for slot, tiles in enumerate(index):
        name = f"index[{slot}]"
        if not isinstance(tiles, np.ndarray) or tiles.ndim != 3:
            raise TypeError(f"{name} must be a NumPy array of shape [H_kv, tiles, bytes]")
        heads = heads or int(tiles.shape[0])
        if heads == 0:
            raise ValueError("index[0] must have at least one KV head")
        want = (heads, int(tiles.shape[1]), tile_bytes(dim, kind_of(index[0], dim)))
        check_array(name, tiles, np.dtype(np.uint8), want, written=written)
    return RowShape(len(index), heads, dim, np.dtype(np.uint8))


def check_slots(name: str, array: object, slots: int) -> NDArray[np.int32]:
    """Refuses anything but an int32 array with one entry a slot."""
    check_array(name, array, np.dtype(np.int32), (slots,))
    assert isinstance(array, np.ndarray)
    return array


def check_between(name: str, low: Any, values: NDArray[np.int32], high: Any, limit: str) -> None:
    """Refuses the first slot whose value is not in ``low..high``."""
    bad = np.flatnonzero((values < low) | (values > high))
    if bad.size:
        slot = int(bad[0])
        least = int(np.broadcast_to(low, values.shape)[slot])
        most = int(np.broadcast_to(high, values.shape)[slot])
        raise ValueError(
            f"{name}[{slot}] is {int(values[slot])}, "
            f"but must be between {least} and {limit} ({most})"
        )


def check_rows_of(name: str, array: object, shape: RowShape, *, written: bool = False) -> int:
    """Refuses anything but int32 ``[N, H_kv, K_cap]``; returns K_cap."""
    if not isinstance(array, np.ndarray) or array.ndim != 3:
        raise TypeError(f"{name} must be a NumPy array of shape [N, H_kv, K_cap]")
    capacity = int(array.shape[2])
    heads = shape.heads if shape.slots else int(array.shape[1])
    check_array(name, array, np.dtype(np.int32), (shape.slots, heads, capacity), written=written)
    return capacity
