"""A block-diffusion decoder with no cache at all: the definition of a right dense answer."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from herald_jax.diffusion.reference import accept_reference
from herald_jax.engine.config import GenerationConfig


def decode(model, config, prompt, generation: GenerationConfig) -> list[int]:
    """Greedy answer of ``max_new_tokens`` tokens at most, the whole sequence recomputed each step."""
    block = config.block_size
    total = -(-(len(prompt) + generation.max_new_tokens) // block) * block
    tokens = np.full(total, config.mask_token_id, np.int32)
    tokens[: len(prompt)] = prompt
    masked = np.arange(total) >= len(prompt)
    for start in range(len(prompt) // block * block, total, block):
        end, step = start + block, 0
        while masked[start:end].any():
            # Padding to the full length keeps one compiled shape; later blocks are never seen.
            logits = np.array(model(jnp.asarray(tokens)[None])[0, start:end], np.float64)
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
