"""Families: what a config.json becomes, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import families
import hf_folders
import jax.numpy as jnp
import pytest
from flax import nnx

from herald_jax.models import registry
from herald_jax.models.config import ModelConfig

HF = {key: value for key, value in hf_folders.CONFIG.items() if key != "herald"}


def read(**changes: object) -> ModelConfig:
    return registry.from_hf({**HF, "eos_token_id": 5, **changes})


@pytest.mark.parametrize("model_type", ["qwen3", "llama"])
def test_constants_of_a_family_without_a_table_come_from_the_file(model_type):
    config = read(model_type=model_type)
    assert (config.block_size, config.mask_token_id, config.stop_token_ids) == (4, 39, (5,))
    assert config.qk_norm == (model_type == "qwen3")
    assert read(model_type=model_type, eos_token_id=[5, 6]).stop_token_ids == (5, 6)
    for key in ("block_size", "mask_token_id"):
        with pytest.raises(ValueError, match=f"only when its config.json states {key}"):
            read(model_type=model_type, **{key: None})


def test_constants_of_sdar_come_from_the_table():
    config = registry.from_hf(
        {**HF, "vocab_size": 151936, "block_size": None, "mask_token_id": None, "eos_token_id": 7}
    )
    assert config.block_size == 4
    assert config.mask_token_id == 151669
    # config.json's own eos_token_id names only one of the two, so it is not what decides.
    assert config.stop_token_ids == (151645, 151643)


def test_constants_are_overridden_in_order():
    own = {"block_size": 16, "mask_token_id": 1, "stop_token_ids": [2, 3], "exact_layers": 0}
    config = read(block_size=8, herald=own)
    assert (config.block_size, config.mask_token_id) == (16, 1)
    assert (config.stop_token_ids, config.exact_layers) == ((2, 3), 0)
    assert registry.from_hf({**HF, "herald": own}, block_size=64).block_size == 64


def test_round_trip_through_hugging_face_words():
    config = read(herald=hf_folders.CONFIG["herald"], rope_theta=12345.5, rms_norm_eps=1e-5)
    assert registry.from_hf(json.loads(json.dumps(registry.to_hf(config)))) == config


def test_rope_theta_is_read_from_both_places():
    herald = hf_folders.CONFIG["herald"]
    newer = {"rope_type": "default", "rope_theta": 500.0}
    assert read(rope_theta=77, herald=herald).rope_theta == 77.0
    changed = {**HF, "herald": herald, "rope_parameters": newer}
    del changed["rope_theta"]
    assert registry.from_hf(changed).rope_theta == 500.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "'gpt2' is not supported; supported: llada2_moe, .*sdar, .*llama"),
        ({"model_type": "sdar_moe"}, "num_experts must be a positive integer, not None"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling factor must be a positive number"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 0.5}}, "YaRN needs a factor of 1 or"),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "beta_fast": 1}}, "beta_fast above"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2}, "rope_theta": 1},
            "YaRN needs a rope_theta above 1, not 1",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling of type 'linear'"),
        ({"rope_theta": None}, "rope_theta must be a positive number, not None"),
        ({"use_sliding_window": True}, "use_sliding_window is not supported; it must be false"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"attention_bias": True}, "attention_bias True is not supported; it must be false"),
        ({"mlp_bias": True}, "mlp_bias True is not supported; it must be false"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; it must be silu"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of .* 3"),
        ({"head_dim": 5}, "head_dim 5 is odd"),
        ({"head_dim": None, "hidden_size": 18}, "hidden_size 18 is not a multiple of"),
        ({"hidden_size": "16"}, "hidden_size must be a positive integer, not '16'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer, not 0"),
        ({"vocab_size": None}, "vocab_size must be a positive integer, not None"),
        ({"block_size": -4}, "block_size must be an integer from 1 .*, not -4"),
        ({"block_size": 4.5}, "block_size must be an integer, not 4.5"),
        ({"mask_token_id": 40}, "mask_token_id 40 is outside the vocabulary of 40"),
        ({"herald": {"stop_token_ids": [41]}}, "stop_token_ids 41 is outside the vocabulary"),
        ({"herald": {"stop_token_ids": ["a"]}}, "stop token ids must be integers"),
        ({"herald": {"stop_token_ids": [39]}}, "mask_token_id 39 is also a stop token"),
        ({"herald": {"stop_token_ids": [], "exact_layers": 4}}, "exact_layers 4 is not between"),
        ({"herald": {"exact_layers": "2"}}, "exact_layers must be an integer, not '2'"),
        ({"herald": [1]}, "herald must be an object"),
        ({"block_size": 0}, "block_size must be an integer from 1 .*, not 0"),
        ({"block_size": 65}, "block_size 65 is more than max_position_embeddings 64"),
        ({"num_hidden_layers": 10**9}, "num_layers must be an integer from 1 to 1000"),
        ({"vocab_size": 10**30}, "vocab_size must be an integer from 1 to 2147483647"),
        *[
            ({"rope_theta": bad}, "rope_theta must be a positive number")
            for bad in (float("nan"), float("inf"), True, "1e6", -1, 10**400)
        ],
        *[
            ({"rms_norm_eps": bad}, "rms_norm_eps must be a positive number")
            for bad in (None, [], float("nan"), -1e-6, "1e-6", True)
        ],
        *[
            ({key: bad}, f"{key} must be an object")
            for key in ("rope_scaling", "rope_parameters")
            for bad in ("x", 5, [1])
        ],
        ({"rope_parameters": {"rope_type": ["yarn"]}}, "rope_scaling of type"),
        ({"layer_types": 5}, "layer_types must be a list, not 5"),
        ({"layer_types": [[1], 2]}, "layer_types .* is not supported"),
        ({"model_type": None, "architectures": 5}, "architectures must be a list, not 5"),
        ({"model_type": ["sdar"]}, "is not supported"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false"),
    ],
)
def test_refusals_are_one_sentence(changes, message):
    base = {**HF, "herald": {"stop_token_ids": [1]}}
    with pytest.raises(ValueError, match=message) as caught:
        registry.from_hf({**base, **changes})
    assert "\n" not in str(caught.value)


def test_architectures_stand_in_for_a_missing_model_type():
    config = read(model_type=None, architectures=["LlamaForCausalLM"])
    assert config.family == "llama"


@pytest.mark.parametrize("family", families.CONFIGS)
def test_every_family_reads_back_what_it_writes(family):
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    for changes in ({}, {"rope_scaling": yarn}):
        config = registry.from_hf(families.CONFIGS[family] | changes)
        assert config.family == family
        assert (config.yarn is None) == (not changes)
        assert registry.from_hf(json.loads(json.dumps(registry.to_hf(config)))) == config
        header = json.loads(json.dumps(dataclasses.asdict(config)))
        assert ModelConfig.from_json(header) == config


@pytest.mark.parametrize("family", families.CONFIGS)
def test_parameters_have_names_and_are_counted(family):
    config = registry.from_hf(families.CONFIGS[family])
    shapes = registry.parameters(registry.abstract(config, jnp.bfloat16))
    stored = {path: registry.FAMILIES[family].stored(config, path) for path in shapes}
    usual = [name for layer, ways in stored.values() for name in ways[0].names(layer)]
    shared = [ways[0].rows is not None for _, ways in stored.values()]
    assert len(set(usual)) == len(usual) - sum(shared) * 2 // 3
    assert sum(shape.size for shape in shapes.values()) == config.parameter_count
    if family in ("sdar", "qwen3"):
        assert set(usual) == set(hf_folders.tensors(families.COMMON))


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llada2", {"expert_capacity": 48}, "expert_capacity .LLaDA2.2.* is not supported"),
        ("llada2", {"use_qkv_bias": True}, "use_qkv_bias True is not supported; it must be false"),
        ("llada2", {"use_qk_norm": False}, "use_qk_norm False .* must be true"),
        ("llada2", {"score_function": "softmax"}, "score_function 'softmax' .* must be sigmoid"),
        ("llada2", {"norm_topk_prob": 1}, "norm_topk_prob 1 is not supported; it must be true"),
        ("llada2", {"num_experts": 10**8, "n_group": 4}, "experts are more than the 10000"),
        ("llada2", {"partial_rotary_factor": 1e308}, "1e.308 of head_dim 16 is no part of it"),
        ("llada2", {"head_dim": 10**400}, "is no part of it"),
        ("llada2", {"n_group": 5}, "16 experts cannot be cut into 5 equal groups"),
        ("llada2", {"topk_group": 5}, "16 experts .* of which a token uses 5"),
        ("llada2", {"n_group": 16, "topk_group": 4}, "groups of one expert"),
        ("llada2", {"num_experts_per_tok": 9}, "takes 9 experts but may choose among 8"),
        ("llada2", {"routed_scaling_factor": None}, "routed_scaling_factor must be a positive"),
        ("llada2", {"first_k_dense_replace": 4}, "dense layer 3 is not one of the 3 layers"),
        ("llada2", {"rotary_dim": 16}, "rotary_dim 16 contradicts partial_rotary_factor 0.5"),
        ("llada2", {"partial_rotary_factor": 0.2, "rotary_dim": None}, "even number from 2"),
        ("llada2", {"num_shared_experts": -1}, "num_shared_experts must be a positive integer"),
        ("sdar_moe", {"mlp_only_layers": 2}, "mlp_only_layers must be a list"),
        ("sdar_moe", {"norm_topk_prob": "yes"}, "norm_topk_prob must be true or false"),
        ("sdar_moe", {"num_experts": 0}, "num_experts must be a positive integer, not 0"),
        ("fast_dllm_v2", {"attention_bias": False}, "attention_bias False .* must be true"),
        ("fast_dllm_v2", {"bd_size": "8"}, "block_size must be an integer, not '8'"),
        ("sdar", {"herald": {"rule": 3}}, "rule must be a name, not 3"),
    ],
)
def test_a_family_refuses_what_it_would_compute_otherwise(family, changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        registry.from_hf(families.CONFIGS[family] | changes)
    assert "\n" not in str(caught.value)


def test_constants_of_the_families_are_the_published_ones():
    """Where config.json says nothing, as in the published checkpoints."""
    silent = {"block_size": None, "mask_token_id": None, "herald": None, "vocab_size": 160000}
    wanted = {
        "llada2": (32, 156895, (156892,), "llada2.0"),
        "sdar_moe": (4, 151669, (151645, 151643), "sdar"),
        "fast_dllm_v2": (32, 151665, (151645,), "fast-dllm-v2"),
    }
    for family, constants in wanted.items():
        config = registry.from_hf(families.CONFIGS[family] | silent | {"bd_size": None})
        found = (config.block_size, config.mask_token_id, config.stop_token_ids, config.rule)
        assert found == constants


def test_names_of_checkpoints_tell_what_their_files_do_not():
    sdar, llada2 = registry.FAMILIES["sdar"], registry.FAMILIES["llada2"]
    assert sdar.checkpoint("sdar-8b-chat-B32").block_size == 32
    assert sdar.checkpoint("SDAR-8B-Chat").block_size is None
    assert llada2.checkpoint("LLaDA2.1-mini").rule == "llada2.1"
    assert llada2.checkpoint("LLaDA2.0-mini").rule is None
    assert llada2.checkpoint("LLaDA2.2-flash") is None


def test_abstract_has_the_shapes_of_the_real_network():
    config = read(herald={"stop_token_ids": [1]})
    shapes = registry.parameters(registry.abstract(config, jnp.float32))
    arrays = registry.parameters(registry.build(config, jnp.float32, nnx.Rngs(0)))
    assert {p: (s.shape, s.dtype) for p, s in shapes.items()} == {
        p: (a.shape, a.dtype) for p, a in arrays.items()
    }


@pytest.mark.skipif("HERALD_TEST_DATA" not in os.environ, reason="needs HERALD_TEST_DATA")
def test_sdar_8b_has_exactly_its_published_tensors():
    """Every name of the real index, and its total size, from the real config.json."""
    folder = Path(os.environ["HERALD_TEST_DATA"]) / "sdar-8b-chat"
    config = registry.from_hf(json.loads((folder / "config.json").read_text()))
    assert config.stop_token_ids == (151645, 151643)
    assert (config.mask_token_id, config.block_size) == (151669, 4)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shapes = registry.parameters(registry.abstract(config, jnp.bfloat16))
    family = registry.family_of(config)
    names = {family.stored(config, path)[1][0].name for path in shapes}
    layers = [name.replace("{i}", str(i)) for name in names for i in range(config.num_layers)]
    assert set(layers) == set(index["weight_map"])
    assert sum(2 * shape.size for shape in shapes.values()) == index["metadata"]["total_size"]
