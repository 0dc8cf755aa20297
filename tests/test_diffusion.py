"""Decoding rules against plain loops, over random blocks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from herald_jax.diffusion import accept as rules
from herald_jax.diffusion.draft import draft
from herald_jax.diffusion.reference import accept_reference, filter_reference, quota_reference
from herald_jax.diffusion.sampling import Sampling, ban, filter_logits, greedy, sample
from herald_jax.diffusion.stop import end_of, find_stop, held_back, tokens_for


@pytest.mark.parametrize("block", [1, 4, 8, 32])
def test_quota_covers_the_block_in_t_steps(block):
    for steps in range(1, block + 1):
        due = [int(rules.quota(jnp.array([steps]), block, s)[0]) for s in range(steps)]
        assert due == quota_reference(steps, block)
        assert sum(due) == block


@pytest.mark.parametrize("strategy", ["dynamic", "static"])
@pytest.mark.parametrize("compare", ["gt", "ge"])
@pytest.mark.parametrize("fallback", ["most_confident", "leftmost"])
def test_accept_equals_the_plain_loop(strategy, compare, fallback):
    rng = np.random.default_rng(1)
    rule = rules.AcceptRule(strategy, compare, fallback)
    n, block = 400, 16
    masked = rng.random((n, block)) < rng.random((n, 1))
    # A coarse grid makes ties and exact hits of the threshold common.
    confidence = (rng.integers(0, 9, (n, block)) / 8).astype(np.float32)
    due = rng.integers(1, 6, n).astype(np.int32)
    threshold = (rng.integers(0, 9, n) / 8).astype(np.float32)
    got = np.asarray(
        rules.accept(
            jnp.asarray(masked), jnp.asarray(confidence), jnp.asarray(due), threshold, rule
        )
    )
    for i in range(n):
        want = accept_reference(masked[i], confidence[i], int(due[i]), float(threshold[i]), rule)
        np.testing.assert_array_equal(got[i], want)
    assert not (got & ~masked).any(), "a clean position was rewritten"
    assert got.any(axis=1)[masked.any(axis=1)].all(), "a block with masks did not move on"


def test_unknown_rule_names_the_choices():
    with pytest.raises(ValueError, match="dynamic, static"):
        rules.AcceptRule("sometimes")


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (1, 1.0), (5, 1.0), (0, 0.3), (7, 0.8)])
def test_filter_equals_the_plain_loop(top_k, top_p):
    rng = np.random.default_rng(2)
    logits = rng.normal(size=(3, 4, 50)).astype(np.float32) * 3
    got = filter_logits(
        jnp.asarray(logits), jnp.full(3, top_k, jnp.int32), jnp.full(3, top_p, jnp.float32)
    )
    for i in np.ndindex(3, 4):
        want = np.isfinite(filter_reference(logits[i], top_k, top_p))
        np.testing.assert_array_equal(np.isfinite(np.asarray(got[i])), want)


def _sampling(n, temperature=1.0, top_k=0, top_p=1.0, seed=7):
    return Sampling(
        jnp.full(n, temperature, jnp.float32),
        jnp.full(n, top_k, jnp.int32),
        jnp.full(n, top_p, jnp.float32),
        jnp.full(n, seed, jnp.uint32),
    )


def test_temperature_zero_and_top_one_are_greedy():
    logits = jax.random.normal(jax.random.key(0), (2, 8, 33))
    best, confidence = greedy(logits)
    block = jnp.array([0, 3])
    for settings in (_sampling(2, temperature=0.0), _sampling(2, top_k=1)):
        tokens, sure = sample(logits, settings, block, 0)
        np.testing.assert_array_equal(tokens, best)
        # Unfiltered confidence keeps top-1 decoding from being certain of everything.
        np.testing.assert_allclose(sure, confidence, rtol=1e-5)
    _, sure = sample(logits, _sampling(2, top_k=1), block, 0, confidence="filtered")
    np.testing.assert_allclose(sure, 1.0)


def test_draws_follow_the_distribution_and_do_not_depend_on_the_slot():
    logits = jnp.log(jnp.array([0.6, 0.3, 0.1]))
    rows = jnp.broadcast_to(logits, (1, 4000, 3))
    tokens, _ = sample(rows, _sampling(1), jnp.array([2]), 5)
    share = np.bincount(np.asarray(tokens[0]), minlength=3) / 4000
    np.testing.assert_allclose(share, [0.6, 0.3, 0.1], atol=0.03)
    wide = jnp.concatenate([jax.random.normal(jax.random.key(3), (2, 4000, 3)), rows])
    crowd, _ = sample(wide, _sampling(3), jnp.array([0, 1, 2]), 5)
    np.testing.assert_array_equal(crowd[2], tokens[0])
    other, _ = sample(rows, _sampling(1), jnp.array([2]), 6)
    assert (np.asarray(other) != np.asarray(tokens)).any()


def test_banned_token_is_never_proposed():
    logits = jnp.zeros((1, 4, 5)).at[..., 2].set(9.0)
    assert (greedy(ban(logits, 2))[0] != 2).all()


def test_draft_keeps_accepted_tokens():
    tokens, masked = jnp.array([[5, 6, 7]]), jnp.array([[False, True, False]])
    np.testing.assert_array_equal(draft(tokens, masked, jnp.array([[1, 2, 3]])), [[5, 2, 7]])


def test_end_counts_generated_tokens_only():
    assert end_of([4, 9, 4], [9], 10) == (1, "stop")
    assert end_of([9], [9], 10) == (0, "stop")
    assert end_of([4, 4, 9], [9], 2) == (2, "length")
    assert end_of([4, 4], [9], 3) == (2, None)


def test_stop_strings_and_held_back_text():
    assert find_stop("one two", ["two", "ne"]) == 1
    assert find_stop("one", ["two", ""]) is None
    assert held_back("say th", ["the"]) == 2
    assert held_back("caf\ufffd", ["x"]) == 1
    assert held_back("xyab\ufffd", ["ab\u00e9"]) == 3
    assert held_back("done", ["x"]) == 0
    assert tokens_for(3, [1, 2, 3], lambda ids: "ab" * len(ids)) == 2
