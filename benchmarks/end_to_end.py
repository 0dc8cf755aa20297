"""From prompt to answer: time to the first block, a block's latency, and tokens a second overall.

    python -m benchmarks.end_to_end --json end_to_end.json --plot end_to_end.png

Decoding is a part of the truth: prompts are read first, and a method that keeps the KV on the host
writes it there meanwhile. One row a method, prompt length and batch: the engine is given as many
requests as slots, all at once, and times are its own. ``pays_from_tokens`` is the answer length
from which a row, reading included, delivers more tokens a second than the first method's row of the
same context at its own batch; 0 where it always does and null where it never does.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.environment import DTYPES, arguments, check_output, finish, write
from benchmarks.refusals import at_least, check_steps, read_limit, read_points, refusals
from benchmarks.shapes import SHAPES, random_prompts, random_stack
from herald_jax import Budget, Engine, EngineConfig, GenerationConfig
from herald_jax.engine.request import Result
from herald_jax.engine.stack import LayerStack


def measure(
    stack: LayerStack, method: str, context: int, batch: int, options: Any
) -> dict[str, Any]:
    """Serves one batch of random prompts after a small warm-up."""
    config = SHAPES[options.model]
    engine = Engine(
        config,
        stack,
        None,
        EngineConfig(
            method=method,
            budget=Budget(options.budget),
            max_batch=batch,
            max_context=context + options.tokens,
            candidates_ratio=None if method != "herald-merged" else options.candidates_ratio,
            device_memory=options.device_bytes,
        ),
    )
    with engine:
        warm = GenerationConfig(
            max_new_tokens=min(options.tokens, 3 * config.block_size),
            steps=options.steps,
            stop_token_ids=(),
        )
        list(engine.generate(random_prompts(config, 1, context), warm))
        timeline = engine.timeline
        blocks, spent = timeline.blocks, timeline.block_seconds
        generation = GenerationConfig(
            max_new_tokens=options.tokens, steps=options.steps, stop_token_ids=()
        )
        began = time.perf_counter()
        marks: list[tuple[int, float]] = []
        first, tokens, prefill = math.nan, 0, 0.0
        for item in engine.generate(
            random_prompts(config, batch, context, seed=1), generation, stream=True
        ):
            now = time.perf_counter() - began
            if isinstance(item, Result):
                if item.error:
                    raise SystemExit(f"{method}: {item.error}")
                tokens += item.completion_tokens
                prefill += item.prefill_seconds
            elif math.isnan(first):
                first = now
            if timeline.blocks != (marks[-1][0] if marks else -1):
                marks.append((timeline.blocks, timeline.block_seconds))
        whole = time.perf_counter() - began
        count, decoding = timeline.blocks - blocks, timeline.block_seconds - spent
        each = [b[1] - a[1] for a, b in itertools.pairwise(marks)] or [decoding / count]
    return {
        "method": method,
        "model": options.model,
        "context": context,
        "batch": batch,
        "new_tokens": options.tokens,
        "steps": options.steps,
        "budget": options.budget,
        "dtype": options.dtype,
        "prefill_seconds_each": round(prefill / batch, 4),
        "first_block_seconds": round(first, 3),
        "block_ms": round(1e3 * statistics.median(each), 2),
        "decode_tokens_per_second": round(tokens / decoding, 1),
        "tokens_per_second": round(tokens / whole, 1),
        "seconds": round(whole, 3),
    }


def rate(row: dict[str, Any], tokens: int, block: int) -> float:
    """Tokens a second of answers of ``tokens``, from a row's prefill and block times."""
    blocks = math.ceil(tokens / block)
    seconds = row["batch"] * row["prefill_seconds_each"] + blocks * row["block_ms"] / 1e3
    return float(row["batch"] * tokens / seconds)


def pays_from(row: dict[str, Any], other: dict[str, Any], block: int, most: int) -> int | None:
    """Shortest answer from which ``row`` is faster than ``other``; None if not up to ``most``."""
    lengths = range(block, most + 1, block)
    found = next((n for n in lengths if rate(row, n, block) > rate(other, n, block)), None)
    return 0 if found == block else found


def draw(path: Path, rows: list[dict[str, Any]]) -> None:
    """Tokens a second, reading included, against the length of the answer."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    block = SHAPES[rows[0]["model"]].block_size
    figure, axis = plt.subplots(figsize=(8, 4.5), layout="constrained")
    lengths = [block * 2**power for power in range(8)]
    for row in rows:
        label = f"{row['method']}, batch {row['batch']}, {row['context'] // 1024}K"
        axis.plot(lengths, [rate(row, n, block) for n in lengths], marker="o", label=label)
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [str(n) for n in lengths])
    axis.set(xlabel="tokens of the answer", ylabel="tokens a second, prompts included")
    axis.set_ylim(0, None)
    axis.set_title(f"{rows[0]['model']}, T = {rows[0]['steps']}, {rows[0]['dtype']}")
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
    figure.savefig(path, dpi=130)


def main() -> None:
    """Runs the benchmark."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--model", choices=SHAPES, default="llada2.0-mini")
    parser.add_argument(
        "--points",
        nargs="+",
        metavar="METHOD:BATCH",
        default=["dense:1", "dense:16", "herald-merged:16", "herald-merged:32", "herald-merged:64"],
    )
    parser.add_argument("--contexts", type=int, nargs="+", default=[32768])
    parser.add_argument("--tokens", type=int, default=256, help="of every answer")
    parser.add_argument("--steps", type=int, default=20, help="T, denoising steps per block")
    parser.add_argument("--budget", type=float, default=0.05)
    parser.add_argument("--candidates-ratio", type=float, default=None, help="C / K")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--device-memory", default="80GB", help="arena, or 'all'")
    options = parser.parse_args()
    if options.quick:
        vars(options).update(
            model="tiny",
            points=["dense:2", "herald-merged:2"],
            contexts=[512],
            tokens=64,
            dtype="float32",
            device_memory="all",
        )
    from herald_jax.cli.platform import prepare_platform

    config = SHAPES[options.model]
    with refusals(parser):
        at_least(options, 1, "contexts", "tokens", "steps")
        EngineConfig(budget=Budget(options.budget), candidates_ratio=options.candidates_ratio)
        check_steps(options.steps, config)
        points = read_points(options.points)
        check_output(options.json, options.plot)
        options.device_bytes = read_limit(options.device_memory)
        prepare_platform(options.device_bytes)
    stack = random_stack(config, options.dtype)
    settings = {key: str(value) for key, value in vars(options).items()}
    rows: list[dict[str, Any]] = []
    for context in options.contexts:
        first: dict[str, Any] | None = None
        for method, batch in points:
            with refusals(parser):
                row = measure(stack, method, context, batch, options)
            first = first or row
            row["pays_from_tokens"] = (
                None if row is first else pays_from(row, first, config.block_size, 1 << 14)
            )
            rows.append(row)
            print(row, flush=True)
            if options.json:
                write(options.json, settings, rows)
    finish(options, settings, rows, draw)


if __name__ == "__main__":
    main()
