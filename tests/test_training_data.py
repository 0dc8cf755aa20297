"""Training batches: what is seen, scored and bound in them, read again by rules of their own."""

from __future__ import annotations

import random
import re
from itertools import product

import numpy as np
import pytest

pytest.importorskip("optax")

from training_reader import BLOCK, KEY, SHIPPED, answer_of, read

from herald_jax.training import curriculum, prose
from herald_jax.training.data import (
    ANSWER,
    END,
    FILL,
    KINDS,
    NONE,
    Stage,
    batch_shapes,
    bindings,
    make_batch,
)
from herald_jax.training.documents import Style, filler
from herald_jax.training.loss import layout
from herald_jax.training.tasks import TASKS, UNKNOWN
from herald_jax.training.vocabulary import EOS_ID, MASK_ID, Encoder

MIXED = Stage("mixed", 320, 2, 6, (2, 6), 4, curriculum.MIXED, curriculum.MIX)


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder.load(SHIPPED)


def test_training_never_sees_the_held_out_prose(encoder: Encoder) -> None:
    seen, held_out = set(prose.sentences()), set(prose.sentences(True))
    assert len(seen) > 5 * len(held_out) > 500
    assert not seen & held_out
    for name in ("tiny", "micro"):
        assert not any(stage.style.held_out for stage in curriculum.stages(name))
    assert all(task.style.held_out for task in TASKS.values())
    for trained in (True, False):
        style = Style(prose_share=1.0, held_out=not trained)
        made = filler(random.Random(0), 5000, encoder.cost, style)
        assert {s.atoms[0].strip() for s in made} <= (seen if trained else held_out)
    for index in range(4):
        for row in make_batch(encoder, MIXED, BLOCK, 5, index)["tokens"]:
            text = str(encoder.tokenizer.decode(row.tolist()))
            assert not any(sentence in text for sentence in held_out)


@pytest.fixture(scope="module")
def batches(encoder: Encoder) -> list[dict[str, np.ndarray]]:
    """Until every kind has occurred a few times, which depends on the prose as well."""
    made: list[dict[str, np.ndarray]] = []
    while len(made) < 8 or (min(counts(made)) < 8 and len(made) < 120):
        made.append(make_batch(encoder, MIXED, BLOCK, 7, len(made)))
    return made


def counts(batches: list[dict[str, np.ndarray]]) -> np.ndarray:
    """How many branches there are of each kind."""
    found = np.concatenate([batch["kinds"].ravel() for batch in batches])
    return np.bincount(found, minlength=len(KINDS))


def branches(batch: dict[str, np.ndarray], name: str) -> np.ndarray:
    """[rows, branches, S]"""
    part = batch[name][:, MIXED.context :]
    return part.reshape(MIXED.rows, MIXED.branches, MIXED.blocks * BLOCK)


def test_batches_are_deterministic_and_have_their_shapes(encoder, batches) -> None:
    again = make_batch(encoder, MIXED, BLOCK, 7, 3)
    for name, (shape, dtype) in batch_shapes(MIXED, BLOCK).items():
        assert (batches[3][name].shape, batches[3][name].dtype) == (shape, dtype)
        np.testing.assert_array_equal(batches[3][name], again[name])
        assert (batches[3][name] != batches[4][name]).any()
    assert (batches[3]["tokens"] != make_batch(encoder, MIXED, BLOCK, 8, 3)["tokens"]).any()


