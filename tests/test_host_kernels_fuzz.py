"""Every public function of ``host_kernels`` on wrong arguments of any kind.

Whatever comes in, the answer is a result or one of three exceptions with a message; the process
lives, and nothing outside the arrays is touched (a sanitizer build of the same calls is fuzzed
natively).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import host_kernels as hk
from host_kernels import _native
from host_kernels import prefetch as module

BF16 = np.dtype(ml_dtypes.bfloat16)
ROWS, HEADS, DIM = 40, 2, 16


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def extents() -> list[np.ndarray]:
    return [np.ones((HEADS, 2, ROWS, DIM), BF16) for _ in range(2)]


def indexes() -> list[np.ndarray]:
    return [np.zeros(hk.index_shape(HEADS, ROWS, DIM), np.uint8) for _ in range(2)]


def chosen() -> np.ndarray:
    return np.tile(np.arange(8, dtype=np.int32), (2, HEADS, 1))


def rows_buffer() -> np.ndarray:
    return np.zeros((2, 10, HEADS, DIM), BF16)


def scan() -> dict[str, Any]:
    return {
        "q": np.ones((2, 4, DIM), np.float32),
        "attend_len": int32(40, 33),
        "select_len": int32(40, 30),
        "budget": int32(8, 3),
        "indices": chosen(),
    }


# A call of each function that fits; made anew for each example, since arguments are written.
CALLS: dict[str, Callable[[], dict[str, Any]]] = {
    "attend_select": lambda: {
        **scan(), "kv": extents(), "sinks": 4, "recent": 0, "scale": 0.25, "threads": 2,
        "self_k": np.ones((2, HEADS, DIM), np.float32),
        "self_v": np.ones((2, HEADS, DIM), np.float32),
    },
    "attend_rows": lambda: {
        "q": np.ones((2, 4, DIM), np.float32), "kv": extents(), "indices": chosen(),
        "counts": int32(8, 3), "select_len": int32(30, 33), "attend_len": int32(40, 33),
        "self_k": np.ones((2, HEADS, DIM), np.float32),
        "self_v": np.ones((2, HEADS, DIM), np.float32), "scale": 0.25, "threads": 2,
    },
    "select": lambda: {
        **scan(), "kv": extents(), "sinks": 4, "recent": 2, "threads": 2,
        "elsewhere": np.zeros((2, 4), np.float32),
    },
    "select_indexed": lambda: {
        **scan(), "index": indexes(), "sinks": 4, "recent": 0, "threads": 2,
        "log_rest": np.zeros((2, 4), np.float32),
    },
    "rerank": lambda: {
        "q": np.ones((2, 4, DIM), np.float32), "kv": extents(), "candidates": chosen(),
        "counts": int32(8, 5), "budget": int32(4, 4), "indices": chosen(), "sinks": 1,
        "elsewhere": np.zeros((2, 4), np.float32), "threads": 2,
    },
    "gather": lambda: {
        "kv": extents(), "indices": chosen(), "counts": int32(8, 2), "out_k": rows_buffer(),
        "out_v": rows_buffer(), "row_offset": 1, "threads": 2,
    },
    "gather_changes": lambda: {
        "kv": extents(), "indices": chosen(), "counts": int32(8, 2), "previous": chosen(),
        "previous_counts": int32(4, 2), "source": np.zeros((2, HEADS, 8), np.int32),
        "out_k": np.zeros((32, DIM), BF16), "out_v": np.zeros((32, DIM), BF16),
    },
    "store": lambda: {
        "kv": extents(), "start": int32(0, 7), "counts": int32(10, 3), "k": rows_buffer(),
        "v": rows_buffer(), "threads": 2,
    },
    "index_rows": lambda: {
        "kv": extents(), "index": indexes(), "start": int32(0, 5), "counts": int32(40, 9),
    },
    "index_shape": lambda: {"heads": HEADS, "rows": ROWS, "dim": DIM},
    "read_bandwidth": lambda: {"array": np.zeros(512, np.uint8), "threads": 2, "repeats": 1},
    "copy_bandwidth": lambda: {
        "src": np.zeros(512, np.uint8), "dst": np.ones(512, np.uint8), "threads": 1, "repeats": 1,
    },
    "Arena": lambda: {"nbytes": 4096, "huge_pages": False, "threads": 2},
"top_k": lambda: {"values": np.ones(50, np.float32), "count": 7},
    "set_thread_count": lambda: {"n": 2},
    "set_isa": lambda: {"name": "scalar"},
    "set_prefetch": lambda: {"setting": "t0:1024"},
}  # fmt: skip
# They take nothing, or nothing that could be wrong.
PLAIN = {"set_background", "cpu_info", "thread_count", "prefetch_setting", "calibrate_prefetch"}
TYPES = {"CpuInfo", "Extents", "IndexKind", "Indexes", "Prefetch"}

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 50),
    st.sampled_from([2**31 - 1, 2**31, -(2**31), 2**63, -(2**63), 2**200]),
    st.floats(),
    st.text(max_size=8),
    st.just([]),
    st.builds(object),
)
DTYPES = st.sampled_from(
    [np.int32, np.int64, np.uint8, np.float32, np.float64, np.float16, BF16, np.bool_, object]
)


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    shape = draw(st.lists(st.integers(0, 17), max_size=5))
    return np.full(shape, draw(st.sampled_from([0, 1, 7])), draw(DTYPES))


def spoilt(draw: st.DrawFn, value: np.ndarray) -> Any:
    """An array that is nearly right: another type, shape, layout, or numbers out of range."""
    way = draw(st.integers(0, 9))
    if way == 0:
        return value.astype(draw(DTYPES.filter(lambda t: t is not object)))
    if way == 1:
        return value[..., : draw(st.integers(0, value.shape[-1]))]
    if way == 2:
        return value[: draw(st.integers(0, len(value)))].copy()
    if way == 3:
        return np.asfortranarray(value) if value.ndim > 1 else value[::-1]
    if way == 4:
        value.flags.writeable = False
        return value
    if way == 5:
        return value[None]
    if way == 6:
        return value.tolist()
    if way == 7:
        return np.lib.stride_tricks.as_strided(value, strides=(0,) * value.ndim)
    if value.dtype == BF16 or value.dtype == np.float32:
        value[...] = draw(st.sampled_from([np.nan, np.inf, -np.inf, 3e38, -1e-40, 0.0]))
    else:
        extremes = [0, -1, 1, 39, 40, 41, 127, 2**31 - 1, -(2**31)]
        number = draw(st.sampled_from(extremes)) % 256 if value.dtype == np.uint8 else None
        at = draw(st.integers(0, max(value.size - 1, 0)))
        if value.size:
            value.flat[at] = draw(st.sampled_from(extremes)) if number is None else number
    return value


@st.composite
def wrong_calls(draw: st.DrawFn, name: str) -> dict[str, Any]:
    given_ = CALLS[name]()
    keys = draw(st.lists(st.sampled_from(sorted(given_)), min_size=1, max_size=3, unique=True))
    for key in keys:
        value = given_[key]
        nearly = draw(st.integers(0, 3)) > 0
        if nearly and isinstance(value, np.ndarray):
            given_[key] = spoilt(draw, value)
        elif nearly and isinstance(value, list):
            value[draw(st.integers(0, 1))] = spoilt(draw, value[0])
            given_[key] = value[: draw(st.integers(0, 2))] if draw(st.booleans()) else value
        else:
            given_[key] = draw(st.one_of(SCALARS, arrays()))
    # Such requests are valid, and would try to be met.
    if name == "Arena" and isinstance(given_["nbytes"], int):
        given_["nbytes"] = given_["nbytes"] % 8192 if abs(given_["nbytes"]) < 2**40 else 2**62
    for key in ("threads", "n"):
        if isinstance(given_.get(key), int) and not isinstance(given_[key], bool):
            given_[key] = min(given_[key], 8)
    for key in ("repeats",):
        if isinstance(given_.get(key), int):
            given_[key] = min(given_[key], 8)
    return given_


@pytest.fixture(scope="module", autouse=True)
def as_before() -> Iterator[None]:
    isa, prefetch, chosen_by = hk.cpu_info()["isa"], _native.prefetch(), module._chosen
    yield
    hk.set_isa(isa)
    hk.set_thread_count(None)
    _native.set_prefetch(*prefetch)
    module._chosen = chosen_by


def test_every_public_function_is_here() -> None:
    assert CALLS.keys() | PLAIN | TYPES == set(hk.__all__)
    for name, call in CALLS.items():
        parameters = inspect.signature(getattr(hk, name)).parameters
        assert call().keys() <= parameters.keys(), name


@pytest.mark.parametrize("name", sorted(CALLS))
def test_the_right_call_is_right(name: str) -> None:
    getattr(hk, name)(**CALLS[name]())


@pytest.mark.parametrize("name", sorted(CALLS))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(data=st.data())
def test_wrong_arguments_are_refused(name: str, data: st.DataObject) -> None:
    arguments = data.draw(wrong_calls(name))
    with np.errstate(all="ignore"):
        try:
            getattr(hk, name)(**arguments)
        except (TypeError, ValueError, MemoryError) as error:
            assert str(error)  # noqa: PT017 (a result is as good)
