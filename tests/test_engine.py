"""The engine when things go wrong, and the edges of what it accepts."""

from __future__ import annotations

import ast
import functools
import gc
import threading
import time
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from networks import TINY, answers, engine, make_model, prompts, tiny_model, unless_variant

import herald_jax
import host_kernels
from benchmarks.shapes import SHAPES
from herald_jax import Budget, Engine, EngineConfig, EngineError, GenerationConfig
from herald_jax.engine import block_rows
from herald_jax.kv.full_pool import FullPool
from herald_jax.kv.host_memory import cgroup_room, format_bytes, parse_bytes
from herald_jax.kv.plan import activation_bytes, cache_shape, cut_bytes, plan
from herald_jax.kv.transfer import Staging
from herald_jax.models import attention_parts
from herald_jax.selection import SELECTORS

RULE = GenerationConfig(max_new_tokens=24, threshold=0.3)
PACKAGE = Path(herald_jax.__file__).parent


# -- callbacks and threads ------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["selection/callback.py", "selection/job.py"])
def test_callback_modules_never_import_jax(module):
    """jax#24255, #24219, #25861: a callback that touches JAX hangs under async dispatch."""
    tree = ast.parse((PACKAGE / module).read_text())
    names = {
        name
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert not [name for name in names if name.split(".")[0] in ("jax", "flax")]


@pytest.mark.parametrize("path", sorted((PACKAGE / "selection").glob("*.py")), ids=lambda p: p.name)
def test_selectors_run_on_numpy_alone(path):
    """What runs inside the callback includes every selector."""
    assert "import jax" not in path.read_text()


def test_a_failing_selector_fails_its_requests_only(monkeypatch):
    """A callback must not raise; the requests concerned end with a sentence, others go on."""
    select, calls = host_kernels.attend_select, []

    def failing(*args, **rest):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("the scan broke")
        return select(*args, **rest)

    monkeypatch.setattr(host_kernels, "attend_select", failing)
    made = engine("herald-draft", 0.2, max_batch=1)
    first, second = made.generate(prompts((60, 50)), RULE)
    assert first.finish_reason == "error"
    assert "the scan broke" in first.error
    assert second.finish_reason != "error"
    assert second.token_ids == answers(engine("herald-draft", 0.2), prompts((60, 50)), RULE)["1"]
    assert made.session.full_pool.used == 0


def test_scores_that_are_not_finite_fail_one_request():
    """A slot with broken KV is retired with a sentence and leaves its batch-mates alone."""
    made = engine("herald-draft", 0.2, max_batch=2)
    given = prompts((60, 50))
    good = answers(engine("herald-draft", 0.2), given, RULE)
    stream = made.generate(given, RULE, stream=True)
    results = {}
    for item in stream:
        if isinstance(item, herald_jax.Result):
            results[item.id] = item
        elif item.id == "0":
            slot = made.session.batch.slots[0]
            if slot is not None and slot.booking is not None:
                slot.booking.extents[0][:, :, 3] = np.nan
    assert results["0"].finish_reason == "error"
    assert "not finite" in results["0"].error
    assert results["1"].token_ids == good["1"]


def test_a_retrieval_that_hangs_times_out_with_a_name(monkeypatch):
    """vllm#45387: no wait is for ever, and the message says what was waited for."""
    made = engine("herald-draft", 0.2, max_batch=2, timeout=60)
    answers(made, prompts((60,)), RULE)
    made.session.retrieval.timeout = 0.3
    select = host_kernels.attend_select

    def slow(*args, **rest):
        time.sleep(3)
        return select(*args, **rest)

    monkeypatch.setattr(host_kernels, "attend_select", slow)
    began = time.monotonic()
    results = list(made.generate(prompts((60, 50, 40)), RULE))
    assert time.monotonic() - began < 20
    assert len(results) == 3
    for result in results:
        assert result.finish_reason == "error"
        assert "waited 0.3 s for the retrieval stream" in result.error
        assert "sparse layer" in result.error
    time.sleep(3.5)


def test_rows_that_hang_on_their_way_to_the_host_are_named(monkeypatch):
    made = engine("herald-merged", 0.2, max_batch=1, timeout=60)
    answers(made, prompts((60,)), RULE)
    made.session.retrieval.timeout = 0.3
    ended = threading.Event()
    monkeypatch.setattr(block_rows, "store_rows", lambda *args: ended.wait(30))
    try:
        (result,) = made.generate(prompts((60,)), RULE)
        assert "waited 0.3 s for the retrieval stream" in result.error
        assert "the rows of the block before" in result.error
    finally:
        ended.set()


def test_a_retrieval_that_hangs_is_waited_for_once(monkeypatch):
    """The session that ends for it must not wait as long again."""
    made = engine("herald-merged", 0.2, max_batch=1, timeout=60)
    answers(made, prompts((60,)), RULE)
    made.session.retrieval.timeout = 3
    ended = threading.Event()
    monkeypatch.setattr(made.session.selector, "choose", lambda *args: ended.wait(30), False)
    began = time.monotonic()
    try:
        (result,) = made.generate(prompts((60,)), RULE)
        assert "waited 3 s for the retrieval stream" in result.error
        assert time.monotonic() - began < 5.5
    finally:
        ended.set()


@pytest.mark.parametrize("streams", [1, 2])
def test_same_prompt_many_times_under_load(streams):
    """vllm#45704, vllm#31210: KV in host memory never shows another request's rows."""
    prompt, other = prompts((70, 45))
    rule = GenerationConfig(max_new_tokens=16, threshold=0.3)
    made = engine("herald-draft", 0.2, max_batch=4, retrieval_streams=streams)
    given = [prompt if n % 3 else other for n in range(40)]
    results = answers(made, given, rule)
    assert len({tuple(results[str(n)]) for n in range(40) if n % 3}) == 1
    assert len({tuple(results[str(n)]) for n in range(40) if not n % 3}) == 1


def test_one_generation_at_a_time():
    """Two generators of one engine would share slots: the second is refused, not corrupted."""
    made = engine("herald-draft", 0.2)
    given = prompts((60, 50))
    want = answers(made, given, RULE)
    first = made.generate(given, RULE)
    head = next(first)
    with pytest.raises(EngineError, match="generating already"):
        next(made.generate(given, RULE))
    rest = {result.id: result.token_ids for result in [head, *first]}
    assert rest == want
    assert answers(made, given, RULE) == want


def test_an_interruption_leaves_a_usable_engine(monkeypatch):
    """Whatever breaks a block, the next generation begins anew and nothing stays booked."""
    made = engine("herald-draft", 0.2)
    given = prompts((60, 50))
    want = answers(made, given, RULE)
    decide = type(made.session.main)._decide

    def interrupted(self, x, state, decoding, step):
        if step == 2:
            raise KeyboardInterrupt
        return decide(self, x, state, decoding, step)

    with monkeypatch.context() as patch:
        patch.setattr(type(made.session.main), "_decide", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(made.generate(given, RULE))
    assert made.session is None
    assert answers(made, given, RULE) == want


@functools.cache
def poisoned_engine(token: int) -> Engine:
    """Over a network that makes NaN of one token; those made from it share what is compiled."""
    model = make_model(TINY, seed=0)
    table = model.embedding.embedding
    table[...] = table[...].at[token].set(jnp.nan)
    return Engine(TINY, model)


def test_a_network_that_gives_nan_fails_one_request_only():
    """Invariant 3 holds for failures too: the batch-mate answers as it does alone."""
    poisoned = 7
    good, bad = [8, 9, 10, 11], [8, poisoned, 10]
    for method in ("dense", "herald-draft"):
        config = EngineConfig(method=method, max_batch=2, max_context=192, warm_up=False)
        with poisoned_engine(poisoned).with_config(config) as made:
            alone = answers(made, [{"id": "b", "prompt_ids": good}], RULE)
            given = [{"id": "a", "prompt_ids": bad}, {"id": "b", "prompt_ids": good}]
            results = {result.id: result for result in made.generate(given, RULE)}
        assert results["a"].finish_reason == "error"
        assert "not finite" in results["a"].error
        assert results["a"].token_ids == []
        assert results["b"].token_ids == alone["b"]


@pytest.mark.parametrize("exact_layers", [None, 0])
@pytest.mark.parametrize("method", map(unless_variant, ["dense", *SELECTORS]))
def test_nan_does_not_outlive_its_request(method, exact_layers):
    """Whoever comes next into the slot, shorter or longer, answers as on a fresh engine."""
    if method == "dense" and exact_layers == 0:
        pytest.skip("dense keeps every layer exact")
    poisoned = 95
    long, short, other = ([t % poisoned for t in p] for p in prompts((150, 6, 90)))
    long[20] = poisoned
    config = EngineConfig(
        method=method,
        budget=Budget(0.3),
        max_batch=1,
        max_context=192,
        exact_layers=exact_layers,
        warm_up=False,
    )
    with poisoned_engine(poisoned).with_config(config) as made:
        want = answers(made, [short, other], RULE)
        (failed,) = made.generate([long], RULE)
        assert "not finite" in failed.error
        assert answers(made, [short, other], RULE) == want
        assert answers(made, [other, short], RULE) == {"0": want["1"], "1": want["0"]}


def test_closing_during_a_generation_answers_every_request():
    made = engine("herald-draft", 0.2, max_batch=2)
    stream = made.generate(prompts((60, 50, 40)), RULE, stream=True)
    next(stream)
    made.close()
    began = time.monotonic()
    results = [item for item in stream if isinstance(item, herald_jax.Result)]
    assert time.monotonic() - began < 30
    assert {result.id for result in results} == {"0", "1", "2"}
    assert all("closed" in result.error for result in results)
    assert made.session is None
    assert answers(made, prompts((60,)), RULE)


@pytest.mark.parametrize("streams", [1, 3])
def test_a_failing_copy_to_the_device_is_an_error_not_a_corruption(streams, monkeypatch):
    made = engine("herald-draft", 0.2, retrieval_streams=streams)
    want = answers(made, prompts((60,)), RULE)
    with monkeypatch.context() as patch:

        def broken(layer):
            raise RuntimeError("no memory for the copy")

        patch.setattr(made.session.retrieval.transfer, "send", broken)
        (result,) = made.generate(prompts((60,)), RULE)
    assert "no memory for the copy" in result.error
    assert answers(made, prompts((60,)), RULE) == want


def test_sessions_leave_nothing_behind():
    """Programs outlive sessions; streams, staging and full pools do not."""
    made = engine("herald-draft", 0.2, max_context=None)
    streams = []
    for length in (40, 100, 160):
        answers(made, prompts((length,)), RULE)
        streams.append(weakref.ref(made.session.retrieval))
        streams.append(weakref.ref(made.session.full_pool))
    made.close()
    gc.collect()
    assert [ref() for ref in streams] == [None] * 6


def test_an_abort_reaches_the_running_generation_only():
    made = engine("dense")
    made.abort("0")
    (result,) = made.generate(prompts((20,)), RULE)
    assert result.finish_reason != "error"


# -- transfers ------------------------------------------------------------------------------------


def test_what_was_sent_does_not_change_with_staging():
    """On the CPU backend a plain put aliases NumPy memory; staging is overwritten every block."""
    staging = Staging(2, (1, 8, 2, 16), np.dtype(np.float32), jax.devices()[0])
    staging.keys[1][:] = 7
    staging.values[1][:] = 8
    k, v = staging.send(1)
    staging.reclaim(1)
    staging.keys[1][:] = 0
    staging.values[1][:] = 0
    assert (np.asarray(k) == 7).all()
    assert (np.asarray(v) == 8).all()
    staging.close()


# -- the full pool --------------------------------------------------------------------------------


def test_requests_wait_for_room_in_the_host_pool():
    """Labman42/JetEngine#4: too little KV memory means waiting, never a hang or a lost result."""
    made = engine("herald-draft", 0.2, max_batch=3)
    given = prompts((60, 50, 40, 70, 30))
    plenty = answers(made, given, RULE)
    shape = made.session.shape
    one = made.session.full_pool.bytes_for(96)
    tight = engine("herald-draft", 0.2, max_batch=3)
    session = tight._prepare(
        [herald_jax.engine.request.Request("0", np.zeros(60, np.int32), 24)], RULE
    )
    session.full_pool = FullPool(
        layers=shape.sparse_layers,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        dtype=shape.dtype,
        nbytes=one + 4096,
    )
    assert answers(tight, given, RULE) == plenty


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: engine("herald"), ["--method", "herald-draft"]),
        (lambda: engine("herald-draft", exact_layers=4), ["--exact-layers 4", "at most 3"]),
        (lambda: Budget(0.0), ["--budget 0", "(0, 1]"]),
        (lambda: Budget(1.5), ["--budget 1.5"]),
        (lambda: Budget(tokens=0), ["--budget-tokens 0"]),
        (lambda: EngineConfig(max_batch=0), ["--max-batch 0"]),
        (lambda: EngineConfig(key_index="int2"), ["--key-index 'int2'", "int8, int4 or none"]),
        (lambda: EngineConfig(exact_layers=-1), ["--exact-layers -1"]),
        (lambda: GenerationConfig(max_new_tokens=0), ["--max-new-tokens 0"]),
        (lambda: GenerationConfig(threshold=2), ["--threshold 2"]),
        (lambda: GenerationConfig(top_p=0), ["--top-p 0"]),
        (lambda: GenerationConfig(temperature=-1), ["--temperature -1"]),
        (lambda: GenerationConfig(temperature=float("inf")), ["--temperature inf"]),
        (lambda: GenerationConfig(temperature=float("nan")), ["--temperature nan"]),
        (lambda: GenerationConfig(top_k=10**11), ["--top-k"]),
        (lambda: list(engine("dense").generate("text")), ["one string"]),
        (lambda: GenerationConfig(strategy="sometimes"), ["sometimes", "dynamic, static"]),
        (lambda: list(engine("dense").generate([[7]], GenerationConfig(steps=9))), ["--steps 9"]),
    ],
)
def test_wrong_options_get_one_sentence(make, words):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (its words are checked below)
        make()
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "empty"),
        ([TINY.vocab_size], "vocabulary"),
        ([TINY.mask_token_id], "mask"),
        ("text", "tokenizer"),
        ({"prompt_ids": [7], "prompt": "x"}, "exactly one"),
        ({"id": "a"}, "exactly one"),
        ({"prompt_ids": [7], "n": 4}, "'n' is unknown"),
        ({"prompt_ids": [7], "max_new_tokens": 0}, "max_new_tokens 0"),
        ({"prompt_ids": [7] * 190}, "--max-context 192"),
        ({"prompt_ids": 5}, "not a list of token ids"),
        ({"prompt_ids": None}, "not a list of token ids"),
        ({"prompt_ids": "text"}, "not a list of token ids"),
        ({"prompt_ids": [7, 1.5]}, "not a list of token ids"),
        (None, "not a list of token ids"),
        ({"id": "\ud800", "prompt_ids": [7]}, "id is not valid"),
    ],
)
def test_a_bad_request_gets_its_own_error(prompt, words):
    """mmcdermott/MEDS_EIC_AR#171: too long is refused, never cut silently."""
    made = engine("dense")
    results = {r.id: r for r in made.generate([prompt, {"id": "good", "prompt_ids": [7, 8]}], RULE)}
    bad = next(r for name, r in results.items() if name != "good")
    assert bad.finish_reason == "error"
    assert words in bad.error
    assert results["good"].finish_reason != "error"


