"""The one description of a network that every other room reads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Router = Literal["sigmoid", "softmax"]

#: Sizes beyond this do not fit the int32 that arrays are counted in; layers have three digits.
LARGEST, MOST_LAYERS, MOST_EXPERTS = 2**31 - 1, 1000, 10_000
#: Rows that every expert is given at a time where no kernel takes groups of any size. It does not
#: depend on the number of tokens, and so neither does what a token gets.
EXPERT_ROWS = 128


@dataclass(frozen=True)
class YarnConfig:
    """YaRN, RoPE stretched to longer contexts (arXiv:2309.00071).

    Attributes:
      factor: s, how much longer.
      original_length: positions that the unscaled frequencies were trained for.
      beta_fast, beta_slow: turns within ``original_length`` above which a frequency is kept, and
        below which it is divided by the factor.
      attention_factor: multiplies rotated queries and keys.
      truncates: the two bounds are rounded to whole dimensions.
    """

    factor: float
    original_length: int
    beta_fast: float
    beta_slow: float
    attention_factor: float
    truncates: bool = True

    def check(self) -> None:
        """Refuses what no frequencies follow from.

        Raises:
          ValueError: one sentence that names the field.
        """
        _check_integers(self, ["original_length"])
        _check_reals(self, ["factor", "beta_fast", "beta_slow", "attention_factor"])
        _check_booleans(self, ["truncates"])
        if self.factor < 1 or self.beta_fast <= self.beta_slow:
            raise ValueError(
                f"YaRN needs a factor of 1 or more and beta_fast above beta_slow, not "
                f"{self.factor:g}, {self.beta_fast:g} and {self.beta_slow:g}"
            )


@dataclass(frozen=True)
class ExpertsConfig:
    """The mixture of experts that stands for the MLP of a layer.

    Attributes:
      count: E, routed experts of a layer; ``per_token``: k, how many of them a token takes.
      intermediate_size: inner width of one expert.
      router: "sigmoid" scores experts apart, chooses with a bias and by groups (LLaDA2);
        "softmax" scores them against each other (SDAR-MoE).
      groups, groups_per_token: equal parts of the experts, and how many of them a token may use.
      scale: factor on the weights of the chosen experts.
      normalizes: those weights are divided by their sum.
      shared_size: inner width of the expert that every token takes; 0 for none.
      dense_layers: indices of layers with a plain MLP of the network's ``intermediate_size``.
    """

    count: int
    per_token: int
    intermediate_size: int
    router: Router
    groups: int = 1
    groups_per_token: int = 1
    scale: float = 1.0
    normalizes: bool = True
    shared_size: int = 0
    dense_layers: tuple[int, ...] = ()

    def check(self, layers: int) -> None:
        """Refuses what no network of ``layers`` layers could have.

        Raises:
          ValueError: one sentence that names the field.
        """
        sizes = ["count", "per_token", "intermediate_size", "groups", "groups_per_token"]
        _check_integers(self, sizes)
        if self.count > MOST_EXPERTS:
            raise ValueError(f"{self.count} experts are more than the {MOST_EXPERTS} that can be")
        _check_reals(self, ["scale"])
        _check_booleans(self, ["normalizes"])
        if self.router not in ("sigmoid", "softmax"):
            raise ValueError(f"router {self.router!r} is unknown; use sigmoid or softmax")
        if type(self.shared_size) is not int or not 0 <= self.shared_size <= LARGEST:
            raise ValueError(f"shared_size must be an integer from 0, not {self.shared_size!r}")
        if self.count % self.groups or self.groups_per_token > self.groups:
            raise ValueError(
                f"{self.count} experts cannot be cut into {self.groups} equal groups of which a "
                f"token uses {self.groups_per_token}"
            )
        if self.groups > 1 and self.count // self.groups < 2:
            raise ValueError(f"groups of one expert ({self.groups} of {self.count}) have no rank")
        if self.per_token > self.count // self.groups * self.groups_per_token:
            raise ValueError(
                f"a token takes {self.per_token} experts but may choose among "
                f"{self.count // self.groups * self.groups_per_token}"
            )
        for layer in self.dense_layers:
            if type(layer) is not int or not 0 <= layer < layers:
                raise ValueError(f"dense layer {layer!r} is not one of the {layers} layers")


@dataclass(frozen=True)
class ModelConfig:
    """Shape and generation constants of one block-diffusion network.

    Attributes:
      family: key into ``models.registry``.
      block_size: B, positions decoded together; the grid is anchored at position 0.
      mask_token_id: id of [MASK]; masks are tracked by arrays, never by this id.
      stop_token_ids: ids that end a generation, counted at generated positions only.
      rotary_dim: leading channels of a head that RoPE turns; None turns all.
      yarn: how RoPE is stretched, or None.
      experts: the mixture of experts of its sparse layers, or None for plain MLPs.
      exact_layers: how many leading layers keep their full KV on the device by default.
      rule: the generation rule the checkpoint was made for, a name from ``diffusion.rules``.
      shifts_logits: logits at position i predict position i + 1, as in an autoregressive model.
      max_position_embeddings: longest context (prompt + generated) the weights were trained for.
    """

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-6
    qk_norm: bool = True
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 32768
    block_size: int = 4
    mask_token_id: int = 0
    stop_token_ids: tuple[int, ...] = ()
    exact_layers: int = 2
    rule: str = "sdar"
    shifts_logits: bool = False
    rotary_dim: int | None = None
    yarn: YarnConfig | None = None
    experts: ExpertsConfig | None = None

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> ModelConfig:
        """The configuration that ``dataclasses.asdict`` took apart, from parsed JSON.

        Raises:
          TypeError, ValueError, KeyError: the fields are not those of a configuration.
        """
        made = dict(fields)
        made["stop_token_ids"] = tuple(made["stop_token_ids"])
        if made.get("yarn") is not None:
            made["yarn"] = YarnConfig(**made["yarn"])
        if made.get("experts") is not None:
            experts = dict(made["experts"])
            made["experts"] = ExpertsConfig(
                **experts | {"dense_layers": tuple(experts["dense_layers"])}
            )
        return cls(**made)

    @property
    def group_size(self) -> int:
        """G, query heads served by one KV head."""
        return self.num_heads // self.num_kv_heads

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has a mixture of experts in place of its MLP."""
        return self.experts is not None and layer not in self.experts.dense_layers

    @property
    def parameter_count(self) -> int:
        """Numbers in the network."""
        hidden, dim, experts = self.hidden_size, self.head_dim, self.experts
        attention = hidden * dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        bias = dim * (self.num_heads + 2 * self.num_kv_heads) if self.attention_bias else 0
        norms = 2 * hidden + (2 * dim if self.qk_norm else 0)
        plain = 3 * hidden * self.intermediate_size
        mixed, sparse = 0, 0
        if experts is not None:
            router = experts.count * (hidden + (experts.router == "sigmoid"))
            widths = experts.count * experts.intermediate_size + experts.shared_size
            mixed, sparse = (
                router + 3 * hidden * widths,
                self.num_layers - len(experts.dense_layers),
            )
        mlps = sparse * mixed + (self.num_layers - sparse) * plain
        embeddings = self.vocab_size * hidden * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * (attention + bias + norms) + mlps + embeddings + hidden

    def check(self) -> None:
        """Refuses values that no network could have.

        Raises:
          ValueError: one sentence that names the field.
        """
        self._check_types()
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads {self.num_heads} is not a multiple of "
                f"num_key_value_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd; rotary embedding needs an even one")
        turned = self.head_dim if self.rotary_dim is None else self.rotary_dim
        if type(turned) is not int or turned % 2 or not 2 <= turned <= self.head_dim:
            raise ValueError(
                f"rotary_dim must be an even number from 2 to head_dim {self.head_dim}, "
                f"not {turned!r}"
            )
        if self.yarn is not None:
            self.yarn.check()
            if self.rope_theta <= 1:
                raise ValueError(f"YaRN needs a rope_theta above 1, not {self.rope_theta:g}")
        if self.experts is not None:
            self.experts.check(self.num_layers)
        if self.block_size > self.max_position_embeddings:
            raise ValueError(
                f"block_size {self.block_size} is more than max_position_embeddings "
                f"{self.max_position_embeddings}"
            )
        if not 0 <= self.exact_layers <= self.num_layers:
            raise ValueError(
                f"exact_layers {self.exact_layers} is not between 0 and the network's "
                f"{self.num_layers} layers"
            )
        named = [("mask_token_id", self.mask_token_id)]
        named += [("stop_token_ids", token) for token in self.stop_token_ids]
        for name, token in named:
            if not 0 <= token < self.vocab_size:
                raise ValueError(
                    f"{name} {token} is outside the vocabulary of {self.vocab_size}; "
                    f'state the checkpoint\'s own in config.json, as in "herald": {{"{name}": ...}}'
                )
        if self.mask_token_id in self.stop_token_ids:
            raise ValueError(f"mask_token_id {self.mask_token_id} is also a stop token")

    def _check_types(self) -> None:
        """Every field on its own: a file may have said anything."""
        sizes = "vocab_size hidden_size num_layers num_heads num_kv_heads head_dim "
        sizes += "intermediate_size max_position_embeddings block_size"
        _check_integers(self, sizes.split())
        _check_reals(self, ["rope_theta", "rms_norm_eps"])
        _check_booleans(self, ["qk_norm", "attention_bias", "tie_word_embeddings", "shifts_logits"])
        for value in (self.exact_layers, self.mask_token_id, *self.stop_token_ids):
            if type(value) is not int:
                raise ValueError(f"token ids and exact_layers must be integers, not {value!r}")


def _check_integers(owner: object, names: list[str]) -> None:
    for name in names:
        value, most = getattr(owner, name), MOST_LAYERS if name == "num_layers" else LARGEST
        if type(value) is not int or not 1 <= value <= most:
            raise ValueError(f"{name} must be an integer from 1 to {most}, not {value!r}")


def _check_reals(owner: object, names: list[str]) -> None:
    for name in names:
        value = getattr(owner, name)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise ValueError(f"{name} must be a positive number, not {value!r}")


def _check_booleans(owner: object, names: list[str]) -> None:
    for name in names:
        if not isinstance(getattr(owner, name), bool):
            raise ValueError(f"{name} must be true or false, not {getattr(owner, name)!r}")
