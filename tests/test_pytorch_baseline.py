"""The PyTorch baseline computes what ``dense`` computes: same weights, logits and tokens."""

from __future__ import annotations

import dataclasses
import itertools
import json
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from networks import TINY, make_model

from herald_jax.diffusion.accept import AcceptRule, accept, quota
from herald_jax.diffusion.sampling import ban, greedy
from herald_jax.models.attention import attend
from herald_jax.models.config import ExpertsConfig, ModelConfig
from herald_jax.models.decoder import Decoder
from tests.precision import near

pytestmark = pytest.mark.oracle
torch = pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.17")

from benchmarks import pytorch_baseline, torch_experts, torch_weights  # noqa: E402 (needs torch)
from benchmarks.shapes import SHAPES  # noqa: E402
from benchmarks.torch_denoise import Block, denoise, quotas  # noqa: E402
from benchmarks.torch_plain import Plain  # noqa: E402
from benchmarks.torch_tuned import Tuned  # noqa: E402

CPU = torch.device("cpu")
SOFTMAX = ExpertsConfig(count=16, per_token=4, intermediate_size=24, router="softmax")
CONFIGS = {
    "sdar": TINY,
    "sdar_moe": dataclasses.replace(TINY, family="sdar_moe", experts=SOFTMAX),
    "llada2": dataclasses.replace(
        TINY,
        family="llada2",
        rotary_dim=8,
        experts=dataclasses.replace(
            SOFTMAX,
            router="sigmoid",
            groups=4,
            groups_per_token=2,
            scale=2.5,
            shared_size=24,
            dense_layers=(0,),
        ),
    ),
}
STARTS, STEPS = [24, 24, 24], 5


class Recorder:
    """A network whose logits are kept, step by step."""

    def __init__(self, network: Any) -> None:
        self.network, self.block, self.logits = network, network.block, []

    def step(self) -> None:
        self.logits.append(self.network.logits().numpy())
        self.network.step()

    def commit(self) -> None:
        self.network.commit()


def cache_of(config: ModelConfig, starts: list[int]) -> torch_weights.Cache:
    rows = max(starts) + config.block_size
    return torch_weights.random_cache(config, len(starts), rows, torch.float32, CPU)


def with_torch(network: str, model: Decoder, starts: list[int]) -> tuple[Any, ...]:
    """Tokens, logits of every step, and the cache."""
    config = model.config
    weights, cache = torch_weights.weights_of(model), cache_of(config, starts)
    block = Block.empty(len(starts), config.block_size, config.mask_token_id, CPU)
    made = (
        Plain(config, weights, cache, starts[0], block)
        if network == "plain"
        else Tuned(config, weights, cache, starts, block)
    )
    recorder = Recorder(made)
    with torch.no_grad():
        tokens = denoise(recorder, quotas(config.block_size, STEPS))
    return tokens.numpy(), np.stack(recorder.logits), cache


def with_jax(model: Decoder, starts: list[int]) -> tuple[Any, ...]:
    """The same from our network and our rule."""
    config = model.config
    cache = cache_of(config, starts)
    buffers = [
        (jnp.asarray(k.numpy()), jnp.asarray(v.numpy()))
        for k, v in zip(cache.keys, cache.values, strict=True)
    ]
    count, size = len(starts), config.block_size
    graph, state = nnx.split(model)
    tokens = jnp.full((count, size), config.mask_token_id)
    masked = jnp.ones((count, size), bool)
    steps, rule = jnp.full(count, STEPS), AcceptRule(strategy="static")
    logits = []
    for step in range(STEPS):
        scores, _ = forward(graph, state, buffers, tokens, jnp.asarray(starts))
        logits.append(np.asarray(scores))
        proposed, sure = greedy(ban(scores, config.mask_token_id))
        due = quota(steps, size, jnp.int32(step))
        taken = accept(masked, sure, due, jnp.ones(count), rule)
        tokens, masked = jnp.where(taken, proposed, tokens), masked & ~taken
    assert not masked.any()
    _, buffers = forward(graph, state, buffers, tokens, jnp.asarray(starts))
    return np.asarray(tokens), np.stack(logits), buffers


@partial(jax.jit, static_argnums=0)
def forward(graph, state, buffers, tokens, starts):
    model = nnx.merge(graph, state)
    positions = starts[:, None] + jnp.arange(tokens.shape[1])
    slots, x, filled = jnp.arange(len(starts))[:, None], model.embed(tokens), []
    for layer, (keys, values) in zip(model.layers, buffers, strict=True):
        q, k, v = layer.pre(x, positions)
        keys, values = keys.at[slots, positions].set(k), values.at[slots, positions].set(v)
        filled.append((keys, values))
        x = layer.post(x, attend(q, keys, values, starts + tokens.shape[1], "xla"))
    return model.head(x), filled


@pytest.mark.parametrize(
    ("network", "name"),
    [
        *itertools.product(("plain", "ragged"), CONFIGS),
        # Ragged is the tuned network too.
        ("tuned", "llada2"),
        pytest.param("tuned", "sdar", marks=pytest.mark.slow),
        pytest.param("tuned", "sdar_moe", marks=pytest.mark.slow),
    ],
)
def test_a_block_is_that_of_dense(network: str, name: str) -> None:
    starts = [8, 24, 16] if network == "ragged" else STARTS
    model = make_model(CONFIGS[name], seed=3)
    tokens, logits, buffers = with_jax(model, starts)
    torch_tokens, torch_logits, cache = with_torch(network, model, starts)
    np.testing.assert_array_equal(torch_tokens, tokens)
    assert len(np.unique(tokens)) > 3
    np.testing.assert_allclose(torch_logits, logits, atol=near(1e-3), rtol=0)
    for index, (keys, values) in enumerate(buffers):
        # Committed, and no other row touched.
        np.testing.assert_allclose(cache.keys[index], keys, atol=near(1e-3), rtol=0)
        np.testing.assert_allclose(cache.values[index], values, atol=near(1e-3), rtol=0)


