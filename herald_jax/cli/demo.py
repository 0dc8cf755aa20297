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

from herald_jax.cli.console import Progress, Refused, note, refusals
from herald_jax.cli.options import Json
from herald_jax.cli.platform import prepare_platform
from herald_jax.kv.host_memory import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from herald_jax.engine.engine import Engine
    from herald_jax.engine.request import Result
    from herald_jax.training.tasks import Document

#: Report key -> method.
METHODS = {"dense": "dense", "herald": "herald-draft"}
#: The longest document for which the embedded model's card states scores, in tokens.
MEASURED_TOKENS = 2048
LONG_TOKENS = 8192
QUESTIONS, CROSSING, LONG_QUESTIONS = 6, 4, 1
TOKENS_PER_FACT = 64
ANSWER_TOKENS = 32
#: Documents made at most in search of answers in the right place.
ATTEMPTS = 500
#: A crossing answer has at most this many tokens in the first generated block, and more in all.
BEFORE_CROSSING = 3
CROSSING_NOTE = (
    "The rows for the first block are chosen by that block's own masked positions; a later "
    "block's are chosen beforehand, by one mask token at its centre. In this small model that "
    "mask, which lies after the end of a short answer, looks nothing up (see Known weaknesses in "
    "its card)."
)
CPU_NOTE = (
    "The device is the CPU here: both streams share its cores, so retrieval and its second pass "
    "are not hidden and tokens/s tells little. This demo shows memory and answers; "
    "docs/overlap.md measures speed on a GPU."
)
#: Characters of an answer that the table shows; --json has all.
SHOWN = 40


@dataclass(frozen=True)
class Asked:
    """A question, its right answer, and the prompt that asks it after a document."""

    question: str
    answer: str
    prompt: list[int]


