"""Copying only what the device lacks, and reading it there, against copying everything."""

from __future__ import annotations

import dataclasses
import gc
import itertools

import fake_cuda
import jax
import numpy as np
import pytest
from networks import TINY, answers, engine, prompts

from herald_jax import GenerationConfig
from herald_jax.engine import transfers
from herald_jax.engine.errors import EngineError
from herald_jax.engine.request import Request
from herald_jax.kv import changes, device_cache
from herald_jax.kv.changes import ChangesTransfer
from herald_jax.kv.cuda_driver import CudaError
from herald_jax.kv.cuda_row_reader import CudaReader
from herald_jax.kv.device_cache import CacheShape, DeviceCache, Transfer
from herald_jax.kv.direct import DirectTransfer
from herald_jax.kv.pool_transfer import FullTransfer
from herald_jax.kv.row_reader import HostReader
from herald_jax.selection import check_method

BLOCK, ROWS, HEADS, DIM = 4, 64, 2, 16
RULE = GenerationConfig(max_new_tokens=40, threshold=0.3)
METHODS = ["herald-draft", "herald-merged", "random"]


def shape_of(
    slots: int,
    selected: int,
    candidates: int,
    layers: int = 3,
    transfer: Transfer = "changes",
) -> CacheShape:
    return CacheShape(
        slots=slots,
        rows=ROWS,
        exact_layers=0,
        sparse_layers=layers,
        selected=selected,
        candidates=candidates,
        block_size=BLOCK,
        kv_heads=HEADS,
        head_dim=DIM,
        dtype=np.dtype(np.float32),
        transfer=transfer,
    )


def await_rows(done, what):
    while not done():
        assert what


