"""Does retrieval run while the main stream denoises? A timeline of both streams over real blocks.

    python -m benchmarks.overlap --json overlap.json --plot overlap.png

One row a method and way to transfer its rows, after one of ``dense``, with the fraction of block
time that the main stream waited at block boundaries. Tokens are those delivered; prompts are read
before the clock of a block starts, and the first blocks are warm-up.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from typing import Any, get_args

from benchmarks.environment import arguments, write
from benchmarks.shapes import SHAPES, random_model, random_prompts
from herald_jax import Budget, Engine, EngineConfig, GenerationConfig
from herald_jax.engine.config import KeyIndex
from herald_jax.engine.timeline import Span
from herald_jax.kv.device_cache import Transfer

WARM_UP_BLOCKS = 2


def measure(
    model: Any, method: str, transfer: Transfer, options: Any
) -> tuple[dict[str, Any], list[Span]]:
    """Generates and times every block but the first ones."""
    config = SHAPES[options.model]
    blocks = options.blocks + WARM_UP_BLOCKS
    engine = Engine(
        config,
        model,
        None,
        EngineConfig(
            method=method,
            budget=Budget(options.budget),
            max_batch=options.batch,
            prefill_chunk=options.chunk,
            layer_group=options.layer_group,
            retrieval_streams=options.streams,
            threads=options.threads,
            host_memory=options.host_memory,
            transfer=transfer,
            key_index=options.key_index,
            candidates_ratio=None if method == "dense" else options.candidates_ratio,
            trace=True,
        ),
    )
    generation = GenerationConfig(
        max_new_tokens=blocks * config.block_size, steps=options.steps, stop_token_ids=()
    )
    prompts = random_prompts(config, options.batch, options.context)
    marks: list[tuple[float, float, float, float, int]] = []
    failures = []
    with engine:
        timeline = engine.timeline
        for item in engine.generate(prompts, generation, stream=True):
            error = getattr(item, "error", None)
            if error:
                failures.append(error)
            if not marks or timeline.blocks != marks[-1][4]:
                marks.append(
                    (
                        time.perf_counter() - timeline.began,
                        timeline.block_seconds,
                        timeline.stall_seconds,
                        timeline.retrieval_seconds,
                        timeline.blocks,
                    )
                )
        if failures:
            raise SystemExit(f"{method}: {failures[0]}")
        kept = marks[WARM_UP_BLOCKS - 1 :]
        # The last block has no successor, so nothing is retrieved beside it.
        kept = kept[:-1] if method != "dense" else kept
        steps = [b[1] - a[1] for a, b in itertools.pairwise(kept)]
        stall = kept[-1][2] - kept[0][2]
        busy = kept[-1][1] - kept[0][1]
        retrieval = (kept[-1][3] - kept[0][3]) / max(1, len(steps))
        row = {
            "method": method,
            "model": options.model,
            "context": options.context,
            "batch": options.batch,
            "block": config.block_size,
            "steps": options.steps,
            "budget": options.budget,
            "candidates_ratio": engine.sizing.candidates_ratio(method),
            "key_index": engine.sizing.key_index(method),
            "transfer": None if method == "dense" else transfer,
            "rows_moved_fraction": timeline.rows_moved_fraction,
            "exact_layers": config.exact_layers,
            "dtype": options.dtype,
            "blocks": len(steps),
            "tokens_per_second": round(options.batch * config.block_size * len(steps) / busy, 2),
            "block_ms": round(1e3 * statistics.median(steps), 2),
            "step_ms": round(1e3 * statistics.median(steps) / (options.steps + 1), 3),
            "retrieval_ms": round(1e3 * retrieval, 2),
            "stall_fraction": round(stall / busy, 4),
            "prefill_seconds": round(timeline.prefill_seconds, 2),
            "device_bytes": engine.device_kv_bytes,
            "host_bytes": engine.host_kv_peak,
        }
        return row, timeline.spans


def draw(path: Any, spans: list[Span], title: str, shown: int = 3) -> None:
    """The spans of a few blocks in the middle, a row a stream."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Rectangle

    last = max(span.block for span in spans)
    first = max(1, last // 2 - shown // 2)
    chosen = [span for span in spans if first <= span.block < first + shown]
    begin = min(span.begin for span in chosen)
    streams = sorted({span.stream for span in chosen})
    labels = sorted({span.label for span in chosen})
    colours = dict(zip(labels, [plt.get_cmap("tab10")(n) for n in range(10)], strict=False))
    figure, axis = plt.subplots(figsize=(12, 1.2 + 0.7 * len(streams)), layout="constrained")
    for span in chosen:
        axis.barh(
            streams.index(span.stream),
            1e3 * (span.end - span.begin),
            left=1e3 * (span.begin - begin),
            height=0.7,
            color=colours[span.label],
            linewidth=0,
        )
    axis.set_yticks(range(len(streams)), streams)
    axis.invert_yaxis()
    axis.set_xlabel("milliseconds")
    axis.set_title(title)
    handles = [Rectangle((0, 0), 1, 1, color=colours[label]) for label in labels]
    figure.legend(handles, labels, ncols=len(labels), loc="outside lower center", frameon=False)
    figure.savefig(path, dpi=130)


def main() -> None:
    """Runs the benchmark."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--model", choices=SHAPES, default="sdar-8b")
    parser.add_argument("--method", nargs="+", default=["herald-draft"])
    parser.add_argument("--context", type=int, default=16384, help="prompt tokens")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=20, help="measured blocks")
    parser.add_argument("--steps", type=int, default=20, help="T, denoising steps per block")
    parser.add_argument("--budget", type=float, default=0.05)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--chunk", type=int, default=None, help="prompt tokens per program")
    parser.add_argument("--layer-group", type=int, default=None)
    parser.add_argument("--streams", type=int, default=None, help="retrieval threads")
    parser.add_argument("--threads", type=int, default=None, help="host kernel threads")
    parser.add_argument("--host-memory", type=int, default=None, help="bytes")
    parser.add_argument("--transfer", nargs="+", choices=("changes", "full"), default=["changes"])
    parser.add_argument("--key-index", choices=get_args(KeyIndex), default="int8")
    parser.add_argument("--candidates-ratio", type=float, default=None, help="C / K")
    parser.add_argument("--no-dense", action="store_true", help="leave the dense row out")
    options = parser.parse_args()
    if options.quick:
        small = {"model": "tiny", "context": 2048, "batch": 2, "blocks": 6, "dtype": "float32"}
        vars(options).update(small)
    model = random_model(SHAPES[options.model], options.dtype)
    rows = []
    settings = {key: str(value) for key, value in vars(options).items()}
    settings["shape"] = str(dataclasses.asdict(SHAPES[options.model]))
    runs = list(itertools.product(options.method, options.transfer))
    for method, transfer in runs if options.no_dense else [("dense", options.transfer[0]), *runs]:
        row, spans = measure(model, method, transfer, options)
        rows.append(row)
        shown = ("method", "transfer", "block_ms", "retrieval_ms", "stall_fraction")
        print({key: row[key] for key in shown}, flush=True)
        if options.json:
            write(options.json, settings, rows)
    if not options.json:
        write(None, settings, rows)
    if options.plot:
        row = rows[-1]
        title = (
            f"{row['method']}, {row['model']} shape, batch {row['batch']}, "
            f"{row['context'] // 1024}K context, T = {row['steps']}, budget {row['budget']:.0%}: "
            f"stall {row['stall_fraction']:.1%} of block time"
        )
        draw(options.plot, spans, title)


if __name__ == "__main__":
    main()