def test_no_memory_names_the_options():
    with pytest.raises(EngineError, match="--max-batch"):
        list(engine("dense", device_memory=10_000).generate(prompts((60,)), RULE))
    with pytest.raises(EngineError, match="--host-memory"):
        list(engine("herald-draft", 0.2, host_memory=10_000).generate(prompts((60,)), RULE))


def test_auto_is_dense_while_it_fits():
    """sglang#7059: say when offload helps; stay on the device while the cache fits."""
    small = engine("auto", 0.05)
    answers(small, prompts((60,)), RULE)
    assert small.method == "dense"
    need = small.sizing.plan(small.sizing.shape("dense", 1024)).device_bytes
    tight = engine("auto", 0.05, max_context=1024, device_memory=need - 1)
    answers(tight, prompts((60,)), RULE)
    assert tight.method == "herald-merged"
    assert "dense does not fit" in tight.method_reason
    assert "herald-merged keeps" in tight.method_reason
    crowded = engine("auto", 0.05, max_context=1024, device_memory=need - 1, host_memory=10**5)
    assert "host memory that all" in crowded.sizing.choose(1024)[1]
    hopeless = engine("auto", 0.05, max_context=1024, device_memory=10**4)
    assert "herald-merged does not either" in hopeless.sizing.choose(1024)[1]
    assert tight.device_kv_bytes < small.sizing.shape("dense", 1024).device_bytes