class Pair:
    """The transfer of a shape and a full one that are told the same, over random rows."""

    def __init__(self, shape: CacheShape, parts: int, seed: int) -> None:
        self.shape, self.rng = shape, np.random.default_rng(seed)
        device = jax.devices()[0]
        cuts = [shape.slots * n // parts for n in range(parts + 1)]
        self.parts = list(itertools.pairwise(cuts))
        self.caches = [DeviceCache(shape, device) for _ in range(2)]
        if shape.transfer == "changes":
            made = ChangesTransfer(shape, self.parts, device, jax.block_until_ready)
        else:
            made = DirectTransfer(self.caches[0], self.parts, HostReader(), await_rows)
        self.transfers = [made, FullTransfer(shape, self.parts, device)]
        size = (shape.sparse_layers, shape.slots, HEADS, 2, ROWS, DIM)
        self.extents = self.rng.normal(size=size).astype(np.float32)
        self.moved = self.selected = 0

    def denoise(self) -> None:
        """Own rows are written; where C > K step 0 leaves K of the candidates."""
        shape = self.shape
        own = self.rng.normal(size=shape.buffer_shape(BLOCK)).astype(np.float32)
        for index, cache in enumerate(self.caches):
            if shape.refines:
                cache.candidates = [] if index else list(cache.pool)
                kept = 2 * BLOCK + shape.selected
                cache.pool = [(k[:, :kept], v[:, :kept]) for k, v in cache.pool]
            cache.pool = [
                (k.at[:, :BLOCK].set(own), v.at[:, :BLOCK].set(-own)) for k, v in cache.pool
            ]

    def choose(self, like: np.ndarray | None, most: int) -> tuple[np.ndarray, np.ndarray]:
        """Selections that keep most of ``like``; slots with 0 rows take no part."""
        shape = self.shape
        counts = self.rng.integers(1, most + 1, shape.slots).astype(np.int32)
        counts[self.rng.random(shape.slots) < 0.2] = 0
        size = (shape.sparse_layers, shape.slots, HEADS, shape.candidates)
        indices = np.full(size, -1, np.int32)
        for at in itertools.product(*map(range, size[:3])):
            weight = self.rng.random(ROWS)
            if like is not None:
                weight[like[at][like[at] >= 0]] += self.rng.choice([0.0, 0.7, 1.0])
            best = np.argsort(-weight)[: counts[at[1]]]
            indices[at][: len(best)] = np.sort(best)
        return indices, counts

    def block(self, indices: np.ndarray, counts: np.ndarray, failing: int | None = None) -> None:
        """One block: every part gathers or fails, layers are sent, pools are swapped."""
        self.denoise()
        committed = []
        for transfer, cache in zip(self.transfers, self.caches, strict=True):
            sent = []
            for layer in range(self.shape.sparse_layers):
                for part, (first, last) in enumerate(self.parts):
                    if part == failing and layer:
                        transfer.skip(layer, part)
                        continue
                    moved = transfer.gather(
                        layer,
                        part,
                        list(self.extents[layer, first:last]),
                        indices[layer, first:last],
                        counts[first:last],
                    )
                    if isinstance(transfer, ChangesTransfer):
                        self.moved += moved
                        self.selected += int(counts[first:last].sum()) * HEADS
                sent.append(transfer.send(layer))
            committed.append(np.asarray(transfer.swap(cache, sent, indices, counts)))
        assert not self.caches[0].candidates
        np.testing.assert_array_equal(*committed)

    def check(self, counts: np.ndarray, slots=None) -> None:
        """Rows in use are the same, bit for bit; all others are finite numbers."""
        changed, full = (cache.pool for cache in self.caches)
        for mine, theirs in zip(itertools.chain(*changed), itertools.chain(*full), strict=True):
            mine, theirs = np.asarray(mine), np.asarray(theirs)
            assert mine.shape == theirs.shape
            assert np.isfinite(mine).all()
            for n in range(self.shape.slots) if slots is None else slots:
                rows = slice(BLOCK, 2 * BLOCK + counts[n])
                np.testing.assert_array_equal(mine[n, rows], theirs[n, rows])

    def close(self) -> None:
        for transfer in self.transfers:
            transfer.close()


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize(("selected", "candidates"), [(12, 12), (8, 13), (1, 1), (30, 60)])
@pytest.mark.parametrize("kind", ["changes", "direct"])
def test_pools_are_those_of_a_full_transfer(kind, selected, candidates, parts):
    """Over many blocks with refilled, idle, cleared and failed slots."""
    shape = shape_of(3, selected, candidates, transfer=kind)
    pair = Pair(shape, parts, seed=candidates + parts)
    indices = None
    for block in range(14):
        indices, counts = pair.choose(indices, candidates)
        failing = block % parts if block in (5, 9) else None
        pair.block(indices, counts, failing)
        first, last = (0, 0) if failing is None else pair.parts[failing]
        pair.check(counts, [n for n in range(3) if not first <= n < last])
        for slot in range(first, last):
            # Its rows are those of another request from now on, as after a prefill.
            for transfer, cache in zip(pair.transfers, pair.caches, strict=True):
                transfer.clear(slot)
                cache.clear(slot)
        if block % 4 == 3:
            slot = block % 3
            pair.extents[:, slot] = pair.rng.normal(size=pair.extents[:, slot].shape)
            for transfer in pair.transfers:
                transfer.forget(slot)
        if block == 7:
            for transfer, cache in zip(pair.transfers, pair.caches, strict=True):
                cache.reset_pool()
                transfer.forget()
    assert kind == "direct" or candidates == 1 or pair.moved < 0.9 * pair.selected
    pair.close()


def test_only_new_rows_move():
    pair = Pair(shape_of(2, 10, 10), 1, seed=0)
    indices = np.broadcast_to(np.arange(0, 20, 2, dtype=np.int32), (3, 2, HEADS, 10)).copy()
    counts = np.array([10, 10], np.int32)
    pair.block(indices, counts)
    assert pair.moved == pair.selected == 3 * 2 * HEADS * 10
    pair.block(indices, counts)
    assert pair.moved == 3 * 2 * HEADS * 10
    indices[:, 1, 0, -1] = 40
    pair.block(indices, counts)
    assert pair.moved == 3 * (2 * HEADS * 10 + 1)
    pair.check(counts)
    pair.close()


@pytest.mark.parametrize(("selected", "candidates"), [(32, 32), (16, 32)])
@pytest.mark.parametrize("layers", [1, 5])
def test_the_device_holds_no_more_than_was_planned(selected, candidates, layers, monkeypatch):
    """Where all rows are new, layers wait until the boundary makes room for them."""
    shape = shape_of(2, selected, candidates, layers)
    peak, start = 0, changes.put

    def watch(array, device):
        nonlocal peak
        made = start(array, device)
        peak = max(peak, sum(a.nbytes for a in jax.live_arrays()) - others)
        return made

    gc.collect()
    others = sum(a.nbytes for a in jax.live_arrays())
    pair = Pair(shape, 1, seed=1)
    pair.transfers.pop().close()
    pair.caches.pop()
    gc.collect()
    monkeypatch.setattr(changes, "put", watch)
    (transfer,), (cache,) = pair.transfers, pair.caches
    every = np.arange(candidates, dtype=np.int32)
    counts = np.full(2, candidates, np.int32)
    late = 0
    for block in range(4):
        indices = np.broadcast_to(every + 32 * (block % 2), (layers, 2, HEADS, candidates)).copy()
        pair.denoise()
        sent = []
        for layer in range(layers):
            transfer.gather(layer, 0, list(pair.extents[layer]), indices[layer], counts)
            sent.append(transfer.send(layer))
            late += sent[-1].copies is None
            assert sum(transfer._flying) <= shape.changes_room
        committed = transfer.swap(cache, sent, indices, counts).nbytes
        assert sum(transfer._flying) == 0
        got = np.array(cache.pool[-1][0])[:, 2 * BLOCK :].swapaxes(1, 2)
        np.testing.assert_array_equal(
            got, np.take_along_axis(pair.extents[-1, :, :, 0], indices[-1][..., None], 2)
        )
    planned = shape.pool_bytes + shape.refined_bytes + shape.incoming_bytes
    # The committed block's rows are on their way to the host meanwhile.
    assert 0 < peak <= planned + committed
    assert late == 4 * (layers - max(1, layers * 7 // 8))
    pair.close()


def test_what_was_sent_does_not_change_with_staging():
    """On the CPU backend a plain put aliases NumPy memory; staging is overwritten every block."""
    pair = Pair(shape_of(1, 4, 4, 2), 1, seed=0)
    transfer = pair.transfers[0]
    indices, counts = (
        np.arange(4, dtype=np.int32)[None, None].repeat(HEADS, 1),
        np.array([4], np.int32),
    )
    transfer.gather(0, 0, list(pair.extents[0]), indices, counts)
    source, ((k, v),) = transfer.send(0).copies
    transfer._copies.reclaim(0)
    for array in transfer._memory.arrays:
        array[:] = 77
    wanted = pair.extents[0, 0, :, :, :4]
    np.testing.assert_array_equal(np.asarray(k).reshape(HEADS, 4, DIM), wanted[:, 0])
    np.testing.assert_array_equal(np.asarray(v).reshape(HEADS, 4, DIM), wanted[:, 1])
    assert (np.asarray(source) < 0).all()
    pair.close()


# -- the engine -----------------------------------------------------------------------------------


def pools_in_use(session) -> list[np.ndarray]:
    rows = session.batch.pool_rows()
    return [
        np.asarray(part)[n, TINY.block_size : rows[n]]
        for pair in session.cache.pool
        for part in pair
        for n, _ in session.batch.active()
    ]


@pytest.mark.parametrize("method", METHODS)
def test_blocks_are_the_same_with_every_transfer(method):
    """Tokens and pools, bit for bit, while requests end and others take their slots."""
    given = [
        Request(str(n), np.array(p, np.int32), 24 + 8 * n)
        for n, p in enumerate(prompts((130, 112, 90, 40)))
    ]
    sessions = []
    for transfer, streams in (("changes", 2), ("direct", 2), ("full", 1)):
        made = engine(method, 0.2, max_batch=2, transfer=transfer, retrieval_streams=streams)
        sessions.append(made._prepare(given, RULE))
    waiting, blocks = list(given), 0
    while waiting or any(sessions[0].batch.active()):
        for index in sessions[0].batch.free():
            if waiting:
                request = waiting.pop(0)
                for session in sessions:
                    session.admit(index, request)
        tokens, pools = [], []
        for session in sessions:
            made, broken, failures = session.run_block()
            assert not failures
            assert not broken.any()
            tokens.append([made[n] for n, _ in session.batch.active()])
            for n, slot in list(session.batch.active()):
                prompt = len(slot.request.prompt_ids)
                slot.generated += made[n][max(0, prompt - slot.start) :].tolist()
                last = slot.is_last(TINY.block_size)
                slot.start += TINY.block_size
                if last:
                    session.retire(n)
            pools.append(pools_in_use(session))
        for other in (0, 1):
            np.testing.assert_array_equal(tokens[other], tokens[2])
            for mine, theirs in zip(pools[other], pools[2], strict=True):
                np.testing.assert_array_equal(mine, theirs)
        blocks += 1
    assert blocks > 6
    for session in sessions:
        session.close()


@pytest.mark.parametrize("transfer", ["changes", "direct"])
def test_transfers_equal_dense_at_full_budget(transfer):
    """With full transfers, the default, every method is held to this in test_invariants.py."""
    given = prompts((64, 65, 3, 130))
    want = answers(engine("dense"), given, RULE)
    assert answers(engine("herald-merged", transfer=transfer), given, RULE) == want


@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("method", ["herald-draft", "herald-merged"])
@pytest.mark.parametrize("transfer", ["changes", "direct"])
def test_a_slot_that_fails_does_not_spoil_the_next_request_in_it(transfer, method, streams):
    """Selection meets NaN in one slot; its mates and what comes later answer as ever."""
    given = prompts((120, 100, 90, 80))
    options = {"max_batch": 2, "key_index": "none"}
    want = answers(engine(method, 0.2, **options), given, RULE)
    made = engine(method, 0.2, transfer=transfer, retrieval_streams=streams, **options)
    stream = made.generate(given, RULE, stream=True)
    first = next(stream)
    slot = next(s for s in made.session.batch.slots if s.request.id == "1")
    slot.booking.extents[0][:, :, 5:9] = np.nan
    results = {r.id: r for r in [first, *stream] if hasattr(r, "finish_reason")}
    assert "not finite" in results["1"].error
    assert {n: r.token_ids for n, r in results.items() if n != "1"} == {
        n: ids for n, ids in want.items() if n != "1"
    }


def test_the_share_of_rows_moved_is_reported():
    """All of them in full transfers and for a first selection, few where the prefix is kept."""
    shares = {}
    for transfer in ("changes", "full"):
        made = engine("window", 0.2, transfer=transfer)
        answers(made, prompts((120,)), RULE)
        shares[transfer] = made.summary(1.0)["rows_moved_fraction"]
        assert made.summary(1.0)["transfer"] == transfer
    assert shares["full"] == 1
    assert 0.2 < shares["changes"] < 0.6
    dense = engine("dense")
    answers(dense, prompts((20,)), dataclasses.replace(RULE, max_new_tokens=8))
    assert dense.summary(1.0)["rows_moved_fraction"] is None


@pytest.mark.parametrize("how", ["copied", "read", "both"])
@pytest.mark.parametrize(("method", "ratio"), [("herald-draft", None), ("herald-merged", 1.5)])
def test_tokens_are_the_same_through_the_driver(monkeypatch, method, ratio, how):
    """Rows arrive late; whoever is too early, or unmaps too early, fails in the stand-in."""
    given = prompts((130, 112, 90, 40))
    options = {"max_batch": 2, "retrieval_streams": 2, "candidates_ratio": ratio}
    want = answers(engine(method, 0.2, **options), given, RULE)
    fake = fake_cuda.install(monkeypatch)
    monkeypatch.setattr(transfers, "row_reader", CudaReader)
    turns = itertools.cycle([True, False, False])
    choice = {"copied": lambda *_: True, "read": lambda *_: False, "both": lambda *_: next(turns)}
    monkeypatch.setattr(DirectTransfer, "_in_time", choice[how])
    made = engine(method, 0.2, transfer="direct", **options)
    assert answers(made, given, RULE) == want
    assert (fake.kernels > 0) == (how != "copied")
    assert fake.copies > 0
    assert len(fake.mapped) == 3
    made.close()
    assert not fake.mapped


class NeverRead(HostReader):
    """Rows that stay under way."""

    def done(self) -> bool:
        return False


def test_rows_that_the_device_never_reads_are_told_by_name(monkeypatch):
    """Neither the boundary nor the end of the engine waits for ever."""
    monkeypatch.setattr(transfers, "row_reader", lambda *_: NeverRead())
    made = engine("herald-merged", 0.2, transfer="direct", timeout=0.3, warm_up=False)
    (result,) = made.generate(prompts((60,)), RULE)
    assert result.finish_reason == "error"
    assert "waited 0.3 s for selected rows on their way to the device" in result.error


class Final(HostReader):
    """Nothing may be asked of it once it is closed."""

    closed = False

    def read(self, *told):
        assert not self.closed
        super().read(*told)

    def done(self) -> bool:
        assert not self.closed, "asked after it was closed"
        return True

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("how", ["failure", "close"])
def test_a_reader_is_left_alone_once_it_is_closed(monkeypatch, how):
    """However a generation ends."""
    reader = Final()
    monkeypatch.setattr(transfers, "row_reader", lambda *_: reader)
    made = engine("herald-merged", 0.2, transfer="direct")
    stream = made.generate(prompts((60, 90)), RULE, stream=True)
    next(stream)
    if how == "failure":
        monkeypatch.setattr(made.session.retrieval, "_await", fail)
        results = [each for each in stream if hasattr(each, "finish_reason")]
        assert {each.error for each in results} == {"nobody waits"}
    made.close()
    stream.close()
    assert reader.closed


def fail(*_):
    raise EngineError("nobody waits")


@pytest.mark.parametrize(("selected", "candidates"), [(12, 12), (8, 12)])
def test_no_more_pools_are_held_than_planned(selected, candidates):
    """Also while an empty pool is made, where no slot goes on."""
    shape = shape_of(2, selected, candidates, transfer="direct")
    gc.collect()
    others = sum(a.nbytes for a in jax.live_arrays())
    peak = 0

    def watch(*told):
        nonlocal peak
        made = zeros(*told)
        peak = max(peak, sum(a.nbytes for a in jax.live_arrays()) - others)
        return made

    zeros, device_cache.zeros = device_cache.zeros, watch
    try:
        pair = Pair(shape, 1, seed=0)
        pair.transfers.pop().close()
        pair.caches.pop()
        peak = 0
        pair.denoise()
        pair.caches[0].reset_pool()
    finally:
        device_cache.zeros = zeros
    assert 0 < peak <= shape.pool_bytes + (0 if shape.refines else shape.pool_bytes)
    pair.close()


def test_a_device_that_cannot_read_host_memory_is_refused_by_name(monkeypatch):
    def refuse(*_):
        raise CudaError("no driver")

    monkeypatch.setattr(transfers, "row_reader", refuse)
    made = engine("herald-merged", 0.2, transfer="direct")
    with pytest.raises(EngineError, match=r"--transfer direct .*no driver.*--transfer full"):
        list(made.generate(prompts((60,)), RULE))


@pytest.mark.parametrize("method", ["dense", "mage", "infinigen"])
def test_a_transfer_is_refused_for_methods_that_send_nothing(method):
    with pytest.raises(ValueError, match=f"--transfer direct .*{method}, which sends no selected"):
        check_method(method, transfer="direct")
    check_method("auto", transfer="direct")
    assert engine(method, transfer="direct").sizing.transfer(method) is None


def test_an_unknown_transfer_is_refused():
    with pytest.raises(ValueError, match=r"transfer 'none' .*full, changes or direct"):
        engine("herald-draft", transfer="none")
