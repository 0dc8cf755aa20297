"""Sessions over the tiny network that tests drive block by block."""

from __future__ import annotations

import numpy as np
from networks import engine, prompts

from herald_jax import GenerationConfig
from herald_jax.engine.request import Request

RULE = GenerationConfig(max_new_tokens=40, threshold=0.3)


def start(method: str, lengths=(112, 90), seed: int = 0, budget: float = 0.25):
    """A session of two slots with some filled; always of one size, to compile little."""
    given = prompts(lengths, seed=seed)
    requests = [Request(str(n), np.array(p, np.int32), 40) for n, p in enumerate(given)]
    session = engine(method, budget, max_batch=2)._prepare(requests, RULE)
    for index, request in enumerate(requests):
        session.admit(index, request)
    return session


def advance(session) -> np.ndarray:
    """One block; every slot takes its tokens and moves on."""
    tokens, broken, failures = session.run_block()
    assert not failures
    assert not broken.any()
    for index, slot in session.batch.active():
        prompt = len(slot.request.prompt_ids)
        slot.generated += tokens[index][max(0, prompt - slot.start) :].tolist()
        slot.start += session.shape.block_size
    return tokens
