"""How well each selector finds what dense attention of the next block attends.

    python -m benchmarks.recall --json recall.json --plot recall.png

Decodes prompts densely, and for every two consecutive generated blocks compares what each selector
would choose for the second while the first is denoised with what the second really attends. No
selection influences the decoding. Results of single prompts are kept beside the output
(``recall.items.jsonl``), so that an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import lookahead
from benchmarks.environment import arguments, check_output, whole_lines, write
from benchmarks.lookahead import Case, Units
from benchmarks.prompts import prompt_ids
from benchmarks.recall_table import table
from benchmarks.trajectories import Network, decode
from herald_jax import Budget, GenerationConfig, checkpoint
from herald_jax.engine.engine import EMBEDDED
from herald_jax.tokenizer import Tokenizer
from herald_jax.training.tasks import TASKS

BUDGETS = [0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2]
RATIOS = [1.25, 1.5, 1.75, 2.0, 4.0]
#: Tasks whose answers go over several blocks: one place of the document, or several in turn.
ASKED = ["passage", "several", "continue"]
#: Ends of the buckets of paper Fig. 7; the first starts at 0.
BUCKETS = (0.6, 0.7, 0.8, 0.9, 1.0)
#: Who is compared in buckets, by the selector whose recall decides the bucket.
BUCKETED = {
    "centre": ("centre", "herald-draft", "centre-completed"),
    "mage-omitted": ("mage-omitted", "mage-drafted", "mage"),
}
#: What a row says where nothing else is said.
PLAIN = {"candidates_ratio": 1.0, "refined": False, "index": "exact", "bucketed_by": None}


class Study:
    """Measures prompts one by one and keeps what was measured in a file of JSON lines."""

    def __init__(self, options: argparse.Namespace) -> None:
        """``options``: the command line's."""
        path = EMBEDDED if options.model == "embedded" else Path(options.model)
        config, model = checkpoint.load(path, dtype="float32")
        if options.exact_layers is not None:
            config = dataclasses.replace(config, exact_layers=options.exact_layers)
        if config.exact_layers >= config.num_layers:
            raise ValueError(
                f"--exact-layers {config.exact_layers} leaves none of the {config.num_layers} "
                "layers to select in: give fewer"
            )
        if options.steps is not None and options.steps > config.block_size:
            raise ValueError(
                f"--steps {options.steps} is more than the block size: give {config.block_size} "
                "or fewer"
            )
        self.network = Network(config, model)
        self.tokenizer = Tokenizer.from_directory(path, config)
        self.case = Case(tuple(options.budgets), tuple(options.ratios), options.detail)
        self.blocks: int = options.blocks
        stops = () if options.ignore_eos else None
        self.generation = GenerationConfig(
            threshold=options.threshold, steps=options.steps, stop_token_ids=stops
        )
        weights = hashlib.sha256()
        for leaf in jax.tree.leaves(self.network.state):
            weights.update(np.asarray(leaf).tobytes())
        self._same = (
            f"{lookahead.MEASURES} {config} {self.case} {self.blocks} {self.generation} "
            f"{weights.hexdigest()}"
        )
        self.kept: dict[str, list[Units]] = {}
        self.path = None if options.json is None else options.json.with_suffix(".items.jsonl")
        if self.path is not None and self.path.exists():
            for line in whole_lines(self.path):
                self._remember(json.loads(line))

    def _remember(self, item: dict[str, Any]) -> None:
        self.kept[item["key"]] = [
            {name: np.array(unit, np.float32) for name, unit in pair.items()}
            for pair in item["pairs"]
        ]

    def pairs(self, task: str, context: int, index: int) -> list[Units]:
        """The units of every pair of consecutive generated blocks of one prompt."""
        prompt = prompt_ids(self.tokenizer, task, context, index)
        key = hashlib.sha256(f"{self._same} {index} {prompt}".encode()).hexdigest()[:32]
        if key not in self.kept:
            # Prompts of one context share compiled programs, if they keep near its length.
            width = max(self.network.width(n, self.blocks) for n in (context, len(prompt)))
            made = decode(self.network, prompt, self.generation, self.blocks, width)
            pairs = [
                lookahead.measure(self.network, made, number, self.case, index)
                for number in range(len(made.blocks) - 1)
                if made.blocks[number].start > 0
            ]
            item = {
                "key": key,
                "task": task,
                "context": context,
                "index": index,
                "prompt_tokens": len(prompt),
                "steps": [block.steps for block in made.blocks],
                "pairs": [{k: np.round(v, 4).tolist() for k, v in p.items()} for p in pairs],
            }
            self._remember(item)
            if self.path is not None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with self.path.open("a") as file:
                    file.write(json.dumps(item) + "\n")
        return self.kept[key]

    def collect(self, task: str, context: int, items: int) -> Units:
        """All pairs of ``items`` prompts, stacked: [pairs, sparse layers, H, budgets, 3].

        Raises:
          SystemExit: no answer reached a second block.
        """
        found: list[Units] = []
        for index in range(items):
            began = time.perf_counter()
            pairs = self.pairs(task, context, index)
            found += pairs
            seconds = time.perf_counter() - began
            print(
                f"{task}, {context} tokens: {index + 1}/{items}, {len(pairs)} pairs of blocks, "
                f"{seconds:.1f} s",
                file=sys.stderr,
                flush=True,
            )
        if not found:
            raise SystemExit(
                f"no answer to {task!r} at --contexts {context} reached a second block: give "
                "--ignore-eos, or another of --tasks"
            )
        return {name: np.stack([pair[name] for pair in found]) for name in found[0]}


