"""How much of an exact scan's choice a scan of a smaller key index finds, on real keys.

    python -m benchmarks.index_recall --contexts 2048 7900 --json index.json --plot index.png

Decodes a block of each prompt densely, takes the queries with which ``merged`` and
``herald-merged`` select for the next one, and compares what each index finds with what the same
queries find in the keys themselves: alone, and after exact scores of C > K candidates, divided by
the normaliser that the scan of the index found. ``covered`` is what exact normalisers would give:
the share of the exact choice that is among the candidates.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import estimators, key_indexes
from benchmarks.drafted import drafted
from benchmarks.environment import arguments, check_output, write
from benchmarks.prompts import prompt_ids
from benchmarks.trajectories import Network, Trajectory, decode
from herald_jax import Budget, GenerationConfig, checkpoint
from herald_jax.diffusion.draft import equal_parts
from herald_jax.engine.engine import EMBEDDED
from herald_jax.selection.herald_merged import HeraldMerged
from herald_jax.tokenizer import Tokenizer
from host_kernels import reference

TASKS = ["passage", "several", "continue"]
BUDGETS, RATIOS = [0.02, 0.05, 0.1], [1.0, 1.25, 1.5, 2.0]
#: Recall, covered and mass of a layer's KV head for each index: [indexes, budgets, ratios, 3].
Units = list[np.ndarray]

#: What the embedded model was trained for, less room for an answer.
MOST_TOKENS = 7936


def queries(
    network: Network, made: Trajectory, number: int, fraction: float
) -> Iterator[tuple[str, int, np.ndarray, np.ndarray | None]]:
    """What each selector asks with for the block after ``made.blocks[number]``.

    Args:
      fraction: budget of the pool that drafted queries attend.

    Yields:
      Selector, layer, float32 [Q, D] with the queries of a KV head together, and the log of their
      mass outside the prefix, float32 [Q], where it counts.
    """
    config, now = network.config, made.blocks[number]
    heads, dim, size = config.num_kv_heads, config.head_dim, config.block_size
    ahead = drafted(network, made, number, fraction)
    for layer in range(config.exact_layers, config.num_layers):
        moved = estimators.advance(now.queries[0][layer], size, config)
        yield "merged", layer, np.asarray(estimators.merge(moved, now.masked[0]))[0], None
        own = ahead.queries[layer]
        parts = equal_parts(len(own), HeraldMerged.segments)
        merged = np.asarray(estimators.merge_parts(own, parts))
        grouped = merged.reshape(parts, heads, -1, dim).swapaxes(0, 1).reshape(heads, -1, dim)
        scores = np.einsum("hqd,rhd->hqr", grouped, np.asarray(ahead.keys[layer])) * dim**-0.5
        outside = np.logaddexp.reduce(scores, axis=-1).astype(np.float32)
        yield "herald-merged", layer, grouped.reshape(-1, dim), outside.reshape(-1)


def measure(
    network: Network,
    made: Trajectory,
    budgets: list[float],
    ratios: list[float],
    fraction: float = 0.05,
) -> dict[tuple[str, int], Units]:
    """How every index does for each decoded block but those without a prefix.

    Returns:
      By selector and layer, one array a unit: [indexes, budgets, ratios, 3].
    """
    found: dict[tuple[str, int], Units] = {}
    for number, block in enumerate(made.blocks):
        prefix = block.start
        if prefix == 0:
            continue
        counts = np.array([Budget(budget).entries(prefix) for budget in budgets])
        pairs = np.repeat(counts, len(ratios))
        most = np.minimum(np.ceil(np.outer(counts, ratios)), prefix).astype(int).ravel()
        for selector, layer, q, outside in queries(network, made, number, fraction):
            keys = np.asarray(made.cache[layer][0][0, :prefix])
            wanted = key_indexes.find("exact", q, keys, counts, counts, outside)[0]
            extent = np.stack([keys.swapaxes(0, 1)] * 2, axis=1)
            mass = reference.importance(q, extent, prefix, elsewhere=outside)
            best = np.repeat(wanted, len(ratios), axis=0)
            each = []
            for index in key_indexes.INDEXES:
                kept, candidates = key_indexes.find(index, q, keys, pairs, most, outside)
                recall = (kept & best).sum(-1) / pairs[:, None]
                covered = (candidates & best).sum(-1) / pairs[:, None]
                held = (kept * mass).sum(-1) / np.maximum((best * mass).sum(-1), 1e-30)
                each.append(np.stack([recall, covered, held], axis=-1))
            # [indexes, budgets * ratios, H, 3] -> a unit for every head.
            shape = (len(each), len(counts), len(ratios), *each[0].shape[1:])
            units = np.moveaxis(np.stack(each).reshape(shape), 3, 0)
            found.setdefault((selector, layer), []).extend(units)
    return found


def rows_of(
    found: dict[tuple[str, int], Units], budgets: list[float], ratios: list[float], dim: int
) -> Iterator[dict[str, Any]]:
    """A row for each selector, index, budget and C / K, over all layers and for each of them."""
    for selector in dict.fromkeys(selector for selector, _ in found):
        layers = [layer for name, layer in found if name == selector]
        for label in ("all", *layers):
            held = [
                unit
                for layer in layers
                if label in ("all", layer)
                for unit in found[selector, layer]
            ]
            for (i, index), (k, budget), (r, ratio) in (
                (a, b, c)
                for a in enumerate(key_indexes.INDEXES)
                for b in enumerate(budgets)
                for c in enumerate(ratios)
            ):
                recall, covered, mass = np.stack(held)[:, i, k, r].T
                yield {
                    "selector": selector,
                    "reference": "exact scan",
                    "index": index,
                    "key_bytes": int(key_indexes.key_bytes(index, dim)),
                    "layer": label,
                    "budget": budget,
                    "candidates_ratio": ratio,
                    "recall": round(float(recall.mean()), 5),
                    "p10": round(float(np.percentile(recall, 10)), 5),
                    "worst": round(float(recall.min()), 5),
                    "covered": round(float(covered.mean()), 5),
                    "mass": round(float(mass.mean()), 5),
                    "n": len(recall),
                }


def table(rows: list[dict[str, Any]]) -> str:
    """Recall over all layers in Markdown, and coverage in brackets, a column for each C / K."""
    ratios = list(dict.fromkeys(row["candidates_ratio"] for row in rows))
    lines = ["| context | selector | budget | index | bytes a key | "]
    lines[0] += " | ".join(f"C/K {ratio:g}" for ratio in ratios) + " |"
    lines.append("|---" * (5 + len(ratios)) + "|")
    places: dict[tuple[Any, ...], list[str]] = {}
    for row in rows:
        if row["layer"] == "all":
            names = ("context", "selector", "budget", "index", "key_bytes")
            key = tuple(row[name] for name in names)
            places.setdefault(key, []).append(f"{row['recall']:.4f} ({row['covered']:.4f})")
    lines += [f"| {' | '.join(map(str, (*key, *cells)))} |" for key, cells in places.items()]
    return "\n".join(lines)


def draw(path: Path, rows: list[dict[str, Any]], budget: float) -> None:
    """Share of the exact choice that is missed against C / K, a panel for each selector."""
    from matplotlib.figure import Figure

    shown = [row for row in rows if row["layer"] == "all" and row["budget"] == budget]
    panels = list(dict.fromkeys((row["selector"], row["context"]) for row in shown))
    figure = Figure(figsize=(4.2 * len(panels), 3.6), layout="constrained")
    for axis, (selector, context) in zip(
        figure.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels, strict=True
    ):
        here = [r for r in shown if (r["selector"], r["context"]) == (selector, context)]
        for index in key_indexes.INDEXES:
            line = [row for row in here if row["index"] == index]
            axis.plot(
                [row["candidates_ratio"] for row in line],
                # Nothing missed is drawn at the bottom of the logarithmic axis.
                [max(1 - row["recall"], 1e-5) for row in line],
                marker="o",
                label=f"{index}, {line[0]['key_bytes']:g} bytes a key",
            )
        axis.set(title=f"{selector}, {context} tokens", xlabel="candidates C / K", yscale="log")
        axis.grid(alpha=0.3)
    figure.axes[0].set_ylabel(f"missed of the exact choice at {budget:g}")
    figure.axes[-1].legend(fontsize=8)
    figure.savefig(path, dpi=130)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = arguments(str(__doc__).splitlines()[0])
    made.add_argument("--model", default="embedded", help="checkpoint directory or embedded")
    made.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS, metavar="TASK")
    made.add_argument("--contexts", nargs="+", type=int, default=[2048], metavar="TOKENS")
    made.add_argument("--items", type=int, default=4, help="prompts for each task and context")
    made.add_argument("--blocks", type=int, default=2, help="blocks decoded at most")
    made.add_argument("--budgets", nargs="+", type=float, default=BUDGETS, metavar="SHARE")
    made.add_argument("--ratios", nargs="+", type=float, default=RATIOS, metavar="C/K")
    return made


def check(options: argparse.Namespace) -> None:
    """Refuses options that measure nothing.

    Raises:
      ValueError: one sentence that names the option.
    """
    for fraction in options.budgets:
        Budget(fraction)
    for name in ("items", "blocks"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name} {getattr(options, name)} is too few: give 1 or more")
    if max(options.contexts) > MOST_TOKENS:
        raise ValueError(f"--contexts {max(options.contexts)} is too long: up to {MOST_TOKENS}")
    if min(options.contexts) < 256:
        raise ValueError(f"--contexts {min(options.contexts)} is too short: give 256 or more")
    if not all(1 <= ratio < math.inf for ratio in options.ratios):
        raise ValueError(f"--ratios {min(options.ratios):g} is below 1: give 1 or more")


def main() -> None:
    """Runs the study."""
    given = parser()
    options = given.parse_args()
    if options.quick:
        vars(options).update(tasks=TASKS[:1], contexts=[1024], items=2)
    try:
        check(options)
        check_output(options.json, options.plot)
        path = EMBEDDED if options.model == "embedded" else Path(options.model)
        config, model = checkpoint.load(path, dtype="float32")
        network = Network(config, model)
        tokenizer = Tokenizer.from_directory(path, config)
    except (ValueError, OSError, checkpoint.CheckpointError) as error:
        given.error(str(error))
    rows: list[dict[str, Any]] = []
    for context in options.contexts:
        found: dict[tuple[str, int], Units] = {}
        for task in options.tasks:
            for item in range(options.items):
                began = time.perf_counter()
                prompt = prompt_ids(tokenizer, task, context, item)
                # Prompts of one context share compiled programs, if they keep near its length.
                width = max(network.width(n, options.blocks) for n in (context, len(prompt)))
                made = decode(network, prompt, GenerationConfig(), options.blocks, width)
                measured = measure(network, made, options.budgets, options.ratios)
                for key, units in measured.items():
                    found.setdefault(key, []).extend(units)
                seconds = time.perf_counter() - began
                print(
                    f"{task}, {context} tokens: {item + 1}/{options.items}, {seconds:.1f} s",
                    file=sys.stderr,
                    flush=True,
                )
        about = {"model": options.model, "context": context}
        made_rows = rows_of(found, options.budgets, options.ratios, config.head_dim)
        rows += [about | row for row in made_rows]
    settings: dict[str, Any] = {key: str(value) for key, value in vars(options).items()}
    settings |= {"block_size": config.block_size, "exact_layers": config.exact_layers}
    if options.json:
        write(options.json, settings, rows)
    if options.plot:
        middle = sorted(options.budgets)[len(options.budgets) // 2]
        draw(options.plot, rows, 0.05 if 0.05 in options.budgets else middle)
    print(table(rows))


if __name__ == "__main__":
    main()
