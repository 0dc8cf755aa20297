"""Every family through the engine: the first three invariants, with its own generation rules."""

from __future__ import annotations

import dataclasses
import functools

import families
import numpy as np
import pytest
from networks import answers, engine, plain_pass, prompts, tiny_model
from reference_decoder import decode
from sessions import advance

from herald_jax import GenerationConfig
from herald_jax.engine.request import Request
from herald_jax.models import registry
from herald_jax.models.config import ModelConfig

BLOCK = families.COMMON["block_size"]
# Prompt lengths mod B of 0, 1 and B - 1, shorter than B, and longer than a chunk.
LENGTHS = (64, 65, 71, 3)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
#: Family, changes to its config.json, its rule.
CASES = {
    "llada2.0": (
        "llada2",
        {},
        GenerationConfig(max_new_tokens=20, stop_token_ids=(), threshold=0.6),
    ),
    "llada2.1": (
        "llada2",
        {},
        GenerationConfig(max_new_tokens=20, stop_token_ids=(), rule="llada2.1"),
    ),
    "sdar-moe": (
        "sdar_moe",
        {"rope_scaling": YARN},
        GenerationConfig(max_new_tokens=20, stop_token_ids=(), rule="sdar-sequential", steps=3),
    ),
    "fast-dllm-v2": (
        "fast_dllm_v2",
        {},
        GenerationConfig(max_new_tokens=20, stop_token_ids=(), threshold=0.4, small_block=4),
    ),
}


#: One rule for each network, and the one that edits.
ONE_RULE = [case for case in CASES if case != "llada2.0"]
#: The same, all but the quickest only at length.
ONE_QUICK = [
    case if case == "fast-dllm-v2" else pytest.param(case, marks=pytest.mark.slow)
    for case in ONE_RULE
]


@functools.cache
def network(case: str) -> ModelConfig:
    family, changes, _ = CASES[case]
    config = registry.from_hf(families.CONFIGS[family] | changes)
    return dataclasses.replace(config, exact_layers=1)


@pytest.mark.parametrize("case", CASES)
def test_dense_and_herald_at_full_budget_equal_a_decoder_without_a_cache(case):
    config, rule = network(case), CASES[case][2]
    given = prompts(LENGTHS, config)
    made = {
        method: answers(engine(method, config=config, max_batch=2), given, rule)
        for method in ("dense", "herald-draft")
    }
    for index, prompt in enumerate(given):
        want = decode(tiny_model(config), config, prompt, rule)
        assert len(want) > 4
        for method, found in made.items():
            assert found[str(index)] == want, f"{method}, prompt of {len(prompt)} tokens"


@pytest.mark.parametrize("method", ["dense", "herald-draft"])
@pytest.mark.parametrize("case", ONE_QUICK)
def test_committed_kv_is_that_of_the_final_tokens(case, method):
    """Edited blocks among them: what is kept was computed after the last edit."""
    config, rule = network(case), CASES[case][2]
    given = prompts((40, 19), config)
    requests = [Request(str(n), np.array(p, np.int32), 40) for n, p in enumerate(given)]
    session = engine(method, config=config, max_batch=2)._prepare(requests, rule)
    for index, request in enumerate(requests):
        session.admit(index, request)
    for _ in range(3):
        advance(session)
    exact = session.shape.exact_layers
    for index, slot in session.batch.active():
        # The newest block reaches the host when the next retrieval begins.
        whole = slot.start - (BLOCK if session.retrieval else 0)
        ids = [*slot.request.prompt_ids.tolist(), *slot.generated][: slot.start]
        for layer, (_, k, v) in enumerate(plain_pass(ids, config)):
            if layer < exact:
                got_k, got_v = (np.asarray(b)[index] for b in session.cache.exact[layer])
            else:
                extent = slot.booking.extents[layer - exact]
                got_k, got_v = extent[:, 0].swapaxes(0, 1), extent[:, 1].swapaxes(0, 1)
            np.testing.assert_allclose(got_k[:whole], k[:whole], atol=5e-5)
            np.testing.assert_allclose(got_v[:whole], v[:whole], atol=5e-5)
    session.close()


@pytest.mark.parametrize("case", ONE_QUICK)
def test_output_does_not_depend_on_the_batch(case):
    config, rule = network(case), CASES[case][2]
    given = prompts((150, 33, 90, 7), config)
    together = answers(engine("herald-draft", 0.05, config, max_batch=2), given, rule)
    for index, prompt in enumerate(given):
        request = [{"id": index, "prompt_ids": prompt}]
        alone = answers(engine("herald-draft", 0.05, config, max_batch=2), request, rule)
        assert alone[str(index)] == together[str(index)]
