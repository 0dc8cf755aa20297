"""A block-diffusion decoder with no cache at all: the definition of a right dense answer."""

from __future__ import annotations

import functools

import jax
import numpy as np
from flax import nnx

from herald_jax.diffusion.reference import block_reference, entropy_reference, shift_reference
from herald_jax.engine.config import GenerationConfig


@functools.cache
def _forward(graph):
    return jax.jit(lambda state, tokens: nnx.merge(graph, state)(tokens))


def decode(model, config, prompt, generation: GenerationConfig) -> list[int]:
    """Greedy answer of at most ``max_new_tokens`` tokens; all is recomputed at every step."""
    graph, state = nnx.split(model)
    logits_of = _forward(graph)
    rule = generation.resolve(config.rule)
    assert rule.temperature == 0, "this decoder is greedy"
    stops = generation.stop_token_ids
    stops = config.stop_token_ids if stops is None else stops
    block = config.block_size
    total = -(-(len(prompt) + generation.max_new_tokens) // block) * block
    padded = -(-total // 128) * 128
    tokens = np.full(padded, config.mask_token_id, np.int32)
    tokens[: len(prompt)] = prompt
    masked = np.arange(padded) >= len(prompt)

    def logits(first, last):
        # Padding keeps the number of compiled shapes small; later blocks are never seen.
        found = np.asarray(logits_of(state, tokens[None]))[0, first:last].astype(np.float64)
        if rule.ban_mask:
            found[:, config.mask_token_id] = -np.inf
        return found

    for start in range(len(prompt) // block * block, total, block):
        end = start + block
        if config.shifts_logits and start >= max(len(prompt), 1):
            lead = logits(start - 1, start)[0]
            lead[config.mask_token_id] = -np.inf
            tokens[start] = lead.argmax()
            masked[start] = False

        def propose(step, current, start=start, end=end):
            tokens[start:end] = current
            found = logits(start, end)
            if config.shifts_logits:
                found = shift_reference(found)
            shifted = np.exp(found - found.max(-1, keepdims=True))
            sure = (shifted / shifted.sum(-1, keepdims=True)).max(-1)
            return found.argmax(-1), sure, np.array([entropy_reference(row) for row in found])

        tokens[start:end], masked[start:end], _ = block_reference(
            tokens[start:end], masked[start:end], propose, rule, config.mask_token_id
        )
        answer = tokens[len(prompt) : end][: generation.max_new_tokens].tolist()
        for at, token in enumerate(answer):
            if token in stops:
                return answer[:at]
    return answer
