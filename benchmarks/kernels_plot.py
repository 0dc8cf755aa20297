"""The picture of the kernels: roofline, queries, bandwidth, contexts, other axes, top-k."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.kernel_cases import SCANS

Row = dict[str, Any]

LABELS = {
    "fused": "fused K+V",
    "keys": "keys",
    "int8": "int8 index",
    "int4": "int4 index",
    "merged4_keys": "keys, 4 parts",
    "merged4_int8": "int8, 4 parts",
    "merged4_int4": "int4, 4 parts",
    "many": "keys, 32 queries",
    "rerank": "re-rank of 2K",
    "gather": "gather",
    "gather_runs": "gather, runs",
    "changes": "gather of changes",
    "index_rows": "index of new keys",
    "store": "store",
}


#: Kernels whose throughput is drawn against the number of queries, and over the other axes.
QUERIED = ("keys", "int8", "int4")
SHOWN = ("fused", *QUERIED, "merged4_keys", "merged4_int8", "merged4_int4", "gather")


def draw(path: Path, rows: Sequence[Row], settings: dict[str, Any], must: dict[str, float]) -> None:
    """Draws the rows of the most threads; ``must`` is the fraction asked of a kernel."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    scores = [row for row in rows if row["axis"] == "order"]
    rows = [row for row in rows if row["axis"] != "order"]
    threads = max(row["threads"] for row in rows)
    here = [row for row in rows if row["threads"] == threads]
    figure, axes = plt.subplots(2, 3, figsize=(19, 10.5), layout="constrained")
    _roofline(axes[0, 0], here, settings["gflop_roofs"])
    _queries(axes[0, 1], here)
    _fractions(axes[0, 2], rows, must)
    _contexts(axes[1, 0], here)
    _others(axes[1, 1], here, settings["base"])
    _top_k(axes[1, 2], scores)
    base = settings["base"]
    pages = "2 MiB pages" if settings["huge_pages"] else "4 KiB pages"
    figure.suptitle(
        f"{settings['cpu']['model']}, {here[0]['isa']}, {threads} threads, {pages}; base point: "
        f"{base['context']} keys, D = {base['head_dim']}, G = {base['group']}, top "
        f"{base['topk_fraction']:.0%}; medians of {settings['rounds']} rounds"
    )
    figure.savefig(path, dpi=130)


def _colour(kernel: str) -> str:
    return f"C{list(LABELS).index(kernel) % 10}"


def _at(rows: Sequence[Row], axis: str, kernel: str) -> list[Row]:
    """The base point and the points of one axis, in its order."""
    found = [row for row in rows if row["kernel"] == kernel and row["axis"] in ("base", axis)]
    return sorted(found, key=lambda row: row[axis])


def _roofline(axis: Any, rows: Sequence[Row], roofs: dict[str, float]) -> None:
    """Arithmetic against intensity under the measured roofs (paper Fig. 6)."""
    scans = [row for row in rows if row["kernel"] in SCANS and row["axis"] in ("base", "queries")]
    bandwidth = max(row["read_gb_per_s"] for row in rows)
    right = 2 * max(
        [roof / bandwidth for roof in roofs.values()] + [r["flop_per_byte"] for r in scans]
    )
    left = 0.5 * min([r["flop_per_byte"] for r in scans], default=1.0)
    for style, (name, roof) in zip(("-", "--", ":"), roofs.items(), strict=False):
        ridge = roof / bandwidth
        points = [left, ridge, right], [left * bandwidth, roof, roof]
        axis.plot(*points, style, color="grey", label=f"{name}: {roof:.0f} GFLOP/s")
    for row in scans:
        axis.errorbar(
            row["flop_per_byte"],
            row["gflop_per_s"],
            marker="o" if row["axis"] == "base" else ".",
            color=_colour(row["kernel"]),
            linestyle="",
            label=LABELS[row["kernel"]] if row["axis"] == "base" else None,
        )
    axis.set(xscale="log", yscale="log", xlabel="floating point operations a byte read")
    axis.set_ylabel("GFLOP/s")
    axis.set_title(f"roofline; reading gives {bandwidth:.1f} GB/s")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8, frameon=False)


def _queries(axis: Any, rows: Sequence[Row]) -> None:
    """Keys a second against the number of queries, as multiples of the most (paper Fig. 8)."""
    axis.set(xscale="log", yscale="log", xlabel="queries, each with G heads")
    for kernel in QUERIED:
        line = _at(rows, "queries", kernel)
        if not line:
            continue
        rates = [row["keys_per_second"] / line[-1]["keys_per_second"] for row in line]
        style = {"marker": "o", "markersize": 4, "color": _colour(kernel), "label": LABELS[kernel]}
        axis.plot([row["queries"] for row in line], rates, **style)
        axis.set_xticks([row["queries"] for row in line], [str(row["queries"]) for row in line])
    axis.yaxis.set_major_formatter("{x:g}")
    axis.minorticks_off()
    axis.set_ylabel("keys a second, over those at most queries")
    axis.set_title("throughput against the number of queries")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8, frameon=False)


