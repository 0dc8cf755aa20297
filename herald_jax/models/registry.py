"""The model families this project knows, each described in a file of its own beside this one.

Nothing here runs code from a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from herald_jax.models import hf_config
from herald_jax.models.config import ModelConfig
from herald_jax.models.decoder import Decoder
from herald_jax.models.family import Family
from herald_jax.models.fast_dllm_v2 import FAST_DLLM_V2
from herald_jax.models.hf_config import first, positive, token_ids
from herald_jax.models.llada2 import LLADA2
from herald_jax.models.llama import LLAMA
from herald_jax.models.sdar import QWEN3, SDAR
from herald_jax.models.sdar_moe import SDAR_MOE

FAMILIES: dict[str, Family] = {
    family.name: family for family in (LLADA2, SDAR, SDAR_MOE, FAST_DLLM_V2, QWEN3, LLAMA)
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


def from_hf(
    hf: Mapping[str, Any], *, block_size: int | None = None, rule: str | None = None
) -> ModelConfig:
    """Reads a Hugging Face ``config.json`` that was parsed as plain JSON.

    Shapes come from the file alone, never from class defaults. Generation constants come from, in
    this order: what is given here; a ``"herald"`` object inside the file with any of
    ``block_size``, ``mask_token_id``, ``stop_token_ids``, ``exact_layers``, ``rule``; the file's
    own keys; the family's table; and, for stop ids of a family without a table, ``eos_token_id``.

    Args:
      hf: the parsed file.
      block_size: B to decode with instead of the checkpoint's own.
      rule: name of the default generation rule instead of the family's.

    Returns:
      A consistent configuration.

    Raises:
      ValueError: one sentence on what is unsupported, missing or contradictory.
    """
    family = find_family(hf)
    read, yarn = family.read(hf), hf_config.yarn(hf)
    heads = positive(hf, "num_attention_heads")
    hidden = positive(hf, "hidden_size")
    if hf.get("head_dim") is None and hidden % heads:
        raise ValueError(
            f"config.json: hidden_size {hidden} is not a multiple of num_attention_heads {heads}; "
            "state head_dim"
        )
    layers = positive(hf, "num_hidden_layers")
    own = hf_config.table(hf, "herald")
    # Some families keep it under a name of their own.
    stated = first(read.pop("block_size", None), hf.get("block_size"))
    block = first(block_size, own.get("block_size"), stated, family.block_size)
    mask = first(own.get("mask_token_id"), hf.get("mask_token_id"), family.mask_token_id)
    stops = first(own.get("stop_token_ids"), family.stop_token_ids, hf.get("eos_token_id"))
    exact = first(own.get("exact_layers"), min(2, layers))
    named = first(rule, own.get("rule"), family.rule)
    if not isinstance(named, str):
        raise ValueError(f"config.json: rule must be a name, not {named!r}")
    config = ModelConfig(
        family=family.name,
        vocab_size=positive(hf, "vocab_size"),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=positive(hf, "num_key_value_heads", heads),
        head_dim=positive(hf, "head_dim", hidden // heads),
        intermediate_size=positive(hf, "intermediate_size"),
        rope_theta=hf_config.rope_theta(hf),
        yarn=yarn,
        rms_norm_eps=hf_config.real("rms_norm_eps", hf.get("rms_norm_eps", 1e-6)),
        tie_word_embeddings=hf_config.boolean(hf, "tie_word_embeddings"),
        max_position_embeddings=positive(hf, "max_position_embeddings"),
        block_size=_stated(block, "block_size", family),
        mask_token_id=_stated(mask, "mask_token_id", family),
        stop_token_ids=token_ids(stops),
        exact_layers=_stated(exact, "exact_layers", family),
        rule=named,
        **read,
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
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.yarn is None else hf_config.yarn_to_hf(config.yarn),
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "max_position_embeddings": config.max_position_embeddings,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "herald": {
            "stop_token_ids": list(config.stop_token_ids),
            "exact_layers": config.exact_layers,
            "rule": config.rule,
        },
    } | family.write(config)


def check(config: ModelConfig) -> None:
    """Refuses a configuration that no network could have.

    Raises:
      ValueError: one sentence that names the field.
    """
    family_of(config)
    config.check()


def build(config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs) -> Decoder:
    """A network with random weights."""
    return Decoder(config, dtype=dtype, rngs=rngs)


def abstract(config: ModelConfig, dtype: jnp.dtype) -> Decoder:
    """The network with ``jax.ShapeDtypeStruct`` in place of arrays: its shapes, at no memory."""
    model: Decoder = nnx.eval_shape(lambda: Decoder(config, dtype=dtype, rngs=_Keys(0)))
    return model


class _Keys(nnx.Rngs):
    """One key for all: nothing is drawn, and counting keys takes time that grows quadratically."""

    def params(self) -> jax.Array:
        return jax.random.key(0)


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


def _stated(value: object, key: str, family: Family) -> int:
    if type(value) is not int:
        raise ValueError(
            f"config.json: {key} must be an integer, not {value!r}; a {family.name} network can "
            f"decode by blocks only when its config.json states {key}"
        )
    return value
