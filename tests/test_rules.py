"""Generation rules over random blocks, against plain loops; and how options name them."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from herald_jax import GenerationConfig
from herald_jax.diffusion.accept import AcceptRule, accept
from herald_jax.diffusion.block import Block, Limits, Proposal, advance
from herald_jax.diffusion.edit import Editing, choose_edits
from herald_jax.diffusion.reference import (
    accept_reference,
    block_reference,
    edit_reference,
    entropy_reference,
)
from herald_jax.diffusion.rules import CHOICES, RULES, Rule, rule_named
from herald_jax.diffusion.sampling import Sampling, entropy, measured, sample

DOCS = Path(__file__).parents[1] / "docs"
BLOCK, SLOTS, MASK = 12, 300, 9

ACCEPTING = [
    AcceptRule(strategy, compare, fallback, clamp, small)
    for strategy in CHOICES["strategy"]
    for compare in (CHOICES["compare"] if strategy == "dynamic" else ("gt",))
    for fallback in (CHOICES["fallback"] if strategy == "dynamic" else ("most_confident",))
    for clamp in (True, False)
    for small in (None, 4, 5)
]


def coarse(rng, *shape, steps=8):
    """Numbers in [0, 1] from a grid, so that ties and hits of a threshold are common."""
    return (rng.integers(0, steps + 1, shape) / steps).astype(np.float32)


@pytest.mark.parametrize(
    "rule", ACCEPTING, ids=lambda rule: "-".join(map(str, vars(rule).values()))
)
def test_accept_equals_the_plain_loop(rule):
    rng = np.random.default_rng(4)
    masked = rng.random((SLOTS, BLOCK)) < rng.random((SLOTS, 1))
    confidence, spread = coarse(rng, SLOTS, BLOCK), coarse(rng, SLOTS, BLOCK)
    if rule.compare == "near":
        # Some closer to one another than 1e-5, some not.
        confidence += rng.choice([0, 5e-6, 2e-5], (SLOTS, BLOCK)).astype(np.float32)
    due = rng.integers(1, 6, SLOTS).astype(np.int32)
    threshold, bound = coarse(rng, SLOTS), coarse(rng, SLOTS) * 3
    got = np.asarray(accept(masked, confidence, due, threshold, rule, spread, bound))
    for i in range(SLOTS):
        want = accept_reference(
            masked[i], confidence[i], int(due[i]), threshold[i], rule, spread[i], bound[i]
        )
        np.testing.assert_array_equal(got[i], want, err_msg=f"{masked[i]} {confidence[i]} {due[i]}")
    np.testing.assert_array_equal(got.any(axis=1), masked.any(axis=1))
    rewritten = (got & ~masked).any()
    unclamped = not rule.clamp_quota and rule.strategy != "entropy_bounded"
    assert rewritten == unclamped, "known positions are rewritten by an unclamped quota alone"


def test_edits_equal_the_plain_loop():
    rng = np.random.default_rng(5)
    masked = rng.random((SLOTS, BLOCK)) < rng.random((SLOTS, 1)) * 0.5
    fixed = ~masked & (rng.random((SLOTS, BLOCK)) < 0.3)
    tokens, proposal = rng.integers(0, 3, (2, SLOTS, BLOCK))
    confidence, threshold = coarse(rng, SLOTS, BLOCK), coarse(rng, SLOTS)
    rounds, post = rng.integers(0, 4, (2, SLOTS))
    settled = rng.random(SLOTS) < 0.2
    got, memory = choose_edits(
        Editing(jnp.asarray(fixed), jnp.asarray(rounds), jnp.asarray(settled)),
        *map(jnp.asarray, (tokens, masked, proposal, confidence, threshold, post)),
    )
    for i in range(SLOTS):
        clean = not masked[i].any()
        want = edit_reference(
            tokens[i], masked[i], fixed[i], proposal[i], confidence[i], threshold[i]
        )
        if settled[i] or (clean and rounds[i] + 1 > post[i]):
            want[:] = False
        np.testing.assert_array_equal(np.asarray(got[i]), want)
        assert memory.rounds[i] == rounds[i] + clean
        assert memory.settled[i] == (settled[i] or (clean and not want.any()))


def limits_of(rule: Rule, slots: int) -> Limits:
    def full(value, dtype):
        return jnp.full(slots, value, dtype)

    return Limits(
        full(rule.threshold, jnp.float32),
        full(rule.steps or BLOCK, jnp.int32),
        full(rule.edit_threshold or 0.0, jnp.float32),
        full(rule.max_post_steps, jnp.int32),
        full(rule.entropy_bound, jnp.float32),
    )


WHOLE = {
    **{name: RULES[name] for name in RULES},
    "few post steps": dataclasses.replace(RULES["llada2.1-speed"], max_post_steps=2),
    "no post steps": dataclasses.replace(RULES["llada2.1-speed"], max_post_steps=0),
    "static steps": dataclasses.replace(RULES["sdar-static"], steps=5),
    "dynamic steps": dataclasses.replace(RULES["sdar"], steps=5, threshold=0.5),
    "edits and steps": dataclasses.replace(RULES["llada2.1"], steps=3),
    "unclamped": dataclasses.replace(RULES["sdar"], steps=3, clamp_quota=False),
    "wide bound": dataclasses.replace(RULES["sdar-entropy"], entropy_bound=2.0, small_block=5),
}


@pytest.mark.parametrize("ban", [True, False], ids=["banned", "allowed"])
@pytest.mark.parametrize("name", WHOLE)
def test_whole_blocks_equal_the_plain_loop(name, ban):
    """Every slot goes its own way to its own end, whatever the others still do."""
    rule = dataclasses.replace(WHOLE[name], ban_mask=ban)
    accepting, mask_id = AcceptRule.of(rule), None if ban else MASK
    rng = np.random.default_rng(6)
    most = accepting.rounds(BLOCK, rule.steps or BLOCK, rule.max_post_steps)
    steps, slots = most + 3, 60
    # Few tokens and, as a network would, the same ones again and again.
    favourite = rng.integers(0, MASK + (not ban), (slots, BLOCK))
    proposals = np.where(
        rng.random((steps, slots, BLOCK)) < rng.random((1, slots, 1)) * 0.2,
        rng.integers(0, MASK + (not ban), (steps, slots, BLOCK)),
        favourite,
    ).astype(np.int32)
    sure, spread = coarse(rng, steps, slots, BLOCK, steps=20), coarse(rng, steps, slots, BLOCK)
    masked = rng.random((slots, BLOCK)) < rng.random((slots, 1)) * 1.3
    tokens = np.where(masked, MASK, rng.integers(0, MASK, (slots, BLOCK))).astype(np.int32)

    editing = None
    if accepting.edits:
        editing = Editing(~masked, np.zeros(slots, np.int32), np.zeros(slots, bool))
    block, ends = Block(tokens, masked, editing), np.full(slots, -1)
    for step in range(steps):
        before, seen = block, np.asarray(block.masked)
        proposal = Proposal(proposals[step], sure[step], spread[step])
        block, left, unsettled = advance(
            block, proposal, limits_of(rule, slots), step, accepting, mask_id
        )
        assert not (np.asarray(left) & ~np.asarray(block.masked).any(axis=1)).any()
        done = ~np.asarray(unsettled)
        assert done[ends >= 0].all(), "a final slot moves again"
        same = (np.asarray(before.tokens) == np.asarray(block.tokens)).all(axis=1)
        assert same[done].all()
        assert (seen == np.asarray(block.masked))[done].all()
        ends[done & (ends < 0)] = step
    assert (ends >= 0).all(), "a slot does not end"
    for i in range(slots):
        want, left, count = block_reference(
            tokens[i],
            masked[i],
            lambda step, _, i=i: (proposals[step, i], sure[step, i], spread[step, i]),
            rule,
            MASK,
        )
        np.testing.assert_array_equal(np.asarray(block.tokens[i]), want)
        np.testing.assert_array_equal(np.asarray(block.masked[i]), left)
        # Its last step was the commit, or one more follows.
        assert ends[i] in (count - 1, count)
    assert ban <= (not np.asarray(block.masked).any())


def test_entropy_is_that_of_the_measured_distribution():
    logits = jax.random.normal(jax.random.key(1), (3, 4, 30)) * 3
    sampling = Sampling(
        jnp.array([0.0, 1.0, 0.5]),
        jnp.array([5, 5, 0], jnp.int32),
        jnp.array([0.5, 1.0, 0.6]),
        jnp.zeros(3, jnp.uint32),
    )
    for confidence in ("unfiltered", "filtered"):
        found = np.asarray(measured(logits, sampling, confidence))
        np.testing.assert_array_equal(found[0], logits[0])
        kept = np.isfinite(found).sum(-1)
        assert (kept[1] == (5 if confidence == "filtered" else 30)).all()
        got = np.asarray(entropy(jnp.asarray(found)))
        for at in np.ndindex(*got.shape):
            np.testing.assert_allclose(got[at], entropy_reference(found[at]), atol=1e-5)
        tokens, sure = sample(logits, sampling, jnp.arange(3), 0, confidence)
        picked = jnp.take_along_axis(jax.nn.softmax(found), tokens[..., None], -1)[..., 0]
        np.testing.assert_allclose(sure, picked, rtol=1e-5)


# -- names and options ----------------------------------------------------------------------------


def test_presets_hold_the_published_numbers():
    """Thresholds, rounds of edits and small blocks as authors and engines set them."""
    numbers = {
        name: (rule.threshold, rule.edit_threshold, rule.small_block, rule.temperature)
        for name, rule in RULES.items()
    }
    assert numbers == {
        "sdar": (0.95, None, None, 0),
        "sdar-static": (0.95, None, None, 0),
        "sdar-sequential": (0.95, None, None, 0),
        "sdar-entropy": (0.95, None, None, 0),
        "sdar-script": (0.85, None, None, 1),
        "trado": (0.9, None, None, 1),
        "jetengine": (0.9, None, None, 1),
        "lmdeploy": (0.85, None, None, 0),
        "dinfer": (0.9, None, None, 0),
        "llada2.0": (0.95, None, None, 0),
        "llada2.1": (0.7, 0.5, None, 0),
        "llada2.1-speed": (0.5, 0.0, None, 0),
        "llada2.1-hf": (0.95, 0.9, None, 0),
        "sglang": (0.95, None, None, 0),
        "sglang-joint": (0.5, 0.0, None, 0),
        "fast-dllm-v2": (1.0, None, 8, 0),
        "fast-dllm-v2-chat": (0.9, None, 8, 0),
    }
    assert {rule.max_post_steps for rule in RULES.values()} == {16}
    assert RULES["sdar-entropy"].entropy_bound == 0.35
    assert all(rule.name == name for name, rule in RULES.items())


def test_options_come_before_the_rule_and_the_rule_before_the_model():
    model = "llada2.1"
    assert GenerationConfig().resolve(model) == RULES[model]
    assert GenerationConfig(rule="sdar").resolve(model) == RULES["sdar"]
    mine = GenerationConfig(rule="sdar", threshold=0.2, edit_threshold=0.0).resolve(model)
    assert mine == dataclasses.replace(RULES["sdar"], threshold=0.2, edit_threshold=0.0)
    assert not GenerationConfig(ban_mask=False).resolve(model).ban_mask
    with pytest.raises(ValueError, match=r"--rule 'magic' is unknown: use one of sdar, "):
        GenerationConfig(rule="magic")
    with pytest.raises(ValueError, match="the model's rule 'gone' is unknown"):
        GenerationConfig().resolve("gone")


@pytest.mark.parametrize(
    ("options", "strategy"),
    [
        ({"steps": 3}, "static"),
        ({"steps": 3, "strategy": "dynamic"}, "dynamic"),
        ({"steps": 3, "rule": "sdar"}, "dynamic"),
        ({"steps": 3, "rule": "sdar-sequential"}, "sequential"),
        ({"rule": "sdar-entropy"}, "entropy_bounded"),
    ],
    ids=str,
)
def test_steps_alone_mean_static(options, strategy):
    assert GenerationConfig(**options).resolve("sdar").strategy == strategy


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 3, "threshold": 0.5}, "--threshold does nothing with strategy static"),
        ({"strategy": "sequential", "compare": "ge"}, "--compare does nothing with strategy seq"),
        ({"strategy": "static", "fallback": "leftmost"}, "--fallback .* needs --strategy dynamic"),
        ({"entropy_bound": 0.5}, "--entropy-bound .* needs --strategy entropy_bounded"),
        ({"max_post_steps": 3}, "--max-post-steps .* needs --edit-threshold"),
    ],
    ids=str,
)
def test_options_that_would_do_nothing_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        GenerationConfig(**options).resolve("sdar")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"edit_threshold": 1.5}, "--edit-threshold 1.5"),
        ({"max_post_steps": -1}, "--max-post-steps -1"),
        ({"entropy_bound": float("nan")}, "--entropy-bound nan"),
        ({"small_block": 0}, "--small-block 0"),
        ({"compare": "lt"}, "--compare 'lt' is unknown: use one of gt, ge, near"),
        ({"fallback": "none"}, "--fallback 'none'"),
        ({"confidence": "none"}, "--confidence 'none'"),
        ({"steps": 1.5}, "--steps 1.5"),
        ({"temperature": True}, "--temperature True"),
        ({"top_k": "5"}, "--top-k '5'"),
    ],
)
def test_wrong_options_name_their_flag(options, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        GenerationConfig(**options)


def test_every_rule_has_a_row_with_its_numbers():
    rows = re.findall(r"^\| `([^`]+)` \|(.*)\|$", (DOCS / "rules.md").read_text(), re.MULTILINE)
    table = {name: [cell.strip() for cell in cells.split("|")] for name, cells in rows}
    rules = {name: cells for name, cells in table.items() if name in RULES}
    assert list(rules) == list(RULES)
    for name, cells in rules.items():
        rule = rule_named(name)
        edits = "none" if rule.edit_threshold is None else f"{rule.edit_threshold:g}"
        small = "" if rule.small_block is None else f"{rule.small_block}"
        assert cells == [
            rule.summary,
            rule.strategy,
            f"{rule.threshold:g}",
            edits,
            f"{rule.temperature:g}",
            small,
            rule.source,
        ]
