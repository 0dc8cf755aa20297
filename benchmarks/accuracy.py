"""Answers of each method against dense ones on the same questions, with paired intervals.

    python -m benchmarks.accuracy --json accuracy.json --plot accuracy.png

Every item is a fresh document and one question about it; an answer counts if it is exactly right.
``delta`` is the method's score less dense's on the same items, with a paired bootstrap interval of
95%. Answers are kept beside the output (``accuracy.items.jsonl``), so that an interrupted run goes
on where it stopped; files of several runs may be joined. ``chance`` gives the answer to another
such question. A method may carry its C / K: ``herald-merged:1.5``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast, get_args

import jax
import numpy as np

from benchmarks.environment import arguments, check_output, whole_lines, write
from herald_jax import Budget, Engine, EngineConfig, GenerationConfig, Result
from herald_jax.checkpoint import CheckpointError
from herald_jax.engine.config import KeyIndex
from herald_jax.selection import SELECTORS, make_selector
from herald_jax.training.documents import cost_of
from herald_jax.training.tasks import TASKS, Item, make_item

SEED = 2_000_003
RESAMPLES = 2000
ANSWER_TOKENS = 96
METHODS = ["herald-draft", "herald-merged", "merged", "mage", "centre", "window", "random"]
#: Depths (0 the document's beginning, 1 its end) that are also reported apart.
DEPTHS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
Cell = tuple[str, int]


class Answers:
    """What was answered so far, kept in a file of JSON lines."""

    def __init__(
        self, engine: Engine, path: Path | None, batch: int, exact_layers: int | None
    ) -> None:
        """``batch``: requests decoded together; ``exact_layers``: None for the model's."""
        assert engine.tokenizer is not None, "the checkpoint has no tokenizer"
        self.engine, self.path, self.batch = engine, path, batch
        self.exact_layers = engine.config.exact_layers if exact_layers is None else exact_layers
        layers = [group.states for group in engine.stack.groups(0, len(engine.stack), None)]
        weights = hashlib.sha256(f"{engine.config} {self.exact_layers}".encode())
        for leaf in jax.tree.leaves((engine.stack.shell, layers)):
            weights.update(np.asarray(leaf).tobytes())
        self.model = weights.hexdigest()[:12]
        self._cost = cost_of(engine.tokenizer.encode)
        self._items: dict[Cell, list[Item]] = {}
        self.right: dict[tuple[Any, ...], bool] = {}
        if path is not None and path.exists():
            for line in whole_lines(path):
                *key, right = json.loads(line)
                self.right[tuple(key)] = right

    def items(self, cell: Cell, count: int) -> list[Item]:
        """The first ``count`` items of a (task, tokens): a document and a question each."""
        task, tokens = cell
        made = self._items.setdefault(cell, [])
        for index in range(len(made), count):
            rng = random.Random(f"{SEED}/{task}/{tokens}/{index}")
            made.append(make_item(task, rng, tokens, self._cost))
        return made[:count]

    def run(self, method: str, budget: float, cell: Cell, count: int) -> np.ndarray:
        """bool [count], which items the method answers exactly."""
        items = self.items(cell, count)
        about = (self.model, method, budget, *cell)
        todo = [n for n in range(count) if (*about, n) not in self.right]
        began = time.perf_counter()
        answers = self._answers(method, budget, cell[1], {n: items[n] for n in todo})
        for done, (n, text) in enumerate(answers, 1):
            self._keep((*about, n), text == items[n].answer)
            if done % self.batch == 0 or done == len(todo):
                seconds = time.perf_counter() - began
                line = f"{method} {budget:g} {cell[0]} {cell[1]}: {done}/{len(todo)}"
                print(f"{line}, {seconds:.0f} s", file=sys.stderr, flush=True)
        return np.array([self.right[*about, n] for n in range(count)])

    def _answers(
        self, method: str, budget: float, tokens: int, items: dict[int, Item]
    ) -> Iterator[tuple[int, str]]:
        if method == "chance":
            yield from ((n, item.guess) for n, item in items.items())
        if method == "chance" or not items:
            return
        name, ratio, index = parts(method)
        config = EngineConfig(
            method=name,
            key_index=index,
            budget=Budget(budget),
            exact_layers=self.exact_layers,
            candidates_ratio=ratio,
            max_batch=self.batch,
            max_context=tokens + ANSWER_TOKENS,
            prefill_chunk=min(1024, tokens),
        )
        given = [{"id": str(n), "prompt": item.prompt} for n, item in items.items()]
        with self.engine.with_config(config) as engine:
            for result in engine.generate(given, GenerationConfig(max_new_tokens=ANSWER_TOKENS)):
                assert isinstance(result, Result)
                if result.error:
                    raise SystemExit(f"{method}: request {result.id}: {result.error}")
                yield int(result.id), result.text.strip()

    def _keep(self, key: tuple[Any, ...], right: bool) -> None:
        self.right[key] = right
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(json.dumps([*key, right]) + "\n")


def parts(method: str) -> tuple[str, float | None, KeyIndex]:
    """A method's name, its C / K and its key index.

    "herald-merged:1.5:int4" -> ("herald-merged", 1.5, "int4"); both may be left out, in any order.

    Raises:
      ValueError: what follows a colon is neither a number nor an index.
    """
    name, *asked = method.split(":")
    ratio: float | None = None
    index: KeyIndex = "int8"
    for text in asked:
        if text in get_args(KeyIndex):
            index = cast(KeyIndex, text)
            continue
        try:
            ratio = float(text)
        except ValueError as error:
            known = ", ".join(get_args(KeyIndex))
            raise ValueError(
                f"--methods {method!r}: {text!r} is neither a C / K nor one of {known}"
            ) from error
    return name, ratio, index


