"""The picture of a block's retrieval on the host."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.host_batch import STAGES

Row = dict[str, Any]


def draw(path: Path, rows: Sequence[Row]) -> None:
    """The stages stacked, beside what they take together and the floor."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(1.8 + 1.9 * len(rows), 5), layout="constrained")
    places = np.arange(len(rows))
    bottom = np.zeros(len(rows))
    for index, name in enumerate(STAGES):
        heights = np.array([1e3 * row[f"{name}_seconds"] for row in rows])
        axis.bar(places - 0.2, heights, 0.36, bottom=bottom, color=f"C{index}", label=name)
        bottom += heights
    together = [1e3 * row["together_seconds"] for row in rows]
    axis.bar(places + 0.2, together, 0.36, color="C7", label="together")
    for place, row in zip(places, rows, strict=True):
        floor = 1e3 * row["floor_seconds"]
        label = "floor: reading the bytes" if place == 0 else ""
        axis.hlines(floor, place - 0.4, place + 0.4, color="black", linestyle="--", label=label)
        text = f"floor {row['fraction_of_floor']:.2f} of it\ngain {row['overlap_gain']:.2f}"
        at = 1e3 * row["together_seconds"]
        axis.text(place + 0.2, at, text, ha="center", va="bottom", fontsize=8)
    axis.set_xticks(places, [f"{row['gather']}\n{row['new_share']:.0%} new" for row in rows])
    axis.set_ylabel("milliseconds a block")
    axis.margins(y=0.15)
    figure.legend(frameon=False, fontsize=8, ncols=5, loc="outside lower center")
    row = rows[0]
    axis.set_title(
        f"{row['shape']}, {row['context']} tokens, batch {row['batch']}, {row['layers']} layers, "
        f"C = {row['candidates']}\n{row['threads']} threads, to {row['device']}",
        fontsize=10,
    )
    figure.savefig(path, dpi=130)
