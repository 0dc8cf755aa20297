"""Training: how weights begin, what a step computes, stages, exact resuming, export, commands."""

from __future__ import annotations

import shutil
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("optax")

from precision import near
from training_reader import BLOCK, SHIPPED

from checkpoints_convert import convert
from herald_jax import checkpoint
from herald_jax.models.config import ModelConfig
from herald_jax.training import curriculum, trainer
from herald_jax.training.data import ANSWER, END, KINDS, Batch, Stage, make_batch
from herald_jax.training.documents import Style
from herald_jax.training.loss import (
    Start,
    as_model,
    binding_heads,
    init_params,
    layout,
    loss_and_metrics,
)
from herald_jax.training.settings import Settings
from herald_jax.training.state import export, load_state
from herald_jax.training.trainer import Trainer
from herald_jax.training.vocabulary import EOS_ID, MASK_ID, Encoder

SMALL = ModelConfig(
    family="sdar",
    vocab_size=4096,
    hidden_size=32,
    num_layers=3,
    num_heads=8,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=48,
    tie_word_embeddings=True,
    block_size=BLOCK,
    mask_token_id=MASK_ID,
    stop_token_ids=(EOS_ID,),
    exact_layers=1,
)
STAGE = Stage("first", 64, 2, 2, (1, 3), style=Style(adjectives=4, nouns=4))
LAST = replace(STAGE, name="last", supervised=False, mix=(("one", 0.8), ("text", 0.2)))
# Far away, so that the rate depends on the steps alone.
ENDLESS = 1e12


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder.load(SHIPPED)


@pytest.fixture(scope="module")
def batch(encoder: Encoder) -> Batch:
    return make_batch(encoder, LAST, BLOCK, 3, 0)


@pytest.mark.slow
def test_heads_begin_tied_and_copying() -> None:
    start = Start()
    params = jax.device_get(init_params(SMALL, 5))
    embedding = params["embedding"]["embedding"]
    axis = embedding[MASK_ID] / np.linalg.norm(embedding[MASK_ID])
    assert np.std(embedding[MASK_ID]) == pytest.approx(start.mask, rel=0.5)
    assert np.std(embedding[2:]) == pytest.approx(start.embedding, rel=0.05)
    bare = replace(start, tied=0, outputs=1.0, bound=1.0, copied=0.0)
    plain = jax.device_get(init_params(SMALL, 5, bare))
    width = SMALL.head_dim
    for index, layer in params["layers"].items():
        attention, before = layer["attention"], plain["layers"][index]["attention"]
        np.testing.assert_allclose(attention["q_norm"]["scale"], start.qk_scale)
        for head in range(SMALL.num_heads):
            mine = slice(head * width, (head + 1) * width)
            shared = head // SMALL.group_size
            theirs = slice(shared * width, (shared + 1) * width)
            q, o = attention["q"]["kernel"][:, mine], attention["o"]["kernel"][mine]
            if index == 0 or head % SMALL.group_size >= start.tied:
                bound = index == 0 and head in binding_heads(SMALL)
                factor = start.bound if bound else start.outputs
                np.testing.assert_array_equal(q, before["q"]["kernel"][:, mine])
                np.testing.assert_allclose(o, factor * before["o"]["kernel"][mine], rtol=1e-6)
                continue
            k = attention["k"]["kernel"][:, theirs]
            off = np.eye(SMALL.hidden_size) - np.outer(axis, axis)
            np.testing.assert_allclose(off @ q, off @ k, atol=1e-5)
            np.testing.assert_allclose(axis @ q, -(axis @ k), atol=1e-5)
            v = attention["v"]["kernel"][:, theirs]
            np.testing.assert_allclose(o, start.copied * v.T, rtol=1e-6)


def objective(batch: Batch, bind_weight: float):
    static = {"config": SMALL, "context": LAST.context, "branches": LAST.branches}
    static |= {"dtype": jnp.float32, "attention": "xla"}
    return jax.jit(partial(loss_and_metrics, batch=batch, bind_weight=bind_weight, **static))


