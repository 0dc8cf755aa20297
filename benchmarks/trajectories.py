"""Dense decoding of one prompt that keeps the queries and keys of every step.

The simplest right decoder (block after block over a full cache), apart from the engine, so that a
study of selection sees exactly what dense attention sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import ArrayLike

from herald_jax import GenerationConfig
from herald_jax.diffusion.accept import AcceptRule, accept, quota
from herald_jax.diffusion.draft import draft
from herald_jax.diffusion.rules import Rule
from herald_jax.diffusion.sampling import ban, greedy
from herald_jax.models.attention import attend_blocks
from herald_jax.models.config import ModelConfig
from herald_jax.models.decoder import Decoder

#: Keys and values [1, R, H_kv, D] of every layer; row r holds position r.
Cache = list[tuple[jax.Array, jax.Array]]
#: What stands for block n while block n+1 looks ahead (paper Fig. 7).
Ahead = Literal["omitted", "drafted", "completed"]
CHUNK = 512


class Network:
    """A model as a definition and a pytree, which compiled programs share."""

    def __init__(self, config: ModelConfig, model: Decoder) -> None:
        self.config = config
        self.graph, self.state = nnx.split(model)

    def width(self, tokens: int, blocks: int) -> int:
        """Rows of a cache for ``tokens`` prompt tokens, ``blocks`` blocks and one looking ahead."""
        rows = tokens + (blocks + 2) * self.config.block_size
        return -(-rows // self.chunk) * self.chunk

    @property
    def chunk(self) -> int:
        """Prompt tokens of one program, whole blocks."""
        size = self.config.block_size
        return max(1, CHUNK // size) * size

    def forward(
        self, cache: Cache, tokens: ArrayLike, position: int, row: int, stride: int = 1
    ) -> Pass:
        """One pass of int32 [S] tokens, written from ``row`` on and attending what is before.

        ``S`` divides the block size or is whole blocks; ``row`` is a multiple of the block size.
        Token i stands at ``position + i * stride``.
        """
        tokens = jnp.asarray(tokens, jnp.int32)
        return _forward(self.graph, self.state, cache, tokens, position, row, stride)


class Pass(NamedTuple):
    """What a pass over S tokens computed.

    Attributes:
      hidden: [S, hidden] after the last layer.
      queries: [L, S, H_q, D] and ``keys``: [L, S, H_kv, D], both with RoPE.
      cache: with the pass's rows written.
    """

    hidden: jax.Array
    queries: jax.Array
    keys: jax.Array
    cache: Cache


@dataclass(frozen=True)
class Block:
    """One decoded block over its T denoising steps and the commit pass.

    Attributes:
      start: first position.
      tokens: int32 [B], final.
      draft: int32 [B], argmax of step 0 with accepted tokens kept (paper IV-A1).
      masked: bool [T + 1, B] before each pass; the last row is clean.
      queries: [L, B, H_q, D] and ``keys``: [L, B, H_kv, D] of each of the T + 1 passes.
    """

    start: int
    tokens: np.ndarray
    draft: np.ndarray
    masked: np.ndarray
    queries: list[jax.Array]
    keys: list[jax.Array]

    @property
    def steps(self) -> int:
        """T, passes that still saw a mask."""
        return len(self.masked) - 1


@dataclass(frozen=True)
class Trajectory:
    """A prompt's decoded blocks and the final cache: committed rows never change."""

    prompt: np.ndarray
    blocks: list[Block]
    cache: Cache

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt)

    @property
    def generated(self) -> list[int]:
        """Tokens after the prompt, whole blocks."""
        tokens = np.concatenate([block.tokens for block in self.blocks])
        return tokens[self.prompt_length - self.blocks[0].start :].tolist()


@partial(jax.jit, static_argnames="graph")
def _forward(
    graph: Any, state: Any, cache: Cache, tokens: jax.Array, position: int, row: int, stride: int
) -> Pass:
    model = nnx.merge(graph, state)
    count = tokens.shape[0]
    positions = (position + stride * jnp.arange(count))[None]
    rows = (row + jnp.arange(count))[None]
    x, written, queries, keys = model.embed(tokens[None]), [], [], []
    for layer, (old_k, old_v) in zip(model.layers, cache, strict=True):
        q, k, v = layer.pre(x, positions)
        whole_k = jax.lax.dynamic_update_slice_in_dim(old_k, k, row, axis=1)
        whole_v = jax.lax.dynamic_update_slice_in_dim(old_v, v, row, axis=1)
        # A few queries are a block of their own: they see the rows before them and one another.
        size = min(count, model.config.block_size)
        x = layer.post(x, attend_blocks(q, whole_k, whole_v, rows, size))
        written.append((whole_k, whole_v))
        queries.append(q[0])
        keys.append(k[0])
    return Pass(x[0], jnp.stack(queries), jnp.stack(keys), written)


@partial(jax.jit, static_argnames=("graph", "rule", "ban_mask"))
def _decide(
    graph: Any,
    state: Any,
    rule: AcceptRule,
    ban_mask: bool,
    hidden: jax.Array,
    masked: jax.Array,
    threshold: float,
    steps: int,
    step: int,
) -> tuple[jax.Array, jax.Array]:
    """Greedy proposals int32 [B] and which of them a step accepts, bool [B]."""
    model = nnx.merge(graph, state)
    logits = model.head(hidden[None])
    if ban_mask:
        logits = ban(logits, model.config.mask_token_id)
    best, sure = greedy(logits)
    due = quota(jnp.array([steps]), masked.shape[0], jnp.asarray(step))
    return best[0], accept(masked[None], sure, due, jnp.array([threshold]), rule)[0]


