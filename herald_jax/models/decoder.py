"""The decoder of every family: pre-norm layers run block-causally, shaped by its configuration.

What families differ in (QK-norm, biases, rotated channels, mixtures of experts) are fields of
``ModelConfig``; what their checkpoints call it stands in the family's own file.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from herald_jax.models import head_kernel
from herald_jax.models.attention import attend_blocks
from herald_jax.models.config import ModelConfig
from herald_jax.models.layers import GatedMlp, Projections, linear, rms_norm
from herald_jax.models.moe import MixtureOfExperts


class DecoderLayer(nnx.Module):
    """One pre-norm layer, split where attention happens: ``pre``, (attend), ``post``."""

    mlp: GatedMlp | MixtureOfExperts

    def __init__(self, config: ModelConfig, index: int, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.input_norm = rms_norm(config.hidden_size, config.rms_norm_eps, dtype, rngs)
        self.attention = Projections(config, dtype, rngs)
        self.mlp_norm = rms_norm(config.hidden_size, config.rms_norm_eps, dtype, rngs)
        if config.has_experts(index):
            assert config.experts is not None
            self.mlp = MixtureOfExperts(config.hidden_size, config.experts, dtype, rngs)
        else:
            self.mlp = GatedMlp(config.hidden_size, config.intermediate_size, dtype, rngs)

    def pre(self, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """x [N, S, hidden], positions int32 [N, S] -> q [N, S, H_q, D], k, v [N, S, H_kv, D]."""
        return self.attention.qkv(self.input_norm(x), positions)

    def post(self, x: jax.Array, attended: jax.Array) -> jax.Array:
        """x [N, S, hidden], attended [N, S, H_q, D] -> [N, S, hidden]."""
        x = x + self.attention.o(attended.reshape(*x.shape[:-1], -1).astype(x.dtype))
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nnx.Module):
    """Embedding, decoder layers, final norm and head."""

    def __init__(
        self, config: ModelConfig, *, dtype: DTypeLike = jnp.bfloat16, rngs: nnx.Rngs
    ) -> None:
        dtype = jnp.dtype(dtype)
        self.config = config
        self.embedding = nnx.Embed(
            config.vocab_size, config.hidden_size, dtype=dtype, param_dtype=dtype, rngs=rngs
        )
        self.layers = nnx.List(
            [DecoderLayer(config, index, dtype, rngs) for index in range(config.num_layers)]
        )
        self.norm = rms_norm(config.hidden_size, config.rms_norm_eps, dtype, rngs)
        if not config.tie_word_embeddings:
            self.lm_head = linear(config.hidden_size, config.vocab_size, dtype, rngs)

    def embed(self, tokens: jax.Array) -> jax.Array:
        """int32 [N, S] -> [N, S, hidden]."""
        return self.embedding(tokens)

    def head(self, x: jax.Array) -> jax.Array:
        """[N, S, hidden] -> float32 logits [N, S, vocab]."""
        x = self.norm(x)
        if self.config.tie_word_embeddings:
            # Not Embed.attend, which has no precision to set and drops fp32 to TF32 on a GPU.
            precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
            table = self.embedding.embedding[...]
            return jnp.dot(x, table.T, precision=precision).astype(jnp.float32)
        return self.lm_head(x).astype(jnp.float32)

    def greedy(
        self, x: jax.Array, needed: jax.Array, banned: int | None
    ) -> tuple[jax.Array, jax.Array]:
        """The best token and its probability where needed, without the logits of all positions.

        Args:
          x: [N, S, hidden]; ``needed``: bool [N, S].
          banned: a token that is never chosen and has no probability, or None.

        Returns:
          int32 [N, S] and float32 [N, S], as ``head_kernel.greedy_rows``.
        """
        tied = self.config.tie_word_embeddings
        table = self.embedding.embedding if tied else self.lm_head.kernel
        rows = self.norm(x).reshape(-1, x.shape[-1])
        token, probability = head_kernel.greedy_rows(
            rows, table[...], needed.reshape(-1), banned=banned, tied=tied
        )
        return token.reshape(needed.shape), probability.reshape(needed.shape)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Whole uncached pass: int32 [N, S] at positions 0..S-1 -> float32 logits [N, S, vocab]."""
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        x = self.embed(tokens)
        for layer in self.layers:
            q, k, v = layer.pre(x, positions)
            x = layer.post(x, attend_blocks(q, k, v, positions, self.config.block_size))
        return self.head(x)
