"""The picture of the accuracy benchmark: methods by task, and scores by length and depth."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

Row = dict[str, Any]
#: Whose scores are shown by depth.
FOLLOWED = ("dense", "herald-draft", "herald-merged")


def named(row: Row) -> str:
    """A method with its budget, as the legend says it."""
    method, budget = row["method"], row["budget"]
    return method if method in ("dense", "chance") else f"{method} {budget:.0%}"


def draw(path: Path, rows: Sequence[Row]) -> None:
    """Bars that compare methods in one context, or scores by length, and by length and depth."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    pooled = [row for row in rows if row["depth"] == "all"]
    contexts = sorted({row["context"] for row in pooled})
    if len(contexts) == 1:
        figure, axis = plt.subplots(figsize=(13, 4.5), layout="constrained")
        _bars(axis, pooled)
        axis.set_title(
            f"exactly right, {contexts[0]} tokens (intervals: difference from dense, 95%)"
        )
    else:
        tasks = list(dict.fromkeys(row["task"] for row in pooled))
        methods = [m for m in FOLLOWED if any(row["method"] == m for row in rows)]
        figure = plt.figure(figsize=(13, 3.2 + 2.4 * len(methods)), layout="constrained")
        heights = [1.3] + [1.0] * len(methods)
        parts = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)
        top, *others = parts[:, 0]
        for axis, task in zip(top.subplots(1, len(tasks), sharey=True), tasks, strict=True):
            _lines(axis, [row for row in pooled if row["task"] == task])
            axis.set_title(task)
        top.axes[0].set_ylabel("exactly right")
        lines, names = top.axes[0].get_legend_handles_labels()
        top.legend(lines, names, fontsize=8, frameon=False, loc="outside right center")
        for part, method in zip(others, methods, strict=True):
            _depths(part.subplots(), [row for row in rows if row["method"] == method])
            part.suptitle(f"{method}: by task, length and depth of what is asked for", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)
    plt.close(figure)


def _lines(axis: Any, rows: Sequence[Row]) -> None:
    """Score against context, a line a method."""
    for name in dict.fromkeys(named(row) for row in rows):
        mine = sorted((r["context"], r["score"]) for r in rows if named(r) == name)
        style = {"color": "black"} if name == "dense" else {}
        axis.plot([c for c, _ in mine], [s for _, s in mine], "-o", ms=3, label=name, **style)
    contexts = sorted({row["context"] for row in rows})
    axis.set_xscale("log", base=2)
    axis.set_xticks(contexts, [str(context) for context in contexts])
    axis.set_ylim(-0.02, 1.04)
    axis.grid(alpha=0.3)
    axis.set_xlabel("tokens")


def _bars(axis: Any, rows: Sequence[Row]) -> None:
    """A group a task; methods with another C / K than their own are left to the table."""
    rows = [row for row in rows if ":" not in row["method"]]
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    names = list(dict.fromkeys(named(row) for row in rows))
    width = 0.84 / len(names)
    for index, name in enumerate(names):
        mine = {row["task"]: row for row in rows if named(row) == name}
        at, heights, errors = [], [], []
        for place, task in enumerate(tasks):
            if task in mine:
                row = mine[task]
                at.append(place + (index - (len(names) - 1) / 2) * width)
                heights.append(row["score"])
                low, high = row["delta"] - row["ci_low"], row["ci_high"] - row["delta"]
                errors.append((max(0.0, low), max(0.0, high)))
            else:
                where = place + (index - (len(names) - 1) / 2) * width
                axis.text(where, 0.01, "n/m", rotation=90, fontsize=5, ha="center", color="gray")
        colour = "black" if name == "dense" else _colour(index, len(names))
        style = {"color": colour, "alpha": 0.85}
        axis.bar(at, heights, width * 0.92, label=name, **style)
        axis.errorbar(at, heights, np.array(errors).T, fmt="none", ecolor="gray", elinewidth=0.8)
    axis.set_xticks(range(len(tasks)), tasks)
    axis.set_ylim(0, 1.04)
    axis.grid(axis="y", alpha=0.3)
    axis.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _colour(index: int, count: int) -> Any:
    import matplotlib

    return matplotlib.colormaps["tab20" if count > 11 else "tab10"](index)


def _depths(axis: Any, rows: Sequence[Row]) -> None:
    """A map: a row a depth, a column a task and context."""
    budget = min(row["budget"] for row in rows)
    rows = [row for row in rows if row["budget"] == budget and row["depth"] != "all"]
    depths = sorted({tuple(row["depth"]) for row in rows})
    columns = list(dict.fromkeys((row["task"], row["context"]) for row in rows))
    columns.sort(key=lambda column: ([row["task"] for row in rows].index(column[0]), column[1]))
    grid = np.full((len(depths), len(columns)), np.nan)
    for row in rows:
        at = depths.index(tuple(row["depth"])), columns.index((row["task"], row["context"]))
        grid[at] = row["score"]
    image = axis.imshow(grid, vmin=0, vmax=1, aspect="auto", cmap="RdYlGn")
    for (y, x), score in np.ndenumerate(grid):
        if not np.isnan(score):
            axis.text(x, y, f"{score:.2f}", ha="center", va="center", fontsize=7)
    labels = [f"{task}\n{context}" for task, context in columns]
    axis.set_xticks(range(len(columns)), labels, fontsize=7)
    axis.set_yticks(range(len(depths)), [f"{low:g}-{high:g}" for low, high in depths])
    axis.set_ylabel("depth")
    axis.figure.colorbar(image, ax=axis, fraction=0.02)