def test_one_block_is_decoded_and_the_rest_is_as_in_serving(batches) -> None:
    starts = set()
    for batch in batches:
        assert (batch["classes"][:, : MIXED.context] == NONE).all()
        assert (batch["tokens"][:, : MIXED.context] > MASK_ID).all()
        parts = [branches(batch, name) for name in ("tokens", "targets", "classes")]
        for row, number in product(range(MIXED.rows), range(MIXED.branches)):
            seen, clean, classes = (part[row, number] for part in parts)
            assert (clean != MASK_ID).all()
            scored = np.flatnonzero(classes)
            current = (seen == MASK_ID).argmax() // BLOCK
            assert set(scored // BLOCK) <= {current}
            np.testing.assert_array_equal(
                seen == MASK_ID, (classes != NONE) | (np.arange(len(seen)) // BLOCK > current)
            )
            np.testing.assert_array_equal(seen[seen != MASK_ID], clean[seen != MASK_ID])
            end = np.append(np.flatnonzero(clean == EOS_ID), len(clean))[0]
            kinds = np.select([scored < end, scored == end], [ANSWER, END], FILL)
            np.testing.assert_array_equal(classes[scored], kinds)
            starts.update(scored[:1] % BLOCK)
    assert len(starts) > BLOCK // 2


def test_branches_ask_what_their_kind_says(encoder, batches) -> None:
    assert min(counts(batches)) > 0
    for batch in batches:
        for row, number in product(range(MIXED.rows), range(MIXED.branches)):
            kind = KINDS[batch["kinds"][row, number]]
            context = encoder.decode(batch["tokens"][row, : MIXED.context])
            ids = branches(batch, "targets")[row, number]
            if kind in ("copy", "text"):
                pieces = np.lib.stride_tricks.sliding_window_view(
                    batch["tokens"][row, : MIXED.context], len(ids)
                )
                assert (pieces == ids).all(axis=1).any() == (kind == "copy")
                continue
            question, answer = re.fullmatch(
                r".*?(\n\nQuestion: .*\nAnswer:)(.*)", encoder.decode(ids), re.DOTALL
            ).groups()
            if kind == "continue":
                assert "How does this sentence go on?" in question
                assert answer.strip() in context
                continue
            expected = answer_of(context, question)
            assert answer.strip() == expected
            assert (kind == "absent") == (expected == UNKNOWN.strip())
            assert (kind == "several") == ("What belongs to" in question)
            assert (kind == "every") == ("What is every" in question)
            key = re.findall(KEY, question)[0]
            assert (kind == "reference") == (key in read(context)[1])
            if kind in ("one", "passage"):
                atoms = re.findall(r"[a-z]+|\d", expected)
                assert (kind == "passage") == (len(atoms) >= 12)


def test_bindings_are_visible_and_point_to_names(encoder, batches) -> None:
    _, visible = layout(MIXED.context, MIXED.branches, MIXED.blocks * BLOCK, BLOCK)
    kinds_bound = set()
    for batch, row in product(batches, range(MIXED.rows)):
        tokens, classes = batch["tokens"][row], batch["classes"][row]
        clean = np.where(classes, batch["targets"][row], tokens)
        bound = batch["bind"][row][batch["bound"][row]]
        assert len(bound) < bindings(MIXED)
        values: dict[tuple[int, ...], set[int]] = {}
        for query, first, last in bound[bound[:, 0].argsort()]:
            assert first < last < query
            assert visible[query, [first, last, query - 1]].all()
            name = tuple(tokens[first : last + 1].tolist())
            assert MASK_ID not in name
            assert re.fullmatch(KEY, encoder.decode(name).strip())
            if query < MIXED.context:
                values.setdefault(name, set()).add(int(tokens[query]))
                continue
            assert classes[query] in (ANSWER, END)
            size = MIXED.blocks * BLOCK
            kind = KINDS[batch["kinds"][row, (query - MIXED.context) // size]]
            kinds_bound.add(kind)
            text = encoder.decode([clean[query]])
            if kind in ("one", "passage", "every", "several") and text.strip(",\n"):
                assert int(clean[query]) in values[name] | {EOS_ID}
    assert kinds_bound == {"one", "passage", "every", "several", "reference", "absent"}


@pytest.mark.parametrize(("context", "count", "size"), [(64, 2, 64), (32, 3, 32), (96, 1, 96)])
def test_branches_see_the_context_and_themselves_only(context, count, size) -> None:
    positions, mask = layout(context, count, size, BLOCK)
    width = context + count * size
    assert mask.shape == (width, width)
    for i, j in product(range(width), repeat=2):
        mine, other = ((at - context) // size if at >= context else -1 for at in (i, j))
        here, there = (at if at < context else context + (at - context) % size for at in (i, j))
        assert positions[i] == here
        allowed = other in (-1, mine) and there // BLOCK <= here // BLOCK
        assert mask[i, j] == allowed
