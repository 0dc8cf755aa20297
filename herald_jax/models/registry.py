"""The model families this project knows, and the only place that names them.

A family says which Hugging Face configurations belong to it, which module runs it, what its
tensors are called in a Hugging Face checkpoint, and the generation constants that its
``config.json`` does not reliably carry. Nothing here runs code from a checkpoint.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from herald_jax.models.config import ModelConfig
from herald_jax.models.decoder import Decoder

#: Hugging Face tensor name -> (parameter path, whether the stored matrix is transposed).
#: ``{i}`` is the layer index. torch stores a projection as [out, in], Flax as [in, out].
_DECODER_TENSORS: dict[str, tuple[str, bool]] = {
    "model.embed_tokens.weight": ("embedding.embedding", False),
    "model.layers.{i}.input_layernorm.weight": ("layers.{i}.input_norm.scale", False),
    "model.layers.{i}.self_attn.q_proj.weight": ("layers.{i}.attention.q.kernel", True),
    "model.layers.{i}.self_attn.k_proj.weight": ("layers.{i}.attention.k.kernel", True),
    "model.layers.{i}.self_attn.v_proj.weight": ("layers.{i}.attention.v.kernel", True),
    "model.layers.{i}.self_attn.o_proj.weight": ("layers.{i}.attention.o.kernel", True),
    "model.layers.{i}.self_attn.q_norm.weight": ("layers.{i}.attention.q_norm.scale", False),
    "model.layers.{i}.self_attn.k_norm.weight": ("layers.{i}.attention.k_norm.scale", False),
    "model.layers.{i}.post_attention_layernorm.weight": ("layers.{i}.mlp_norm.scale", False),
    "model.layers.{i}.mlp.gate_proj.weight": ("layers.{i}.mlp.gate.kernel", True),
    "model.layers.{i}.mlp.up_proj.weight": ("layers.{i}.mlp.up.kernel", True),
    "model.layers.{i}.mlp.down_proj.weight": ("layers.{i}.mlp.down.kernel", True),
    "model.norm.weight": ("norm.scale", False),
    "lm_head.weight": ("lm_head.kernel", True),
}


@dataclass(frozen=True)
class Family:
    """One kind of network.

    Attributes:
      name: what ``ModelConfig.family`` and the tables call it.
      model_types, architectures: the Hugging Face ``config.json`` values that select it.
      module: the Flax NNX module, called as ``module(config, dtype=..., rngs=...)``.
      qk_norm: whether queries and keys are normalised per head.
      block_size, mask_token_id, stop_token_ids: the published constants, used where the
        configuration does not state its own; None where the family has none.
    """

    name: str
    model_types: tuple[str, ...]
    architectures: tuple[str, ...]
    module: type[Decoder]
    qk_norm: bool
    block_size: int | None = None
    mask_token_id: int | None = None
    stop_token_ids: tuple[int, ...] | None = None

    def tensor_name(self, path: str) -> tuple[str, bool]:
        """The Hugging Face name of the parameter at ``path`` and whether it is transposed."""
        parts = path.split(".")
        index = parts[1] if parts[0] == "layers" else ""
        for name, (pattern, transpose) in _DECODER_TENSORS.items():
            if pattern.replace("{i}", index) == path:
                return name.replace("{i}", index), transpose
        raise ValueError(f"family {self.name} has no Hugging Face name for parameter {path}")


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        # SDAR-*-Chat (B = 4) and its -b8 .. -b64 variants, TraDo-*-Instruct.
        Family(
            "sdar",
            ("sdar",),
            ("SDARForCausalLM",),
            Decoder,
            qk_norm=True,
            block_size=4,
            mask_token_id=151669,
            stop_token_ids=(151645, 151643),
        ),
        # The same network under its base model's names; generation constants are its own.
        Family("qwen3", ("qwen3",), ("Qwen3ForCausalLM",), Decoder, qk_norm=True),
        Family("llama", ("llama",), ("LlamaForCausalLM",), Decoder, qk_norm=False),
    )
}


def find_family(hf: Mapping[str, Any]) -> Family:
    """The family of a Hugging Face configuration, by ``model_type``, else by ``architectures``.

    Raises:
      ValueError: no family matches.
    """
    model_type, architectures = hf.get("model_type"), hf.get("architectures") or []
    if not isinstance(architectures, list):
        raise ValueError(f"config.json: architectures must be a list, not {architectures!r}")
    for family in FAMILIES.values():
        if model_type in family.model_types:
            return family
    for family in FAMILIES.values():
        if model_type is None and any(name in family.architectures for name in architectures):
            return family
    asked = model_type if model_type is not None else architectures
    known = ", ".join(kind for family in FAMILIES.values() for kind in family.model_types)
    raise ValueError(f"config.json: model_type {asked!r} is not supported; supported: {known}")


def family_of(config: ModelConfig) -> Family:
    """The family a ``ModelConfig`` names.

    Raises:
      ValueError: the name is unknown.
    """
    if not isinstance(config.family, str) or config.family not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ValueError(f"model family {config.family!r} is not supported; supported: {known}")
    return FAMILIES[config.family]


def from_hf(hf: Mapping[str, Any], *, block_size: int | None = None) -> ModelConfig:
    """Reads a Hugging Face ``config.json`` that was parsed as plain JSON.

    Shapes come from the file alone, never from class defaults. Generation constants come from, in
    this order: ``block_size`` given here; a ``"herald"`` object inside the file with any of
    ``block_size``, ``mask_token_id``, ``stop_token_ids``, ``exact_layers``; the plain keys
    ``block_size`` and ``mask_token_id``; the family's table; and, for stop ids of a family
    without a table, ``eos_token_id``.

    Args:
      hf: the parsed file.
      block_size: B to decode with instead of the checkpoint's own.

    Returns:
      A consistent configuration.

    Raises:
      ValueError: one sentence on what is unsupported, missing or contradictory.
    """
    family = find_family(hf)
    _refuse_unsupported(hf)
    heads = _positive(hf, "num_attention_heads")
    hidden = _positive(hf, "hidden_size")
    if hf.get("head_dim") is None and hidden % heads:
        raise ValueError(
            f"config.json: hidden_size {hidden} is not a multiple of num_attention_heads {heads}; "
            "state head_dim"
        )
    layers = _positive(hf, "num_hidden_layers")
    own = _object(hf, "herald")
    block = _first(block_size, own.get("block_size"), hf.get("block_size"), family.block_size)
    mask = _first(own.get("mask_token_id"), hf.get("mask_token_id"), family.mask_token_id)
    stops = _first(own.get("stop_token_ids"), family.stop_token_ids, hf.get("eos_token_id"))
    config = ModelConfig(
        family=family.name,
        vocab_size=_positive(hf, "vocab_size"),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=_positive(hf, "num_key_value_heads", heads),
        head_dim=_positive(hf, "head_dim", hidden // heads),
        intermediate_size=_positive(hf, "intermediate_size"),
        rope_theta=_rope_theta(hf),
        rms_norm_eps=_real("rms_norm_eps", hf.get("rms_norm_eps", 1e-6)),
        qk_norm=family.qk_norm,
        tie_word_embeddings=_boolean(hf, "tie_word_embeddings"),
        max_position_embeddings=_positive(hf, "max_position_embeddings"),
        block_size=_stated(block, "block_size", family),
        mask_token_id=_stated(mask, "mask_token_id", family),
        stop_token_ids=_ids(stops),
        exact_layers=_stated(
            _first(own.get("exact_layers"), min(2, layers)), "exact_layers", family
        ),
    )
    check(config)
    return config


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """The ``config.json`` of a network made here; ``from_hf`` reads it back to ``config``."""
    family = family_of(config)
    return {
        "architectures": list(family.architectures),
        "model_type": family.model_types[0],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "hidden_act": "silu",
        "attention_bias": False,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "max_position_embeddings": config.max_position_embeddings,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "herald": {
            "stop_token_ids": list(config.stop_token_ids),
            "exact_layers": config.exact_layers,
        },
    }


def check(config: ModelConfig) -> None:
    """Refuses a configuration that no network could have.

    Raises:
      ValueError: one sentence that names the field.
    """
    family_of(config)
    config.check()


def build(config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs) -> Decoder:
    """A network with random weights."""
    return family_of(config).module(config, dtype=dtype, rngs=rngs)


def abstract(config: ModelConfig, dtype: jnp.dtype) -> Decoder:
    """The network with ``jax.ShapeDtypeStruct`` in place of arrays: its shapes, at no memory."""
    model: Decoder = nnx.eval_shape(lambda: build(config, dtype, nnx.Rngs(0)))
    return model


def parameters(model: Decoder) -> dict[str, Any]:
    """Every parameter of a network (or abstract network) by dotted path, in module order."""
    pure = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    return {_dotted(path): value for path, value in jax.tree_util.tree_leaves_with_path(pure)}


def assemble(skeleton: Decoder, values: Mapping[str, Any]) -> Decoder:
    """An abstract network made real with the arrays of ``values``, keyed as in ``parameters``.

    Raises:
      KeyError: a parameter is absent.
    """
    graph, state = nnx.split(skeleton)
    filled = jax.tree_util.tree_map_with_path(
        lambda path, _: values[_dotted(path)], nnx.to_pure_dict(state)
    )
    nnx.replace_by_pure_dict(state, filled)
    model: Decoder = nnx.merge(graph, state)
    return model


def _dotted(path: tuple[Any, ...]) -> str:
    return ".".join(str(entry.key) for entry in path)


def _refuse_unsupported(hf: Mapping[str, Any]) -> None:
    """Refuses what would load without complaint and compute something else."""
    layer_types = hf.get("layer_types") or []
    if not isinstance(layer_types, list):
        raise ValueError(f"config.json: layer_types must be a list, not {layer_types!r}")
    others = [kind for kind in layer_types if kind != "full_attention"]
    ropes = [_object(hf, key) for key in ("rope_scaling", "rope_parameters")]
    rope_types = [rope.get("rope_type", rope.get("type", "default")) for rope in ropes]
    rope_type = next((kind for kind in rope_types if kind != "default"), "default")
    # (option, whether it is switched on, what the file must say)
    switched = [
        (f"rope_scaling of type {rope_type!r}", rope_type != "default", "null"),
        ("use_sliding_window", bool(hf.get("use_sliding_window")), "false"),
        (f"layer_types {others[:3]}", bool(others), "full_attention only"),
        ("attention_bias", bool(hf.get("attention_bias")), "false"),
        ("mlp_bias", bool(hf.get("mlp_bias")), "false"),
        ("partial_rotary_factor", hf.get("partial_rotary_factor", 1) != 1, "1"),
        ("quantization_config", bool(hf.get("quantization_config")), "absent"),
        (f"hidden_act {hf.get('hidden_act')!r}", hf.get("hidden_act", "silu") != "silu", "silu"),
    ]
    for option, on, wanted in switched:
        if on:
            raise ValueError(f"config.json: {option} is not supported; it must be {wanted}")


def _rope_theta(hf: Mapping[str, Any]) -> float:
    """RoPE base, from either place that Hugging Face has kept it."""
    return _real(
        "rope_theta", hf.get("rope_theta", _object(hf, "rope_parameters").get("rope_theta"))
    )


def _real(key: str, value: object) -> float:
    # Compared as it is: an integer may be too large for a float.
    if type(value) not in (int, float) or not 0 < value < sys.float_info.max:  # type: ignore[operator]
        raise ValueError(f"config.json: {key} must be a positive number, not {value!r}")
    return float(value)  # type: ignore[arg-type]


def _boolean(hf: Mapping[str, Any], key: str) -> bool:
    value = hf.get(key, False)
    if not isinstance(value, bool):
        raise ValueError(f"config.json: {key} must be true or false, not {value!r}")
    return value


def _object(hf: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = hf.get(key)
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"config.json: {key} must be an object, not {value!r}")
    return value or {}


def _positive(hf: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = hf.get(key)
    value = default if value is None else value
    if type(value) is not int or value < 1:
        raise ValueError(f"config.json: {key} must be a positive integer, not {value!r}")
    return value


def _first(*values: object) -> object:
    """The first value that is stated."""
    return next((value for value in values if value is not None), None)


def _stated(value: object, key: str, family: Family) -> int:
    if type(value) is not int:
        raise ValueError(
            f"config.json: {key} must be an integer, not {value!r}; a {family.name} network can "
            f"decode by blocks only when its config.json states {key}"
        )
    return value


def _ids(value: object) -> tuple[int, ...]:
    ids = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
    if any(type(token) is not int for token in ids):
        raise ValueError(f"config.json: stop token ids must be integers, not {value!r}")
    return tuple(ids)
