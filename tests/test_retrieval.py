"""What the retrieval stream selects, against a plain pass of the representative query."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from networks import TINY, answers, engine, prompts, tiny_model

from herald_jax import GenerationConfig
from herald_jax.engine import main_stream
from herald_jax.engine.errors import EngineError
from herald_jax.engine.request import Request
from herald_jax.models.attention import attend, attend_blocks
from host_kernels import reference

BLOCK = TINY.block_size
RULE = GenerationConfig(max_new_tokens=40, threshold=0.3)


@pytest.fixture
def observed(monkeypatch):
    """A session with two requests, and what its main stream handed to its retrieval stream."""
    seen = {}
    pair = main_stream._pair_inputs

    def watch_pair(state, argmax, mask_id, representative):
        tokens, positions = pair(state, argmax, mask_id, representative)
        seen["tokens"], seen["positions"] = np.asarray(tokens), np.asarray(positions)
        return tokens, positions

    monkeypatch.setattr(main_stream, "_pair_inputs", watch_pair)

    def run(method: str, blocks: int):
        lengths = (112, 90)
        requests = [
            Request(str(n), np.array(p, np.int32), 40) for n, p in enumerate(prompts(lengths))
        ]
        made = engine(method, 0.25, max_batch=2)
        session = made._prepare(requests, RULE)
        for index, request in enumerate(requests):
            session.admit(index, request)
        begin = session.retrieval.begin

        def watch_begin(job, rows, **rest):
            seen.update(rest, job=job)
            begin(job, rows, **rest)

        monkeypatch.setattr(session.retrieval, "begin", watch_begin)
        for _ in range(blocks):
            tokens, _, failures = session.run_block()
            assert not failures
            for index, slot in session.batch.active():
                slot.generated += tokens[index].tolist()
                slot.start += BLOCK
        seen["pool"] = [[np.asarray(part) for part in pair] for pair in session.cache.pool]
        return session, seen

    return run


def chosen_and_attended(method, job, layer, q, k, v):
    """Indices and attention output of a representative [N, H, D], by the references."""
    wanted = np.full_like(job.indices[layer], -1)
    rows = job.attend_len, job.select_len, job.budget, wanted
    own = {"self_k": k, "self_v": v}
    if method != "herald-draft-indexed":
        kv = job.extents[layer]
        return wanted, reference.attend_select(q, kv, *rows, sinks=job.sinks, **own)[0]
    group = q.shape[1] // k.shape[1]
    scores = (q * np.repeat(k, group, axis=1)).sum(-1) / np.sqrt(q.shape[2])
    beside = scores.astype(np.float32)
    reference.select_indexed(q, job.index[layer], *rows, sinks=job.sinks, elsewhere=beside)
    lengths = job.budget, job.select_len, job.attend_len
    return wanted, reference.attend_rows(q, job.extents[layer], wanted, *lengths, **own)[0]


@pytest.mark.parametrize(
    ("method", "blocks"),
    [("herald-draft", 1), ("herald-draft", 3), ("herald-draft-indexed", 3), ("centre", 3)],
)
def test_selection_equals_a_plain_pass(observed, method, blocks):
    """Layer by layer: attention over prefix (and draft) and itself, top-k, gather."""
    session, seen = observed(method, blocks)
    job, model, exact = seen["job"], tiny_model(), session.shape.exact_layers
    drafted = 0 if method == "centre" else BLOCK
    np.testing.assert_array_equal(job.attend_len, job.start + drafted)
    np.testing.assert_array_equal(job.select_len, job.start)
    np.testing.assert_array_equal(seen["positions"][:, -1], job.start + BLOCK + BLOCK // 2)
    x, positions = seen["representative"], jnp.asarray(seen["positions"][:, -1:])
    assert (job.budget < job.select_len).any(), "this budget selects everything"
    for index, layer in enumerate(model.layers[exact:]):
        q, k, v = layer.pre(x, positions)
        parts = (np.asarray(part[:, 0]) for part in (q, k, v))
        wanted, out = chosen_and_attended(method, job, index, *parts)
        np.testing.assert_array_equal(job.indices[index], wanted)
        x = layer.post(x, jnp.asarray(out, jnp.float32)[:, None])
        for which, pool in enumerate(seen["pool"][index]):
            for slot in range(2):
                for head in range(TINY.num_kv_heads):
                    rows = wanted[slot, head, : job.budget[slot]]
                    np.testing.assert_array_equal(
                        pool[slot, 2 * BLOCK : 2 * BLOCK + len(rows), head],
                        job.extents[index][slot][head, which, rows],
                    )
    session.close()


def context_and_one(layers, x, places):
    """The last position attends everything, all others attend block by block and not it."""
    n = x.shape[1] - 1
    for layer in layers:
        q, k, v = layer.pre(x, places)
        blocks = attend_blocks(q[:, :n], k[:, :n], v[:, :n], places[:, :n], BLOCK)
        own = attend(q[:, n:], k, v, jnp.array([n + 1]))
        x = layer.post(x, jnp.concatenate([blocks, own], axis=1))
    return x


@pytest.mark.parametrize("method", ["herald-draft", pytest.param("centre", marks=pytest.mark.slow)])
def test_representative_passes_the_exact_layers_over_prefix_and_draft(observed, method):
    """Its hidden state at the first sparse layer, recomputed from tokens alone."""
    session, seen = observed(method, 1)
    exact, stack = session.shape.exact_layers, engine("dense").stack
    for index, slot in session.batch.active():
        start = slot.start - BLOCK
        prefix = slot.request.prompt_ids[:start].tolist()
        draft = seen["tokens"][index, BLOCK : 2 * BLOCK].tolist()
        given = [*prefix, *draft] if method == "herald-draft" else prefix
        ids = jnp.asarray([[*given, TINY.mask_token_id]])
        places = jnp.asarray([[*range(len(given)), seen["positions"][index, -1]]])
        (group,) = stack.groups(0, exact, None)
        x = stack.on_layers(context_and_one, group)(stack.embed(ids), places)
        np.testing.assert_allclose(
            np.asarray(seen["representative"])[index, 0], np.asarray(x)[0, -1], atol=2e-4
        )
    session.close()


def test_a_retrieval_that_failed_does_not_keep_a_session_from_ending(monkeypatch):
    """The main stream may fail in the same block, for the same reason."""
    made = engine("herald-merged")
    answers(made, prompts((20,)), GenerationConfig(max_new_tokens=8))
    session = made.session

    def fails():
        raise EngineError("the retrieval stream failed")

    monkeypatch.setattr(session.retrieval, "join", fails)
    monkeypatch.setattr(session.retrieval, "_current", object())
    made.close()
    assert made.session is None
