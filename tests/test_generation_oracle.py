"""Greedy answers equal small loops over transformers' networks, token for token."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

from checkpoints_convert import convert
from herald_jax import Engine, EngineConfig, GenerationConfig, checkpoint
from herald_jax.models import registry

pytestmark = pytest.mark.oracle

torch_networks = pytest.importorskip("oracle.torch_networks")
torch_checkpoints = pytest.importorskip("oracle.torch_checkpoints")
loops = pytest.importorskip("oracle.torch_decoder")

BLOCK, NEW, VOCAB = 8, 27, 97
#: P mod B of 0, 1 and B - 1, shorter than a block, and one token.
LENGTHS = (16, 17, 23, 5, 8, 1)
STOPS = (VOCAB - 2,)

#: model_type, options of the engine, the loop that must agree.
RULES: dict[str, tuple[str, dict[str, Any], Callable[[Any], list[int]]]] = {
    "llada2.0": (
        "llada2_moe",
        {"threshold": 0.6},
        lambda task: loops.llada20(task, BLOCK, 0.6),
    ),
    "llada2.0 in 3 steps": (
        "llada2_moe",
        {"rule": "llada2.0", "strategy": "dynamic", "threshold": 0.6, "steps": 3},
        lambda task: loops.llada20(task, 3, 0.6),
    ),
    "llada2.1": (
        "llada2_moe",
        {"rule": "llada2.1"},
        lambda task: loops.llada21(task, 0.7, 0.5, 16),
    ),
    "llada2.1 with few rounds": (
        "llada2_moe",
        {"rule": "llada2.1-speed", "max_post_steps": 2},
        lambda task: loops.llada21(task, 0.5, 0.0, 2),
    ),
    "sdar": ("sdar", {}, lambda task: loops.sdar(task, "low_confidence_dynamic", BLOCK, 0.95)),
    "sdar dynamic in 4 steps": (
        "sdar",
        {"rule": "sdar", "strategy": "dynamic", "threshold": 0.5, "steps": 4},
        lambda task: loops.sdar(task, "low_confidence_dynamic", 4, 0.5),
    ),
    "sdar with experts": (
        "sdar_moe",
        {"threshold": 0.6},
        lambda task: loops.sdar(task, "low_confidence_dynamic", BLOCK, 0.6),
    ),
    "sdar-static": (
        "sdar_moe",
        {"rule": "sdar-static", "steps": 3},
        lambda task: loops.sdar(task, "low_confidence_static", 3),
    ),
    "sdar-sequential": (
        "sdar_moe",
        {"rule": "sdar-sequential", "steps": 5},
        lambda task: loops.sdar(task, "sequential", 5),
    ),
    "sdar-entropy": (
        "sdar",
        {"rule": "sdar-entropy", "entropy_bound": 1.5},
        lambda task: loops.sdar(task, "entropy_bounded", BLOCK, bound=1.5),
    ),
    "fast-dllm-v2": (
        "Fast_dLLM_Qwen",
        {"small_block": 4},
        lambda task: loops.fast_dllm_v2(task, 4, 1.0),
    ),
    "fast-dllm-v2-chat": (
        "Fast_dLLM_Qwen",
        {"rule": "fast-dllm-v2-chat", "threshold": 0.4, "small_block": 4},
        lambda task: loops.fast_dllm_v2(task, 4, 0.4),
    ),
}


@functools.cache
def networks(model_type: str) -> tuple[Any, Engine]:
    """A torch network, and an engine over what the converter makes of it."""
    tiny = torch_networks.TinyNetwork(
        model_type, block_size=BLOCK, head_dim=16, hidden=64, layers=3, vocab=VOCAB, shards=2
    )
    network = torch_networks.build(tiny, seed=11)
    with TemporaryDirectory() as folder:
        torch_checkpoints.store(network, tiny, Path(folder) / "hf")
        convert(Path(folder) / "hf", Path(folder) / "ours", dtype="float32")
        config, model = checkpoint.load(Path(folder) / "ours")
    # Without a warm-up only what these prompts need is compiled, for every rule anew.
    settings = EngineConfig(method="dense", max_batch=4, max_context=64, warm_up=False)
    return network, Engine(config, model, None, settings)


@pytest.mark.parametrize("name", RULES)
def test_answers_equal_a_torch_loop(name: str) -> None:
    model_type, options, loop = RULES[name]
    network, engine = networks(model_type)
    draw = np.random.default_rng(5)
    prompts = [draw.integers(0, VOCAB - 2, length).tolist() for length in LENGTHS]
    for bans in (True, False):
        generation = GenerationConfig(max_new_tokens=NEW, ban_mask=bans, **options)
        results = {result.id: result for result in engine.generate(prompts, generation)}
        for index, prompt in enumerate(prompts):
            task = loops.Task(network, prompt, NEW, BLOCK, VOCAB - 1, STOPS, bans)
            said = f"prompt of {len(prompt)} tokens, mask {'banned' if bans else 'allowed'}"
            assert results[str(index)].error is None
            assert results[str(index)].token_ids == loop(task), said


def test_what_the_registry_claims_is_what_is_compared() -> None:
    compared: dict[str, set[str]] = {}
    for model_type, options, _ in RULES.values():
        family = registry.find_family({"model_type": model_type})
        compared.setdefault(family.name, set()).add(options.get("rule", family.rule))
    claimed = {family.name: set(family.verified.rules) for family in registry.FAMILIES.values()}
    assert {name: rules for name, rules in claimed.items() if rules} == compared
