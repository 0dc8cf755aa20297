"""The picture of the study of recall: eight panels, one context, all tasks together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from herald_jax.selection.herald_merged import HeraldMerged

Row = dict[str, Any]

REFERENCES = {"first step": "step-0 oracle", "every step": "per-step oracle"}
CURVES = (
    "mage",
    "mage-drafted",
    "centre-completed",
    "herald-draft",
    "centre",
    "window",
    "random",
)
MERGED: Row = {"step": "first", "rotation": True, "mean_of": "queries"}
DRAFTED: Row = {"attended": "pool", "mass_outside": True}
REFINED: Row = {"refined": True, "candidates_ratio": HeraldMerged.own_ratio}
REFINES = f"C/K {HeraldMerged.own_ratio:g}, refined"
OWN: Row = {"parts": HeraldMerged.segments, "spacing": HeraldMerged.spacing}
#: Who is compared task by task.
BY_TASK = {
    "mage": {"selector": "mage"},
    "herald-merged": {"selector": "herald-merged", **OWN, **DRAFTED},
    "merged": {"selector": "merged", **MERGED},
    "herald-draft": {"selector": "herald-draft"},
    "centre": {"selector": "centre"},
}


def find(rows: Sequence[Row], **wanted: Any) -> list[Row]:
    """Rows over all layers that have these values; what is not asked for is as in a plain row."""
    wanted = {"layer": "all", "bucketed_by": None} | wanted
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def draw(path: Path, rows: Sequence[Row], budget: float) -> None:
    """Draws the longest context of ``rows``, over all tasks; bars are at ``budget``."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    context = max(row["context"] for row in rows)
    rows = every = [row for row in rows if row["context"] == context]
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    if len(tasks) > 1:
        rows = [row for row in rows if row["task"] == "all"]
    here = [row for row in rows if row["budget"] == budget]
    figure, axes = plt.subplots(2, 4, figsize=(21, 9.5), layout="constrained")
    for axis, reference in zip(axes[0, :2], REFERENCES, strict=True):
        _curves(axis, rows, reference, budget)
    _buckets(axes[0, 2], here)
    _queries(axes[0, 3], here)
    _ratios(axes[1, 0], here)
    _merges(axes[1, 1], here)
    _indexes(axes[1, 2], here)
    _tasks(axes[1, 3], [row for row in every if row["budget"] == budget], tasks)
    for axis in axes.flat:
        axis.set_ylabel("recall")
        axis.set_ylim(0, 1.02)
        axis.grid(axis="y", alpha=0.3)
        below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.18)}
        columns = 3 if len(axis.get_legend_handles_labels()[0]) > 4 else 2
        axis.legend(fontsize=8, frameon=False, ncols=columns, handlelength=3, **below)
    asked = ", ".join(task for task in tasks if task != "all")
    figure.suptitle(
        f"{rows[0]['model']}, {context} tokens of context ({asked}); bars and C / K at a budget of "
        f"{budget:.1%}"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _curves(axis: Any, rows: Sequence[Row], reference: str, budget: float) -> None:
    """Recall against budget; the dotted line is mage at ``budget`` (paper Fig. 9)."""
    (mage,) = find(rows, reference=reference, selector="mage", budget=budget)
    axis.axhline(mage["recall"], linestyle=":", color="C0")
    lines: dict[str, Row] = {name: {"selector": name} for name in CURVES}
    lines |= {"merged": {"selector": "merged", **MERGED}}
    lines |= {f"merged, {REFINES}": {"selector": "merged", **REFINED}}
    lines |= {"herald-merged, C/K 1": BY_TASK["herald-merged"]}
    lines |= {f"herald-merged, {REFINES}": {"selector": "herald-merged", **REFINED}}
    for index, (name, wanted) in enumerate(lines.items()):
        found = find(rows, reference=reference, **wanted)
        style = "--" if name in ("window", "random") else "-"
        axis.plot(
            [100 * row["budget"] for row in found],
            [row["recall"] for row in found],
            style,
            marker="o",
            markersize=3,
            color=f"C{index}" if index < 10 else "black",
            label=name,
        )
    shares = sorted({row["budget"] for row in rows})
    axis.set_xscale("log")
    axis.set_xticks([100 * share for share in shares], [f"{100 * share:g}" for share in shares])
    axis.minorticks_off()
    axis.set_xlabel("budget, % of the prefix")
    axis.set_title(f"against the {REFERENCES[reference]}")


def _bars(axis: Any, groups: Sequence[str], series: Mapping[str, Sequence[float]]) -> None:
    """Grouped bars; a series has a height for each group."""
    width = 0.8 / len(series)
    for index, (name, heights) in enumerate(series.items()):
        at = [group + (index - (len(series) - 1) / 2) * width for group in range(len(groups))]
        axis.bar(at, heights, width * 0.9, label=name)
    axis.set_xticks(range(len(groups)), groups, fontsize=8)


def _buckets(axis: Any, rows: Sequence[Row]) -> None:
    """Block n omitted, drafted or completed, bucketed by recall with it omitted (paper Fig. 7)."""
    found = find(rows, reference="every step", bucketed_by="centre")
    buckets = [row["bucket"] for row in found if row["selector"] == "centre"]
    counts = [row["n"] for row in found if row["selector"] == "centre"]
    names = {"omitted": "centre", "drafted": "herald-draft", "completed": "centre-completed"}
    series = {
        name: [row["recall"] for row in found if row["selector"] == selector]
        for name, selector in names.items()
    }
    ends = zip(buckets, counts, strict=True)
    _bars(axis, [f"{low:g} to {high:g}\nn = {n}" for (low, high), n in ends], series)
    axis.set_xlabel("recall with block n omitted")
    axis.set_title("centre query: what block n is worth")


def _queries(axis: Any, rows: Sequence[Row]) -> None:
    """How many queries stand in for the block, each alone or merged by part."""
    single = ["herald-draft", *(f"herald-draft-{few}" for few in (2, 4, 8, 16)), "mage-drafted"]
    recalls = [
        find(rows, reference="every step", selector=selector)[0]["recall"] for selector in single
    ]
    axis.plot([1, 2, 4, 8, 16, 32], recalls, "-o", markersize=3, label="evenly spaced masks, exact")
    found = find(rows, reference="every step", selector="herald-merged", spacing=1, **DRAFTED)
    found.sort(key=lambda row: row["parts"])
    axis.plot(
        [row["parts"] for row in found],
        [row["recall"] for row in found],
        "-o",
        markersize=3,
        label="masks merged by part, over the pool",
    )
    (refined,) = find(rows, reference="every step", selector="herald-merged", **REFINED)
    label = f"herald-merged, {REFINES}"
    axis.axhline(refined["recall"], linestyle="--", color="C1", label=label)
    axis.set_xscale("log", base=2)
    axis.set_xticks([1, 2, 4, 8, 16, 32], ["1", "2", "4", "8", "16", "32"])
    axis.set_xlabel("queries for the block")
    axis.set_title("drafted queries, against the per-step oracle")


def _tasks(axis: Any, rows: Sequence[Row], tasks: Sequence[str]) -> None:
    """The same selections, task by task."""
    asked = [task for task in tasks if task != "all"] or list(tasks)
    series = {
        name: [
            find(rows, reference="every step", task=task, **wanted)[0]["recall"] for task in asked
        ]
        for name, wanted in BY_TASK.items()
    }
    _bars(axis, asked, series)
    axis.set_title("by task, against the per-step oracle")


def _ratios(axis: Any, rows: Sequence[Row]) -> None:
    """What more candidates are worth, before and after refinement."""
    for color, selector in enumerate(("merged", "herald-merged")):
        plain = find(rows, reference="every step", **BY_TASK[selector])
        for refined, style in ((False, "--"), (True, "-")):
            found = find(rows, selector=selector, reference="every step", refined=refined)
            # Merges and indexes have rows of their own.
            found = plain + [row for row in found if row["candidates_ratio"] > 1]
            axis.plot(
                [row["candidates_ratio"] for row in found],
                [row["recall"] for row in found],
                style,
                marker="o",
                markersize=3,
                color=f"C{color}",
                label=f"{selector}, {'refined to K' if refined else 'C candidates'}",
            )
    axis.set_xlabel("C / K")
    axis.set_title("candidates and refinement, against the per-step oracle")


def _merges(axis: Any, rows: Sequence[Row]) -> None:
    """The step whose queries are merged, with and without rotation."""
    steps = ("first", "middle", "last", "done")
    series: dict[str, Sequence[float]] = {}
    for rotation, name in ((True, "rotated by +B"), (False, "as is")):
        wanted = {"rotation": rotation, "mean_of": "queries", "reference": "every step"}
        series[name] = [find(rows, step=step, **wanted)[0]["recall"] for step in steps]
    _bars(axis, steps, series)
    axis.set_xlabel("step of block n whose queries are merged")
    axis.set_title("merged query, against the per-step oracle")


def _indexes(axis: Any, rows: Sequence[Row]) -> None:
    """Key indexes against the exact scan with the same query."""
    series: dict[str, Sequence[float]] = {}
    found = find(rows, reference="exact scan")
    for ratio, name in ((1.0, "alone"), (2.0, "best 2K re-ranked exactly")):
        series[name] = [row["recall"] for row in found if row["candidates_ratio"] == ratio]
    _bars(axis, list(dict.fromkeys(row["index"] for row in found)), series)
    axis.set_title("merged query: key index against the exact scan")
