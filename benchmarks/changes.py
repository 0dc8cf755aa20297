"""Which share of the selected rows is new from one block to the next?

    python -m benchmarks.changes --json changes.json

Decodes documents of the embedded model's tasks, one at a time and beyond the end of their answers,
and counts for every block the rows that its selection has and the previous one lacked. The first
selection beside decoding is left out: what the device holds then was selected by the prefill.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from benchmarks.environment import arguments, check_output, write
from benchmarks.prompts import prompt_ids
from herald_jax import Budget, Engine, EngineConfig, GenerationConfig, Result
from herald_jax.training.tasks import TASKS

METHODS = ["herald-draft", "herald-merged", "merged"]


def shares(engine: Engine, prompt: list[int], blocks: int) -> list[float]:
    """Moved of selected rows for every block but the first two, which no selection precedes."""
    generation = GenerationConfig(
        max_new_tokens=blocks * engine.config.block_size, stop_token_ids=()
    )
    timeline, counted = engine.timeline, [(0, 0)]
    for item in engine.generate([prompt], generation, stream=True):
        if isinstance(item, Result) and item.error:
            raise SystemExit(item.error)
        total = timeline.rows_selected, timeline.rows_moved
        if total != counted[-1]:
            counted.append(total)
    each = np.diff(np.array(counted, float), axis=0)[1:]
    return [float(share) for share in each[:, 1] / each[:, 0]]


def measure(base: Engine, method: str, options: argparse.Namespace) -> dict[str, Any]:
    """One row: the share over all documents and blocks."""
    config = EngineConfig(
        method=method, budget=Budget(options.budget), max_batch=1, transfer="changes"
    )
    tokenizer, found = base.tokenizer, []
    assert tokenizer is not None
    for index in range(options.documents):
        ids = prompt_ids(tokenizer, options.task, options.context, index)
        # An engine each, so that its counters begin at 0.
        with base.with_config(config) as engine:
            found += shares(engine, ids, options.blocks)
            ratio = engine.sizing.candidates_ratio(method)
    return {
        "method": method,
        "task": options.task,
        "context": options.context,
        "budget": options.budget,
        "candidates_ratio": ratio or 1.0,
        "selections": len(found),
        "new_fraction": round(float(np.mean(found)), 4),
        "p10": round(float(np.quantile(found, 0.1)), 4),
        "p90": round(float(np.quantile(found, 0.9)), 4),
    }


def main() -> None:
    """The command line."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--task", default="needle", choices=sorted(TASKS), help="of the documents")
    parser.add_argument("--context", type=int, default=2048, help="tokens of a prompt, about")
    parser.add_argument("--documents", type=int, default=8, help="decoded with each method")
    parser.add_argument("--blocks", type=int, default=8, help="decoded of each")
    parser.add_argument("--budget", type=float, default=0.05, help="share of positions attended")
    options = parser.parse_args()
    for name, least, most in (("context", 256, 2**31 - 1), ("documents", 1, 10**6)):
        if not least <= (value := getattr(options, name)) <= most:
            parser.error(f"--{name} {value} is out of range: give {least} to {most}")
    if not 0 < options.budget <= 1:
        parser.error(f"--budget {options.budget:g} is no share: give one above 0, up to 1")
    if options.blocks < 4:
        parser.error(f"--blocks {options.blocks} leaves no change to count: give 4 or more")
    if options.quick:
        options.context, options.documents, options.blocks = 512, 2, 5
    try:
        check_output(options.json)
    except OSError as error:
        parser.error(str(error))
    base = Engine.from_checkpoint("embedded")
    longest = base.config.max_position_embeddings - options.blocks * base.config.block_size
    if options.context > longest:
        parser.error(f"--context {options.context} is too long for the model: up to {longest}")
    rows = [measure(base, method, options) for method in METHODS]
    write(options.json, vars(options), rows)


if __name__ == "__main__":
    main()
