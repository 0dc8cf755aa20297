"""How fast prompts are read, beside what the device can compute.

    python -m benchmarks.prefill --json prefill.json --plot prefill.png

One row a method and prompt length: random prompts one after the other, the first of a length not
counted. ``warm_up_seconds`` is what compiling took before it, or loading what was compiled before.
``fraction_of_matmul`` counts the operations of the network's matrix products and of block-causal
attention, over time, beside the rate of a large matrix product measured in the same run. Methods
that keep the KV on the host write it there meanwhile, and that is in the time.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from benchmarks.ceilings import ceilings
from benchmarks.environment import DTYPES, arguments, check_output, finish, write
from benchmarks.refusals import at_least, check_methods, refusals
from benchmarks.shapes import SHAPES, random_prompts, random_stack
from herald_jax import Engine, EngineConfig, GenerationConfig
from herald_jax.engine.request import Result
from herald_jax.engine.stack import LayerStack
from herald_jax.models.config import ModelConfig


def operations(config: ModelConfig, tokens: int) -> float:
    """Floating-point operations of reading a prompt of whole blocks: products and attention."""
    hidden, dim = config.hidden_size, config.head_dim
    heads = config.num_heads + 2 * config.num_kv_heads
    weights = 0.0
    for layer in range(config.num_layers):
        weights += hidden * dim * (heads + config.num_heads)
        experts = config.experts
        if experts is not None and config.has_experts(layer):
            wide = experts.per_token * experts.intermediate_size + experts.shared_size
            weights += hidden * (3 * wide + experts.count)
        else:
            weights += 3 * hidden * config.intermediate_size
    # A row attends its block and all before it: half of all pairs, and half a block more.
    pairs = tokens * (tokens + config.block_size) / 2
    return 2 * weights * tokens + 4 * config.num_layers * config.num_heads * dim * pairs


def measure(
    stack: LayerStack, method: str, length: int, options: Any, peak: float
) -> dict[str, Any]:
    """Reads prompts of one length and takes the median."""
    config = SHAPES[options.model]
    engine = Engine(
        config,
        stack,
        None,
        EngineConfig(
            method=method,
            max_batch=1,
            prefill_chunk=options.chunk,
            max_context=length + 2 * config.block_size,
        ),
    )
    generation = GenerationConfig(max_new_tokens=config.block_size, steps=1, stop_token_ids=())
    seconds = []
    with engine:
        for prompt in random_prompts(config, 1 + options.prompts, length):
            (result,) = engine.generate([prompt], generation)
            assert isinstance(result, Result)
            if result.error:
                raise SystemExit(f"{method}: {result.error}")
            seconds.append(result.prefill_seconds)
    taken = statistics.median(seconds[1:])
    made = operations(config, length // config.block_size * config.block_size)
    return {
        "method": method,
        "model": options.model,
        "context": length,
        "chunk": options.chunk,
        "dtype": options.dtype,
        "warm_up_seconds": round(engine.timeline.warm_up_seconds, 2),
        "first_seconds": round(seconds[0], 3),
        "seconds": round(taken, 4),
        "tokens_per_second": round(length / taken, 1),
        "tflops": round(made / taken / 1e12, 2),
        "matmul_tflops": round(peak / 1e12, 2),
        "fraction_of_matmul": round(made / taken / peak, 3),
    }


def draw(path: Path, rows: list[dict[str, Any]]) -> None:
    """Share of the matrix rate against prompt length, a line a method."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    for method in dict.fromkeys(row["method"] for row in rows):
        line = [row for row in rows if row["method"] == method]
        axis.plot(
            [row["context"] for row in line],
            [100 * row["fraction_of_matmul"] for row in line],
            marker="o",
            label=method,
        )
    axis.set_xscale("log", base=2)
    axis.set_xticks([row["context"] for row in rows], [str(row["context"]) for row in rows])
    axis.set(xlabel="prompt tokens", ylabel="% of a large matrix product's rate", ylim=(0, None))
    axis.set_title(f"Prefill of {rows[0]['model']}, {rows[0]['dtype']}")
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
    figure.savefig(path, dpi=130)


def main() -> None:
    """Runs the benchmark."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--model", choices=SHAPES, default="llada2.0-mini")
    parser.add_argument("--methods", nargs="+", default=["dense", "herald-merged"])
    parser.add_argument("--contexts", type=int, nargs="+", default=[8192, 16384, 32768])
    parser.add_argument("--prompts", type=int, default=3, help="measured prompts of each length")
    parser.add_argument("--chunk", type=int, default=4096, help="prompt tokens per program")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    options = parser.parse_args()
    if options.quick:
        vars(options).update(
            model="tiny", contexts=[512, 1024], prompts=1, chunk=256, dtype="float32"
        )
    with refusals(parser):
        at_least(options, 1, "contexts", "prompts", "chunk")
        check_methods(options.methods)
        check_output(options.json, options.plot)
    peak = ceilings(jnp.dtype(options.dtype), 512 if options.quick else 8192).flops_per_second
    stack = random_stack(SHAPES[options.model], options.dtype)
    settings = {key: str(value) for key, value in vars(options).items()}
    rows = []
    for method in options.methods:
        for length in options.contexts:
            with refusals(parser):
                rows.append(measure(stack, method, length, options, peak))
            print(rows[-1], flush=True)
            if options.json:
                write(options.json, settings, rows)
    finish(options, settings, rows, draw)


if __name__ == "__main__":
    main()
