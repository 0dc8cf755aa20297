"""Draws a run's history: ``python -m herald_jax.training.plot runs/tiny/history.json out.png``."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from herald_jax.training import curriculum
from herald_jax.training.data import KINDS

History = Sequence[dict[str, float]]
LOSSES = {"answer_loss": "answers", "end_loss": "end of text", "binding_loss": "bindings"}
# Rows, of 25 steps each, over which a line is averaged.
SMOOTH = 12


def line(history: History, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of one measure in the newest stage, rehearsals left out and smoothed.

    Rows that have none of it (-1) are left out, and a line is only averaged within a stage.
    """
    steps: list[float] = []
    values: list[float] = []
    newest = itertools.accumulate((row["stage"] for row in history), max)
    rows = [row for row, stage in zip(history, newest, strict=True) if row["stage"] == stage]
    for _, part in itertools.groupby(rows, key=lambda row: row["stage"]):
        seen: list[float] = []
        for row in part:
            if row[name] >= 0:
                seen.append(row[name])
                steps.append(row["step"])
                values.append(float(np.mean(seen[-SMOOTH:])))
    return np.array(steps), np.array(values)


def openings(history: History) -> dict[int, float]:
    """The step at which each stage after the first was opened, as near as the rows tell."""
    found: dict[int, float] = {}
    for row in history:
        if row["stage"] > max(found, default=0):
            found[int(row["stage"])] = row["step"]
    return found


def draw(history: History, path: Path, stages: Sequence[str]) -> None:
    """Plots accuracies by kind of question and losses over steps; writes a small PNG.

    Args:
      history: rows of a run's history.json.
      stages: names of the curriculum's stages.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from PIL import Image

    figure, (top, bottom) = pyplot.subplots(
        2, 1, figsize=(10, 7), sharex=True, height_ratios=(3, 2), layout="constrained"
    )
    colours = pyplot.get_cmap("tab10").colors  # type: ignore[attr-defined]
    for number, kind in enumerate(KINDS):
        steps, values = line(history, kind)
        if len(steps):
            top.plot(steps, values, color=colours[number], linewidth=1.4, label=kind)
    for number, (name, label) in enumerate(LOSSES.items()):
        steps, values = line(history, name)
        bottom.plot(steps, np.maximum(values, 1e-4), color=f"C{number}", linewidth=1.2, label=label)
    _mark_stages(top, bottom, openings(history), stages, 0.022 * history[-1]["step"])
    top.set(ylabel="tokens of answers right", ylim=(0, 1.02))
    bottom.set(ylabel="loss", xlabel="step", yscale="log", xlim=(0, history[-1]["step"]))
    for axis in (top, bottom):
        axis.grid(axis="y", alpha=0.3)
        axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80, format="png")
    pyplot.close(figure)
    with Image.open(path) as image:
        # A palette of 255 colours halves the file and cannot be told from the original.
        few = image.convert("RGB").quantize(255, Image.Quantize.MAXCOVERAGE)
    few.save(path, "PNG", optimize=True)


def _mark_stages(
    top: Any, bottom: Any, opened: dict[int, float], stages: Sequence[str], apart: float
) -> None:
    """A dotted line where each stage begins, with its name above; names keep ``apart`` steps."""
    at = -apart
    for number, step in {0: 0.0, **opened}.items():
        at = max(step, at + apart)
        for axis in (top, bottom):
            axis.axvline(step, color="gray", linewidth=0.8, linestyle=":")
        top.text(
            at,
            1.01,
            stages[number],
            transform=top.get_xaxis_transform(),
            rotation=50,
            fontsize=8,
            ha="left",
            va="bottom",
        )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m herald_jax.training.plot", description=__doc__)
    parser.add_argument("history", type=Path, help="history.json of a run")
    parser.add_argument("out", type=Path, help="picture to write")
    parser.add_argument("--curriculum", default="tiny", choices=("tiny", "micro"))
    options = parser.parse_args()
    try:
        history = json.loads(options.history.read_text())
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: {options.history} cannot be read: {error}") from error
    if not history:
        raise SystemExit(f"error: {options.history} has no rows yet: train for 25 steps or more")
    names = [stage.name for stage in curriculum.stages(options.curriculum)]
    if max(row["stage"] for row in history) >= len(names):
        raise SystemExit(f"error: {options.history} has more stages than --curriculum: use tiny")
    draw(history, options.out, names)


if __name__ == "__main__":
    main()