def _pairs(booking):
    """Extent and index of every layer, of no bytes where there is none."""
    index = booking.index or [np.zeros(0, np.uint8)] * len(booking.extents)
    return list(zip(booking.extents, index, strict=True))


@pytest.mark.parametrize(
    ("method", "transfer", "key_index"),
    [
        ("herald-draft", "changes", "int8"),
        ("herald-merged", "changes", "int8"),
        ("herald-merged", "full", "int4"),
        *((name, "full", "int8") for name in ("dense", *SELECTORS)),
    ],
)
def test_booked_equals_planned(method, transfer, key_index):
    made = engine(method, 0.1, transfer=transfer, key_index=key_index)
    answers(made, prompts((60, 150)), RULE)
    session, sizing = made.session, made.sizing
    plan = sizing.plan(sizing.shape(method, 192))
    held = sum(b.nbytes for pair in session.cache.exact for b in pair)
    assert held == plan.exact
    if method != "dense":
        pool = session.full_pool
        assert pool.used == 0
        bookings = [pool.book(str(slot), 192) for slot in range(session.shape.slots)]
        assert pool.used == pool.nbytes == plan.booked
        parts = [(part.nbytes, kept.nbytes) for b in bookings for part, kept in _pairs(b)]
        assert tuple(map(sum, zip(*parts, strict=True))) == (plan.host_pool, plan.key_index)
        assert (plan.key_index > 0) == SELECTORS[method].indexed
        for booking in bookings:
            pool.release(booking)
    moving, shape = (
        session.retrieval.transfer if session.retrieval else session.current,
        session.shape,
    )
    if shape.transfer == "changes":
        staging = moving._memory.arrays
    else:
        staging = moving.staging.keys + moving.staging.values if moving else []
    assert sum(part.nbytes for part in staging) == plan.staging
    session.cache.reset_pool()
    held = sum(b.nbytes for pair in session.cache.pool for b in pair)
    assert held == shape.pool_bytes
    # What changes hold on the device at their peak is measured in test_transfers.py.
    if not (shape.transfer == "changes" or shape.within_step):
        assert shape.incoming_bytes == plan.staging
    partial = getattr(session.current, "partial", None)
    assert shape.partial_bytes == (partial.nbytes if partial else 0)
    assert shape.active_bytes + shape.incoming_bytes + shape.partial_bytes == plan.pools
    assert shape.refines or shape.transfer == "changes" or shape.active_bytes == held
    weights = made.stack.parameter_bytes
    assert weights == plan.weights


