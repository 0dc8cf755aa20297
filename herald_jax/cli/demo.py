"""``herald demo``: the embedded model looks facts up, dense and HERALD side by side."""

from __future__ import annotations

import json
import random
import sys
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from herald_jax.cli.console import Progress, note, refusals
from herald_jax.cli.options import Json
from herald_jax.cli.platform import prepare_platform
from herald_jax.kv.host_memory import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from herald_jax.engine.engine import Engine
    from herald_jax.engine.request import Result
    from herald_jax.training.tasks import Document

#: Report key -> method.
METHODS = {"dense": "dense", "herald": "herald-draft"}
#: The longest document for which the embedded model's card states scores, in tokens.
MEASURED_TOKENS = 2048
LONG_TOKENS = 8192
QUESTIONS, LONG_QUESTIONS = 6, 1
TOKENS_PER_FACT = 64
ANSWER_TOKENS = 32
#: Characters of an answer that the table shows; --json has all.
SHOWN = 40


@dataclass(frozen=True)
class Task:
    """A document, some questions about it, and the prompts that ask them."""

    document: Document
    tokens: int
    questions: list[str]
    answers: list[str]
    prompts: list[list[int]]


def demo(
    seed: Annotated[int, typer.Option(metavar="S", help="Another seed, another document.")] = 0,
    as_json: Json = False,
) -> None:
    """Ask the embedded model about a document, with dense attention and with HERALD.

    Both answer the same questions in one batch; HERALD attends 5% of the document in its sparse
    layers and keeps their whole KV cache in host memory. Example:

    herald demo --json > demo.json
    """
    prepare_platform()
    from herald_jax.engine.engine import Engine

    with refusals(), Progress() as progress:
        note("loading herald-tiny")
        base = Engine.from_checkpoint("embedded")
        assert base.tokenizer is not None
        encode = base.tokenizer.encode
        task = make_task(encode, MEASURED_TOKENS, QUESTIONS, seed)
        note(f"{QUESTIONS} questions about a document of {task.tokens} tokens")
        answers, report = {}, {}
        for name, method in METHODS.items():
            answers[name], report[name] = _ask(base, method, task, progress, warm=True)
        long_task = make_task(encode, LONG_TOKENS, LONG_QUESTIONS, seed)
        note(f"{LONG_QUESTIONS} question about a document of {long_task.tokens} tokens")
        long_report = {
            name: _ask(base, method, long_task, progress, warm=False)[1]
            for name, method in METHODS.items()
        }
    full = {
        "model": "herald-tiny",
        "seed": seed,
        "document_tokens": task.tokens,
        "measured_tokens": MEASURED_TOKENS,
        "facts": len(task.document.questions),
        "questions": _questions(task, answers),
        **report,
        "long_document": {
            "document_tokens": long_task.tokens,
            "beyond_measured_length": long_task.tokens > MEASURED_TOKENS,
            **long_report,
        },
    }
    if as_json:
        typer.echo(json.dumps(full))
    else:
        _print(full)


