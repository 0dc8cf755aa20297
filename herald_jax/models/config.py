"""The one description of a network that every other room reads."""

from __future__ import annotations

import math
from dataclasses import dataclass

#: Sizes beyond this do not fit the int32 that arrays are counted in; layers have three digits.
LARGEST, MOST_LAYERS = 2**31 - 1, 1000


@dataclass(frozen=True)
class ModelConfig:
    """Shape and generation constants of one block-diffusion network.

    Attributes:
      family: key into ``models.registry``.
      block_size: B, positions decoded together; the grid is anchored at position 0.
      mask_token_id: id of [MASK]; masks are tracked by arrays, never by this id.
      stop_token_ids: ids that end a generation, counted at generated positions only.
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

    @property
    def group_size(self) -> int:
        """G, query heads served by one KV head."""
        return self.num_heads // self.num_kv_heads

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
                    "state the checkpoint's own ids in config.json"
                )
        if self.mask_token_id in self.stop_token_ids:
            raise ValueError(f"mask_token_id {self.mask_token_id} is also a stop token")

    def _check_types(self) -> None:
        """Every field on its own: a file may have said anything."""
        sizes = "vocab_size hidden_size num_layers num_heads num_kv_heads head_dim "
        sizes += "intermediate_size max_position_embeddings block_size"
        for name in sizes.split():
            value, most = getattr(self, name), MOST_LAYERS if name == "num_layers" else LARGEST
            if type(value) is not int or not 1 <= value <= most:
                raise ValueError(f"{name} must be an integer from 1 to {most}, not {value!r}")
        for name in ("rope_theta", "rms_norm_eps"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 < value < math.inf:
                raise ValueError(f"{name} must be a positive number, not {value!r}")
        for name in ("qk_norm", "attention_bias", "tie_word_embeddings", "shifts_logits"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, not {getattr(self, name)!r}")
        for value in (self.exact_layers, self.mask_token_id, *self.stop_token_ids):
            if type(value) is not int:
                raise ValueError(f"token ids and exact_layers must be integers, not {value!r}")
