"""Importance and the best rows by kernels, interpreted, against the plain forms."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from herald_jax.engine.choice_kernel import best_of
from herald_jax.models.attention import importance, pack
from herald_jax.models.importance_kernel import importance_of_rows
from tests.precision import near


@pytest.mark.parametrize(("positions", "keys"), [(1, 1), (8, 33), (9, 64), (20, 70)])
def test_importance_is_that_of_all_probabilities(positions: int, keys: int) -> None:
    rng = np.random.default_rng(keys)
    q = jnp.asarray(rng.standard_normal((3, positions, 4, 16)), jnp.float32)
    k = rng.standard_normal((3, keys, 2, 16)).astype(np.float32)
    lengths = np.array([keys, max(1, keys // 2), 0], np.int32)
    voters = rng.random((3, positions)) < 0.5
    voters[0] = True
    wanted = importance(q, jnp.asarray(k), lengths, jnp.asarray(voters))
    k[1, lengths[1] :] = np.nan
    votes = voters / np.maximum(voters.sum(1, keepdims=True), 1)
    votes = jnp.repeat(jnp.asarray(votes, jnp.float32), 2, axis=1)
    packed, keys_ = pack(q, 2), jnp.asarray(k)
    scores = jnp.einsum("nshd,nrhd->nshr", packed, jnp.nan_to_num(keys_)) / 4
    seen = jnp.arange(keys) < lengths[:, None, None, None]
    known = jax.nn.logsumexp(jnp.where(seen, scores, -jnp.inf), axis=-1)
    for mass in (None, jnp.where(jnp.isfinite(known), known, 0)):
        found = importance_of_rows(packed, keys_, lengths, votes, mass, (16, 16))
        np.testing.assert_allclose(found, wanted, atol=near(1e-6), rtol=1e-4)


def plain(scores: np.ndarray, count: int, valid: int, sinks: int) -> list[int]:
    """By a stable sort."""
    value = scores[:valid].copy()
    value[:sinks] = np.inf
    return sorted(np.argsort(-value, kind="stable")[: min(count, valid)].tolist())


@pytest.mark.parametrize(("rows", "capacity"), [(1, 1), (16, 7), (100, 40), (129, 129)])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("sinks", [0, 2])
def test_best_rows_are_those_of_a_sort(rows: int, capacity: int, tied: bool, sinks: int) -> None:
    rng = np.random.default_rng(rows + tied)
    scores = rng.random((4, 2, rows)).astype(np.float32)
    if tied:
        scores = np.round(scores * 4) / 4
    counts = np.array([capacity, max(1, capacity // 2), 1, capacity], np.int32)
    valid = np.array([rows, rows, max(1, rows // 3), 0], np.int32)
    found = np.asarray(best_of(scores, counts, valid, capacity, sinks=sinks))
    for n, head in np.ndindex(4, 2):
        taken = min(counts[n], valid[n])
        wanted = plain(scores[n, head], counts[n], valid[n], sinks)
        assert found[n, head, :taken].tolist() == wanted
        assert len(set(found[n, head].tolist())) == capacity, "no row may stand twice"
        assert ((found[n, head] >= 0) & (found[n, head] < rows)).all()


def test_scores_that_are_no_numbers_count_as_zero() -> None:
    scores = np.array([[[0.5, np.nan, 0.25, np.nan, 0.75]]], np.float32)
    one = np.ones(1, np.int32)
    assert best_of(scores, 3 * one, 5 * one, 3, sinks=0).tolist() == [[[0, 2, 4]]]
