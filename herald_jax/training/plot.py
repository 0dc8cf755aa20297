"""Draws a run's history: ``python -m herald_jax.training.plot history.json out.png``."""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path


def draw(history: list[dict[str, float]], path: Path) -> None:
    """Plots accuracies, the answer loss and the open stage over steps; writes a small PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (top, bottom) = pyplot.subplots(2, 1, figsize=(7, 5), sharex=True)
    newest: list[dict[str, float]] = []
    for row in history:
        # Rehearsed earlier stages are left out: the line follows the newest stage.
        if not newest or row["stage"] >= newest[-1]["stage"]:
            newest.append(row)
    steps = [row["step"] for row in newest]
    for name in ("answer", "end", "copy"):
        top.plot(steps, [row[name] for row in newest], label=f"{name} tokens right")
    for name in ("answer_loss", "binding_loss"):
        bottom.semilogy(steps, [max(row[name], 1e-4) for row in newest], label=name)
    for before, after in itertools.pairwise(newest):
        if after["stage"] > before["stage"]:
            for axis in (top, bottom):
                axis.axvline(after["step"], color="gray", linewidth=0.7, linestyle=":")
    top.set_ylabel("share")
    bottom.set_ylabel("loss")
    bottom.set_xlabel("step (dotted: next stage)")
    for axis in (top, bottom):
        axis.set_xscale("log")
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m herald_jax.training.plot", description=__doc__)
    parser.add_argument("history", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    draw(json.loads(options.history.read_text()), options.out)


if __name__ == "__main__":
    main()