def _fractions(axis: Any, rows: Sequence[Row], must: dict[str, float]) -> None:
    """Bars of the base point, one thread and all, with what is asked."""
    base = [row for row in rows if row["axis"] == "base"]
    names = list(dict.fromkeys((row["kernel"], row.get("new_share")) for row in base))
    counts = sorted({row["threads"] for row in base})
    width = 0.8 / len(counts)
    for index, threads in enumerate(counts):
        bars = {(r["kernel"], r.get("new_share")): r for r in base if r["threads"] == threads}
        found = [bars[name] for name in names]
        middle = [row["fraction_of_read"] for row in found]
        # The percentiles are interpolated, so a median may lie a little outside them.
        low = [max(0, row["fraction_of_read"] - row["low"]) for row in found]
        high = [max(0, row["high"] - row["fraction_of_read"]) for row in found]
        at = [place + (index - (len(counts) - 1) / 2) * width for place in range(len(names))]
        label = f"{threads} thread{'s' if threads > 1 else ''}"
        axis.bar(at, middle, width * 0.9, yerr=[low, high], capsize=2, label=label)
    for place, (kernel, _) in enumerate(names):
        if kernel in must:
            axis.hlines(must[kernel], place - 0.45, place + 0.45, color="black", linestyle="--")
    labels = [LABELS[kernel] + (f", {new:.0%} new" if new else "") for kernel, new in names]
    axis.set_xticks(range(len(names)), labels, rotation=40, ha="right", fontsize=8)
    axis.set_ylabel("share of the read loop beside it")
    axis.set_title("bandwidth by kernel; dashed: what must be reached")
    axis.grid(axis="y", alpha=0.3)
    axis.legend(fontsize=8, frameon=False)


def _contexts(axis: Any, rows: Sequence[Row]) -> None:
    """Share of the read loop over the context."""
    for kernel in SHOWN:
        line = _at(rows, "context", kernel)
        axis.errorbar(
            [row["context"] for row in line],
            [row["fraction_of_read"] for row in line],
            marker="o",
            markersize=4,
            color=_colour(kernel),
            label=LABELS[kernel] if line else None,
        )
    contexts = sorted({row["context"] for row in rows})
    axis.set_xscale("log", base=2)
    axis.set_xticks(contexts, [f"{c // 1024}K" if c >= 1024 else str(c) for c in contexts])
    axis.minorticks_off()
    axis.set_xlabel("keys of a KV head")
    axis.set_ylabel("share of the read loop beside it")
    axis.set_title("over the context")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8, frameon=False)


def _others(axis: Any, rows: Sequence[Row], base: dict[str, Any]) -> None:
    """The scans at other head dimensions, groups and shares, beside the base point."""
    varied = ("head_dim", "group", "topk_fraction")
    short = {"head_dim": "D = {}", "group": "G = {}", "topk_fraction": "top {:.0%}"}
    places = ["base"]
    for name in varied:
        places += [
            short[name].format(value)
            for value in sorted({row[name] for row in rows if row["axis"] == name})
        ]
    for kernel in SHOWN:
        found = {}
        for row in rows:
            if row["kernel"] == kernel and row["axis"] in ("base", *varied):
                name = row["axis"]
                place = "base" if name == "base" else short[name].format(row[name])
                found[place] = row["fraction_of_read"]
        at = [index for index, place in enumerate(places) if place in found]
        heights = [found[places[index]] for index in at]
        style = {"markersize": 5, "color": _colour(kernel)}
        axis.plot(at, heights, "o", label=LABELS[kernel] if at else None, **style)
    axis.set_xticks(range(len(places)), places, rotation=40, ha="right", fontsize=8)
    axis.set_ylabel("share of the read loop beside it")
    axis.set_title(f"one thing varied at {base['context']} keys")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8, frameon=False)


def _top_k(axis: Any, rows: Sequence[Row]) -> None:
    """Microseconds of a top-k by order of the scores."""
    groups = list(dict.fromkeys((row["order"], row["selected"]) for row in rows))
    for index, kernel in enumerate(("heap", "top_k")):
        found = {(r["order"], r["selected"]): r for r in rows if r["kernel"] == kernel}
        heights = [1e6 * found[group]["seconds"] for group in groups]
        at = [place + (index - 0.5) * 0.4 for place in range(len(groups))]
        axis.bar(at, heights, 0.36, label="binary heap" if kernel == "heap" else "histogram")
        for x, group, height in zip(at, groups, heights, strict=True):
            if kernel == "top_k":
                ratio = f"{found[group]['over_heap']:.1f}x"
                axis.text(x, height, ratio, ha="center", va="bottom", fontsize=8)
    names = [f"{order}\nk = {count}" for order, count in groups]
    axis.set_xticks(range(len(groups)), names, fontsize=8)
    axis.set_yscale("log")
    axis.set_ylabel("microseconds, one thread")
    axis.set_title(f"top-k of {rows[0]['context']} scores in cache, over the heap")
    axis.grid(axis="y", alpha=0.3)
    axis.legend(fontsize=8, frameon=False)
