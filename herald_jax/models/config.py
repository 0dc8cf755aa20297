"""The one description of a network that every other room reads."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelConfig:
    """Shape and generation constants of one block-diffusion network.

    Attributes:
      family: key into ``models.registry``.
      block_size: B, positions decoded together; the grid is anchored at position 0.
      mask_token_id: id of [MASK]; masks are tracked by arrays, never by this id.
      stop_token_ids: ids that end a generation, counted at generated positions only.
      exact_layers: how many leading layers keep their full KV on the device by default.
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

    @property
    def group_size(self) -> int:
        """G, query heads served by one KV head."""
        return self.num_heads // self.num_kv_heads

    def kv_bytes_per_token(self, itemsize: int = 2) -> int:
        """Bytes of K and V for one token over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize
