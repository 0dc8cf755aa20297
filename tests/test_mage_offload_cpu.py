"""Step 0 on the CPU: what it attends and chooses."""

from __future__ import annotations

import numpy as np
import pytest
from networks import answers, engine, prompts

import host_kernels
from herald_jax import GenerationConfig
from herald_jax.engine import host_block
from herald_jax.selection import SelectionJob, make_selector
from host_kernels import reference

HEADS, GROUP, BLOCK, DIM = 2, 3, 8, 16


def job_of(rng, start: list[int], kept: list[int], capacity: int) -> SelectionJob:
    """One layer of slots whose block begins at ``start``; 0 kept rows and no rows: no booking."""
    first = np.array(start, np.int32)
    part = first > 0
    extents = [
        rng.normal(size=(HEADS, 2, int(n) + 2 * BLOCK if n else 0, DIM)).astype(np.float32)
        for n in first
    ]
    budget = np.array(kept, np.int32)
    return SelectionJob(
        extents=[extents],
        index=None,
        start=first,
        attend_len=np.where(part, first + BLOCK, 0).astype(np.int32),
        select_len=np.maximum(first - BLOCK, 0),
        budget=budget,
        candidates=budget,
        seeds=np.zeros(len(first), np.uint32),
        indices=np.full((1, len(first), HEADS, capacity), -1, np.int32),
        status=np.zeros(len(first), np.int32),
    )


@pytest.mark.parametrize("seed", range(2))
def test_attention_and_choice_equal_the_definition(seed):
    """All positions vote, some do, one does, a slot without rows, one with a tail alone."""
    rng = np.random.default_rng(seed)
    job = job_of(rng, [96, 64, 0, BLOCK, 40, 96], [20, 5, 0, 0, 32, 20], 32)
    slots = len(job.start)
    q = rng.normal(size=(slots, HEADS, BLOCK, GROUP, DIM)).astype(np.float32)
    voters = np.ones((slots, BLOCK), bool)
    voters[1] = rng.permutation(BLOCK) < 5
    voters[4] = np.arange(BLOCK) == 3
    voters[5, 0] = False
    out = make_selector("mage-offload-cpu").attend(0, q, voters, job)
    assert not job.status.any()
    for slot in range(slots):
        rows, select_len = int(job.attend_len[slot]), int(job.select_len[slot])
        for head in range(HEADS):
            keys, values = job.extents[0][slot][head, :, :rows].astype(np.float64)
            scores = np.einsum("bgd,rd->bgr", q[slot, head].astype(np.float64), keys) / DIM**0.5
            weights = np.exp(scores - scores.max(-1, initial=0, keepdims=True))
            weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-300)
            np.testing.assert_allclose(out[slot, head], weights @ values, atol=1e-5)
            mass = weights[voters[slot]].sum((0, 1))[:select_len]
            kept = int(job.budget[slot])
            got = job.indices[0, slot, head]
            assert set(got[:kept]) == set(reference.top_rows(mass, kept, job.sinks))
            assert (got[kept:] == -1).all()


def test_a_slot_that_is_not_finite_says_so_and_spares_the_others():
    rng = np.random.default_rng(2)
    job = job_of(rng, [40, 48], [8, 8], 8)
    q = rng.normal(size=(2, HEADS, BLOCK, GROUP, DIM)).astype(np.float32)
    job.extents[0][0][1, 0, 3] = np.nan
    out = make_selector("mage-offload-cpu").attend(0, q, np.ones((2, BLOCK), bool), job)
    assert job.status.tolist() == [1, 0]
    assert np.isnan(out[0]).all()
    assert np.isfinite(out[1]).all()


@pytest.mark.parametrize(
    "method",
    [
        "mage-offload-cpu",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("mage-offload", "infinigen")),
    ],
)
def test_a_context_of_two_blocks_has_nothing_to_select(method):
    given = prompts((3, 8))
    rule = GenerationConfig(max_new_tokens=8, threshold=0.3)
    plain = answers(engine("dense", max_context=16, max_batch=2), given, rule)
    assert answers(engine(method, max_context=16, max_batch=2), given, rule) == plain


@pytest.mark.parametrize("call", ["attend_select", "store_rows"])
def test_what_fails_on_the_cpu_fails_its_requests_with_a_reason(monkeypatch, call):
    """As what cannot be fetched does: nothing but a result may come of a request."""
    made, given = engine("mage-offload-cpu"), prompts((20, 30))
    rule = GenerationConfig(max_new_tokens=8, threshold=0.3)
    plain = answers(made, given, rule)

    def fails(*_, **__):
        raise RuntimeError("out of luck")

    where = host_block if call == "store_rows" else host_kernels
    with monkeypatch.context() as patch:
        patch.setattr(where, call, fails)
        results = list(made.generate(given, rule))
    assert [result.error for result in results] == ["selection failed: out of luck"] * 2
    assert answers(made, given, rule) == plain