def test_numpy_ids_are_ids():
    given = prompts((20,))
    made = engine("dense")
    assert answers(made, [np.array(given[0])], RULE) == answers(made, given, RULE)


def test_streamed_ids_joined_are_the_result():
    """NVIDIA/TensorRT-LLM#3280: deltas, not repetitions."""
    made = engine("herald-draft", 0.2)
    ids: dict[str, list[int]] = {}
    for item in made.generate(prompts((60, 9, 33, 70)), RULE, stream=True):
        if isinstance(item, herald_jax.Delta):
            ids.setdefault(item.id, []).extend(item.token_ids)
        else:
            assert ids.get(item.id, []) == item.token_ids


def test_a_session_is_reused_where_it_fits():
    made = engine("herald-draft", 0.2, max_context=None)
    answers(made, prompts((60,)), RULE)
    first = made.session
    answers(made, prompts((40,)), GenerationConfig(max_new_tokens=8, threshold=0.9))
    assert made.session is first
    answers(made, prompts((300,)), RULE)
    assert made.session is not first


def test_bf16_runs_every_method():
    config = TINY
    from flax import nnx

    graph, state = nnx.split(tiny_model())
    from herald_jax.models.decoder import Decoder

    half = Decoder(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    nnx.update(half, jax.tree.map(lambda x: x.astype(jnp.bfloat16), state))
    base, outs = Engine(config, half), {}
    for method in ("dense", "herald-draft", "herald-merged"):
        made = base.with_config(
            EngineConfig(method=method, max_batch=2, max_context=96, budget=Budget(1.0))
        )
        outs[method] = answers(made, prompts((60, 33)), GenerationConfig(max_new_tokens=16))
        assert all(len(ids) <= 16 for ids in outs[method].values())
    first = [outs[method]["0"][:1] for method in outs]
    assert first.count(first[0]) >= 2
    assert graph is not None


# -- sizes ----------------------------------------------------------------------------------------


def test_budget_rule():
    """K_r = min(prefix, max(32, ceil(fraction * prefix)))."""
    budget = Budget(0.05)
    assert [budget.entries(n) for n in (0, 8, 32, 640, 641, 32768)] == [0, 8, 32, 32, 33, 1639]
    assert Budget(1.0).entries(777) == 777
    assert [Budget(tokens=1024).entries(n) for n in (100, 5000)] == [100, 1024]
    assert str(Budget(0.05)) == "0.05"


@pytest.mark.parametrize(
    ("text", "value"),
    [("80GB", 80 * 10**9), ("64GiB", 64 << 30), ("512 mb", 512 * 10**6), ("4096", 4096)],
)
def test_sizes_are_read(text, value):
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "80XB", "-1GB", "0", "lots"])
def test_sizes_that_cannot_be_read(text):
    with pytest.raises(ValueError, match="size"):
        parse_bytes(text)