@pytest.mark.slow
def test_the_loss_is_that_of_serving_each_branch(batch: Batch) -> None:
    """Context and one branch at a time through the plain network, averaged by loops."""
    params = init_params(SMALL, 1)
    total, metrics = jax.device_get(objective(batch, 0.5)(params))
    model = jax.jit(as_model(SMALL, params, jnp.float32))
    context, size = LAST.context, LAST.blocks * BLOCK
    answers, weights, ends, fills = [], [], [], []
    right: dict[str, list[bool]] = {kind: [] for kind in KINDS}
    for row in range(LAST.rows):
        for number in range(LAST.branches):
            where = slice(context + number * size, context + (number + 1) * size)
            tokens = [*batch["tokens"][row, :context], *batch["tokens"][row, where]]
            logits = np.asarray(model(jnp.array([tokens]))[0, context:], np.float64)
            losses = (
                np.log(np.exp(logits).sum(-1)) - logits[range(size), batch["targets"][row, where]]
            )
            kind = KINDS[batch["kinds"][row, number]]
            classes = batch["classes"][row, where]
            asked = np.flatnonzero(classes == ANSWER)
            for at in asked:
                answers.append(losses[at])
                weights.append((0.5 if kind == "text" else 1.0) / len(asked) ** 0.5)
                right[kind].append(logits[at].argmax() == batch["targets"][row, where][at])
            ends += list(losses[classes == END])
            fills += list(losses[classes > END])
    answered = np.average(answers, weights=weights)
    assert metrics["answer_loss"] == pytest.approx(answered, rel=near(1e-4))
    assert metrics["end_loss"] == pytest.approx(np.mean(ends) if ends else 0, rel=near(1e-4))
    for kind, found in right.items():
        assert metrics[kind] == pytest.approx(np.mean(found) if found else -1)
    binding = binding_by_loops(params, batch)
    assert metrics["binding_loss"] == pytest.approx(binding, rel=near(1e-4))
    whole = metrics["answer_loss"] + 0.5 * metrics["end_loss"] + 0.5 * binding
    whole += 0.05 * (np.mean(fills) if fills else 0)
    assert total == pytest.approx(whole, rel=near(1e-4))


