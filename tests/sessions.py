"""Sessions over the tiny network that tests drive block by block."""

from __future__ import annotations

import numpy as np
from networks import engine, prompts

import host_kernels
from herald_jax import GenerationConfig
from herald_jax.engine.request import Request
from host_kernels import reference
from host_kernels.checks import kind_of

RULE = GenerationConfig(max_new_tokens=40, threshold=0.3)


def start(method: str, lengths=(112, 90), seed: int = 0, budget: float = 0.25, **options):
    """A session of two slots with some filled; always of one size, to compile little."""
    given = prompts(lengths, seed=seed)
    requests = [Request(str(n), np.array(p, np.int32), 40) for n, p in enumerate(given)]
    session = engine(method, budget, max_batch=2, **options)._prepare(requests, RULE)
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


def choose_by_definition(job, layer: int, q, elsewhere=None) -> np.ndarray:
    """What a keys-only scan of one layer must choose: int32 [N, H_kv, C_cap].

    A job with key indexes is judged by indexes made anew from its keys.
    """
    chosen = np.full_like(job.indices[layer], -1)
    scan, keys = reference.select, job.extents[layer]
    if job.index is not None:
        scan, keys = reference.select_indexed, []
        for extent, rows in zip(job.extents[layer], job.select_len, strict=True):
            heads, _, capacity, dim = extent.shape
            kind = kind_of(job.index[layer][0], dim)
            shape = host_kernels.index_shape(heads, capacity, dim, kind)
            keys.append(np.zeros(shape, np.uint8))
            zero, count = np.array([0], np.int32), np.array([rows], np.int32)
            reference.index_rows([extent], keys[-1:], zero, count)
    lengths = job.select_len, job.select_len, job.candidates
    scan(q, keys, *lengths, chosen, sinks=job.sinks, elsewhere=elsewhere)
    return chosen