def test_format_bytes():
    assert format_bytes(1_234_567) == "1.23 MB"
    assert format_bytes(12) == "12 B"


def test_cgroup_limits_are_read(tmp_path):
    """sglang PR#35641: plan against the container, not the machine."""
    assert cgroup_room(tmp_path) is None
    (tmp_path / "memory.max").write_text("max\n")
    assert cgroup_room(tmp_path) is None
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("300\n")
    assert cgroup_room(tmp_path) == 700
    old = tmp_path / "v1"
    (old / "memory").mkdir(parents=True)
    (old / "memory/memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert cgroup_room(old) is None


def test_what_step_one_carries_along_is_planned():
    """Activations of the draft and of the masks: half a block of them where their queries merge."""
    made = engine("herald-merged", 0.25)
    shapes = {name: made.sizing.shape(name, 192) for name in ("herald-merged", "merged")}
    assert (shapes["herald-merged"].masks, shapes["merged"].masks) == (TINY.block_size // 2, 1)
    more = activation_bytes(TINY, shapes["merged"].slots * (TINY.block_size // 2 - 1), 4, False)
    planned = {name: made.sizing.plan(shape).workspace for name, shape in shapes.items()}
    assert planned["herald-merged"] - planned["merged"] == more


def test_cut_attention_is_planned(monkeypatch):
    """What the compiler of a GPU says such an attention needs beside its arguments: 7.9 MB."""
    config = SHAPES["sdar-8b"]
    sizes = {"exact_layers": config.num_layers, "budget": Budget(), "candidates_ratio": 1.0}
    shape = cache_shape(config, slots=5, max_context=66048, dtype=jnp.dtype("bfloat16"), **sizes)
    cut, planned = cut_bytes(config, shape), plan(config, shape, fused=True).workspace
    assert 7.8e6 < cut < 8e6
    monkeypatch.setattr(attention_parts, "MULTIPROCESSORS", 1)
    assert cut_bytes(config, shape) == 0
    assert plan(config, shape, fused=True).workspace == planned - cut
