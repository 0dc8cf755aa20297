"""Reads single values of a Hugging Face ``config.json``, as strictly as its network needs them."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

from herald_jax.models.config import YarnConfig


def positive(hf: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """An integer of 1 or more.

    Raises:
      ValueError: naming the key.
    """
    value = hf.get(key)
    value = default if value is None else value
    if type(value) is not int or value < 1:
        raise ValueError(f"config.json: {key} must be a positive integer, not {value!r}")
    return value


def natural(hf: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """An integer of 0 or more.

    Raises:
      ValueError: naming the key.
    """
    return 0 if hf.get(key) == 0 and hf[key] is not False else positive(hf, key, default)


def real(key: str, value: object) -> float:
    """A positive number.

    Raises:
      ValueError: naming the key.
    """
    # Compared as it is: an integer may be too large for a float.
    if type(value) not in (int, float) or not 0 < value < sys.float_info.max:  # type: ignore[operator]
        raise ValueError(f"config.json: {key} must be a positive number, not {value!r}")
    return float(value)  # type: ignore[arg-type]


def boolean(hf: Mapping[str, Any], key: str, default: bool = False) -> bool:
    """True or false.

    Raises:
      ValueError: naming the key.
    """
    value = hf.get(key, default)
    if not isinstance(value, bool):
        raise ValueError(f"config.json: {key} must be true or false, not {value!r}")
    return value


def table(hf: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A JSON object; empty where the key is absent.

    Raises:
      ValueError: naming the key.
    """
    value = hf.get(key)
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"config.json: {key} must be an object, not {value!r}")
    return value or {}


def listed(hf: Mapping[str, Any], key: str) -> list[Any]:
    """A list; empty where the key is absent.

    Raises:
      ValueError: naming the key.
    """
    value = hf.get(key) or []
    if not isinstance(value, list):
        raise ValueError(f"config.json: {key} must be a list, not {value!r}")
    return value


def token_ids(value: object) -> tuple[int, ...]:
    """One id, several, or none.

    Raises:
      ValueError: they are not integers.
    """
    ids = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
    if any(type(token) is not int for token in ids):
        raise ValueError(f"config.json: stop token ids must be integers, not {value!r}")
    return tuple(ids)


def first(*values: object) -> object:
    """The first value that is stated."""
    return next((value for value in values if value is not None), None)


def refuse(hf: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuses options that would load without complaint and compute something else.

    Args:
      wanted: keys and the only value that each may have where the file states it.

    Raises:
      ValueError: naming the first one that differs.
    """
    for key, value in wanted.items():
        stated = hf.get(key)
        if stated is not None and (stated != value or type(stated) is not type(value)):
            raise ValueError(
                f"config.json: {key} {stated!r} is not supported; it must be {_said(value)}"
            )


def _said(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def refuse_other_attention(hf: Mapping[str, Any]) -> None:
    """Refuses windows and quantised weights, which no family here has.

    Raises:
      ValueError: naming what is switched on.
    """
    others = [kind for kind in listed(hf, "layer_types") if kind != "full_attention"]
    if others:
        raise ValueError(
            f"config.json: layer_types {others[:3]} is not supported; it must be "
            "full_attention only"
        )
    if hf.get("use_sliding_window"):
        raise ValueError("config.json: use_sliding_window is not supported; it must be false")
    if hf.get("quantization_config"):
        raise ValueError(
            "config.json: quantization_config is not supported: use the bfloat16 checkpoint, not a "
            "quantised one"
        )


def partial_rotation(hf: Mapping[str, Any]) -> float:
    """The share of a head's channels that RoPE turns, from either place; 1 where none is stated.

    Raises:
      ValueError: it is no positive number.
    """
    parameters = table(hf, "rope_parameters").get("partial_rotary_factor")
    return real("partial_rotary_factor", first(hf.get("partial_rotary_factor"), parameters, 1))


def refuse_partial_rotation(hf: Mapping[str, Any]) -> None:
    """Refuses RoPE over part of a head, for families that turn all of it.

    Raises:
      ValueError: a config.json states a share other than 1.
    """
    if partial_rotation(hf) != 1:
        raise ValueError("config.json: partial_rotary_factor is not supported; it must be 1")


def rope_theta(hf: Mapping[str, Any]) -> float:
    """RoPE base, from either place that Hugging Face has kept it.

    Raises:
      ValueError: it is absent or no positive number.
    """
    return real("rope_theta", hf.get("rope_theta", table(hf, "rope_parameters").get("rope_theta")))


def yarn(hf: Mapping[str, Any]) -> YarnConfig | None:
    """YaRN from ``rope_scaling`` (transformers 4) or ``rope_parameters`` (5); None for plain RoPE.

    Defaults are those of transformers: turns of 32 and 1, the attention factor of the paper
    (or from ``mscale`` and ``mscale_all_dim``), the original length of the network itself.

    Raises:
      ValueError: another kind of scaling, or a value that is none.
    """
    scalings = [table(hf, key) for key in ("rope_scaling", "rope_parameters")]
    for rope in scalings:
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind == "default":
            continue
        if kind != "yarn":
            raise ValueError(
                f"config.json: rope_scaling of type {kind!r} is not supported; it must be yarn "
                "or null"
            )
        factor = real("rope_scaling factor", rope.get("factor"))
        original = rope.get("original_max_position_embeddings")
        if original is None:
            original = hf.get("max_position_embeddings")
        return YarnConfig(
            factor=factor,
            original_length=positive(
                {"original_max_position_embeddings": original}, "original_max_position_embeddings"
            ),
            beta_fast=real("beta_fast", first(rope.get("beta_fast"), 32)),
            beta_slow=real("beta_slow", first(rope.get("beta_slow"), 1)),
            attention_factor=_attention_factor(rope, factor),
            truncates=boolean(rope, "truncate", True),
        )
    return None


def yarn_to_hf(yarn: YarnConfig) -> dict[str, Any]:
    """The ``rope_scaling`` that ``yarn`` reads back."""
    return {
        "rope_type": "yarn",
        "factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_length,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
        "attention_factor": yarn.attention_factor,
        "truncate": yarn.truncates,
    }


def _attention_factor(rope: Mapping[str, Any], factor: float) -> float:
    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if rope.get("attention_factor") is not None:
        return real("attention_factor", rope["attention_factor"])
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        weights = [real(key, rope[key]) for key in ("mscale", "mscale_all_dim")]
        return magnitude(weights[0]) / magnitude(weights[1])
    return magnitude(1.0)
