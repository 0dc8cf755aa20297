"""What a block's retrieval costs on the host: scan, gather and copy together, and one by one.

    python -m benchmarks.host_pipeline --json pipeline.json --plot pipeline.png

As ``herald-merged`` does for every sparse layer of all requests: select C candidates from the
int8 key index, gather their K and V rows into staging, start the copy to the device; all copies
may be in flight together. ``full`` gathers every candidate, ``changes`` only those that the
previous selection lacked, a share that is set here by making up previous selections; what the
device does with them is left out. Every round times the three stages by themselves, then together.
The floor is the time in which the read loop reads the bytes that must be read: the index and the
rows gathered. Keys and values are random numbers.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

import host_kernels
from benchmarks.environment import arguments, check_output, write
from benchmarks.host_batch import STAGES, Host, Part, request_bytes
from benchmarks.kernel_memory import BF16, EACH
from benchmarks.paired import ReadLoop, spread
from benchmarks.shapes import SHAPES
from herald_jax.engine.worker import Worker
from herald_jax.kv.budget import Budget
from herald_jax.kv.device_cache import CacheShape
from herald_jax.kv.host_memory import format_bytes, host_memory_room, parse_bytes
from herald_jax.kv.plan import cache_shape

Row = dict[str, Any]

#: Largest batch that is taken unasked, and the share of host memory that it may use.
BATCH, USABLE = 32, 0.5
#: Seconds that a stage of one round may take.
PATIENCE = 600.0


def run(
    workers: Sequence[Worker], parts: Sequence[Part], steps: Sequence[Callable[[Part, int], None]]
) -> float:
    """Seconds of all ``steps`` of every layer, a part a thread, until the device has its copies."""

    def one(part: Part) -> None:
        for layer in range(part.layers):
            for step in steps:
                step(part, layer)
        part.finish()

    began = time.perf_counter()
    tasks = [functools.partial(one, part) for part in parts]
    futures = [worker.submit(task) for worker, task in zip(workers, tasks, strict=True)]
    for future in futures:
        try:
            future.result(PATIENCE)
        except TimeoutError:
            names = " and ".join(step.__name__ for step in steps)
            raise SystemExit(f"waited {PATIENCE:g} s for {names} of a block") from None
    return time.perf_counter() - began


def measure(
    host: Host, parts: Sequence[Part], new_share: float | None, read: ReadLoop
) -> dict[str, Any]:
    """One row: medians over rounds, each of which times the stages alone, then together."""
    options, shape = host.options, host.shape
    layers, slots, heads = shape.sparse_layers, shape.slots, shape.kv_heads
    scanned = layers * slots * heads * options.context * (shape.head_dim + 4)
    copied = sum(part.copied_bytes for part in parts)
    entry = 2 * shape.head_dim * shape.dtype.itemsize
    gathered = layers * slots * heads * shape.candidates * entry
    if new_share is not None:
        gathered = sum(part.staging.keys[0].nbytes * 2 * layers for part in parts)
    seconds: dict[str, list[float]] = {name: [] for name in (*STAGES, "together")}
    reads, floors, gains, fractions = [], [], [], []
    workers = [Worker(f"part-{index}") for index in range(len(parts))]
    everything = tuple(STAGES.values())
    run(workers, parts, everything)
    for _ in range(options.rounds):
        before = read.plain()
        for name, stage in STAGES.items():
            seconds[name].append(run(workers, parts, (stage,)))
        together = run(workers, parts, everything)
        seconds["together"].append(together)
        reads.append((before + read.plain()) / 2)
        floors.append((scanned + gathered) / 1e9 / reads[-1])
        gains.append(sum(seconds[name][-1] for name in STAGES) / together)
        fractions.append(floors[-1] / together)
    for worker in workers:
        worker.close()
    middle = {f"{name}_seconds": statistics.median(times) for name, times in seconds.items()}
    low, high = spread(fractions)
    return {
        "shape": options.shape,
        "context": options.context,
        "batch": slots,
        "layers": layers,
        "kv_heads": heads,
        "head_dim": shape.head_dim,
        "threads": options.threads,
        "streams": len(parts),
        "isa": host_kernels.cpu_info()["isa"],
        "device": jax.devices()[0].device_kind,
        "budget": options.budget,
        "candidates_ratio": options.candidates_ratio,
        "candidates": shape.candidates,
        "gather": "full" if new_share is None else "changes",
        "new_share": 1.0 if new_share is None else new_share,
        **middle,
        "sum_seconds": sum(middle[f"{name}_seconds"] for name in STAGES),
        "overlap_gain": statistics.median(gains),
        "floor_seconds": statistics.median(floors),
        "fraction_of_floor": statistics.median(fractions),
        "low": low,
        "high": high,
        "scan_bytes": scanned,
        "gather_bytes": gathered,
        "copy_bytes": copied,
        "scan_gb_per_s": scanned / middle["scan_seconds"] / 1e9,
        "gather_gb_per_s": gathered / middle["gather_seconds"] / 1e9,
        "copy_gb_per_s": copied / middle["copy_seconds"] / 1e9,
        "read_gb_per_s": statistics.median(reads),
    }


def collect(host: Host) -> list[Row]:
    """A row with full gathers, then one for each share of new rows."""
    options, slots = host.options, host.shape.slots
    cuts = [slots * part // options.streams for part in range(options.streams + 1)]
    ranges = [(a, b) for a, b in itertools.pairwise(cuts) if b > a]
    sample = min(host.pool.nbytes // 2, options.threads * EACH)
    read = ReadLoop(host.pool.buffer, sample, options.threads)
    rows = []
    for share in (None, *options.new_shares):
        previous = None if share is None else host.previous(share)
        parts = [Part(host, first, last, previous) for first, last in ranges]
        rows.append(measure(host, parts, share, read))
        for part in parts:
            part.staging.close()
        shown = ("together_seconds", "sum_seconds", "floor_seconds", "fraction_of_floor")
        told = ", ".join(f"{name} {rows[-1][name]:.4f}" for name in shown)
        print(f"{rows[-1]['gather']}, {share or 1:.0%} new: {told}", file=sys.stderr)
    return rows


def sized(options: Any) -> CacheShape:
    """The buffers of as many requests as asked for, or as fit.

    Raises:
      ValueError: they do not fit.
    """
    config = SHAPES[options.shape]

    def shape_of(slots: int) -> CacheShape:
        return cache_shape(
            config,
            slots=slots,
            max_context=options.context + 2 * config.block_size,
            exact_layers=config.exact_layers,
            budget=Budget(options.budget),
            candidates_ratio=options.candidates_ratio,
            dtype=BF16,
        )

    each = sum(request_bytes(shape_of(1)))
    room = options.memory or int(host_memory_room() * USABLE)
    fits = room // each
    if not fits or (options.batch or 1) > fits:
        raise ValueError(
            f"--batch {options.batch or 1} of {options.context} tokens takes "
            f"{format_bytes(each * (options.batch or 1))} of host memory, of which "
            f"{format_bytes(room)} may be used: give a smaller --batch or --context, or a larger "
            "--memory"
        )
    return shape_of(options.batch or min(BATCH, fits))


def main() -> None:
    """Runs the benchmark."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="llada2.0-mini")
    parser.add_argument("--context", type=int, default=32768, help="committed tokens")
    parser.add_argument("--batch", type=int, help="requests; default: as fit, 32 at most")
    parser.add_argument("--budget", type=float, default=0.05)
    parser.add_argument("--candidates-ratio", type=float, default=1.5, help="C / K")
    parser.add_argument(
        "--new-shares", type=float, nargs="*", default=[0.1, 0.3, 1.0], help="in (0, 1]"
    )
    parser.add_argument("--threads", type=int, default=host_kernels.thread_count())
    parser.add_argument("--streams", type=int, default=2, help="threads that share the batch")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--memory", type=parse_bytes, help="host memory to use")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.quick:
        vars(options).update(shape="tiny", context=4096, batch=2, rounds=5)
    try:
        for name, value, low, high in (
            ("context", options.context, 64, 1 << 24),
            ("batch", 1 if options.batch is None else options.batch, 1, 4096),
            ("threads", options.threads, 1, 1024),
            ("streams", options.streams, 1, 64),
            ("rounds", options.rounds, 1, 10_000),
            ("candidates-ratio", options.candidates_ratio, 1, 16),
            *(("new-shares", share, 1e-3, 1) for share in options.new_shares),
        ):
            if not low <= value <= high:
                raise ValueError(f"--{name} {value} is not between {low:g} and {high:g}")
        shape = sized(options)
        if 2 * shape.candidates > options.context:
            raise ValueError(
                f"--candidates-ratio {options.candidates_ratio:g} of --budget {options.budget:g} "
                "is more than half of the context: give less of either"
            )
        check_output(options.json, options.plot)
        host = Host(options, shape)
    except (ValueError, OSError, MemoryError) as error:
        parser.error(str(error))
    prefetch = host_kernels.calibrate_prefetch()
    rows = collect(host)
    settings = {key: str(value) for key, value in vars(options).items()} | {
        "batch": shape.slots,
        "request_bytes": dict(zip(("pool", "staging"), request_bytes(shape), strict=True)),
        "prefetch": prefetch["setting"],
        "huge_pages": host.pool.huge_pages,
        "copy": "a real copy in host memory"
        if jax.devices()[0].platform == "cpu"
        else "device_put from registered staging",
    }
    write(options.json, settings, rows)
    if options.plot:
        from benchmarks.host_pipeline_plot import draw

        draw(options.plot, rows)


if __name__ == "__main__":
    main()
