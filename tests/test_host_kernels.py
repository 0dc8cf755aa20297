"""The native kernels against their NumPy reference, on every instruction set of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import host_kernels as hk
from host_kernels import reference

BF16 = np.dtype(ml_dtypes.bfloat16)
FP32 = np.dtype(np.float32)
DTYPES = [pytest.param(BF16, id="bf16"), pytest.param(FP32, id="fp32")]
ISAS = hk.cpu_info()["available"]
TILE, CHUNK = 32, 4096


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test on each instruction set, then goes back to the one before."""
    before = hk.cpu_info()["isa"]
    hk.set_isa(request.param)
    yield request.param
    hk.set_isa(before)


@dataclass
class Call:
    """The arguments of one call of the fused kernel."""

    q: np.ndarray
    kv: list[np.ndarray]
    attend_len: np.ndarray
    select_len: np.ndarray
    budget: np.ndarray
    self_k: np.ndarray | None = None
    self_v: np.ndarray | None = None
    sinks: int = 4

    def indices(self) -> np.ndarray:
        capacity = int(self.budget.max(initial=0)) + 1
        return np.full((len(self.kv), self.kv[0].shape[0], capacity), 7, np.int32)

    def run(self, module: Any = hk, **options: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Output, status and indices."""
        indices = self.indices()
        out, status = module.attend_select(
            self.q, self.kv, self.attend_len, self.select_len, self.budget, indices,
            sinks=self.sinks, self_k=self.self_k, self_v=self.self_v, **options,
        )  # fmt: skip
        return out, status, indices

    def select(self, module: Any = hk, **options: Any) -> tuple[np.ndarray, np.ndarray]:
        """Status and indices of the keys-only kernel."""
        indices = self.indices()
        status = module.select(
            self.q, self.kv, self.attend_len, self.select_len, self.budget, indices,
            sinks=self.sinks, **options,
        )  # fmt: skip
        return status, indices


def make_call(
    lengths: list[int],
    dim: int = 64,
    group: int = 4,
    *,
    heads: int = 2,
    dtype: np.dtype[Any] = BF16,
    with_self: bool = False,
    seed: int = 0,
) -> Call:
    """Random slots of the given attended lengths; queries are exact in bfloat16.

    So the variant that rounds them must meet the same tolerance as the others.
    """
    rng = np.random.default_rng(seed)
    slots = len(lengths)
    kv = [
        rng.standard_normal((heads, 2, n + i % 3, dim)).astype(dtype) for i, n in enumerate(lengths)
    ]
    q = (2 * rng.standard_normal((slots, heads * group, dim))).astype(BF16).astype(np.float32)
    attend = np.array(lengths, np.int32)
    selectable = np.maximum(attend - 3, 0).astype(np.int32)
    own = (
        rng.standard_normal((2, slots, heads, dim)).astype(np.float32) if with_self else [None] * 2
    )
    return Call(q, kv, attend, selectable, (selectable // 6).astype(np.int32), own[0], own[1])


def assert_top_k(call: Call, indices: np.ndarray) -> None:
    """``indices`` are a top-k of the reference importance, up to rounding; form is exact."""
    for n, extent in enumerate(call.kv):
        budget, limit = int(call.budget[n]), int(call.select_len[n])
        own = None if call.self_k is None else call.self_k[n]
        mass = reference.importance(call.q[n], extent, int(call.attend_len[n]), self_k=own)
        forced = min(call.sinks, budget)
        for h in range(extent.shape[0]):
            rows = indices[n, h, :budget]
            assert (indices[n, h, budget:] == -1).all()
            assert (np.diff(rows) > 0).all()
            assert (rows >= 0).all()
            assert (rows < limit).all()
            assert list(rows[:forced]) == list(range(forced))
            chosen = np.zeros(limit, bool)
            chosen[rows] = True
            free = slice(forced, limit)
            least = mass[h, free][chosen[free]].min(initial=np.inf)
            most = mass[h, free][~chosen[free]].max(initial=0)
            assert least >= most * (1 - 1e-4)


def check(call: Call, **options: Any) -> None:
    """Native output and selection against the reference."""
    out, status, indices = call.run(**options)
    want, want_status, _ = call.run(reference)
    np.testing.assert_array_equal(status, want_status)
    np.testing.assert_allclose(out, want, atol=2e-5, rtol=2e-5)
    assert_top_k(call, indices)
    if call.self_k is None:
        status, keys_only = call.select(**options)
        np.testing.assert_array_equal(status, want_status)
        np.testing.assert_array_equal(keys_only, indices)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [16, 48, 64, 128])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 8])
def test_tile_edges(isa: str, dtype: np.dtype[Any], dim: int, group: int) -> None:
    lengths = [0, 1, 2, 15, 16, 17, TILE - 1, TILE, TILE + 1, 63, 64, 65, 130]
    check(make_call(lengths, dim, group, dtype=dtype, with_self=group % 2 == 0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_chunk_edges(isa: str, dtype: np.dtype[Any]) -> None:
    check(make_call([CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 1], 16, 2, heads=1, dtype=dtype))
    # One head alone is handed out by chunk instead of by head.
    check(make_call([2 * CHUNK + 1], 16, 2, heads=1, dtype=dtype, with_self=True), threads=3)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 150), min_size=1, max_size=4),
    dim=st.integers(1, 9).map(lambda x: 16 * x),
    group=st.integers(1, 9),
    heads=st.integers(1, 3),
    bf16=st.booleans(),
    with_self=st.booleans(),
    sinks=st.integers(0, 40),
    threads=st.integers(1, 4),
    seed=st.integers(0, 2**31),
    name=st.sampled_from(ISAS),
)
def test_any_shape(
    lengths: list[int],
    dim: int,
    group: int,
    heads: int,
    bf16: bool,
    with_self: bool,
    sinks: int,
    threads: int,
    seed: int,
    name: str,
) -> None:
    dtype = BF16 if bf16 else FP32
    call = make_call(lengths, dim, group, heads=heads, dtype=dtype, with_self=with_self, seed=seed)
    call.sinks = sinks
    rng = np.random.default_rng(seed)
    call.select_len = rng.integers(0, call.attend_len + 1).astype(np.int32)
    call.budget = rng.integers(0, call.select_len + 1).astype(np.int32)
    before = hk.cpu_info()["isa"]
    hk.set_isa(name)
    try:
        check(call, threads=threads)
    finally:
        hk.set_isa(before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_thread_count_changes_no_bit(isa: str, dtype: np.dtype[Any]) -> None:
    """Invariant: tile splits depend on length only."""
    for call in (
        make_call([9000, 4500], 32, 4, heads=1, dtype=dtype, with_self=True),
        make_call([100, 7, 333, 0, 90], 48, 3, heads=3, dtype=dtype),
        # More heads than threads, and one too many: it is handed out by chunks.
        make_call([8300], 16, 2, heads=13, dtype=dtype, with_self=True),
        make_call([9000, 4500, 8200, 4097, 5000, 0, 9100], 16, 2, heads=1, dtype=dtype),
    ):
        results = [call.run(threads=threads) for threads in (1, 2, 3, 4, 6)]
        for result in results[1:]:
            for one, other in zip(results[0], result, strict=True):
                np.testing.assert_array_equal(one, other)


def test_slots_do_not_influence_each_other(isa: str) -> None:
    lengths = [70, 4100, 33]
    call = make_call(lengths, 64, 4)
    out, _, indices = call.run()
    for n in range(len(lengths)):
        one = slice(n, n + 1)
        alone = Call(call.q[one], call.kv[one], *(
            x[one] for x in (call.attend_len, call.select_len, call.budget)))  # fmt: skip
        alone_out, _, alone_indices = alone.run()
        np.testing.assert_array_equal(alone_out[0], out[n])
        k = int(call.budget[n])
        np.testing.assert_array_equal(alone_indices[0, :, :k], indices[n, :, :k])


def test_equal_scores_are_taken_by_index(isa: str) -> None:
    call = make_call([CHUNK + 50], 48, 3)
    call.kv[0][:, 0] = call.kv[0][:, 0, :1]
    # Better rows, late and in different tiles, move the running maximum between the equal ones.
    for row in (700, 3000, CHUNK + 20):
        call.kv[0][:, 0, row] = call.q[0].reshape(2, 3, 48)[:, 0].astype(BF16)
    call.budget[:] = 60
    _, _, indices = call.run()
    want = [*range(57), 700, 3000, CHUNK + 20]
    np.testing.assert_array_equal(indices[0, :, :60], [want, want])
    np.testing.assert_array_equal(call.run(reference)[2], indices)


def test_growing_scores(isa: str) -> None:
    """The running maximum moves in every tile; the most recent rows win."""
    call = make_call([3000], 32, 2, heads=1, dtype=FP32)
    call.q[:] = 1
    call.kv[0][0, 0] = np.linspace(-3, 3, 3000, dtype=np.float32)[:, None]
    call.select_len[:] = 3000
    call.budget[:] = 104
    check(call)
    np.testing.assert_array_equal(call.run()[2][0, 0, 4:104], np.arange(2900, 3000))


@pytest.mark.parametrize("size", [1e3, 1e6, 1e15])
def test_huge_scores_stay_exact(isa: str, size: float) -> None:
    call = make_call([500], 32, 2, heads=1, dtype=FP32)
    call.q[:] = size
    call.kv[0][0, 0] = 1
    call.kv[0][0, 0, 321] = 2
    out, status, indices = call.run()
    assert status[0] == 0
    np.testing.assert_allclose(out[0], call.kv[0][0, 1, 321][None].repeat(2, 0), rtol=1e-6)
    assert 321 in indices[0, 0]


@pytest.mark.parametrize("poison", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("part", [0, 1])
def test_non_finite_row_retires_its_slot_only(
    isa: str, poison: float, dtype: np.dtype[Any], part: int
) -> None:
    call = make_call([200, 200, 5000], 48, 3, dtype=dtype)
    clean = call.run()
    call.kv[1][1, part, 77, 5] = poison
    call.kv[2][0, part, 4200, 5] = poison
    out, status, indices = call.run()
    want = call.run(reference)
    np.testing.assert_array_equal(status, [0, 1, 1])
    np.testing.assert_array_equal(want[1], status)
    np.testing.assert_array_equal(out[0], clean[0][0])
    np.testing.assert_array_equal(indices[0], clean[2][0])
    assert (out[1:] == 0).all()
    np.testing.assert_array_equal(indices[1:], want[2][1:])
    if part == 0:
        np.testing.assert_array_equal(call.select()[1], indices)


def test_score_overflow_is_reported(isa: str) -> None:
    call = make_call([40], 16, 1, dtype=FP32)
    call.q[:] = 1e30
    call.kv[0][:, 0, 3] = 1e30
    assert call.run()[1][0] == 1
    assert call.run(reference)[1][0] == 1


def test_nothing_to_attend_gives_zeros(isa: str) -> None:
    call = make_call([0, 0])
    out, status, indices = call.run()
    assert not out.any()
    assert not status.any()
    assert (indices == -1).all()
    # With one key of its own, a query sees that value alone.
    call = make_call([0, 0], with_self=True)
    assert call.self_v is not None
    np.testing.assert_allclose(call.run()[0], call.self_v.repeat(4, axis=1), rtol=1e-6)


def test_whole_budget_takes_every_row(isa: str) -> None:
    call = make_call([50, 33])
    call.select_len = call.attend_len.copy()
    call.budget = call.attend_len.copy()
    _, _, indices = call.run()
    np.testing.assert_array_equal(indices[0, :, :50], [np.arange(50)] * 2)


def test_bf16_dot_product_rounds_the_query_only() -> None:
    """The stated tolerance of "avx512_bf16": the query's components are off by 2^-9 at most."""
    if "avx512_bf16" not in ISAS:
        pytest.skip("this machine has no avx512_bf16")
    call = make_call([600], 128, 4)
    call.q += np.random.default_rng(1).uniform(-0.01, 0.01, call.q.shape).astype(np.float32)
    before = hk.cpu_info()["isa"]
    hk.set_isa("avx512_bf16")
    out = call.run()[0]
    hk.set_isa(before)
    rounded = Call(**{**call.__dict__, "q": call.q.astype(BF16).astype(np.float32)})
    np.testing.assert_allclose(out, rounded.run(reference)[0], atol=2e-5)
    keys = np.abs(call.kv[0][:, 0, :600].astype(np.float64))
    size = np.einsum("hgd,hsd->hgs", np.abs(call.q[0]).reshape(2, 4, 128), keys) / 128**0.5
    # A softmax output moves by at most twice the largest score change times the largest value.
    bound = 2 * 2**-9 * size.max() * np.abs(call.kv[0][:, 1].astype(np.float64)).max()
    assert np.abs(out - call.run(reference)[0]).max() <= bound


def test_no_slots() -> None:
    empty = np.zeros(0, np.int32)
    indices = np.zeros((0, 2, 3), np.int32)
    q = np.zeros((0, 4, 16), np.float32)
    for module in (hk, reference):
        out, status = module.attend_select(q, [], empty, empty, empty, indices)
        assert out.shape == q.shape
        assert status.shape == (0,)
        rows = np.zeros((0, 5, 2, 16), np.float32)
        module.gather([], indices, empty, rows, rows)
        module.store([], empty, empty, rows, rows)
