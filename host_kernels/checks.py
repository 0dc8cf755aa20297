"""Argument checks shared by the native kernels and their NumPy reference.

Every refusal names the argument and says what it must be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Extents = Sequence[NDArray[Any]]
"""One array a slot, each ``[H_kv, rows, 2, D]``: the K row, then the V row."""

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
        if extent.ndim != 4 or extent.shape[0] != first.shape[0] or extent.shape[2:] != (2, dim):
            heads = first.shape[0] if first.ndim == 4 else "H_kv"
            raise ValueError(
                f"kv[{slot}] must have shape [{heads}, rows, 2, {dim}], not {list(extent.shape)}"
            )
        if not extent.flags.c_contiguous:
            raise ValueError(f"kv[{slot}] must be C-contiguous")
        if written and not extent.flags.writeable:
            raise ValueError(f"kv[{slot}] must be writeable")
    heads = int(first.shape[0])
    if heads == 0:
        raise ValueError("kv[0] must have at least one KV head")
    if dim == 0 or dim % 16:
        raise ValueError(f"the head dimension must be a positive multiple of 16, not {dim}")
    return RowShape(len(kv), heads, dim, first.dtype)


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


def check_attend(
    q: object,
    kv: Extents,
    attend_len: object,
    select_len: object,
    budget: object,
    indices: object,
    sinks: int,
    scale: float | None,
) -> RowShape:
    """Checks what ``attend_select`` and ``select`` have in common."""
    if not isinstance(q, np.ndarray) or q.ndim != 3:
        raise TypeError("q must be a NumPy array of shape [N, H_q, D]")
    shape = check_extents(kv, int(q.shape[2]))
    check_array("q", q, np.dtype(np.float32), (shape.slots, *q.shape[1:]))
    if shape.slots and (q.shape[1] == 0 or q.shape[1] % shape.heads):
        raise ValueError(
            f"q has {q.shape[1]} query heads, but needs a multiple of the {shape.heads} KV heads"
        )
    attended = check_slots("attend_len", attend_len, shape.slots)
    selectable = check_slots("select_len", select_len, shape.slots)
    wanted = check_slots("budget", budget, shape.slots)
    rows = np.array([extent.shape[1] for extent in kv], np.int64)
    check_between("attend_len", 0, attended, rows, "the rows of its extent")
    check_between("select_len", 0, selectable, attended, "attend_len")
    check_between("budget", 0, wanted, selectable, "select_len")
    if not isinstance(indices, np.ndarray) or indices.ndim != 3:
        raise TypeError("indices must be a NumPy array of shape [N, H_kv, K_cap]")
    capacity = int(indices.shape[2])
    heads = shape.heads if shape.slots else int(indices.shape[1])
    check_array(
        "indices", indices, np.dtype(np.int32), (shape.slots, heads, capacity), written=True
    )
    check_between("budget", 0, wanted, capacity, "the last axis of indices")
    if whole("sinks", sinks) < 0:
        raise ValueError(f"sinks must not be negative, but is {sinks}")
    check_scale(scale)
    return shape


def check_self(self_k: object, self_v: object, shape: RowShape) -> None:
    """Refuses a self key without its value, or either misshapen."""
    if (self_k is None) != (self_v is None):
        raise ValueError("self_k and self_v must be given together")
    if self_k is not None:
        want = (shape.slots, shape.heads, shape.dim)
        check_array("self_k", self_k, np.dtype(np.float32), want)
        check_array("self_v", self_v, np.dtype(np.float32), want)


def check_gather(
    kv: Extents, indices: object, counts: object, out_k: object, out_v: object, row_offset: int
) -> RowShape:
    """Checks everything about a gather but the indices themselves."""
    whole("row_offset", row_offset)
    if not isinstance(out_k, np.ndarray) or out_k.ndim != 4:
        raise TypeError("out_k must be a NumPy array of shape [N, R, H_kv, D]")
    shape = check_extents(kv, int(out_k.shape[3]))
    if not shape.slots:
        return shape
    want = (shape.slots, int(out_k.shape[1]), shape.heads, shape.dim)
    check_array("out_k", out_k, shape.dtype, want, written=True)
    check_array("out_v", out_v, shape.dtype, want, written=True)
    wanted = check_slots("counts", counts, shape.slots)
    if not isinstance(indices, np.ndarray) or indices.ndim != 3:
        raise TypeError("indices must be a NumPy array of shape [N, H_kv, K_cap]")
    capacity = int(indices.shape[2])
    check_array("indices", indices, np.dtype(np.int32), (shape.slots, shape.heads, capacity))
    check_between("counts", 0, wanted, capacity, "the last axis of indices")
    if row_offset < 0 or row_offset > want[1]:
        raise ValueError(f"row_offset is {row_offset}, but out_k has rows 0 to {want[1]}")
    check_between("counts", 0, wanted, want[1] - row_offset, "the rows of out_k after row_offset")
    return shape


def check_store(kv: Extents, start: object, counts: object, k: object, v: object) -> RowShape:
    """Checks everything about a store."""
    if not isinstance(k, np.ndarray) or k.ndim != 4:
        raise TypeError("k must be a NumPy array of shape [N, S, H_kv, D]")
    shape = check_extents(kv, int(k.shape[3]), written=True)
    if not shape.slots:
        return shape
    want = (shape.slots, int(k.shape[1]), shape.heads, shape.dim)
    check_array("k", k, shape.dtype, want)
    check_array("v", v, shape.dtype, want)
    first = check_slots("start", start, shape.slots)
    wanted = check_slots("counts", counts, shape.slots)
    check_between("counts", 0, wanted, want[1], "the rows of k")
    rows = np.array([extent.shape[1] for extent in kv], np.int64)
    # A skipped slot may name any start.
    used = np.where(wanted > 0, first, 0).astype(np.int32)
    check_between("start", 0, used, rows - wanted, "the rows of its extent less counts")
    return shape
