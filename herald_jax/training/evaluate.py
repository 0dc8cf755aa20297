"""Scores of a trained model: plain block decoding, dense or with a random part of the prefix.

This is the simplest right way to decode (one prefill, then block after block over a cache with a
mask per layer), kept apart from the serving engine so that one can be held against the other.
``python -m herald_jax.training.evaluate --help``.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from herald_jax.models.attention import attend_blocks, pack, unpack
from herald_jax.models.config import ModelConfig
from herald_jax.models.sdar import SdarModel
from herald_jax.training.loss import as_model
from herald_jax.training.state import read_config, read_params
from herald_jax.training.tasks import Style, make_document, prompt_text
from herald_jax.training.vocabulary import Encoder

TASKS = {
    "prose, numbers": Style(table_share=0.0, word_share=0.0),
    "prose, words": Style(table_share=0.0, word_share=1.0),
    "table, numbers": Style(table_share=1.0, word_share=0.0),
    "table, words": Style(table_share=1.0, word_share=1.0),
}


@dataclass(frozen=True)
class Sparsity:
    """Decoding attends a random part of the prefix in the layers from ``exact_layers`` on.

    The last committed block and the block being decoded are always attended whole. ``fraction``
    1.0 is dense.
    """

    exact_layers: int = 0
    fraction: float = 1.0


Cache = list[tuple[jax.Array, jax.Array]]


@partial(jax.jit, static_argnames="graph")
def _prefill(graph: Any, state: Any, tokens: jax.Array) -> Cache:
    """KV of every layer for int32 [N, R] tokens; later blocks never change earlier ones."""
    model = nnx.merge(graph, state)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    x, cache = model.embed(tokens), []
    for layer in model.layers:
        q, k, v = layer.pre(x, positions)
        cache.append((k, v))
        x = layer.post(x, attend_blocks(q, k, v, positions, model.config.block_size))
    return cache


@partial(jax.jit, static_argnames="graph")
def _forward(
    graph: Any, state: Any, cache: Cache, tokens: jax.Array, start: jax.Array, allowed: jax.Array
) -> tuple[jax.Array, Cache]:
    """One block [N, B] at ``start`` [N] over cached rows ``allowed`` bool [layers, N, H_kv, R].

    Returns:
      Logits [N, B, V] and the block's own keys and values of every layer.
    """
    model = nnx.merge(graph, state)
    positions = start[:, None] + jnp.arange(tokens.shape[1])
    x, own = model.embed(tokens), []
    for index, layer in enumerate(model.layers):
        q, k, v = layer.pre(x, positions)
        own.append((k, v))
        keys = jnp.concatenate([cache[index][0], k], axis=1)
        values = jnp.concatenate([cache[index][1], v], axis=1)
        valid = jnp.pad(allowed[index], ((0, 0), (0, 0), (0, k.shape[1])), constant_values=True)
        packed = pack(q, k.shape[2])
        scores = jnp.einsum("nshd,nrhd->nhsr", packed, keys) * k.shape[-1] ** -0.5
        scores = jnp.where(valid[:, :, None], scores.astype(jnp.float32), -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1)
        mixed = jnp.einsum("nhsr,nrhd->nshd", weights.astype(values.dtype), values)
        x = layer.post(x, unpack(mixed, q.shape[2]))
    return model.head(x), own


@jax.jit
def _commit(cache: Cache, own: Cache, start: jax.Array) -> Cache:
    """Writes a block's keys and values at row ``start`` of every slot."""

    def put(rows: jax.Array, block: jax.Array) -> jax.Array:
        write = partial(jax.lax.dynamic_update_slice_in_dim, axis=0)
        return jax.vmap(write)(rows, block, start)

    return [
        (put(k, new_k), put(v, new_v)) for (k, v), (new_k, new_v) in zip(cache, own, strict=True)
    ]


