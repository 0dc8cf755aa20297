"""Tokens a second while decoding, by method, context and batch: the paper's tables and figures.

    python -m benchmarks.decode --preset headline --json decode.json --plot decode.png

Weights are random, prompts are not read: caches and the host's pool are filled with random keys and
values. Every point runs real blocks of the engine, T steps and the commit, and then some with
selection switched off ("ideal"): nothing is retrieved, copied or refined. Tokens a second are those
of the median block. A preset's telling points come first; a run that was interrupted goes on where
its JSON file ends, and a point that does not fit is named and left out. What reading the prompts
costs beside this is the end-to-end benchmark's matter.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp

from benchmarks.decode_ceilings import designs, fetched_bytes, link_rate
from benchmarks.decode_ceilings import draw as draw_ceilings
from benchmarks.decode_plot import draw
from benchmarks.decode_points import MODELS, PRESETS, Point
from benchmarks.environment import DTYPES, arguments, check_output, write
from benchmarks.kernel_times import kernel_times
from benchmarks.random_session import RandomSession
from benchmarks.refusals import at_least, check_methods, check_steps, read_limit, refusals
from benchmarks.shapes import SHAPES, random_stack
from herald_jax import Budget, EngineConfig
from herald_jax.cli.options import read_size
from herald_jax.cli.platform import prepare_platform
from herald_jax.engine.config import KeyIndex
from herald_jax.engine.errors import EngineError
from herald_jax.engine.sizing import Sizing
from herald_jax.kv.device_cache import Transfer
from herald_jax.selection import SELECTORS

WARM_UP_BLOCKS = 1
IDEAL_BLOCKS = 3


def sized(point: Point, options: Any) -> Sizing:
    """How the engine of a point runs, its batch chosen; needs no weights.

    Raises:
      EngineError: the batch does not fit.
    """
    config, dtype = SHAPES[point.model], jnp.dtype(options.dtype)
    engine = EngineConfig(
        method=point.method,
        budget=Budget(point.budget, point.tokens),
        candidates_ratio=point.candidates_ratio,
        key_index=point.key_index,
        transfer=point.transfer,
        max_batch=1,
        threads=options.threads,
        layer_group=options.layer_group,
        device_memory=options.device_bytes and int(options.device_bytes * (1 - options.headroom)),
        host_memory=options.host_bytes,
        timeout=120.0,
    )
    length = point.context + (blocks_of(options) + 1) * config.block_size
    largest = Sizing(config, engine, dtype).largest_batch(point.method, length)
    batch = point.batch or largest
    if not 0 < batch <= largest:
        raise EngineError(f"batch {batch or 1} is more than the {largest} that fit")
    return Sizing(config, dataclasses.replace(engine, max_batch=batch), dtype)


def blocks_of(options: Any) -> int:
    """Blocks that a point runs: two to settle in once selection is off, and two to profile."""
    return int(WARM_UP_BLOCKS + options.blocks + IDEAL_BLOCKS + 4)


def measure(point: Point, sizing: Sizing, stack: Any, options: Any) -> dict[str, Any]:
    """One row.

    Raises:
      EngineError, MemoryError: the point does not fit.
    """
    config, batch = sizing.model, sizing.config.max_batch
    began = time.perf_counter()
    made = RandomSession(
        sizing,
        stack,
        point.method,
        context=point.context,
        blocks=blocks_of(options),
        steps=point.steps,
    )
    try:
        filled = time.perf_counter()
        made.run(WARM_UP_BLOCKS)
        warm = time.perf_counter()
        run = made.run(options.blocks)
        kernels = kernel_times(functools.partial(made.run, 1), 1) if options.profile else None
        made.stop_selecting()
        made.run(1)
        ideal = made.run(IDEAL_BLOCKS)
        ideal_kernels = kernel_times(functools.partial(made.run, 1), 1) if options.profile else None
        shape, plan = made.shape, sizing.plan(made.shape)
        stats = jax.devices()[0].memory_stats() or {}
        scanned = plan.key_index or plan.host_pool
        row = {
            "point": point.name,
            "method": point.method,
            "model": point.model,
            "host": f"{os.cpu_count()} CPUs",
            "context": point.context,
            "batch": batch,
            "block": config.block_size,
            "steps": point.steps,
            "budget": point.budget if point.tokens is None else f"{point.tokens} tokens",
            "candidates_ratio": sizing.candidates_ratio(point.method),
            "key_index": sizing.key_index(point.method),
            "transfer": point.transfer,
            "rows_moved_fraction": made.timeline.rows_moved_fraction,
            "exact_layers": sizing.exact_layers(point.method),
            "dtype": options.dtype,
            "device_memory_gb": options.device_bytes and options.device_bytes / 1e9,
            "tokens_per_second": round(run.tokens_per_second, 1),
            "block_ms": round(1e3 * run.median, 2),
            "step_ms": round(1e3 * run.median / run.passes, 3),
            "retrieval_ms": round(1e3 * run.retrieval, 2),
            "stall_fraction": round(run.stall, 4),
            "ideal_tokens_per_second": round(ideal.tokens_per_second, 1),
            "of_ideal": round(run.tokens_per_second / ideal.tokens_per_second, 3),
            "host_gb_per_s": round(scanned / run.retrieval / 1e9, 1) if run.retrieval else None,
            "device_bytes": shape.device_bytes,
            "device_bytes_planned": plan.device_bytes,
            "of_which_prefill": plan.prefill,
            "device_bytes_peak": stats.get("peak_bytes_in_use"),
            "host_bytes": made.session.host_kv_bytes,
            "fetched_bytes": fetched_bytes(shape, point.context),
            "fill_seconds": round(filled - began, 1),
            "warm_up_seconds": round(warm - filled, 1),
            "block_seconds": [round(seconds, 4) for seconds in run.seconds],
        }
        if kernels is not None:
            row |= {"kernels": kernels, "ideal_kernels": ideal_kernels}
    finally:
        made.close()
        del made
        gc.collect()
    return row


def points(options: Any) -> list[Point]:
    """The preset's points, or small ones."""
    found = [point for name in options.preset for point in PRESETS[name]()]
    changes = {
        "steps": options.steps,
        "candidates_ratio": options.candidates_ratio,
        "key_index": options.key_index,
        "transfer": options.transfer,
        "batch": options.batch,
    }
    given = {name: value for name, value in changes.items() if value is not None}
    refining = [name for name, selector in SELECTORS.items() if selector.refines]
    indexed = [name for name, selector in SELECTORS.items() if selector.indexed]
    sent = [name for name, selector in SELECTORS.items() if selector.between_blocks]
    made = []
    for point in found:
        own = dict(given)
        if point.method not in refining or point.candidates_ratio is not None:
            own.pop("candidates_ratio", None)
        if point.method not in indexed:
            own.pop("key_index", None)
        if point.method not in sent:
            own.pop("transfer", None)
        if options.quick:
            own |= {"model": "tiny", "context": 2048, "batch": 2}
        made.append(dataclasses.replace(point, **own))
    kept = [
        p
        for p in dict.fromkeys(made)
        if (not options.models or p.model in options.models or options.quick)
        and (not options.methods or p.method in options.methods)
        and (not options.contexts or p.context in options.contexts or options.quick)
    ]
    return kept[: 2 if options.quick else None]


