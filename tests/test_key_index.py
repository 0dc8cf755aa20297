"""The key index of the full pool: never stale, and what the keys-only scans read."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import TINY, answers, engine, prompts
from sessions import RULE, advance, choose_by_definition, start

import host_kernels
from herald_jax.cli import main
from herald_jax.engine.request import Request
from herald_jax.kv.full_pool import FullPool
from herald_jax.kv.rows import store_rows
from herald_jax.selection import SELECTORS, Merged
from host_kernels import reference

BLOCK, HEADS, DIM = TINY.block_size, TINY.num_kv_heads, TINY.head_dim
KINDS = ["int8", "int4"]
INDEXED = [name for name, made in SELECTORS.items() if made.indexed]


def assert_fresh(booking, rows: int, kind: str) -> None:
    """The index of the first rows is what the stored keys give, bit for bit."""
    assert len(booking.index) == len(booking.extents) > 0
    for extent, index in zip(booking.extents, booking.index, strict=True):
        wanted = np.zeros(host_kernels.index_shape(HEADS, rows, DIM, kind), np.uint8)
        reference.index_rows(
            [extent], [wanted], np.array([0], np.int32), np.array([rows], np.int32)
        )
        found, made = reference.unpack(index, DIM), reference.unpack(wanted, DIM)
        for got, want in zip(found, made, strict=True):
            np.testing.assert_array_equal(got[:, :rows], want[:, :rows])


@settings(max_examples=40, deadline=None)
@given(data=st.data(), bfloat=st.booleans(), kind=st.sampled_from(KINDS))
def test_every_write_brings_the_index_along(data, bfloat, kind):
    """Rows anywhere, overwritten or appended, in several slots at once, some of them gone."""
    import ml_dtypes

    dtype = np.dtype(ml_dtypes.bfloat16 if bfloat else np.float32)
    pool = FullPool(
        layers=2, kv_heads=HEADS, head_dim=DIM, dtype=dtype, nbytes=1 << 18, key_index=kind
    )
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    bookings = [pool.book(str(n), rows) for n, rows in enumerate((31, 32, 70))]
    for booking in bookings:
        for layer in range(2):
            booking.extents[layer][:] = 0
            booking.index[layer][:] = 0
    gone = pool.book("gone", 40)
    pool.release(gone)
    written = [[], [], []]
    for _ in range(3):
        first = [data.draw(st.integers(0, booking.rows - 1)) for booking in bookings]
        count = [
            data.draw(st.integers(0, min(33, b.rows - at)))
            for b, at in zip(bookings, first, strict=True)
        ]
        slots = [None, *bookings, gone]
        start = np.array([5, *first, 0], np.int32)
        counts = np.array([3, *count, 4], np.int32)
        k, v = rng.normal(size=(2, 5, 33, HEADS, DIM)).astype(dtype)
        for layer in range(2):
            store_rows(slots, layer, start, counts, k, v)
        for n in range(3):
            rows = slice(first[n], first[n] + count[n])
            written[n].append(np.arange(bookings[n].rows)[rows])
            for layer in range(2):
                stored = bookings[n].extents[layer][:, :, rows]
                wanted = np.stack([k, v], 1)[n + 1, :, : count[n]].transpose(2, 0, 1, 3)
                np.testing.assert_array_equal(stored, wanted)
    for booking, rows in zip(bookings, written, strict=True):
        touched = np.unique(np.concatenate(rows)).astype(int)
        for extent, index in zip(booking.extents, booking.index, strict=True):
            codes, scales = reference.unpack(index, DIM)
            want_codes, want_scales = reference.quantise_keys(extent[:, 0, touched], kind)
            np.testing.assert_array_equal(codes[:, touched], want_codes)
            np.testing.assert_array_equal(scales[:, touched], want_scales)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["merged", "herald-merged"])
def test_committed_rows_are_indexed_through_blocks_retirement_and_reuse(method, kind):
    """Prompts around chunk and tile edges; slots retired and refilled in others' old memory."""
    session = start(method, (112, 90), key_index=kind)
    given = [Request(f"r{n}", np.array(p, np.int32), 40) for n, p in enumerate(prompts((65, 31)))]
    for round_, replacement in enumerate([None, *given]):
        for _ in range(2):
            advance(session)
        for _, slot in session.batch.active():
            # The newest block reaches the host when the next retrieval begins.
            assert_fresh(slot.booking, slot.start - BLOCK, kind)
        session.full_pool.check_integrity()
        if replacement is not None:
            session.retire(round_ % 2)
            session.admit(round_ % 2, replacement)
            slot = session.batch.slots[round_ % 2]
            assert_fresh(slot.booking, slot.start, kind)
    assert session.full_pool.used == sum(s.booking.nbytes for _, s in session.batch.active())
    session.close()
    assert session.full_pool.free == session.full_pool.nbytes