@dataclass(frozen=True)
class Task:
    """Questions about one document of so many tokens and facts."""

    tokens: int
    facts: int
    asked: list[Asked]


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
    import jax

    from herald_jax.engine.engine import Engine

    with refusals(), Progress() as progress:
        note("loading herald-tiny")
        base = Engine.from_checkpoint("embedded")
        assert base.tokenizer is not None
        make = Maker(base.tokenizer.encode, base.config.block_size, seed)
        task, crossing = make.task(MEASURED_TOKENS, QUESTIONS), make.crossing(MEASURED_TOKENS)
        note(
            f"{QUESTIONS} questions about a document of {task.tokens} tokens, {CROSSING} more "
            "whose answers cross a block boundary"
        )
        texts, report = {}, {}
        for name, method in METHODS.items():
            asked = [*task.asked, *crossing]
            texts[name], report[name] = _ask(base, method, asked, progress, warm=True)
            report[name] |= _score(task.asked, texts[name])
        long_task = make.task(LONG_TOKENS, LONG_QUESTIONS)
        note(f"{LONG_QUESTIONS} question about a document of {long_task.tokens} tokens")
        long_report = {}
        for name, method in METHODS.items():
            answers, long_report[name] = _ask(base, method, long_task.asked, progress, warm=False)
            long_report[name] |= _score(long_task.asked, answers)
    later = {name: answers[QUESTIONS:] for name, answers in texts.items()}
    full = {
        "model": "herald-tiny",
        "platform": jax.default_backend(),
        "seed": seed,
        "document_tokens": task.tokens,
        "measured_tokens": MEASURED_TOKENS,
        "facts": task.facts,
        "questions": _rows(task.asked, texts),
        **report,
        "crossing": {
            "total": len(crossing),
            **{f"{name}_correct": _score(crossing, later[name])["correct"] for name in METHODS},
            "questions": _rows(crossing, later),
        },
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


class Maker:
    """Documents and questions, placed so that it is known which blocks an answer takes.

    Prompts are whole but for the last block, which the answer goes on with: after a prompt of
    ``n`` tokens the first generated block has room for ``B - n % B``.
    """

    def __init__(self, encode: Callable[[str], list[int]], block: int, seed: int) -> None:
        self.encode, self.block, self.seed = encode, block, seed
        self._costs: dict[str, int] = {}

    def task(self, tokens: int, count: int) -> Task:
        """A document and ``count`` questions whose answers end in the first generated block.

        Up to the measured length, prompt and answer fit into ``tokens``; a longer document has
        at least ``tokens`` itself, so that its length is not overstated.
        """
        rng = random.Random(f"demo/{tokens}/{self.seed}")
        for _ in range(ATTEMPTS):
            document = self._document(rng, tokens)
            # The end of text takes one more place.
            near = [asked for asked, room, size in self._asked(document) if size < room]
            if len(near) >= count:
                length = len(self.encode(document.text))
                return Task(length, len(document.questions), rng.sample(near, count))
        raise Refused(f"no document of {tokens} tokens has {count} answers within a block")

    def crossing(self, tokens: int) -> list[Asked]:
        """Questions, a document each, whose answers go on in the second generated block."""
        rng = random.Random(f"demo/crossing/{tokens}/{self.seed}")
        found: list[Asked] = []
        for _ in range(ATTEMPTS):
            # Documents end within a sentence of their length, so that it decides the place.
            document = self._document(rng, tokens - rng.randrange(self.block))
            for asked, room, size in self._asked(document):
                if room <= BEFORE_CROSSING < size and asked.answer.isdigit():
                    found.append(asked)
                    break
            if len(found) == CROSSING:
                return found
        raise Refused(f"no documents of {tokens} tokens have {CROSSING} answers that cross a block")

    def _document(self, rng: random.Random, tokens: int) -> Document:
        from herald_jax.training.tasks import make_document

        margin = 2 * ANSWER_TOKENS
        room = tokens + margin if tokens > MEASURED_TOKENS else tokens - margin
        return make_document(rng, room, tokens // TOKENS_PER_FACT, self._cost)

    def _asked(self, document: Document) -> Iterator[tuple[Asked, int, int]]:
        """Every question with the room of the first generated block and its answer's tokens."""
        from herald_jax.training.tasks import prompt_text

        for question in document.questions:
            prompt = self.encode(prompt_text(document.text, question.text))
            room = self.block - len(prompt) % self.block
            size = len(self.encode(" " + question.answer))
            yield Asked(question.text, question.answer, prompt), room, size

    def _cost(self, atom: str) -> int:
        if atom not in self._costs:
            self._costs[atom] = len(self.encode(atom))
        return self._costs[atom]


def _ask(
    base: Engine, method: str, asked: list[Asked], progress: Progress, *, warm: bool
) -> tuple[list[str], dict[str, Any]]:
    """Asks all questions at once.

    Args:
      warm: answer one question first, so that the seconds that count hold no compilation.

    Returns:
      The answers in order, and what the report says of the run.
    """
    from herald_jax.engine.config import EngineConfig, GenerationConfig

    generation = GenerationConfig(max_new_tokens=ANSWER_TOKENS)
    prompts = [item.prompt for item in asked]
    # The long document is beyond what the network's card states; the report says so.
    longest = max(map(len, prompts)) + ANSWER_TOKENS
    engine = base.with_config(
        EngineConfig(method=method, max_batch=len(prompts), max_context=longest)
    )
    if warm:
        note(f"{method}: compiling")
        list(engine.generate(prompts[:1], generation))
    timeline = engine.timeline
    before = replace(timeline, spans=[])
    began = time.perf_counter()
    results: dict[str, Result] = {}
    for item in engine.generate(
        prompts,
        generation,
        progress=lambda kind, done, total: progress(f"{method}: {kind}", done, total),
    ):
        results[item.id] = item  # type: ignore[assignment]
    seconds = time.perf_counter() - began
    texts = [results[str(n)].text.strip() for n in range(len(prompts))]
    summary = engine.summary(seconds)
    engine.close()
    tokens = timeline.tokens - before.tokens
    busy = timeline.block_seconds - before.block_seconds
    stalled = timeline.stall_seconds - before.stall_seconds
    report = {
        "method": method,
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


def _score(asked: list[Asked], texts: list[str]) -> dict[str, int]:
    """How many of the first answers are exactly right."""
    right = sum(item.answer == text for item, text in zip(asked, texts, strict=False))
    return {"correct": right, "total": len(asked)}


def _rows(asked: list[Asked], texts: dict[str, list[str]]) -> list[dict[str, Any]]:
    rows = []
    for number, item in enumerate(asked):
        row: dict[str, Any] = {"question": item.question, "answer": item.answer}
        for name, answers in texts.items():
            row |= {name: answers[number], f"{name}_correct": answers[number] == item.answer}
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
    crossing = report["crossing"]
    for title, rows in (
        ("answers within the first block", report["questions"]),
        ("answers that cross into the next block, a document each", crossing["questions"]),
    ):
        asked.add_row(f"[bold]{title}[/]")
        for row in rows:
            cells = []
            for name in METHODS:
                mark = "[green](right)[/]" if row[f"{name}_correct"] else "[red](wrong)[/]"
                cells.append(f"{escape(row[name][:SHOWN])} {mark}")
            asked.add_row(row["question"], row["answer"], *cells)
        asked.add_section()
    console.print(asked)
    console.print(CROSSING_NOTE, highlight=False)
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
        if title == lines[0][0]:
            total = crossing["total"]
            right = [f"{crossing[f'{name}_correct']} of {total}" for name in METHODS]
            figures.add_row("right answers that cross", *right)
    console.print(figures)
    if report["platform"] == "cpu":
        console.print(CPU_NOTE, highlight=False)
    if long_report["beyond_measured_length"]:
        console.print(
            f"The model's card states scores up to {report['measured_tokens']} tokens: at {length} "
            "its answers are not to be relied on, whatever the method; the memory figures are.",
            highlight=False,
        )
