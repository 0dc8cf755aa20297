"""Answers of each method against dense ones on the same questions, with paired intervals.

    python -m benchmarks.accuracy --json accuracy.json --plot accuracy.png

Every item is a fresh document and one question about it; an answer counts if it is exactly right.
``delta`` is the method's score less dense's on the same items, with a paired bootstrap interval of
95%. Answers are kept beside the output (``accuracy.items.jsonl``), so that an interrupted run goes
on where it stopped. ``chance`` gives the answer to another such question.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.environment import arguments, write
from herald_jax import Budget, Engine, EngineConfig, GenerationConfig, Result
from herald_jax.training.tasks import TASKS, Item, make_item

SEED = 2_000_003
RESAMPLES = 2000
ANSWER_TOKENS = 96
CHUNK = 64


class Answers:
    """What was answered so far, kept in a file of JSON lines."""

    def __init__(self, path: Path | None, engine: Engine) -> None:
        self.path, self.engine = path, engine
        self._costs: dict[str, int] = {}
        self.right: dict[tuple[str, float, str, int, int], bool] = {}
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                *key, right = json.loads(line)
                self.right[tuple(key)] = right  # type: ignore[index]

    def item(self, task: str, tokens: int, index: int) -> Item:
        """Item ``index`` of a task: a document and a question of its own."""
        rng = random.Random(f"{SEED}/{task}/{tokens}/{index}")
        return make_item(task, rng, tokens, self.cost)

    def cost(self, atom: str) -> int:
        """Tokens of a piece of text that no token crosses; remembered."""
        if atom not in self._costs:
            assert self.engine.tokenizer is not None
            self._costs[atom] = len(self.engine.tokenizer.encode(atom))
        return self._costs[atom]

    def run(
        self, method: str, budget: float, task: str, tokens: int, count: int, batch: int
    ) -> np.ndarray:
        """bool [count], which items the method answers exactly."""
        todo = [n for n in range(count) if (method, budget, task, tokens, n) not in self.right]
        for at in range(0, len(todo), CHUNK):
            part = todo[at : at + CHUNK]
            items = {n: self.item(task, tokens, n) for n in part}
            if method == "chance":
                made = {n: item.guess for n, item in items.items()}
            else:
                made = self._generate(method, budget, tokens, items, batch)
            for n, item in items.items():
                self._keep((method, budget, task, tokens, n), made[n] == item.answer)
            print(f"{method} {budget:g} {task} {tokens}: {at + len(part)}/{len(todo)}", flush=True)
        return np.array([self.right[method, budget, task, tokens, n] for n in range(count)])

    def _generate(
        self,
        method: str,
        budget: float,
        tokens: int,
        items: dict[int, Item],
        batch: int,
    ) -> dict[int, str]:
        config = EngineConfig(
            method=method,
            budget=Budget(budget),
            max_batch=batch,
            max_context=tokens + ANSWER_TOKENS,
            prefill_chunk=min(512, tokens),
        )
        made: dict[int, str] = {}
        with self.engine.with_config(config) as engine:
            given = [{"id": str(n), "prompt": item.prompt} for n, item in items.items()]
            for result in engine.generate(given, GenerationConfig(max_new_tokens=ANSWER_TOKENS)):
                assert isinstance(result, Result)
                if result.error:
                    raise SystemExit(f"{method}: request {result.id}: {result.error}")
                made[int(result.id)] = result.text.strip()
        return made

    def _keep(self, key: tuple[str, float, str, int, int], right: bool) -> None:
        self.right[key] = right
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps([*key, right]) + "\n")


def interval(delta: np.ndarray) -> tuple[float, float]:
    """95% paired bootstrap interval of the mean of per-item differences."""
    rng = np.random.default_rng(0)
    means = delta[rng.integers(0, len(delta), (RESAMPLES, len(delta)))].mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def draw(path: Path, rows: list[dict[str, Any]]) -> None:
    """Scores by method, a group a task and context."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cells = list(dict.fromkeys((row["task"], row["context"]) for row in rows))
    names = list(dict.fromkeys((row["method"], row["budget"]) for row in rows))
    figure, axis = plt.subplots(figsize=(4 + 1.8 * len(cells), 4), layout="constrained")
    width = 0.8 / len(names)
    for index, (method, budget) in enumerate(names):
        chosen = {
            (r["task"], r["context"]): r
            for r in rows
            if (r["method"], r["budget"]) == (method, budget)
        }
        heights = [chosen[cell]["score"] if cell in chosen else 0 for cell in cells]
        at = np.arange(len(cells)) + (index - (len(names) - 1) / 2) * width
        label = method if method in ("dense", "chance") else f"{method} {budget:.0%}"
        axis.bar(at, heights, width * 0.9, label=label)
    axis.set_xticks(range(len(cells)), [f"{task}\n{context} tokens" for task, context in cells])
    axis.set_ylabel("exactly right")
    axis.set_ylim(0, 1.02)
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=130)


def main() -> None:
    """Runs the benchmark."""
    parser = arguments(__doc__.splitlines()[0])
    methods = ["herald-draft", "herald-merged", "window", "random"]
    parser.add_argument("--model", default="embedded", help="checkpoint directory or embedded")
    parser.add_argument("--methods", nargs="+", default=methods, metavar="METHOD")
    parser.add_argument("--budgets", nargs="+", type=float, default=[0.05], metavar="SHARE")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), metavar="TASK")
    parser.add_argument("--contexts", nargs="+", type=int, default=[1024], metavar="TOKENS")
    parser.add_argument("--items", type=int, default=500, help="questions a cell")
    parser.add_argument("--batch", type=int, default=16)
    options = parser.parse_args()
    if options.quick:
        vars(options).update(contexts=[512], items=16, tasks=options.tasks[:1])
    engine = Engine.from_checkpoint(options.model)
    kept = None if options.json is None else options.json.with_suffix(".items.jsonl")
    answers = Answers(kept, engine)
    rows: list[dict[str, Any]] = []
    for context in options.contexts:
        for task in options.tasks:
            cell = (task, context, options.items, options.batch)
            dense = answers.run("dense", 1.0, *cell)
            runs = [("dense", 1.0), ("chance", 0.0)]
            runs += [(method, budget) for method in options.methods for budget in options.budgets]
            for method, budget in runs:
                right = answers.run(method, budget, *cell)
                low, high = interval(right.astype(float) - dense.astype(float))
                row = {
                    "model": options.model,
                    "method": method,
                    "budget": budget,
                    "task": task,
                    "context": context,
                    "n": options.items,
                    "score": round(float(right.mean()), 4),
                    "dense_score": round(float(dense.mean()), 4),
                    "delta": round(float(right.mean() - dense.mean()), 4),
                    "ci_low": round(low, 4),
                    "ci_high": round(high, 4),
                }
                rows.append(row)
                print(row, flush=True)
    settings = {key: str(value) for key, value in vars(options).items()}
    write(options.json, settings | {"exact_layers": engine.config.exact_layers}, rows)
    if options.plot:
        draw(options.plot, rows)


if __name__ == "__main__":
    main()