def make_task(encode: Callable[[str], list[int]], tokens: int, asked: int, seed: int) -> Task:
    """A document and questions about it.

    Up to the measured length, prompt and answer fit into ``tokens``; a longer document has at
    least ``tokens`` itself, so that its length is not overstated.
    """
    from herald_jax.training.tasks import make_document, prompt_text

    rng = random.Random(f"demo/{tokens}/{seed}")
    costs: dict[str, int] = {}

    def cost(atom: str) -> int:
        if atom not in costs:
            costs[atom] = len(encode(atom))
        return costs[atom]

    margin = 2 * ANSWER_TOKENS
    room = tokens + margin if tokens > MEASURED_TOKENS else tokens - margin
    document = make_document(rng, room, tokens // TOKENS_PER_FACT, cost)
    chosen = rng.sample(document.questions, asked)
    prompts = [encode(prompt_text(document.text, question.text)) for question in chosen]
    return Task(
        document,
        len(encode(document.text)),
        [question.text for question in chosen],
        [question.answer for question in chosen],
        prompts,
    )


def _ask(
    base: Engine, method: str, task: Task, progress: Progress, *, warm: bool
) -> tuple[list[str], dict[str, Any]]:
    """Asks all questions of a task at once.

    Args:
      warm: answer one question first, so that the seconds that count hold no compilation.

    Returns:
      The answers in order, and what the report says of the run.
    """
    from herald_jax.engine.config import EngineConfig, GenerationConfig

    generation = GenerationConfig(max_new_tokens=ANSWER_TOKENS)
    # The long document is beyond what the network's card states; the report says so.
    longest = max(map(len, task.prompts)) + ANSWER_TOKENS
    engine = base.with_config(
        EngineConfig(method=method, max_batch=len(task.prompts), max_context=longest)
    )
    if warm:
        note(f"{method}: compiling")
        list(engine.generate(task.prompts[:1], generation))
    timeline = engine.timeline
    before = replace(timeline, spans=[])
    began = time.perf_counter()
    results: dict[str, Result] = {}
    for item in engine.generate(
        task.prompts,
        generation,
        progress=lambda kind, done, total: progress(f"{method}: {kind}", done, total),
    ):
        results[item.id] = item  # type: ignore[assignment]
    seconds = time.perf_counter() - began
    texts = [results[str(n)].text.strip() for n in range(len(task.prompts))]
    summary = engine.summary(seconds)
    engine.close()
    tokens = timeline.tokens - before.tokens
    busy = timeline.block_seconds - before.block_seconds
    stalled = timeline.stall_seconds - before.stall_seconds
    report = {
        "method": method,
        "correct": sum(map(str.__eq__, texts, task.answers)),
        "total": len(texts),
        "device_kv_bytes": summary["device_kv_bytes"],
        "host_kv_bytes": summary["host_kv_bytes"],
        "seconds": round(seconds, 3),
        "seconds_include_compilation": not warm,
        "prefill_seconds": round(timeline.prefill_seconds - before.prefill_seconds, 3),
        "tokens_per_second": round(tokens / seconds, 2),
        "stall_fraction": round(stalled / busy, 4) if busy else 0.0,
        "errors": [result.error for result in results.values() if result.error],
    }
    return texts, report


def _questions(task: Task, answers: dict[str, list[str]]) -> list[dict[str, Any]]:
    rows = []
    for number, (question, answer) in enumerate(zip(task.questions, task.answers, strict=True)):
        row: dict[str, Any] = {"question": question, "answer": answer}
        for name, texts in answers.items():
            row |= {name: texts[number], f"{name}_correct": texts[number] == answer}
        rows.append(row)
    return rows


def _print(report: dict[str, Any]) -> None:
    """The report for people."""
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 120)
    asked = Table(
        title=f"herald-tiny, a document of {report['document_tokens']} tokens with "
        f"{report['facts']} facts"
    )
    for title in ("question", "answer", *METHODS.values()):
        asked.add_column(title)
    for row in report["questions"]:
        cells = []
        for name in METHODS:
            mark = "[green](right)[/]" if row[f"{name}_correct"] else "[red](wrong)[/]"
            cells.append(f"{escape(row[name][:SHOWN])} {mark}")
        asked.add_row(row["question"], row["answer"], *cells)
    console.print(asked)
    figures = Table(title="the same, in figures")
    figures.add_column("")
    for method in METHODS.values():
        figures.add_column(method, justify="right")
    long_report = report["long_document"]
    lines: list[tuple[str, dict[str, Any], Callable[[dict[str, Any]], str]]] = [
        ("right answers", report, lambda run: f"{run['correct']} of {run['total']}"),
        ("KV on the device", report, lambda run: format_bytes(run["device_kv_bytes"])),
        ("KV on the host", report, lambda run: format_bytes(run["host_kv_bytes"])),
        ("tokens/s, prompts included", report, lambda run: f"{run['tokens_per_second']:.1f}"),
        ("stall fraction", report, lambda run: f"{run['stall_fraction']:.3f}"),
    ]
    length = long_report["document_tokens"]
    lines += [(f"at {length} tokens: {title}", long_report, show) for title, _, show in lines[:3]]
    for title, source, show in lines:
        figures.add_row(title, *(show(source[name]) for name in METHODS))
    console.print(figures)
    if long_report["beyond_measured_length"]:
        console.print(
            f"The model's card states scores up to {report['measured_tokens']} tokens: at {length} "
            "its answers are not to be relied on, whatever the method; the memory figures are.",
            highlight=False,
        )
