"""Wrong arguments are refused in one sentence that names them, natively and in the reference."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import host_kernels as hk
from host_kernels import reference

BF16 = np.dtype(ml_dtypes.bfloat16)


def arguments(rows: int = 60) -> dict[str, Any]:
    """A valid call of ``attend_select``: two slots, two KV heads, four query heads, D = 32."""
    lengths = np.array([rows, rows - 9], np.int32)
    return {
        "q": np.ones((2, 4, 32), np.float32),
        "kv": [np.zeros((2, 2, rows, 32), BF16) for _ in range(2)],
        "attend_len": lengths,
        "select_len": lengths - 3,
        "budget": np.array([10, 4], np.int32),
        "indices": np.zeros((2, 2, 12), np.int32),
    }


STRIDED = np.zeros((2, 4, 64), np.float32)[:, :, ::2]
READ_ONLY = np.zeros((2, 2, 12), np.int32)
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize("module", [hk, reference], ids=["native", "reference"])
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": [[1.0]]}, TypeError, "q must be a NumPy array"),
        ({"q": np.ones((2, 4, 32))}, TypeError, "q must have dtype float32, not float64"),
        ({"q": np.ones((3, 4, 32), np.float32)}, ValueError, r"q must have shape \[2, 4, 32\]"),
        ({"q": np.ones((2, 3, 32), np.float32)}, ValueError, "3 query heads"),
        ({"q": STRIDED}, ValueError, "q must be C-contiguous"),
        ({"q": np.ones((2, 4, 24), np.float32)}, ValueError, r"kv\[0\] must have shape"),
        ({"kv": np.zeros((2, 2, 60, 2, 32), BF16)}, TypeError, "kv must be a sequence"),
        ({"kv": [[1], [2]]}, TypeError, r"kv\[0\] must be a NumPy array"),
        ({"kv": [np.zeros((2, 2, 60, 32), np.float16)] * 2}, TypeError, "not float16"),
        (
            {"kv": [np.zeros((2, 2, 60, 32), BF16), np.zeros((2, 2, 60, 32), np.float32)]},
            TypeError,
            r"kv\[1\] has dtype float32",
        ),
        (
            {"kv": [np.zeros((2, 2, 60, 32), BF16), np.zeros((1, 2, 60, 32), BF16)]},
            ValueError,
            r"kv\[1\] must have shape \[2, 2, rows, 32\]",
        ),
        (
            {"kv": [np.zeros((2, 4, 60, 32), BF16)[:, ::2]] * 2},
            ValueError,
            r"kv\[0\] must be C-contiguous",
        ),
        ({"kv": [np.zeros((2, 2, 60, 32), BF16)]}, ValueError, r"q must have shape \[1, 4, 32\]"),
        ({"attend_len": np.array([61, 5], np.int32)}, ValueError, r"attend_len\[0\] is 61"),
        ({"attend_len": np.array([60, 51])}, TypeError, "attend_len must have dtype int32"),
        ({"select_len": np.array([60, 52], np.int32)}, ValueError, r"select_len\[1\] is 52"),
        ({"select_len": np.array([-1, 0], np.int32)}, ValueError, r"select_len\[0\] is -1"),
        ({"budget": np.array([13, 4], np.int32)}, ValueError, "last axis of indices"),
        ({"budget": np.array([58, 4], np.int32)}, ValueError, r"budget\[0\] is 58"),
        ({"budget": np.array([[1, 4]], np.int32)}, ValueError, "budget must have shape"),
        ({"indices": np.zeros((2, 2, 12))}, TypeError, "indices must have dtype int32"),
        ({"indices": np.zeros((2, 3, 12), np.int32)}, ValueError, "indices must have shape"),
        ({"indices": np.zeros((2, 2, 24), np.int32)[:, :, ::2]}, ValueError, "indices must be C-"),
        ({"indices": READ_ONLY}, ValueError, "indices must be writeable"),
        ({"sinks": -1}, ValueError, "sinks must not be negative"),
        ({"sinks": 2.5}, TypeError, "sinks must be a whole number, not 2.5"),
        ({"sinks": True}, TypeError, "sinks must be a whole number, not True"),
        ({"scale": "x"}, TypeError, "scale must be a number, not 'x'"),
        ({"scale": float("nan")}, ValueError, "scale must be finite, but is nan"),
    ],
)
def test_attend_refusals(
    module: Any, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    for kernel in (module.attend_select, module.select):
        with pytest.raises(error, match=message) as caught:
            kernel(**{**arguments(), **change})
        assert "\n" not in str(caught.value)


def test_head_dimension_must_be_a_multiple_of_16() -> None:
    given = arguments()
    given["q"] = np.ones((2, 4, 24), np.float32)
    given["kv"] = [np.zeros((2, 2, 60, 24), BF16)] * 2
    with pytest.raises(ValueError, match="multiple of 16 up to 1024, not 24"):
        hk.attend_select(**given)


def test_self_refusals() -> None:
    own = np.zeros((2, 2, 32), np.float32)
    with pytest.raises(ValueError, match="self_k and self_v must be given together"):
        hk.attend_select(**arguments(), self_k=own)
    with pytest.raises(TypeError, match="self_v must have dtype float32"):
        hk.attend_select(**arguments(), self_k=own, self_v=own.astype(BF16))
    with pytest.raises(ValueError, match="self_k must have shape"):
        hk.attend_select(**arguments(), self_k=own[:1], self_v=own)


@pytest.mark.parametrize("count", [0, -3, 1025])
def test_threads_refusals(count: int) -> None:
    with pytest.raises(ValueError, match="threads must be between 1 and 1024"):
        hk.attend_select(**arguments(), threads=count)


@pytest.mark.parametrize("module", [hk, reference], ids=["native", "reference"])
def test_gather_and_store_refusals(module: Any) -> None:
    kv = [np.zeros((2, 2, 9, 16), np.float32)]
    one, four = np.array([1], np.int32), np.array([4], np.int32)
    rows = np.zeros((1, 5, 2, 16), np.float32)
    indices = np.zeros((1, 2, 4), np.int32)
    with pytest.raises(ValueError, match="after row_offset"):
        module.gather(kv, indices, four, rows, rows.copy(), row_offset=2)
    with pytest.raises(TypeError, match=r"row_offset must be a whole number, not 1\.5"):
        module.gather(kv, indices, one, rows, rows.copy(), row_offset=1.5)
    with pytest.raises(ValueError, match="row_offset is 6"):
        module.gather(kv, indices, one, rows, rows.copy(), row_offset=6)
    with pytest.raises(ValueError, match=r"counts\[0\] is 5"):
        module.gather(kv, indices, four + 1, rows, rows.copy())
    with pytest.raises(TypeError, match="out_v must have dtype float32"):
        module.gather(kv, indices, one, rows, rows.astype(BF16))
    with pytest.raises(ValueError, match=r"start\[0\] is 6, but must be between 0 and .* \(5\)"):
        module.store(kv, four + 2, four, rows, rows)
    with pytest.raises(ValueError, match=r"start\[0\] is -1"):
        module.store(kv, one - 2, four, rows, rows)
    with pytest.raises(ValueError, match=r"counts\[0\] is 6"):
        module.store(kv, one, four + 2, rows, rows)
    with pytest.raises(TypeError, match="k must have dtype float32"):
        module.store(kv, one, one, rows.astype(BF16), rows)
    kv[0].flags.writeable = False
    with pytest.raises(ValueError, match=r"kv\[0\] must be writeable"):
        module.store(kv, one, one, rows, rows)
    module.gather(kv, indices, four, rows, rows.copy())
    module.gather(kv, indices, one, rows, rows.copy(), row_offset=np.int64(1))


def test_numpy_numbers_are_numbers() -> None:
    given = arguments()
    hk.attend_select(**given, sinks=np.int32(2), scale=np.float32(0.5))
    numpy_numbers = given["indices"].copy()
    hk.attend_select(**given, sinks=2, scale=0.5)
    np.testing.assert_array_equal(given["indices"], numpy_numbers)


def test_arena_and_bandwidth_refusals() -> None:
    for nbytes in (1.5, "4096", True):
        with pytest.raises(TypeError, match="nbytes must be a whole number"):
            hk.Arena(nbytes)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"repeats must be a whole number, not 1\.5"):
        hk.read_bandwidth(np.zeros(4096, np.uint8), repeats=1.5)  # type: ignore[arg-type]
