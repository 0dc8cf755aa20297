"""Bars of tokens a second: a group a model and context, a bar a method, ideal as an outline."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def draw(path: Path, rows: list[dict[str, Any]]) -> None:
    """Draws lines by batch where there are several batches of a method, else bars."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(10, 4.5), layout="constrained")
    series = dict.fromkeys((row["method"], row["model"], row["context"]) for row in rows)
    if len(rows) >= 2 * len(series):
        for key in series:
            line = sorted(
                (row["batch"], row["tokens_per_second"])
                for row in rows
                if (row["method"], row["model"], row["context"]) == key
            )
            axis.plot(*zip(*line, strict=True), marker="o", label=" ".join(map(str, key)))
        axis.set_xlabel("batch")
        axis.legend(frameon=False)
    else:
        groups = list(dict.fromkeys((row["model"], row["context"]) for row in rows))
        methods = list(dict.fromkeys(map(_named, rows)))
        width = 0.8 / len(methods)
        for at, method in enumerate(methods):
            for row in (row for row in rows if _named(row) == method):
                x = groups.index((row["model"], row["context"])) + (at + 0.5) * width - 0.4
                label = method if method not in axis.get_legend_handles_labels()[1] else None
                speed = row["tokens_per_second"]
                axis.bar(x, speed, 0.9 * width, color=f"C{at}", label=label)
                axis.bar(
                    x, row["ideal_tokens_per_second"], 0.9 * width, fill=False, edgecolor="0.5"
                )
                top = max(speed, row["ideal_tokens_per_second"])
                axis.annotate(f"{row['batch']}", (x, top), ha="center", va="bottom", size=8)
        names = [f"{model}\n{context // 1024}K" for model, context in groups]
        axis.set_xticks(range(len(groups)), names)
        axis.legend(frameon=False, title="number on a bar: batch; outline: selection off")
    axis.set_ylabel("tokens a second")
    axis.set_ylim(0, None)
    axis.grid(alpha=0.3, axis="y")
    memory = rows[0]["device_memory_gb"]
    held = "all device memory" if memory is None else f"{memory:g} GB of device memory"
    axis.set_title(f"Decoding with {held}, {rows[0]['dtype']}")
    figure.savefig(path, dpi=130)


def _named(row: dict[str, Any]) -> str:
    """The method, and what tells its bars apart at one context."""
    kept = row["budget"] if isinstance(row["budget"], str) else ""
    sent = row.get("transfer", "full")
    return ", ".join(filter(None, [row["method"], kept, "" if sent == "full" else sent]))
