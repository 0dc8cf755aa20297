"""Training: documents and batches by rule, bindings, a step that learns, and exact resuming."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("optax")

from herald_jax.models.config import ModelConfig
from herald_jax.training.data import (
    ANSWER,
    BRANCH_BLOCKS,
    COPY,
    END,
    FILL,
    NONE,
    Batch,
    Stage,
    batch_shapes,
    make_batch,
)
from herald_jax.training.evaluate import Sparsity, allowed_rows, decode
from herald_jax.training.loss import as_model, init_params, layout
from herald_jax.training.state import export, load_state, read_config, read_params
from herald_jax.training.tasks import Style, make_document, prompt_text
from herald_jax.training.train import Settings, Trainer
from herald_jax.training.vocabulary import EOS_ID, MASK_ID, Encoder, build_tokenizer

BLOCK = 32
SMALL = ModelConfig(
    family="sdar",
    vocab_size=1664,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=48,
    tie_word_embeddings=True,
    block_size=BLOCK,
    mask_token_id=MASK_ID,
    stop_token_ids=(EOS_ID,),
    exact_layers=1,
)
STAGE = Stage("test", 64, 2, 2, (1, 3), Style(adjectives=4, nouns=4))


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(build_tokenizer(documents=300))


@pytest.mark.parametrize("facts", [1, 5, 20])
@pytest.mark.parametrize("table_share", [0.0, 1.0])
def test_documents_are_deterministic_and_hold_their_answers(
    encoder: Encoder, facts: int, table_share: float
) -> None:
    style = Style(table_share=table_share)
    for seed in range(5):
        first, again = (
            make_document(random.Random(seed), 600, facts, encoder.cost, style) for _ in range(2)
        )
        assert first == again
        assert len(first.questions) == facts
        assert len({question.text for question in first.questions}) == facts
        assert len(encoder.tokenizer.encode(first.text).ids) <= 600
        for question in first.questions:
            key = question.text.split(" of the ")[1].removesuffix("?")
            after = first.text.split(f" {key}", 1)[1].split("\n")[0].split(".")[0]
            assert after.endswith(f" {question.answer}")
    assert first != make_document(random.Random(99), 600, facts, encoder.cost, style)


def test_too_many_facts_are_refused() -> None:
    with pytest.raises(ValueError, match="facts=5 is more than the 4 keys"):
        make_document(random.Random(0), 100, 5, style=Style(adjectives=2, nouns=2))


def test_atoms_and_text_have_the_same_tokens(encoder: Encoder) -> None:
    rng = random.Random(3)
    for _ in range(20):
        document = make_document(rng, 300, 6, encoder.cost)
        for sentence, asked in zip(
            [s for s in document.sentences if s.is_fact], document.questions, strict=True
        ):
            ids, _ = encoder.encode(sentence.question)
            assert encoder.tokenizer.encode(prompt_text("", asked.text)).ids == ids
            answer = encoder.encode(sentence.atoms[slice(*sentence.value)])[0]
            assert encoder.tokenizer.encode(f" {asked.answer}").ids == answer
        atoms = [atom for sentence in document.sentences for atom in sentence.atoms]
        assert encoder.tokenizer.encode(document.text).ids == encoder.encode(atoms)[0]


def test_every_listed_word_is_one_token(encoder: Encoder) -> None:
    from herald_jax.training import words

    for name in ("ADJECTIVES", "NOUNS", "VALUE_WORDS"):
        assert all(encoder.cost(f" {word}") == 1 for word in getattr(words, name))


def test_batches_are_deterministic_and_score_only_masked_tokens(encoder: Encoder) -> None:
    batch, again = (make_batch(encoder, STAGE, BLOCK, 7, 3) for _ in range(2))
    other = make_batch(encoder, STAGE, BLOCK, 7, 4)
    for name, (shape, dtype) in batch_shapes(STAGE, BLOCK).items():
        assert batch[name].shape == shape
        assert batch[name].dtype == dtype
        np.testing.assert_array_equal(batch[name], again[name])
    assert (batch["tokens"] != other["tokens"]).any()
    scored = batch["classes"] != NONE
    assert (batch["tokens"][scored] == MASK_ID).all()
    ends = np.isin(batch["classes"], (END, FILL))
    assert (batch["targets"][ends] == EOS_ID).all()
    words_scored = np.isin(batch["classes"], (ANSWER, COPY))
    assert (batch["targets"][words_scored] > MASK_ID).all()


def test_answers_start_anywhere_in_a_block(encoder: Encoder) -> None:
    starts = set()
    for index in range(40):
        classes = make_batch(encoder, STAGE, BLOCK, 1, index)["classes"][:, STAGE.context :]
        for branch in classes.reshape(-1, BRANCH_BLOCKS * BLOCK):
            where = np.nonzero(branch == ANSWER)[0]
            starts.update(where[:1] % BLOCK)
            # One block is decoded at a time.
            assert len({slot // BLOCK for slot in np.nonzero(branch)[0]}) <= 1
    assert len(starts) > BLOCK // 2


def test_bindings_point_from_values_and_slots_to_their_keys(encoder: Encoder) -> None:
    for index in range(5):
        batch = make_batch(encoder, STAGE, BLOCK, 2, index)
        for row in range(STAGE.rows):
            tokens, targets = batch["tokens"][row], batch["targets"][row]
            bound = batch["bind"][row][batch["bound"][row]]
            values: dict[tuple[int, int], set[int]] = {}
            for query, first, last in bound[bound[:, 0] < STAGE.context]:
                assert first < last < query
                values.setdefault((tokens[first], tokens[last]), set()).add(int(tokens[query]))
            slots = bound[bound[:, 0] >= STAGE.context]
            for query, first, last in slots:
                assert tokens[query] == MASK_ID
                key = (tokens[first], tokens[last])
                if batch["classes"][row, query] == ANSWER:
                    assert targets[query] in values[key]


def test_branches_do_not_see_each_other() -> None:
    positions, mask = layout(64, 2, 64, BLOCK)
    first, second = slice(64, 128), slice(128, 192)
    assert not mask[first, second].any()
    assert not mask[second, first].any()
    assert not mask[:64, 64:].any()
    assert mask[64:, :64].all()
    assert positions[64] == positions[128] == 64
    for i, j in np.random.default_rng(0).integers(0, 128, (200, 2)):
        assert mask[i, j] == (j // BLOCK <= i // BLOCK)


def _trainer(out: Path, steps: int) -> Trainer:
    settings = Settings(steps=steps, seconds=1e9, rate=3e-3, warmup=5, decay_share=1e-6)
    return Trainer(SMALL, [STAGE], settings, out)


def _advance(trainer: Trainer, batches: list[Batch]) -> None:
    for batch in batches:
        trainer.update(0, batch)


def test_steps_reduce_the_loss_and_resuming_is_exact(encoder: Encoder, tmp_path: Path) -> None:
    batches = [make_batch(encoder, STAGE, BLOCK, 0, index) for index in range(3)] * 17
    straight = _trainer(tmp_path / "straight", 100)
    _advance(straight, batches)
    straight.note()
    history = straight.progress.history
    assert history[-1]["answer_loss"] < 0.7 * history[0]["answer_loss"]
    assert history[-1]["binding_loss"] < history[0]["binding_loss"]

    half = _trainer(tmp_path / "half", 100)
    half.programs = straight.programs
    _advance(half, batches[:25])
    half.save()
    resumed = _trainer(tmp_path / "half", 100)
    resumed.programs = straight.programs
    assert resumed.resume()
    assert resumed.progress == half.progress
    _advance(resumed, batches[25:])
    resumed.note()
    assert resumed.progress.history == history
    for a, b in zip(jax.tree.leaves(straight.params), jax.tree.leaves(resumed.params), strict=True):
        np.testing.assert_array_equal(a, b)


def test_state_of_another_network_is_refused(tmp_path: Path) -> None:
    _trainer(tmp_path, 10).save()
    other = replace(SMALL, num_layers=1)
    with pytest.raises(ValueError, match="another network"):
        load_state(tmp_path, init_params(other, 0))


def test_export_round_trip(tmp_path: Path) -> None:
    params = init_params(SMALL, 1)
    export(tmp_path, SMALL, params)
    config, loaded = read_config(tmp_path), read_params(tmp_path)
    assert config.exact_layers == 1
    assert config.stop_token_ids == (EOS_ID,)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(loaded), strict=True):
        np.testing.assert_array_equal(np.asarray(a, jnp.bfloat16), np.asarray(b, jnp.bfloat16))


def test_decoding_equals_uncached_decoding() -> None:
    block = 8
    config = replace(SMALL, block_size=block)
    model = as_model(config, init_params(config, 2), jnp.float32)
    whole = jax.jit(lambda tokens: model(tokens[None])[0])
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, 1600, length).tolist() for length in (7, 16, 19)]
    answers, _ = decode(config, model, prompts, blocks=2, threshold=0.9)
    for prompt, answer in zip(prompts, answers, strict=True):
        start = len(prompt) // block * block
        end = start + 2 * block
        tokens = np.full(32, MASK_ID)
        tokens[: len(prompt)] = prompt
        masked = np.arange(len(tokens)) >= len(prompt)
        for begin in (start, start + block):
            here = np.arange(begin, begin + block)
            while masked[here].any():
                # Later blocks are there, as masks, but no earlier one attends them.
                probability = np.array(jax.nn.softmax(whole(jnp.asarray(tokens))[here]))
                probability[:, MASK_ID] = 0
                sure = np.where(masked[here], probability.max(-1), -1)
                accept = masked[here] & ((sure > 0.9) | (sure == sure.max()))
                tokens[here[accept]] = probability.argmax(-1)[accept]
                masked[here[accept]] = False
        expected = tokens[len(prompt) : end].tolist()
        if EOS_ID in expected:
            expected = expected[: expected.index(EOS_ID)]
        assert answer == expected


def test_sparse_rows_keep_the_exact_layers_and_the_last_block() -> None:
    start = np.array([320, 640])
    rows = allowed_rows(SMALL, 704, start, Sparsity(1, 0.1), np.random.default_rng(0))
    assert rows.shape == (2, 2, 2, 704)
    for slot, begin in enumerate(start):
        assert rows[0, slot, :, :begin].all()
        assert rows[1, slot, :, begin - BLOCK : begin].all()
        assert not rows[:, slot, :, begin:].any()
        share = rows[1, slot, :, : begin - BLOCK].mean()
        assert 0.03 < share < 0.2
