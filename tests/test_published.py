"""Every published checkpoint at its true size, from headers alone: no weights are allocated."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import published
import pytest

from checkpoints_convert import memory_bound
from checkpoints_convert.source import open_folder
from herald_jax import checkpoint
from herald_jax.models import registry

#: Repository's name -> block size and rule that it decodes with.
DECODES = {
    "LLaDA2.0-mini": (32, "llada2.0"),
    "LLaDA2.0-flash": (32, "llada2.0"),
    "LLaDA2.1-mini": (32, "llada2.1"),
    "LLaDA2.1-flash": (32, "llada2.1"),
    "SDAR-1.7B-Chat": (4, "sdar"),
    "SDAR-4B-Chat": (4, "sdar"),
    "SDAR-8B-Chat": (4, "sdar"),
    "SDAR-8B-Chat-b32": (32, "sdar"),
    "SDAR-30B-A3B-Chat": (4, "sdar"),
    "TraDo-4B-Instruct": (4, "sdar"),
    "TraDo-8B-Instruct": (4, "sdar"),
    "Fast_dLLM_v2_1.5B": (32, "fast-dllm-v2"),
    "Fast_dLLM_v2_7B": (32, "fast-dllm-v2"),
}


@pytest.mark.parametrize("name", published.CONFIGS)
def test_a_published_checkpoint_is_read_whole(tmp_path: Path, name: str) -> None:
    """Every tensor is found, none is unexpected, and all counts agree."""
    tensors = published.write_headers(tmp_path / name, published.CONFIGS[name])
    source = open_folder(tmp_path / name, dtype="bfloat16")
    config, parameters = source.config, source.parameters
    assert (config.block_size, config.rule) == DECODES[name]

    read = {tensor for parameter in parameters.values() for tensor in parameter.names}
    assert read == set(tensors)
    # Shapes are those of the abstract network, as dtypes are.
    count = sum(math.prod(shape) for shape in tensors.values())
    entry = registry.family_of(config).checkpoint(name)
    assert entry is not None
    assert entry.parameters == count
    assert config.parameter_count == count
    assert sum(parameter.size for parameter in parameters.values()) == count

    for path, parameter in parameters.items():
        single = path.endswith("router.bias")
        assert parameter.dtype == (np.float32 if single else jnp.bfloat16), path

    index = json.loads((tmp_path / name / "model.safetensors.index.json").read_text())
    if name in published.TOTAL_SIZES:
        assert index["metadata"]["total_size"] == published.TOTAL_SIZES[name]
        assert sum(one.nbytes for one in parameters.values()) == published.TOTAL_SIZES[name]

    # What a conversion holds at once: the largest item is an embedding, or a layer's experts.
    items = checkpoint.by_item(parameters)
    sizes = [sum(parameters[path].nbytes for path in paths) for paths in items.values()]
    hf = published.CONFIGS[name]
    embedding = 2 * hf["vocab_size"] * hf["hidden_size"]
    experts = 2 * hf["hidden_size"] * hf.get("num_experts", 0) * hf.get("moe_intermediate_size", 0)
    assert max(sizes) <= max(embedding, experts) + (1 << 20)
    if name == "LLaDA2.0-mini":
        assert max(sizes) < 0.65e9
        assert memory_bound(sizes) < 4e9


def test_every_published_checkpoint_of_the_registry_is_covered() -> None:
    """But for variants that differ in their name alone."""
    known = {one.name for family in registry.FAMILIES.values() for one in family.checkpoints}
    variants = {name for name in known if name.endswith(("-CAP", "-preview", "-Thinking"))}
    variants |= {name for name in known if name.rpartition("-b")[2] in ("8", "16", "32", "64")}
    assert known - variants <= set(published.CONFIGS) <= known


@pytest.mark.skipif("HERALD_TEST_DATA" not in os.environ, reason="needs HERALD_TEST_DATA")
def test_the_names_written_by_hand_are_those_of_the_real_index() -> None:
    folder = Path(os.environ["HERALD_TEST_DATA"]) / "sdar-8b-chat"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(published.shapes(published.CONFIGS["SDAR-8B-Chat"])) == set(index["weight_map"])