def rows_of(units: Units, first_layer: int, case: Case, detail: float) -> Iterator[dict[str, Any]]:
    """Statistics over (pair, layer, head) units.

    Args:
      units: per label [pairs, layers, H, budgets, 3].
      first_layer: the model's index of the first sparse layer.
      case: whose budgets.
      detail: the budget that is also reported by layer, by head and in buckets.
    """
    for name, values in units.items():
        about = PLAIN | json.loads(name)
        for at, budget in enumerate(case.budgets):
            here = values[..., at, :]
            yield about | _statistics(here, budget)
            if budget != detail:
                continue
            for layer in range(here.shape[1]):
                by_layer = about | {"layer": layer + first_layer}
                yield by_layer | _statistics(here[:, layer], budget)
                for head in range(here.shape[2]):
                    yield by_layer | {"head": head} | _statistics(here[:, layer, head], budget)
    if detail in case.budgets:
        yield from _buckets(units, case.budgets.index(detail), detail)


def _statistics(values: np.ndarray, budget: float) -> dict[str, Any]:
    """Of recall, mass and share [..., 3]."""
    recall, mass, share = values.reshape(-1, len(lookahead.MEASURES)).T.astype(float)
    # Units that look at nothing count alike where there are no others.
    weights = np.maximum(share, 1e-9)
    return {
        "budget": budget,
        "recall": round(float(recall.mean()), 4),
        "median": round(float(np.median(recall)), 4),
        "p10": round(float(np.percentile(recall, 10)), 4),
        "mass": round(float(mass.mean()), 4),
        "mass_p10": round(float(np.percentile(mass, 10)), 4),
        "share": round(float(share.mean()), 4),
        "weighted": round(float(np.average(recall, weights=weights)), 4),
        "weighted_mass": round(float(np.average(mass, weights=weights)), 4),
        "n": recall.size,
    }


