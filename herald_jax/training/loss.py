"""The training pass: context and branches in one sequence, and what is scored in it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from herald_jax.models.attention_parts import Implementation
from herald_jax.models.config import ModelConfig
from herald_jax.models.decoder import Decoder
from herald_jax.training.data import ANSWER, END, FILL, KINDS

Params = Any
WEIGHT_DECAY = 0.1
FILL_WEIGHT, END_WEIGHT = 0.05, 0.5
# Losses are averaged over the tokens of each kind of branch, then weighed.
KIND_WEIGHTS = {kind: 0.5 if kind == "text" else 1.0 for kind in KINDS}


def binding_heads(config: ModelConfig) -> tuple[int, int, int]:
    """Heads of layer 0 bound to a name's first token, its last, and the token just before.

    The first two use different KV heads wherever there are two.
    """
    return 0, config.num_heads // 2, 1


def layout(context: int, branches: int, size: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Positions and attention of a row ``[context | branch | branch ...]``.

    Returns:
      int32 [W] positions (every branch starts at ``context``), and bool [W, W]: a query attends
      blocks up to its own, in the context and in its own branch only.
    """
    branch = np.concatenate([np.zeros(context, int), np.repeat(1 + np.arange(branches), size)])
    inside = np.tile(np.arange(size), branches)
    positions = np.concatenate([np.arange(context), context + inside]).astype(np.int32)
    blocks = positions // block
    visible = (branch[None] == 0) | (branch[None] == branch[:, None])
    return positions, visible & (blocks[None] <= blocks[:, None])


@dataclass(frozen=True)
class Start:
    """How weights begin; the defaults are those that learned to look up soonest.

    Attributes:
      embedding: deviation of the embedding.
      qk_scale: of the query and key norms; lets a head attend one token of hundreds at once.
      outputs: factor on every output projection, so that the residual stream is not noise.
      bound: the same factor for the supervised heads of the first layer, whose news must not
        drown.
      mask: deviation of the mask's embedding.
      tied: how many query heads of each group begin equal to their key projection in the layers
        after the first, reflected along the mask's embedding: residuals with the same news attend
        one another from the start, but masked slots do not attend masked slots.
      copied: factor on the transposed value projection that the same heads begin with as output
        projection: what they attend is passed on as it is. 0 leaves them random.
    """

    embedding: float = 0.1
    qk_scale: float = 1.5
    outputs: float = 0.2
    bound: float = 0.5
    mask: float = 0.3
    tied: int = 2
    copied: float = 0.2


def init_params(config: ModelConfig, seed: int, start: Start | None = None) -> Params:
    """fp32 weights as ``start`` says; equal arguments give equal weights."""
    start = start or Start()
    model = Decoder(config, dtype=jnp.float32, rngs=nnx.Rngs(seed))
    params = nnx.split(model)[1].to_pure_dict()
    shape = params["embedding"]["embedding"].shape
    noise = jax.random.normal(jax.random.key(seed), shape, jnp.float32)
    scale = jnp.full(config.vocab_size, start.embedding).at[config.mask_token_id].set(start.mask)
    params["embedding"]["embedding"] = scale[:, None] * noise
    axis = noise[config.mask_token_id] / jnp.linalg.norm(noise[config.mask_token_id])
    heads = (-1, config.num_heads, config.head_dim)
    for index, layer in params["layers"].items():
        attention = layer["attention"]
        for name in ("q_norm", "k_norm"):
            attention[name]["scale"] *= start.qk_scale
        layer["mlp"]["down"]["kernel"] *= start.outputs
        factor = jnp.full(config.num_heads, start.outputs)
        if index == 0:
            factor = factor.at[jnp.array(binding_heads(config))].set(start.bound)
        else:
            q = attention["q"]["kernel"].reshape(heads)
            k = attention["k"]["kernel"]
            along = jnp.matmul(axis, k, precision=jax.lax.Precision.HIGHEST)
            k = jnp.repeat(
                (k - 2 * axis[:, None] * along).reshape(-1, config.num_kv_heads, config.head_dim),
                config.group_size,
                axis=1,
            )
            alike = jnp.arange(config.num_heads) % config.group_size < start.tied
            q = jnp.where(alike[:, None], k, q)
            attention["q"]["kernel"] = q.reshape(attention["q"]["kernel"].shape)
        attention["o"]["kernel"] *= jnp.repeat(factor, config.head_dim)[:, None]
        if index > 0 and start.copied:
            v = attention["v"]["kernel"].reshape(-1, config.num_kv_heads, config.head_dim)
            back = jnp.repeat(v, config.group_size, axis=1).transpose(1, 2, 0) * start.copied
            o = attention["o"]["kernel"].reshape(back.shape)
            alike = jnp.arange(config.num_heads) % config.group_size < start.tied
            o = jnp.where(alike[:, None, None], back, o)
            attention["o"]["kernel"] = o.reshape(attention["o"]["kernel"].shape)
    return params