@pytest.mark.parametrize("name", ["tiny", "tiny-experts"])
def test_both_networks_agree_on_the_shapes_of_the_benchmarks(name: str) -> None:
    config = SHAPES[name]
    weights = torch_weights.random_weights(config, torch.float32, CPU)
    assert sum(part.numel() for part in _tensors(weights)) == config.parameter_count
    made = []
    for kind in (Plain, Tuned):
        block = Block.empty(1, config.block_size, config.mask_token_id, CPU)
        start: Any = 64 if kind is Plain else [64]
        cache = torch_weights.random_cache(config, 1, 96, torch.float32, CPU)
        with torch.no_grad():
            made.append(denoise(kind(config, weights, cache, start, block), quotas(32, 4)))
    assert torch.equal(*made)


def _tensors(part: Any) -> list[Any]:
    if isinstance(part, torch.Tensor):
        return [part]
    if isinstance(part, list):
        return [tensor for each in part for tensor in _tensors(each)]
    return _tensors(list(vars(part).values())) if dataclasses.is_dataclass(part) else []


@pytest.mark.parametrize("steps", [1, 3, 8, 20, 32, 40])
def test_quotas_are_those_of_the_static_rule(steps: int) -> None:
    due = quotas(32, steps)
    wanted = [int(quota(jnp.array([steps]), 32, jnp.int32(at))[0]) for at in range(len(due))]
    assert due == wanted
    assert sum(due) == 32


@pytest.mark.parametrize("name", ["torch.nn.functional.grouped_mm", "torch._grouped_mm"])
def test_grouped_products_are_those_of_the_loop(name: str) -> None:
    """The layout and the offsets that the kernel is given, experts without rows among them."""
    owner = torch if name == "torch._grouped_mm" else torch.nn.functional
    if not hasattr(owner, name.rsplit(".", 1)[1]):
        pytest.skip(f"this PyTorch has no {name}")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20, 64, generator=generator, dtype=torch.bfloat16)
    ids = torch.randint(0, 7, (20, 2), generator=generator)
    weights = torch.randn(9, 48, 64, generator=generator, dtype=torch.bfloat16)
    rows, row, ends = torch_experts.sort_by_expert(x, ids, len(weights))
    assert torch.equal(rows[row].unflatten(0, ids.shape), x[:, None].expand(-1, 2, -1))
    made = torch_experts.product(rows, weights, ends, name)
    torch.testing.assert_close(made, torch_experts.product(rows, weights, ends, "loop"))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["sdar", "sdar_moe", "llada2"])
def test_tuning_changes_how_and_not_what(name: str) -> None:
    """Kernels, compiled pieces and graphs against the same functions one by one, in bfloat16."""
    if not torch.cuda.is_available():
        pytest.skip("PyTorch finds no CUDA device")
    device, dtype, experts = torch.device("cuda", 0), torch.bfloat16, CONFIGS[name].experts
    config = dataclasses.replace(
        SHAPES["tiny"],
        family=name,
        rotary_dim=CONFIGS[name].rotary_dim,
        experts=experts and dataclasses.replace(experts, intermediate_size=64),
    )
    if config.experts and config.experts.shared_size:
        wider = dataclasses.replace(config.experts, shared_size=64)
        config = dataclasses.replace(config, experts=wider)
    weights = torch_weights.random_weights(config, dtype, device)
    cache = torch_weights.random_cache(config, 2, 96, dtype, device)
    block = Block.empty(2, config.block_size, config.mask_token_id, device)
    due = quotas(config.block_size, STEPS)
    with torch.no_grad():
        tuned = Tuned(config, weights, cache, [64, 64], block)
        before = tuned.logits().float()
        tuned.tune()
        block.tokens.fill_(config.mask_token_id)
        after = tuned.logits().float()
        captured = denoise(tuned, due)
        tuned.run_step, tuned.run_commit = tuned._step, tuned._commit
        launched = denoise(tuned, due)
    assert tuned.notes["compiled"] is True, tuned.notes
    assert tuned.notes["cuda_graph"] is True, tuned.notes
    # Where experts score alike, another rounding takes another one, for all masks at once.
    most = 0.05 if experts is None else 0.5
    assert float((after - before).norm() / before.norm()) < most
    assert torch.equal(captured, launched)
    assert not (captured == config.mask_token_id).any()


def test_the_command_writes_rows_and_refuses(tmp_path, capsys) -> None:
    out = tmp_path / "pytorch.json"
    small = ["--context", "32", "--batch", "1", "--blocks", "1", "--steps", "2"]
    pytorch_baseline.main(["--model", "tiny-experts", *small, "--json", str(out)])
    written = json.loads(out.read_text())
    assert [row["implementation"] for row in written["rows"]] == ["pytorch-plain", "pytorch-tuned"]
    assert written["environment"]["torch"] == torch.__version__
    assert all(row["tokens_per_second"] > 0 for row in written["rows"])
    wrong = [["--model", "tiny", "--context", "33"], ["--model", "tiny", "--steps", "0"]]
    if not torch.cuda.is_available():
        wrong.append(["--model", "sdar-8b"])
    for options in wrong:
        with pytest.raises(SystemExit) as caught:
            pytorch_baseline.main(options)
        assert caught.value.code == 2
        message = capsys.readouterr().err.splitlines()[-1]
        assert options[-1] in message