@pytest.mark.parametrize("method", INDEXED)
def test_the_scan_reads_the_index_unless_told_not_to(method, monkeypatch):
    """And chooses what the definition says, whichever it reads."""
    calls = {"select": 0, "select_indexed": 0}
    choose = Merged.choose

    def checked(self, layer, queries, job):
        choose(self, layer, queries, job)
        wanted = choose_by_definition(job, layer, queries.q, queries.elsewhere)
        np.testing.assert_array_equal(job.indices[layer], wanted)

    monkeypatch.setattr(Merged, "choose", checked)
    for name in calls:
        original = getattr(host_kernels, name)

        def counted(*arguments, name=name, original=original, **rest):
            calls[name] += 1
            return original(*arguments, **rest)

        monkeypatch.setattr(host_kernels, name, counted)
    for key_index in (*KINDS, "none"):
        calls.update(select=0, select_indexed=0)
        made = engine(method, 0.25, max_batch=2, key_index=key_index)
        answers(made, prompts((60, 33)), RULE)
        scanned, idle = ("select_indexed", "select")[:: -1 if key_index == "none" else 1]
        assert calls[scanned] > 0
        assert calls[idle] == 0
        assert made.summary(1.0)["key_index"] == key_index
        assert made.session.full_pool.key_index == (None if key_index == "none" else key_index)


def test_half_batches_scan_their_own_part_of_the_index():
    given = prompts((150, 33, 90, 7))
    plain = answers(engine("herald-merged", 0.05, max_batch=4), given, RULE)
    split = engine("herald-merged", 0.05, max_batch=4, retrieval_streams=3)
    assert answers(split, given, RULE) == plain


@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_key_fails_one_request(kind):
    made = engine("herald-merged", 0.2, max_batch=2, key_index=kind)
    given = prompts((60, 50))
    good = answers(engine("herald-merged", 0.2, key_index=kind), given, RULE)
    results = {}
    for item in made.generate(given, RULE, stream=True):
        if hasattr(item, "finish_reason"):
            results[item.id] = item
        elif item.id == "0" and (slot := made.session.batch.slots[0]) is not None:
            bad = np.full((1, 1, HEADS, DIM), np.nan, np.float32)
            at, one = np.array([3], np.int32), np.array([1], np.int32)
            store_rows([slot.booking], 0, at, one, bad, bad)
    assert results["0"].finish_reason == "error"
    assert "not finite" in results["0"].error
    assert results["1"].token_ids == good["1"]


def test_the_plan_counts_the_index_and_admission_refuses_it():
    """Memory for the rows alone is not enough for one request with an index."""
    shapes = {}
    for key_index in (*KINDS, "none"):
        made = engine("herald-merged", 0.2, max_batch=1, key_index=key_index)
        plan = made.sizing.plan(made.sizing.shape("herald-merged", 192))
        shapes[key_index] = plan
        assert plan.host_bytes == plan.host_pool + plan.key_index + plan.staging
    assert shapes["none"].key_index == 0
    tiles = -(-192 // 32)
    sparse = TINY.num_layers - TINY.exact_layers
    assert shapes["int8"].key_index == sparse * HEADS * tiles * 32 * (DIM + 4)
    assert shapes["int4"].key_index == sparse * HEADS * tiles * 32 * (DIM // 2 + 4)
    room = shapes["none"].host_bytes
    answers(
        engine("herald-merged", 0.2, max_batch=1, host_memory=room, key_index="none"),
        prompts((60,)),
        RULE,
    )
    for kind in KINDS:
        tight = engine("herald-merged", 0.2, max_batch=1, host_memory=room, key_index=kind)
        assert tight.sizing.largest_batch("herald-merged", 192) == 0
        with pytest.raises(Exception, match="--host-memory"):
            list(tight.generate(prompts((60,)), RULE))


def test_the_command_refuses_other_indexes(capsys):
    for command in (["plan"], ["generate", "--prompt", "a"]):
        assert main([*command, "--key-index", "int2"]) == 2
        said = capsys.readouterr().err.strip().splitlines()
        assert len(said) == 1
        assert "--key-index" in said[0]
        assert all(kind in said[0] for kind in KINDS)
        assert "none" in said[0]


@pytest.mark.parametrize("method", ["dense", *(name for name in SELECTORS if name not in INDEXED)])
def test_an_index_for_what_reads_none_is_refused(method, capsys):
    """Not where it is the default, nor for auto, which may take a method that has one."""
    assert main(["generate", "--prompt", "a", "--method", method, "--key-index", "int8"]) == 2
    (said,) = capsys.readouterr().err.strip().splitlines()
    assert f"--key-index int8 does not go with --method {method}" in said
    assert "herald-merged" in said
