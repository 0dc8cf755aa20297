"""A block-diffusion decoder with no cache at all: the definition of a right dense answer."""

from __future__ import annotations

import functools

import jax
import numpy as np
from flax import nnx

from herald_jax.diffusion.reference import accept_reference
from herald_jax.engine.config import GenerationConfig


@functools.cache
def _forward(graph):
    return jax.jit(lambda state, tokens: nnx.merge(graph, state)(tokens))


def decode(model, config, prompt, generation: GenerationConfig) -> list[int]:
    """Greedy answer of at most ``max_new_tokens`` tokens; all is recomputed at every step."""
    graph, state = nnx.split(model)
    logits_of = _forward(graph)
    block = config.block_size
    total = -(-(len(prompt) + generation.max_new_tokens) // block) * block
    padded = -(-total // 64) * 64
    tokens = np.full(padded, config.mask_token_id, np.int32)
    tokens[: len(prompt)] = prompt
    masked = np.arange(padded) >= len(prompt)
    for start in range(len(prompt) // block * block, total, block):
        end, step = start + block, 0
        while masked[start:end].any():
            # Padding keeps the number of compiled shapes small; later blocks are never seen.
            logits = np.array(logits_of(state, tokens[None])[0, start:end], np.float64)
            logits[:, config.mask_token_id] = -np.inf
            best = logits.argmax(-1)
            shifted = np.exp(logits - logits.max(-1, keepdims=True))
            sure = (shifted / shifted.sum(-1, keepdims=True)).max(-1)
            steps = generation.steps or block
            due = max(1, block // steps + (step < block % steps))
            chosen = accept_reference(
                masked[start:end], sure, due, generation.threshold, generation.rule
            )
            tokens[start:end][chosen] = best[chosen]
            masked[start:end][chosen] = False
            step += 1
        answer = tokens[len(prompt) : end][: generation.max_new_tokens].tolist()
        for at, token in enumerate(answer):
            if token in config.stop_token_ids:
                return answer[:at]
    return answer