def _buckets(units: Units, at: int, budget: float) -> Iterator[dict[str, Any]]:
    """Paper Fig. 7: units bucketed by their recall with block n left out."""
    for deciding, compared in BUCKETED.items():
        for reference in ("first step", "every step"):
            by = units[lookahead.label(deciding, reference)][..., at, 0]
            low = -1.0
            for high in BUCKETS:
                inside = (by > low) & (by <= high)
                for selector in compared:
                    values = units[lookahead.label(selector, reference)][..., at, :][inside]
                    if len(values):
                        about: dict[str, Any] = {"selector": selector, "reference": reference}
                        about |= {"bucketed_by": deciding, "bucket": [max(low, 0.0), high]}
                        yield PLAIN | about | _statistics(values, budget)
                low = high


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = arguments(str(__doc__).splitlines()[0])
    made.add_argument("--model", default="embedded", help="checkpoint directory or embedded")
    made.add_argument("--tasks", nargs="+", choices=TASKS, default=ASKED, metavar="TASK")
    made.add_argument("--contexts", nargs="+", type=int, default=[2048], metavar="TOKENS")
    made.add_argument("--items", type=int, default=32, help="prompts for each task and context")
    made.add_argument("--blocks", type=int, default=4, help="blocks decoded at most")
    made.add_argument("--ignore-eos", action="store_true", help="decode all of them")
    made.add_argument("--threshold", type=float, default=0.95, help="confidence that is accepted")
    made.add_argument("--steps", type=int, help="T: accept B / T positions a step instead")
    made.add_argument("--exact-layers", type=int, help="layers left out; the model's by default")
    made.add_argument("--budgets", nargs="+", type=float, default=BUDGETS, metavar="SHARE")
    made.add_argument("--ratios", nargs="+", type=float, default=RATIOS, metavar="C/K")
    made.add_argument(
        "--detail",
        type=float,
        default=0.05,
        help="budget of block n's pool, and the one reported by layer",
    )
    return made


def check(options: argparse.Namespace) -> None:
    """Refuses options that measure nothing.

    Raises:
      ValueError: one sentence that names the option.
    """
    for fraction in options.budgets:
        Budget(fraction)
    if options.detail not in options.budgets:
        raise ValueError(f"--detail {options.detail:g} is not among --budgets: give one of them")
    for name, least in (("items", 1), ("blocks", 2)):
        if getattr(options, name) < least:
            raise ValueError(f"--{name} {getattr(options, name)} is too few: give {least} or more")
    if min(options.contexts) < 256:
        raise ValueError(f"--contexts {min(options.contexts)} is too short: give 256 or more")
    if options.exact_layers is not None and options.exact_layers < 0:
        raise ValueError(f"--exact-layers {options.exact_layers} is negative: give 0 or more")
    if not all(1 < ratio < math.inf for ratio in options.ratios):
        raise ValueError(f"--ratios {min(options.ratios):g} is not above 1, which is always shown")


def main() -> None:
    """Runs the study."""
    given = parser()
    options = given.parse_args()
    if options.quick:
        vars(options).update(tasks=ASKED[:1], contexts=[1024], items=3, blocks=3)
    try:
        check(options)
        check_output(options.json, options.plot)
        study = Study(options)
    except (ValueError, OSError, checkpoint.CheckpointError) as error:
        given.error(str(error))
    config = study.network.config
    rows: list[dict[str, Any]] = []
    for context in options.contexts:
        parts = {task: study.collect(task, context, options.items) for task in options.tasks}
        if len(parts) > 1:
            names = list(next(iter(parts.values())))
            parts["all"] = {n: np.concatenate([p[n] for p in parts.values()]) for n in names}
        for task, units in parts.items():
            about = {"model": options.model, "task": task, "context": context}
            about |= {"layer": "all", "head": "all"}
            for row in rows_of(units, config.exact_layers, study.case, options.detail):
                entries = Budget(row["budget"]).entries(context)
                rows.append(about | row | {"entries": entries})
    settings: dict[str, Any] = {key: str(value) for key, value in vars(options).items()}
    settings |= {"block_size": config.block_size, "exact_layers": config.exact_layers}
    if options.json:
        write(options.json, settings, rows)
    if options.plot:
        from benchmarks.recall_plot import draw

        draw(options.plot, rows, options.detail)
    print(table(rows, options.detail))


if __name__ == "__main__":
    main()
