"""Greedy tokens without logits against greedy tokens from logits."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from networks import TINY, answers, make_model, prompts

from herald_jax import Engine, EngineConfig, GenerationConfig
from herald_jax.diffusion.sampling import ban, greedy
from herald_jax.engine import step_programs
from herald_jax.models import head_kernel

SIZES = (16, 64, 32)


def case(rows: int, vocabulary: int, tied: bool, dtype: str = "float32"):
    """x, head and the rows that are needed, drawn at random."""
    rng = np.random.default_rng(rows + vocabulary)
    x = jnp.asarray(rng.standard_normal((rows, 64)), dtype)
    shape = (vocabulary, 64) if tied else (64, vocabulary)
    head = jnp.asarray(rng.standard_normal(shape) / 8, dtype)
    return x, head, jnp.asarray(rng.random(rows) < 0.6)


def exact(x: jax.Array, head: jax.Array, tied: bool, banned: int | None):
    """Token and probability from all logits."""
    logits = jnp.matmul(x, head.T if tied else head).astype(jnp.float32)[None]
    tokens, sure = greedy(logits if banned is None else ban(logits, banned))
    return tokens[0], sure[0]


@pytest.mark.parametrize(
    ("rows", "vocabulary", "tied", "banned"),
    [
        (1, 40, False, None),
        (16, 64, True, 3),
        (17, 65, False, -1),
        (17, 65, True, -1),
        (50, 200, False, 3),
        (50, 200, True, None),
    ],
)
def test_needed_rows_get_what_all_logits_say(
    rows: int, vocabulary: int, tied: bool, banned: int | None
) -> None:
    x, head, needed = case(rows, vocabulary, tied)
    banned = vocabulary - 1 if banned == -1 else banned
    tokens, sure = head_kernel.greedy_rows(x, head, needed, banned=banned, tied=tied, sizes=SIZES)
    wanted, probability = exact(x, head, tied, banned)
    np.testing.assert_array_equal(tokens, jnp.where(needed, wanted, 0))
    np.testing.assert_allclose(sure, jnp.where(needed, probability, 0), rtol=1e-4)


def test_equal_logits_go_to_the_lowest_token_across_tiles() -> None:
    x = jnp.ones((3, 64))
    head = jnp.zeros((64, 200)).at[:, jnp.array([70, 130, 199])].set(1.0)
    tokens, sure = head_kernel.greedy_rows(
        x, head, jnp.ones(3, bool), banned=None, tied=False, sizes=SIZES
    )
    assert tokens.tolist() == [70] * 3
    np.testing.assert_allclose(sure, 1 / 3, rtol=1e-5)


@pytest.mark.parametrize("needs", [0, 40])
def test_none_and_all(needs: int) -> None:
    x, head, _ = case(40, 100, False)
    needed = jnp.arange(40) < needs
    tokens, sure = head_kernel.greedy_rows(x, head, needed, banned=None, tied=False, sizes=SIZES)
    wanted, probability = exact(x, head, False, None)
    np.testing.assert_array_equal(tokens, jnp.where(needed, wanted, 0))
    np.testing.assert_allclose(sure, jnp.where(needed, probability, 0), rtol=1e-4)


def test_numbers_that_are_none_are_told_and_stay_in_their_row() -> None:
    x, head, _ = case(20, 100, False)
    x = x.at[5].set(jnp.nan)
    sure = np.asarray(
        head_kernel.greedy_rows(x, head, jnp.ones(20, bool), banned=None, tied=False, sizes=SIZES)[
            1
        ]
    )
    assert np.isnan(sure[5])
    assert np.isfinite(np.delete(sure, 5)).all()


@pytest.mark.parametrize("shifts", [False, True])
@pytest.mark.parametrize("rule", ["sdar", "llada2.1"])
def test_generation_is_the_same_with_and_without_logits(
    shifts: bool, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shifts and rule == "llada2.1":
        pytest.skip("no family edits and shifts its logits")
    config = dataclasses.replace(
        TINY, hidden_size=64, num_layers=2, shifts_logits=shifts, tie_word_embeddings=shifts
    )
    model = make_model(config, 1)
    given, generation = prompts([13, 24], config), GenerationConfig(max_new_tokens=20, rule=rule)

    def run() -> dict[str, list[int]]:
        options = EngineConfig(method="dense", max_batch=2, max_context=64, prefill_chunk=32)
        options = dataclasses.replace(options, warm_up=False)
        with Engine(config, model, None, options) as made:
            return answers(made, given, generation)

    wanted = run()
    monkeypatch.setattr(step_programs, "applies", lambda *_: True)
    assert run() == wanted