def prefill(network: Network, prompt: Sequence[int], width: int) -> Cache:
    """The cache [1, width] of the prompt's whole blocks; later rows hold nothing of meaning."""
    config, chunk = network.config, network.chunk
    dtype = jax.tree.leaves(network.state)[0].dtype
    empty = jnp.zeros((1, width, config.num_kv_heads, config.head_dim), dtype)
    cache: Cache = [(empty, empty)] * config.num_layers
    whole = len(prompt) // config.block_size * config.block_size
    for at in range(0, whole, chunk):
        tokens = np.zeros(chunk, np.int32)
        part = prompt[at : min(at + chunk, whole)]
        tokens[: len(part)] = part
        cache = network.forward(cache, tokens, at, at).cache
    return cache


def decode(
    network: Network,
    prompt: Sequence[int],
    generation: GenerationConfig,
    blocks: int,
    width: int | None = None,
) -> Trajectory:
    """Greedy dense decoding of at most ``blocks`` blocks.

    Args:
      network: whose trajectory.
      prompt: token ids.
      generation: acceptance and stop tokens; ``stop_token_ids=()`` goes on to the last block.
      blocks: decoded at most, the one that holds the prompt's remainder included; an answer that
        ends earlier ends the trajectory with the block that holds its end.
      width: rows of the cache, to share compiled programs among prompts.

    Raises:
      ValueError: the prompt is empty, ``width`` is too small for it, or the rule is not one of
        plain acceptance.
    """
    config = network.config
    rule = generation.resolve(config.rule)
    edits, spreads = rule.edit_threshold is not None, rule.strategy == "entropy_bounded"
    if edits or spreads or not rule.ban_mask or config.shifts_logits:
        raise ValueError(
            f"the rule {rule.name} edits, bounds entropy, allows [MASK] or shifts logits, which a "
            "trajectory does not: use a rule like sdar"
        )
    size, needed = config.block_size, network.width(len(prompt), blocks)
    width = width or needed
    if not prompt:
        raise ValueError("the prompt is empty: give at least one token")
    if width < needed or width % network.chunk:
        raise ValueError(f"width {width} does not hold the prompt: give {needed}")
    stops = generation.stop_token_ids
    stops = config.stop_token_ids if stops is None else stops
    cache, done = prefill(network, prompt, width), []
    for start in range(len(prompt) // size * size, width, size)[:blocks]:
        tokens = np.full(size, config.mask_token_id, np.int32)
        head = prompt[start : start + size]
        tokens[: len(head)] = head
        block, cache = _denoise(network, cache, rule, start, tokens, len(head))
        done.append(block)
        if set(block.tokens[len(head) :].tolist()) & set(stops):
            break
    return Trajectory(np.array(prompt, np.int32), done, cache)


def _denoise(
    network: Network,
    cache: Cache,
    rule: Rule,
    start: int,
    tokens: np.ndarray,
    known: int,
) -> tuple[Block, Cache]:
    """One block whose first ``known`` tokens are the prompt's, and the cache with it committed."""
    size = len(tokens)
    masked = np.arange(size) >= known
    masks, drafted = [masked], tokens
    queries: list[jax.Array] = []
    keys: list[jax.Array] = []
    while True:
        made = network.forward(cache, tokens, start, start)
        queries.append(made.queries)
        keys.append(made.keys)
        if not masked.any():
            return Block(start, tokens, drafted, np.stack(masks), queries, keys), made.cache
        best, chosen = (
            np.asarray(part)
            for part in _decide(
                network.graph,
                network.state,
                AcceptRule.of(rule),
                rule.ban_mask,
                made.hidden,
                jnp.asarray(masked),
                rule.threshold,
                rule.steps or size,
                len(queries) - 1,
            )
        )
        tokens, masked = np.where(chosen, best, tokens), masked & ~chosen
        if len(queries) == 1:
            drafted = np.asarray(draft(*map(jnp.asarray, (tokens, masked, best))))
        masks.append(masked)


def look_ahead(
    network: Network, trajectory: Trajectory, block: Block, ahead: Ahead, count: int
) -> tuple[Pass, int]:
    """[MASK] queries of the block after ``block``, attending exactly in every layer.

    Args:
      network: as decoded.
      trajectory: whose committed rows before ``block`` are attended.
      block: block n; rows for it are left out, its draft's, or the final ones.
      ahead: which of these.
      count: how many, evenly spaced; 1 for the representative query at the centre (paper IV-A2),
        B for the whole block.

    Returns:
      The pass, and how many rows of its cache are attended (its own last).
    """
    size, cache = network.config.block_size, trajectory.cache
    if ahead == "drafted":
        cache = network.forward(cache, block.draft, block.start, block.start).cache
    row = block.start + (0 if ahead == "omitted" else size)
    stride = size // count
    position = block.start + size + (stride // 2 if stride > 1 else 0)
    masks = np.full(count, network.config.mask_token_id, np.int32)
    made = network.forward(cache, masks, position, row, stride)
    return made, row + count