def binding_by_loops(params, batch: Batch) -> float:
    """Three heads of the first layer: first token, last token of the name, the token before."""
    model = as_model(SMALL, params, jnp.float32)
    places, visible = layout(LAST.context, LAST.branches, LAST.blocks * BLOCK, BLOCK)
    found: dict[tuple[bool, int], list[float]] = {}
    for row, tokens in enumerate(batch["tokens"]):
        q, k, _ = model.layers[0].pre(model.embed(jnp.array([tokens])), jnp.array([places]))
        for query, first, last in batch["bind"][row][batch["bound"][row]]:
            for place, (head, target) in enumerate(
                zip(binding_heads(SMALL), (first, last, query - 1), strict=True)
            ):
                keys = k[0, :, head // SMALL.group_size]
                scores = np.asarray(keys @ q[0, query, head], np.float64) / SMALL.head_dim**0.5
                mass = np.exp(scores)
                loss = np.log(mass[visible[query]].sum()) - scores[target]
                found.setdefault((query < LAST.context, place), []).append(loss)
    return sum(np.mean(losses) for losses in found.values()) / 6


def made(out: Path, steps: int, plan=(STAGE, LAST), **options) -> Trainer:
    settings = {"steps": steps, "seconds": ENDLESS, "rate": 3e-3, "warmup": 5, "fade": 4}
    return Trainer(SMALL, list(plan), Settings(**settings | options), out)


@pytest.mark.slow
def test_a_step_lowers_the_loss(batch: Batch, tmp_path: Path) -> None:
    run = made(tmp_path, 100, warmup=1)
    value = objective(batch, 0.5)
    before, _ = value(run.params)
    run.update(0, batch)
    after, _ = value(run.params)
    assert after < before
    for _ in range(30):
        run.update(0, batch)
    last, metrics = value(run.params)
    assert last < 0.5 * before
    assert metrics["one"] > 0.5


def inline(encoder: Encoder, asked: list[tuple[str, int]]):
    def submit(stage: Stage, block: int, seed: int, index: int) -> Future[Batch]:
        asked.append((stage.name, index))
        future: Future[Batch] = Future()
        future.set_result(make_batch(encoder, stage, block, seed, index))
        return future

    return submit


def test_a_stopped_run_goes_on_as_if_it_had_not(encoder, monkeypatch, tmp_path) -> None:
    """Stopped between looks at the metrics, while batches of the stage before are under way."""
    monkeypatch.setattr(trainer, "WINDOW", 4)
    monkeypatch.setattr(trainer, "LOG_EVERY", 3)
    plan = (replace(STAGE, goals=(("one", 0.0),)), LAST)
    straight, asked = made(tmp_path / "straight", 15, plan), []
    straight.run(inline(encoder, asked), ahead=4)
    assert straight.progress.reached == 1
    assert [index for _, index in asked[:15]] == list(range(15))
    assert straight.progress.opened < [name for name, _ in asked].index("last") <= 11

    stopped_at = straight.progress.opened + 1
    half = made(tmp_path / "half", 15, plan)
    half.programs = straight.programs
    update = half.update

    def watched(number: int, batch: Batch) -> None:
        update(number, batch)
        half.stopping = half.progress.step == stopped_at

    monkeypatch.setattr(half, "update", watched)
    half.run(inline(encoder, []), ahead=4)
    assert half.progress.step == stopped_at
    assert half.progress.unread
    resumed = made(tmp_path / "half", 15, plan)
    resumed.programs = straight.programs
    assert resumed.resume()
    assert resumed.progress == half.progress
    resumed.run(inline(encoder, []), ahead=2)
    assert replace(resumed.progress, seconds=0, chosen=[]) == replace(
        straight.progress, seconds=0, chosen=[]
    )
    for name in ("params", "moments"):
        both = [jax.tree.leaves(getattr(run, name)) for run in (straight, resumed)]
        for a, b in zip(*both, strict=True):
            np.testing.assert_array_equal(a, b)


def look(run: Trainer, number: int, count: int, **accuracies: float) -> None:
    """As if ``count`` batches of a stage had been trained on."""
    names = ("answer_loss", "end_loss", "binding_loss", "end", *KINDS)
    metrics = dict.fromkeys(names, -1.0) | accuracies
    run.progress.step += count
    run.pending = [(number, metrics)] * count
    run.note()


def test_stages_open_by_goals_or_patience(tmp_path: Path) -> None:
    goals = (("one", 0.9), ("copy", 0.5))
    plan = [replace(STAGE, goals=goals, patience=200)] * 2 + [LAST]
    run = made(tmp_path, 10_000, plan)
    look(run, 0, 49, one=1.0, copy=1.0)
    assert run.progress.reached == 0  # too few to tell
    look(run, 0, 50, one=1.0, copy=0.4)
    assert run.progress.reached == 0
    look(run, 0, 40, one=1.0)  # batches without copies say nothing of them
    assert run.progress.reached == 0
    look(run, 0, 40, one=1.0, copy=0.6)
    assert (run.progress.reached, run.progress.opened) == (1, 179)
    assert run.progress.recent == []
    look(run, 0, 300, one=1.0, copy=1.0)  # rehearsals of an earlier stage
    assert run.progress.reached == 1
    look(run, 1, 60, one=0.75, copy=0.1)  # patience is over, but short answers are mostly wrong
    assert run.progress.reached == 1
    assert run.progress.released == -1
    assert run.bind_weight() == run.settings.bind_weight
    look(run, 1, 60, one=0.85, copy=0.1)
    assert run.progress.reached == 2
    assert run.progress.released == run.progress.step  # nothing beyond is supervised
    weights = []
    for _ in range(6):
        weights.append(run.bind_weight() / run.settings.bind_weight)
        run.progress.step += 1
    assert weights == [1, 0.75, 0.5, 0.25, 0, 0]
    look(run, 2, 80, one=1.0)
    assert run.progress.reached == 2  # there is no further one
    assert run.progress.history[-1].keys() >= {"step", "stage", "end", *KINDS}
    assert [row["stage"] for row in run.progress.history[3:6]] == [0, 0, 1]


def test_rate_and_choice_of_stages(tmp_path: Path) -> None:
    run = made(tmp_path, 1000, rate=1.0, warmup=10, decay_share=0.5)
    rates = []
    for step in (0, 4, 9, 500, 750, 1000):
        run.progress.step = step
        rates.append(run.rate())
    assert rates == pytest.approx([0.1, 0.5, 1.0, 1.0, 0.51, 0.02])
    plan = curriculum.stages("tiny")
    chosen = [curriculum.choose(plan, 6, 0, index) for index in range(2000)]
    assert set(chosen) == {2, 3, 4, 5, 6}
    assert np.mean(np.array(chosen) == 6) == pytest.approx(0.8, abs=0.03)
    assert {curriculum.choose(plan, 1, 0, index) for index in range(99)} == {1}


def test_an_exported_network_computes_the_same_when_converted(batch, tmp_path: Path) -> None:
    params = init_params(SMALL, 1)
    export(tmp_path / "hf", SMALL, params)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SHIPPED.parent / name, tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "out")
    config, model = checkpoint.load(tmp_path / "out", dtype="float32")
    for name in ("block_size", "mask_token_id", "stop_token_ids", "exact_layers", "num_heads"):
        assert getattr(config, name) == getattr(SMALL, name)
    tokens = jnp.asarray(batch["tokens"][:, :64])
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    wanted = jax.jit(as_model(SMALL, rounded, jnp.float32))(tokens)
    np.testing.assert_allclose(jax.jit(model)(tokens), wanted, atol=1e-5)


def test_states_of_other_runs_are_refused(tmp_path: Path) -> None:
    run = made(tmp_path, 10)
    run.progress.reached = 1
    run.save()
    with pytest.raises(ValueError, match="belongs to another network; use another --model"):
        load_state(tmp_path, init_params(replace(SMALL, num_layers=1), 0))
    with pytest.raises(ValueError, match="belongs to another curriculum"):
        made(tmp_path, 10, [STAGE]).resume()
    with pytest.raises(ValueError, match="belongs to another curriculum"):
        made(tmp_path, 10, [replace(stage, rows=stage.rows + 1) for stage in run.plan]).resume()
    for damaged in (b"PK\3\4 not a state", b"text", b""):
        (tmp_path / "state.npz").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"state\.npz is no state of a training run"):
            run.resume()