def decode(
    config: ModelConfig,
    model: SdarModel,
    prompts: list[list[int]],
    *,
    blocks: int = 2,
    threshold: float = 0.9,
    sparsity: Sparsity | None = None,
    seed: int = 0,
    width: int | None = None,
) -> tuple[list[list[int]], int]:
    """Greedy block decoding: each step accepts what exceeds ``threshold``, else the surest.

    Args:
      prompts: token ids, decoded as one batch.
      blocks: how many blocks are decoded, the one that holds the prompt's remainder included.
      width: rows of the cache, to share compiled programs among batches; enough when left out.

    Returns:
      Generated ids of every prompt up to the first end of text, and the steps taken in all.
    """
    sparsity = sparsity or Sparsity()
    size, count = config.block_size, len(prompts)
    rng = np.random.default_rng(seed)
    graph, state = nnx.split(model)
    rows = width or (max(map(len, prompts)) // size + blocks) * size
    known = np.full((count, rows + blocks * size), config.mask_token_id, np.int32)
    for row, prompt in enumerate(prompts):
        known[row, : len(prompt)] = prompt
    lengths = np.array([len(prompt) for prompt in prompts])
    first = lengths // size * size
    masked = np.arange(known.shape[1]) >= lengths[:, None]
    cache = _prefill(graph, state, jnp.asarray(known[:, :rows]))
    steps = 0
    for number in range(blocks):
        start = first + number * size
        place = start[:, None] + np.arange(size)
        slots = np.arange(count)[:, None]
        allowed = allowed_rows(config, rows, start, sparsity, rng)
        while True:
            tokens = jnp.asarray(known[slots, place])
            logits, own = _forward(
                graph, state, cache, tokens, jnp.asarray(start), jnp.asarray(allowed)
            )
            open_slots = masked[slots, place]
            if not open_slots.any():
                break  # this pass saw the clean block, so its keys and values are the final ones
            scores = np.array(jax.nn.softmax(logits))
            scores[..., config.mask_token_id] = 0.0
            best, sure = scores.argmax(-1), np.where(open_slots, scores.max(-1), -1.0)
            accept = (sure > threshold) | (sure == sure.max(-1, keepdims=True))
            accept &= open_slots
            known[slots, place] = np.where(accept, best, known[slots, place])
            masked[slots, place] = open_slots & ~accept
            steps += 1
        cache = _commit(cache, own, jnp.asarray(start))
    answers = []
    for row_index, length in enumerate(lengths):
        generated = known[row_index, length : first[row_index] + blocks * size].tolist()
        stops = [i for i, token in enumerate(generated) if token in config.stop_token_ids]
        answers.append(generated[: stops[0]] if stops else generated)
    return answers, steps


def allowed_rows(
    config: ModelConfig,
    rows: int,
    start: np.ndarray,
    sparsity: Sparsity,
    rng: np.random.Generator,
) -> np.ndarray:
    """Which cached rows a block at ``start`` [N] attends: bool [layers, N, H_kv, rows]."""
    before = np.arange(rows) < start[:, None]
    last = before & (np.arange(rows) >= start[:, None] - config.block_size)
    shape = (config.num_layers, len(start), config.num_kv_heads, rows)
    picked = rng.random(shape) < sparsity.fraction
    picked[: sparsity.exact_layers] = True
    return np.asarray((picked | last[:, None]) & before[:, None])


def questions(
    encoder: Encoder, style: Style, tokens: int, facts: int, count: int, seed: int
) -> Iterator[tuple[list[int], str]]:
    """Yields ``count`` prompts of about ``tokens`` tokens with their answers, a document each."""
    for number in range(count):
        rng = random.Random(f"evaluate/{seed}/{tokens}/{facts}/{number}")
        document = make_document(rng, tokens - 24 - rng.randrange(32), facts, encoder.cost, style)
        asked = rng.choice(document.questions)
        text = prompt_text(document.text, asked.text)
        yield encoder.tokenizer.encode(text).ids, asked.answer


def score(
    config: ModelConfig,
    model: SdarModel,
    encoder: Encoder,
    asked: list[tuple[list[int], str]],
    batch: int,
    **options: Any,
) -> tuple[float, float]:
    """Share of exactly right answers, and decoding steps per block of a batch."""
    width = (max(len(prompt) for prompt, _ in asked) // config.block_size + 2) * config.block_size
    right, steps, batches = 0, 0, 0
    for begin in range(0, len(asked), batch):
        part = asked[begin : begin + batch]
        prompts = [prompt for prompt, _ in part]
        answers, taken = decode(config, model, prompts, width=width, seed=begin, **options)
        pairs = zip(answers, part, strict=True)
        right += sum(encoder.decode(ids).strip() == answer for ids, (_, answer) in pairs)
        steps, batches = steps + taken, batches + 1
    return right / len(asked), steps / (2 * batches)


def main() -> None:
    """Command line: a table of scores, and the collapse under random selection."""
    parser = argparse.ArgumentParser(prog="python -m herald_jax.training.evaluate")
    parser.add_argument("model", type=Path, help="folder written by herald_jax.training.train")
    parser.add_argument("--lengths", type=int, nargs="*", default=[128, 256, 512, 1024, 2048])
    parser.add_argument("--facts", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--count", type=int, default=20, help="questions for each table entry")
    parser.add_argument("--seed", type=int, default=1_000_003)
    parser.add_argument("--random", type=float, nargs="*", default=[0.05, 0.1])
    parser.add_argument("--random-length", type=int, default=512)
    parser.add_argument("--json", type=Path, help="write the rows here too")
    options = parser.parse_args()
    config = read_config(options.model)
    model = as_model(config, read_params(options.model), jnp.float32)
    encoder = Encoder.load(options.model / "tokenizer.json")
    rows: list[dict[str, Any]] = []

    def measure(style: Style, tokens: int, facts: int, sparsity: Sparsity, **labels: Any) -> None:
        asked = list(questions(encoder, style, tokens, facts, options.count, options.seed))
        share, steps = score(
            config, model, encoder, asked, max(1, 8192 // tokens), sparsity=sparsity
        )
        row = {**labels, "tokens": tokens, "facts": facts, "n": len(asked), "score": share}
        rows.append({**row, "steps_per_block": round(steps, 2)})
        print(json.dumps(rows[-1]), flush=True)

    for tokens in options.lengths:
        for facts in options.facts:
            if facts * 20 > tokens:
                continue
            for task, style in TASKS.items():
                measure(style, tokens, facts, Sparsity(), task=task, selection="dense")
    for exact in (0, 1, 2):
        for fraction in (*options.random, 1.0):
            labels = {"task": "all", "selection": f"random {fraction}", "exact_layers": exact}
            sparsity = Sparsity(exact, fraction)
            measure(Style(), options.random_length, 8, sparsity, **labels)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