def main() -> None:
    """Runs the benchmark."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--preset", nargs="+", choices=PRESETS, default=["headline"])
    parser.add_argument("--models", nargs="*", choices=MODELS, default=[], help="only these")
    parser.add_argument("--methods", nargs="*", default=[], help="only these")
    parser.add_argument("--contexts", nargs="*", type=int, default=[], help="only these")
    parser.add_argument("--batch", type=int, help="this batch instead of the preset's")
    parser.add_argument("--steps", type=int, help="this T instead of the preset's")
    parser.add_argument("--blocks", type=int, default=5, help="measured blocks")
    parser.add_argument("--candidates-ratio", type=float, help="C / K of methods that refine")
    parser.add_argument("--key-index", choices=get_args(KeyIndex), help="of methods that have one")
    parser.add_argument(
        "--transfer",
        choices=get_args(Transfer),
        help="instead of the preset's",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--layer-group", type=int, default=None)
    parser.add_argument("--threads", type=int, default=None, help="host kernel threads")
    parser.add_argument("--device-memory", default="80GB", help="arena, or 'all'")
    parser.add_argument("--profile", action="store_true", help="kernels of a block, and of ideal's")
    parser.add_argument("--headroom", type=float, default=0.03, help="share left to fragments")
    parser.add_argument("--host-memory", default=None)
    options = parser.parse_args()
    if options.quick:
        options.dtype, options.blocks, options.device_memory = "float32", 2, "all"
    with refusals(parser):
        at_least(options, 1, "batch", "steps", "blocks", "layer_group", "threads")
        check_methods(options.methods)
        if not 0 <= options.headroom < 1:
            raise ValueError(f"--headroom {options.headroom:g} is no share: give one in [0, 1)")
        options.device_bytes = read_limit(options.device_memory)
        options.host_bytes = read_size(options.host_memory, "--host-memory")
        wanted = _checked(points(options))
        check_output(options.json, options.plot)
        rows, skipped = _known(options.json), []
        prepare_platform(options.device_bytes)
    done = {(row["point"], row["device_memory_gb"], row["dtype"]) for row in rows}
    settings = {key: str(value) for key, value in vars(options).items()}
    limit = options.device_bytes and options.device_bytes / 1e9
    model, stack = None, None
    for at, point in enumerate(wanted):
        if (point.name, limit, options.dtype) in done:
            continue
        print(f"[{at + 1}/{len(wanted)}] {point.name}", file=sys.stderr, flush=True)
        try:
            sizing = sized(point, options)
            if point.model != model:
                stack = None
                gc.collect()
                model, stack = point.model, random_stack(SHAPES[point.model], options.dtype)
            row = measure(point, sizing, stack, options)
        except (MemoryError, RuntimeError) as error:
            skipped.append(f"{point.name}: {str(error).splitlines()[0]}")
            print(f"left out: {skipped[-1]}", file=sys.stderr, flush=True)
            continue
        rows.append(row)
        shown = ("batch", "tokens_per_second", "of_ideal", "stall_fraction", "step_ms")
        print({key: row[key] for key in (*shown, "retrieval_ms")}, flush=True)
        if options.json:
            write(options.json, settings | {"left_out": skipped}, rows)
    said: dict[str, Any] = {"left_out": skipped}
    drawn = functools.partial(draw, rows=rows)
    if "ceilings" in options.preset:
        link = link_rate(jax.devices()[0])
        found = designs(_of_ceilings(rows, options), link)
        said |= {"link_gb_per_s": round(link / 1e9, 1), "designs": found}
        drawn = functools.partial(draw_ceilings, found=found)
        for row in found:
            print(row, flush=True)
    if rows or not options.json:
        write(options.json, settings | said, rows)
    if options.plot and rows:
        drawn(options.plot)


def _of_ceilings(rows: list[dict[str, Any]], options: Any) -> list[dict[str, Any]]:
    """Rows of the preset "ceilings", measured as these options ask; a file may have others too."""
    alone = argparse.Namespace(**vars(options) | {"preset": ["ceilings"]})
    limit = options.device_bytes and options.device_bytes / 1e9
    asked = {(point.name, limit, options.dtype) for point in points(alone)}
    return [row for row in rows if (row["point"], row["device_memory_gb"], row["dtype"]) in asked]


def _known(path: Path | None) -> list[dict[str, Any]]:
    """Rows of an earlier run.

    Raises:
      ValueError: the file holds something else.
    """
    if path is None or not path.exists():
        return []
    try:
        rows = list(json.loads(path.read_text())["rows"])
        _ = [(row["point"], row["device_memory_gb"], row["dtype"]) for row in rows]
    except (ValueError, LookupError, TypeError):
        raise ValueError(
            f"{path} is no result to go on from: delete it or name another file"
        ) from None
    return rows


def _checked(wanted: list[Point]) -> list[Point]:
    """The points, if there are any and they can be measured.

    Raises:
      ValueError: with one sentence.
    """
    if not wanted:
        raise ValueError(
            "the presets have no such point: give fewer of --models, --methods and --contexts, or "
            "another --preset"
        )
    for point in wanted:
        EngineConfig(candidates_ratio=point.candidates_ratio)
        check_steps(point.steps, SHAPES[point.model])
    return wanted


if __name__ == "__main__":
    main()
