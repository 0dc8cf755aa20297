"""The warm-up compiles side by side, once each, and leaves a session as it was."""

from __future__ import annotations

import collections
import dataclasses
import threading
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from networks import TINY, engine, prompts

from herald_jax import GenerationConfig
from herald_jax.engine.errors import WaitTimeout
from herald_jax.engine.rehearsal import Rehearsal, perform
from herald_jax.engine.request import Request

#: A network of these tests alone: nothing of it is compiled when they begin.
FLAT = dataclasses.replace(TINY, num_layers=2, exact_layers=1, vocab_size=101)


def test_a_session_is_warm_and_as_new():
    made = engine("herald-merged", 0.25, FLAT, max_batch=2, max_context=96, warm_up=True)
    compiled, said = collections.Counter(), []

    def listen(name, seconds, **details):
        if name.endswith("backend_compile_duration"):
            compiled[details["fun_name"]] += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        requests = [Request("0", np.array(prompts((40,))[0], np.int32), 8)]
        session = made._prepare(
            requests, GenerationConfig(threshold=0.3), lambda *progress: said.append(progress)
        )
    finally:
        jax.monitoring.clear_event_listeners()
    known = collections.Counter(f"jit({each.name})" for each in made.stack.known.values())
    assert {"jit(chunk)", "jit(first_block)", "jit(query_step)", "jit(decide)"} <= set(known)
    # What the rehearsal compiled is what runs in earnest: nothing was compiled again.
    assert known == {name: compiled[name] for name in known}
    total = sum(known.values())
    assert said == [("programs", done, total) for done in range(total + 1)]

    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(session.cache.pool))
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(session.cache.exact))
    assert session.full_pool.used == 0
    assert not list(session.batch.active())
    timeline = made.timeline
    assert (timeline.blocks, timeline.steps, timeline.retrieval_seconds) == (0, 0, 0)
    summary = made.summary(1.0)
    assert summary["warm_up_seconds"] > 0
    # The logits alone, and no more than a few times what a network of this size holds.
    assert 2 * 8 * 101 * 4 <= summary["workspace_bytes_compiled"] < 10 * made.stack.parameter_bytes
    assert summary["device_bytes_planned"] > summary["device_kv_bytes"]
    assert summary["device_bytes_peak"] is None, "the CPU does not tell"

    before, said[:] = timeline.warm_up_seconds, []
    assert made._prepare(requests, GenerationConfig(threshold=0.4)) is session
    assert timeline.warm_up_seconds == before
    assert not said


def test_a_rehearsal_runs_nothing_and_gives_donated_buffers_back():
    ran = []

    def body(kept, buffer):
        jax.debug.callback(lambda: ran.append(1))
        return buffer + 1, kept.sum(0)

    program = jax.jit(body, donate_argnums=1)
    device = jax.devices()[0]
    kept, buffer = jnp.ones((3, 5)), jnp.full((4,), 7.0)
    rehearsal = Rehearsal({}, device, 60)
    with rehearsal.of_this_thread():
        result, total = perform(program, (kept, buffer), [1])
        other = threading.Thread(target=perform, args=(program, (kept, jnp.ones(4))))
        other.start()
        other.join(60)
    rehearsal.finish(None)
    rehearsal.close()
    jax.effects_barrier()
    assert result is buffer
    assert (total.shape, total.dtype, bool(total.any())) == ((5,), np.dtype(np.float32), False)
    assert len(ran) == 1, "only the other thread, which does not rehearse, has run it"
    assert [each.name for each in rehearsal.known.values()] == ["body"]


def test_a_compiler_that_hangs_is_named():
    never = threading.Event()
    lowered = SimpleNamespace(compile=lambda: never.wait(30))

    class Program:
        __name__ = "pool_step"

        def trace(self):
            return SimpleNamespace(lower=lambda: lowered, out_info=None)

    rehearsal = Rehearsal({}, jax.devices()[0], 0.1)
    rehearsal.call(Program(), (), ())
    try:
        with pytest.raises(WaitTimeout, match=r"waited 0\.1 s for the compiler of program pool_st"):
            rehearsal.finish(None)
    finally:
        never.set()
        rehearsal.close()
