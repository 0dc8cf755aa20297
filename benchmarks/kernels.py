"""How close each host kernel comes to reading memory: every one paired with a read loop.

    python -m benchmarks.kernels --json kernels.json --plot kernels.png

One row a kernel, number of threads and point: a base point, from which one axis at a time is
varied. A sample goes through memory far larger than the caches, and a plain read loop on the same
threads runs just before and just after it; ``fraction_of_read`` is the median ratio over the
rounds, ``low`` and ``high`` its 10th and 90th percentile. Bytes are those that a kernel must read
(K and V for ``fused``, K, or an index with its scales) or, for the kernels that move rows,
those it copies. Rounds in which a thread was made to give up its CPU are repeated, a few of them;
``undisturbed`` tells how many were not. ``prefetched_read_gb_per_s`` is the best of the read loops
with several streams and software prefetch. ``top_k`` and ``heap`` select from scores in cache;
there ``low`` and ``high`` belong to ``over_heap``.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

import host_kernels
from benchmarks import kernel_top_k
from benchmarks.environment import arguments, check_output, write
from benchmarks.kernel_cases import KERNELS, SCANS, Cases, Point, Work
from benchmarks.kernel_memory import EACH, Memory, default_bytes
from benchmarks.paired import ReadLoop, measure, spread
from herald_jax.kv.host_memory import parse_bytes
from host_kernels import _native

Row = dict[str, Any]

#: Fractions of the read loop that scans must reach, by CPU vendor; and int8 keys over fused keys.
MUST = {
    "AuthenticAMD": {"keys": 0.90, "fused": 0.85, "int8": 0.82},
    "GenuineIntel": {"keys": 0.82, "fused": 0.78, "int8": 0.76},
}
MUST_OVER_FUSED = 3.0
#: Kernels that are measured against the number of queries, and the queries.
QUERIED, QUERIES = ("keys", "int8", "int4"), (1, 2, 4, 8, 16, 32)


def points(options: Any, base: Point) -> Iterator[tuple[str, Point]]:
    """The base point, then every axis by itself."""
    yield "base", base
    for name, field, values in (
        ("context", "context", options.contexts),
        ("head_dim", "head_dim", options.head_dims),
        ("group", "group", options.groups),
        ("topk_fraction", "topk_fraction", options.topk_fractions),
        ("queries", "queries", options.queries),
    ):
        for value in values:
            if value != getattr(base, field):
                yield name, replace(base, **{field: value})


class Bench:
    """One memory and one read loop a number of threads."""

    def __init__(self, memory: Memory, options: Any) -> None:
        """Measures the clock, and calibrates the read loops."""
        self.memory, self.options = memory, options
        self.isa = host_kernels.cpu_info()["isa"]
        self.calibration = host_kernels.calibrate_prefetch()
        self.clock = _native.clock_rate()
        self.reads: dict[int, ReadLoop] = {}
        self.cases: dict[int, Cases] = {}
        for threads in options.threads:
            # One thread gets less, so that its samples do not take all day.
            sample = min(memory.key_bytes // 2, threads * options.sample)
            self.cases[threads] = Cases(memory, sample)
            self.reads[threads] = ReadLoop(memory.rows.view(np.uint8), sample, threads)

    def rows(self, axis: str, kernel: str, point: Point, threads: int) -> list[Row]:
        """A row for each variant of a kernel."""
        made = []
        for work in self.cases[threads].make(kernel, point):
            made.append(self._row(axis, kernel, point, threads, work))
        return made

    def _row(self, axis: str, kernel: str, point: Point, threads: int, work: Work) -> Row:
        found = measure(
            lambda i: work.run(i, threads), work.nbytes, self.reads[threads], self.options.rounds
        )
        row = {
            "kernel": kernel,
            "isa": self.isa,
            "threads": threads,
            "context": point.context,
            "head_dim": point.head_dim,
            "group": point.group,
            "topk_fraction": point.topk_fraction,
            "seconds": found.seconds,
            "gb_per_s": round(found.rate, 3),
            "read_gb_per_s": round(found.read, 3),
            "fraction_of_read": round(found.fraction, 4),
            "low": round(found.low, 4),
            "high": round(found.high, 4),
            "prefetched_read_gb_per_s": round(found.best, 3),
            "keys_per_second": work.keys / found.seconds,
            "undisturbed": found.undisturbed,
            "axis": axis,
        }
        if kernel in SCANS:
            row["cycles_per_key"] = round(threads * self.clock * found.seconds / work.keys, 2)
            row["gflop_per_s"] = round(work.operations / found.seconds / 1e9, 3)
            row["flop_per_byte"] = round(work.operations / work.nbytes, 3)
        return row | work.more

    def over_fused(self, point: Point, threads: int) -> Row:
        """Keys per second of int8 over those of fused, sample by sample."""
        parts = {name: self.cases[threads].make(name, point)[0] for name in ("fused", "int8")}
        ratios = []
        for index in range(self.options.rounds):
            rate = {}
            for name, work in parts.items():
                began = time.perf_counter()
                work.run(index, threads)
                rate[name] = work.keys / (time.perf_counter() - began)
            ratios.append(rate["int8"] / rate["fused"])
        low, high = spread(ratios)
        return {
            "keys_over_fused": statistics.median(ratios),
            "keys_over_fused_low": low,
            "keys_over_fused_high": high,
        }


def collect(bench: Bench, base: Point) -> list[Row]:
    """Every row; progress goes to stderr."""
    options = bench.options
    rows: list[Row] = []
    for axis, point in points(options, base):
        for kernel in options.kernels:
            if axis == "queries" and kernel not in QUERIED:
                continue
            for threads in options.threads:
                rows += bench.rows(axis, kernel, point, threads)
                if axis == "base" and kernel == "int8" and "fused" in options.kernels:
                    rows[-1] |= bench.over_fused(point, threads)
                shown = f"{rows[-1]['fraction_of_read']:.3f} of read"
                value = "" if axis == "base" else f" {getattr(point, axis)}"
                print(f"{axis}{value}, {kernel}, {threads} threads: {shown}", file=sys.stderr)
    return rows


def settings(bench: Bench, base: Point) -> dict[str, Any]:
    """What was measured with."""
    memory, options = bench.memory, bench.options
    most = max(options.threads)
    roofs = {
        name: round(_native.compute_roof(name, most) / 1e9, 2)
        for name in ("bf16", "int8", "float32")
    }
    thp = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return {key: str(value) for key, value in vars(options).items()} | {
        "base": asdict(base),
        "key_bytes": memory.key_bytes,
        "sample_key_bytes": {n: cases.sample_bytes for n, cases in bench.cases.items()},
        "page_bytes": (2 << 20) if memory.huge_pages else 4096,
        "huge_pages": memory.huge_pages,
        "transparent_huge_pages": thp.read_text().strip() if thp.is_file() else "unknown",
        "cpu": host_kernels.cpu_info(),
        "clock_ghz": round(bench.clock / 1e9, 3),
        # Of the scans; its file is no part of a measurement.
        "prefetch": {key: bench.calibration[key] for key in ("setting", "source", "gb_per_s")},
        "prefetched_read": {
            n: {"streams": read.streams, "bytes_ahead": read.prefetch}
            for n, read in bench.reads.items()
        },
        "gflop_roofs": {name: roof for name, roof in roofs.items() if roof},
    }


def must_table(rows: list[Row], vendor: str) -> str:
    """What the scans must reach and what they did, on the most threads measured."""
    most = max(row["threads"] for row in rows)
    here = {r["kernel"]: r for r in rows if r.get("axis") == "base" and r["threads"] == most}
    lines = [f"{'scan':<12}{'must':>6}{'median':>8}   10% .. 90%      (base point, {most} threads)"]
    for kernel in ("keys", "fused", "int8"):
        if kernel not in here:
            continue
        row, must = here[kernel], MUST.get(vendor, {}).get(kernel)
        asked = "-" if must is None else f"{must:.2f}"
        verdict = "" if must is None else _verdict(row["fraction_of_read"], must)
        lines.append(
            f"{kernel:<12}{asked:>6}{row['fraction_of_read']:>8.3f}   {row['low']:.3f} .. "
            f"{row['high']:.3f}   {verdict} ({row['undisturbed']} rounds undisturbed)"
        )
    ratio = here.get("int8", {}).get("keys_over_fused")
    if ratio is not None:
        low, high = (here["int8"][f"keys_over_fused_{end}"] for end in ("low", "high"))
        lines.append(
            f"{'int8/fused':<12}{MUST_OVER_FUSED:>6.2f}{ratio:>8.3f}   {low:.3f} .. {high:.3f}   "
            f"{_verdict(ratio, MUST_OVER_FUSED)} (keys per second)"
        )
    return "\n".join(lines)


def _verdict(value: float, must: float) -> str:
    return "met" if value >= must else "missed"


def main() -> None:
    """Runs the benchmark."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS))
    parser.add_argument("--threads", type=int, nargs="+", help="default: 1 and all")
    parser.add_argument("--context", type=int, default=32768, help="keys at the base point")
    parser.add_argument("--head-dim", type=int, default=128, help="D at the base point")
    parser.add_argument("--group", type=int, default=4, help="G at the base point")
    parser.add_argument("--topk-fraction", type=float, default=0.05, help="at the base point")
    sweeps = {
        "contexts": [4096, 8192, 16384, 65536, 131072],
        "head_dims": [64],
        "groups": [1, 2, 8],
        "topk_fractions": [0.01, 0.02, 0.1, 0.2],
        "queries": list(QUERIES),
    }
    for name, values in sweeps.items():
        kind = float if name == "topk_fractions" else int
        option = "--" + name.replace("_", "-")
        parser.add_argument(option, type=kind, nargs="*", default=values, help="also at these")
    parser.add_argument("--scores", type=int, default=32768, help="scores of the top-k alone")
    parser.add_argument("--rounds", type=int, default=9, help="samples of each row")
    parser.add_argument("--memory", type=parse_bytes, help="bytes of keys; default: as they fit")
    parser.add_argument(
        "--sample", type=parse_bytes, default=EACH, help="bytes of keys of a thread's sample"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.quick:
        few: dict[str, list[Any]] = {name: [] for name in sweeps}
        vars(options).update(few, rounds=7, sample=min(options.sample, EACH // 4))
        options.contexts, options.queries = [4096], [4, 32]
    options.threads = options.threads or sorted({1, host_kernels.thread_count()})
    base = Point(options.context, options.head_dim, options.group, options.topk_fraction)
    try:
        check(options, base)
        check_output(options.json, options.plot)
        memory = Memory(options.memory or default_bytes(max(options.threads)), options.seed)
        for _, point in points(options, base):
            memory.slots(point.context, point.head_dim)
        bench = Bench(memory, options)
    except (ValueError, OSError, MemoryError) as error:
        parser.error(str(error))
    rows = collect(bench, base)
    wanted = sorted({round(0.05 * options.scores), min(1024, options.scores)})
    print(f"top-k of {options.scores} scores against a heap", file=sys.stderr)
    rows += kernel_top_k.rows(options.scores, wanted, options.rounds, options.seed)
    told = settings(bench, base)
    write(options.json, told, rows)
    print(must_table(rows, told["cpu"]["vendor"]), file=sys.stdout if options.json else sys.stderr)
    if options.plot:
        from benchmarks.kernels_plot import draw

        draw(options.plot, rows, told, MUST.get(told["cpu"]["vendor"], {}))


def check(options: Any, base: Point) -> None:
    """Refuses points that no kernel takes.

    Raises:
      ValueError: naming the option and what would work.
    """
    for name, values, low, high in (
        ("threads", options.threads, 1, 1024),
        ("rounds", [options.rounds], 1, 10_000),
        ("context", [base.context, *options.contexts], 64, 1 << 24),
        ("head-dim", [base.head_dim, *options.head_dims], 16, 1024),
        ("group", [base.group, *options.groups], 1, 64),
        ("topk-fraction", [base.topk_fraction, *options.topk_fractions], 1e-4, 0.5),
        ("queries", options.queries, 1, 64),
        ("scores", [options.scores], 32, 1 << 24),
    ):
        for value in values:
            if not low <= value <= high:
                raise ValueError(f"--{name} {value} is not between {low:g} and {high:g}")
    for value in (base.head_dim, *options.head_dims):
        if value % 16:
            raise ValueError(f"--head-dim {value} is not a multiple of 16")


if __name__ == "__main__":
    main()