def as_model(config: ModelConfig, params: Params, dtype: Any) -> Decoder:
    """The network over ``params`` cast to ``dtype``."""
    model = nnx.eval_shape(lambda: Decoder(config, dtype=dtype, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(model)
    state.replace_by_pure_dict(jax.tree.map(lambda leaf: leaf.astype(dtype), params))
    return nnx.merge(graph, state)


def _binding_loss(
    config: ModelConfig,
    q: jax.Array,
    k: jax.Array,
    mask: jax.Array,
    batch: dict[str, jax.Array],
    context: int,
) -> jax.Array:
    """Mean -log attention of layer-0 heads on a name's first and last token and the token before.

    Answer slots and value tokens of the context are averaged apart: both bindings are needed.
    """
    query = batch["bind"][..., 0]
    slots = batch["bound"] & (query >= context)
    values = batch["bound"] & (query < context)
    chooser = jax.nn.one_hot(query, q.shape[1], dtype=q.dtype)
    total = jnp.zeros(())
    for place, head in enumerate(binding_heads(config)):
        rows = chooser @ q[:, :, head]
        keys = k[:, :, head // config.group_size]
        scores = jnp.einsum("nmd,nwd->nmw", rows, keys, preferred_element_type=jnp.float32)
        scores = jnp.where(mask[query], scores * config.head_dim**-0.5, -1e30)
        target = query - 1 if place == 2 else batch["bind"][..., 1 + place]
        picked = jnp.take_along_axis(jax.nn.log_softmax(scores), target[..., None], axis=-1)
        for chosen in (slots, values):
            share = jnp.where(chosen, picked[..., 0], 0.0).sum() / jnp.maximum(chosen.sum(), 1)
            total -= share / (2 * len(binding_heads(config)))
    return total


def loss_and_metrics(
    params: Params,
    batch: dict[str, jax.Array],
    bind_weight: jax.Array,
    *,
    config: ModelConfig,
    context: int,
    branches: int,
    dtype: Any,
    attention: Implementation,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Loss of one batch.

    Answer and end-of-text losses are means over their own tokens, so that the many fill tokens
    never outweigh the few answer tokens.

    Args:
      params: fp32 weights; ``batch``: as ``data.make_batch`` makes it.
      bind_weight: float32 [], weight of the binding loss.
      config, context, branches, dtype, attention: static; ``dtype`` and ``attention`` say how
        to compute.

    Returns:
      float32 [] and metrics, each float32 [].
    """
    model = as_model(config, params, dtype)
    size = (batch["tokens"].shape[1] - context) // branches
    where, visible = layout(context, branches, size, config.block_size)
    mask = jnp.asarray(visible)
    positions = jnp.broadcast_to(jnp.asarray(where), batch["tokens"].shape)
    # Products with one-hot rows instead of gathers: a gather's gradient is a scatter, and thousands
    # of equal tokens (masks, ends) adding to one row are slow on a GPU.
    x = (
        jax.nn.one_hot(batch["tokens"], config.vocab_size, dtype=dtype)
        @ model.embedding.embedding[...]
    )
    binding = jnp.zeros(())
    for index, layer in enumerate(model.layers):
        q, k, v = layer.pre(x, positions)
        if index == 0:
            binding = _binding_loss(config, q, k, mask, batch, context)
        mixed = jax.nn.dot_product_attention(
            q, k, v, mask=mask[None, None], implementation=attention
        )
        x = layer.post(x, mixed)
    logits = model.head(x[:, context:])
    targets, classes = batch["targets"][:, context:], batch["classes"][:, context:]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    right = (logits.argmax(-1) == targets).astype(jnp.float32)
    shape = (len(targets), branches, size)
    per_branch = (classes == ANSWER).reshape(shape).sum(-1)
    # Each further token of an answer counts less: short answers decide as much as long ones.
    weight = jnp.array([KIND_WEIGHTS[kind] for kind in KINDS])[batch["kinds"]]
    weight = (weight / jnp.sqrt(jnp.maximum(per_branch, 1)))[..., None]
    weight = jnp.broadcast_to(weight, shape).reshape(classes.shape)

    def mean(values: jax.Array, chosen: jax.Array, weight: jax.Array | float = 1.0) -> jax.Array:
        weights = jnp.where(chosen, weight, 0.0)
        return (values * weights).sum() / jnp.maximum(weights.sum(), 1e-6)

    metrics = {
        "answer_loss": mean(losses, classes == ANSWER, weight),
        "end_loss": mean(losses, classes == END),
        "binding_loss": binding,
        "end": mean(right, classes == END),
    }
    for number, kind in enumerate(KINDS):
        mine = jnp.repeat(batch["kinds"] == number, size, axis=1) & (classes == ANSWER)
        # -1 where the batch has none of a kind.
        metrics[kind] = jnp.where(mine.any(), mean(right, mine), -1.0)
    loss = metrics["answer_loss"] + END_WEIGHT * metrics["end_loss"]
    loss += FILL_WEIGHT * mean(losses, classes == FILL)
    return loss + bind_weight * binding, metrics


def optimizer() -> optax.GradientTransformation:
    """Adam directions after clipping; the learning rate is applied by ``train_step``."""
    return optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam(b1=0.9, b2=0.95))


@partial(
    jax.jit,
    static_argnames=("config", "context", "branches", "dtype", "attention"),
    donate_argnames=("params", "moments"),
)
def train_step(
    params: Params,
    moments: Any,
    batch: dict[str, jax.Array],
    rate: jax.Array,
    bind_weight: jax.Array,
    *,
    config: ModelConfig,
    context: int,
    branches: int,
    dtype: Any,
    attention: Implementation,
) -> tuple[Params, Any, dict[str, jax.Array]]:
    """One update at learning rate ``rate``; returns weights, moments and metrics."""
    grad = jax.grad(loss_and_metrics, has_aux=True)
    gradient, metrics = grad(
        params,
        batch,
        bind_weight,
        config=config,
        context=context,
        branches=branches,
        dtype=dtype,
        attention=attention,
    )
    updates, moments = optimizer().update(gradient, moments)

    def move(leaf: jax.Array, step: jax.Array) -> jax.Array:
        return leaf - rate * (step + (WEIGHT_DECAY * leaf if leaf.ndim > 1 else 0.0))

    params = jax.tree.map(move, params, updates)
    return params, moments, metrics