def check(method: str) -> None:
    """Refuses a method that is no selector, or whose C / K does not go with it.

    Raises:
      ValueError: one sentence that names the method as it was given.
    """
    name, ratio, _ = parts(method)
    if name not in SELECTORS:
        known = ", ".join(SELECTORS)
        raise ValueError(f"--methods {method!r} is no selector: use some of {known}")
    try:
        EngineConfig(method=name, candidates_ratio=ratio)
        make_selector(name, ratio)
    except ValueError as error:
        refining = ", ".join(name for name, made in SELECTORS.items() if made.refines)
        raise ValueError(
            f"--methods {method!r}: a C / K is 1 or more and goes with {refining}"
        ) from error


def interval(delta: np.ndarray) -> tuple[float, float]:
    """95% paired bootstrap interval of the mean of per-item differences."""
    rng = np.random.default_rng(0)
    means = delta[rng.integers(0, len(delta), (RESAMPLES, len(delta)))].mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def compare(right: np.ndarray, dense: np.ndarray) -> dict[str, Any]:
    """Scores of a method and of dense on the same items, bool [n] each, and their difference."""
    delta = right.astype(float) - dense.astype(float)
    low, high = interval(delta)
    return {
        "n": len(right),
        "score": round(float(right.mean()), 4),
        "dense_score": round(float(dense.mean()), 4),
        "delta": round(float(delta.mean()), 4),
        "ci_low": round(low, 4),
        "ci_high": round(high, 4),
    }


def rows_of(answers: Answers, cell: Cell, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows of one task and context: every method and budget, over all depths and by depth."""
    count = options.items
    dense = answers.run("dense", 1.0, cell, count)
    depth = np.array([item.depth for item in answers.items(cell, count)])
    place = np.clip(np.digitize(depth, DEPTHS) - 1, 0, len(DEPTHS) - 2)
    runs = [("dense", 1.0), ("chance", 0.0)]
    runs += [(method, budget) for budget in options.budgets for method in options.methods]
    for method, budget in runs:
        right = answers.run(method, budget, cell, count)
        about = {"model": options.model, "method": method, "budget": budget}
        about |= {"task": cell[0], "context": cell[1]}
        yield about | {"depth": "all"} | compare(right, dense)
        for number in range(len(DEPTHS) - 1):
            here = place == number
            if here.any():
                span = list(DEPTHS[number : number + 2])
                yield about | {"depth": span} | compare(right[here], dense[here])


def main() -> None:
    """Runs the benchmark."""
    parser = arguments(str(__doc__).splitlines()[0])
    parser.add_argument("--model", default="embedded", help="checkpoint directory or embedded")
    parser.add_argument("--methods", nargs="*", default=METHODS, metavar="METHOD")
    parser.add_argument("--budgets", nargs="+", type=float, default=[0.05], metavar="SHARE")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), metavar="TASK")
    parser.add_argument("--contexts", nargs="+", type=int, default=[2048], metavar="TOKENS")
    parser.add_argument("--items", type=int, default=500, help="questions a cell")
    parser.add_argument("--batch", type=int, default=16, help="requests decoded together")
    parser.add_argument("--exact-layers", type=int, help="the model's by default")
    options = parser.parse_args()
    if options.quick:
        quick = {"contexts": [512], "items": 12, "tasks": ["passage"], "methods": METHODS[:2]}
        # What was asked for stays.
        for name, value in quick.items():
            if getattr(options, name) == parser.get_default(name):
                setattr(options, name, value)
    try:
        for budget in options.budgets:
            Budget(budget)
        for method in options.methods:
            check(method)
        if options.items < 1:
            raise ValueError(f"--items {options.items} asks nothing: give 1 or more")
        check_output(options.json, options.plot)
        config = EngineConfig(exact_layers=options.exact_layers, max_batch=options.batch)
        engine = Engine.from_checkpoint(options.model, config)
        for method in options.methods:
            engine.with_config(replace(config, method=parts(method)[0]))
        longest = engine.config.max_position_embeddings
        if max(options.contexts) > longest:
            raise ValueError(f"--contexts {max(options.contexts)} is beyond the model's {longest}")
        for task in options.tasks:
            make_item(task, random.Random(0), min(options.contexts), len)
    except (ValueError, CheckpointError, OSError) as error:
        parser.error(str(error))
    kept = None if options.json is None else options.json.with_suffix(".items.jsonl")
    answers = Answers(engine, kept, options.batch, options.exact_layers)
    rows: list[dict[str, Any]] = []
    for context in options.contexts:
        for task in options.tasks:
            for row in rows_of(answers, (task, context), options):
                rows.append(row)
                if row["depth"] == "all":
                    print(row, file=sys.stderr, flush=True)
    settings = {key: str(value) for key, value in vars(options).items()}
    write(options.json, settings | {"exact_layers": answers.exact_layers}, rows)
    if options.plot:
        from benchmarks.accuracy_plot import draw

        draw(options.plot, rows)


if __name__ == "__main__":
    main()
