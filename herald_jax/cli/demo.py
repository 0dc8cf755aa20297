"""``herald demo``: the embedded model looks facts up, dense and HERALD side by side."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from itertools import takewhile
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

    from herald_jax.cli.demo_questions import Asked
    from herald_jax.engine.engine import Engine
    from herald_jax.engine.request import Result

#: Report key -> method.
METHODS = {"dense": "dense", "herald": "herald-draft", "drafted": "herald-merged"}
#: Tokens of prompt and answer together, at most; the last as long as the model was made for.
SHORT_TOKENS, CROSSING_TOKENS, LONG_TOKENS = 2048, 1024, 8192
QUESTIONS = 6
#: Kinds of questions whose answers go over blocks, a document each.
CROSSING = ("passage", "several")
ANSWER_TOKENS = 96
#: Of longer answers, the first wrong word is named.
LONG_WORDS = 4
BLOCKS_NOTE = "Blocks: how many blocks of 32 positions an answer goes over."
CROSSING_NOTE = (
    "The rows for the first block of an answer are chosen by that block's own masks, those for a "
    "later block beforehand: with herald-draft by one mask at its centre, which is enough for a "
    "few digits or words and often not for the long answers above; with herald-merged by every "
    "second of its masks. docs/accuracy.md has both over many questions."
)
CPU_NOTE = (
    "The device is the CPU here: both streams share its cores, so retrieval and its second pass "
    "are not hidden and tokens/s tells little. This demo shows memory and answers; "
    "docs/gpu.md measures speed on a GPU."
)


def demo(
    seed: Annotated[int, typer.Option(metavar="S", help="Another seed, another document.")] = 0,
    as_json: Json = False,
) -> None:
    """Ask the embedded model about a document, with dense attention and with HERALD.

    All answer the same questions in one batch; the others than dense attend 5% of the document in
    their sparse layers and keep the whole KV cache of these in host memory. Example:

    herald demo --json > demo.json
    """
    prepare_platform()
    import jax

    from herald_jax.cli.demo_questions import Maker
    from herald_jax.engine.engine import Engine

    with refusals(), Progress() as progress:
        note("loading herald-tiny and making documents")
        base = Engine.from_checkpoint("embedded")
        assert base.tokenizer is not None
        make = Maker(base.tokenizer.encode, base.config.block_size, seed)
        short = make.short(SHORT_TOKENS, QUESTIONS)
        crossing = [make.item(kind, CROSSING_TOKENS, blocks=2) for kind in CROSSING]
        far = [make.item("needle", LONG_TOKENS)]
        note(
            f"{QUESTIONS} questions about a document of {short.tokens} tokens, {len(crossing)} "
            "more with long answers"
        )
        texts, report, far_texts, far_report = {}, {}, {}, {}
        for name, method in METHODS.items():
            asked = [*short.asked, *crossing]
            texts[name], report[name] = _ask(base, method, asked, ANSWER_TOKENS, progress)
            report[name] |= _score(short.asked, texts[name])
        length = len(far[0].prompt)
        note(f"a question about a document that makes a prompt of {length} tokens")
        for name, method in METHODS.items():
            room = LONG_TOKENS - length
            far_texts[name], far_report[name] = _ask(base, method, far, room, progress, warm=False)
            far_report[name] |= _score(far, far_texts[name])
    later = {name: answers[QUESTIONS:] for name, answers in texts.items()}
    full = {
        "model": "herald-tiny",
        "platform": jax.default_backend(),
        "seed": seed,
        "document_tokens": short.tokens,
        "facts": short.facts,
        "questions": _rows(short.asked, texts),
        **report,
        "crossing": {
            "total": len(crossing),
            **{f"{name}_correct": _score(crossing, later[name])["correct"] for name in METHODS},
            "questions": _rows(crossing, later),
        },
        "long_document": {
            "prompt_tokens": length,
            "questions": _rows(far, far_texts),
            **far_report,
        },
    }
    if as_json:
        typer.echo(json.dumps(full))
    else:
        _print(full)


def _ask(
    base: Engine,
    method: str,
    asked: list[Asked],
    answer_tokens: int,
    progress: Progress,
    *,
    warm: bool = True,
) -> tuple[list[str], dict[str, Any]]:
    """Asks all questions at once.

    Args:
      answer_tokens: of an answer, at most.
      warm: answer the longest and the shortest prompt first, so that the seconds that count hold
        no compilation.

    Returns:
      The answers in order, and what the report says of the run.
    """
    from herald_jax.engine.config import EngineConfig, GenerationConfig

    generation = GenerationConfig(max_new_tokens=answer_tokens)
    prompts = [item.prompt for item in asked]
    engine = base.with_config(
        EngineConfig(
            method=method,
            max_batch=len(prompts),
            max_context=max(map(len, prompts)) + answer_tokens,
        )
    )
    if warm:
        note(f"{method}: compiling")
        list(engine.generate([max(prompts, key=len), min(prompts, key=len)], generation))
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
        row: dict[str, Any] = {"kind": item.kind, "question": item.question}
        row |= {"answer": item.answer, "blocks": item.blocks}
        for name, answers in texts.items():
            row |= {name: answers[number], f"{name}_correct": answers[number] == item.answer}
        rows.append(row)
    return rows


def _shown(row: dict[str, Any], name: str) -> str:
    """An answer with a mark; of a right one that is long, the mark alone."""
    text, answer = escape(row[name]), row["answer"]
    if row[f"{name}_correct"]:
        mark = "[green](right)[/]"
        return mark if len(answer.split()) > LONG_WORDS else f"{text} {mark}"
    given, wanted = row[name].split(), answer.split()
    same = sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(given, wanted, strict=False))
    )
    where = f" from word {same + 1}" if len(wanted) > LONG_WORDS else ""
    return f"{text} [red](wrong{where})[/]"


def _print(report: dict[str, Any]) -> None:
    """The report for people."""
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 120)
    crossing, far = report["crossing"], report["long_document"]
    asked = Table(title="herald-tiny answers")
    for title in ("question", "blocks", "answer", *METHODS.values()):
        asked.add_column(title, justify="right" if title == "blocks" else "left")
    tokens, facts = report["document_tokens"], report["facts"]
    for title, rows in (
        (f"about one document of {tokens} tokens with {facts} facts", report["questions"]),
        ("long answers, a document each", crossing["questions"]),
        (f"after a prompt of {far['prompt_tokens']} tokens", far["questions"]),
    ):
        asked.add_row(f"[bold]{title}[/]")
        for row in rows:
            cells = [_shown(row, name) for name in METHODS]
            asked.add_row(row["question"], str(row["blocks"]), escape(row["answer"]), *cells)
        asked.add_section()
    console.print(asked)
    console.print(BLOCKS_NOTE, CROSSING_NOTE, highlight=False)
    figures = Table(title="the same, in figures")
    figures.add_column("")
    for method in METHODS.values():
        figures.add_column(method, justify="right")
    lines: list[tuple[str, dict[str, Any], Callable[[dict[str, Any]], str]]] = [
        ("right answers", report, lambda run: f"{run['correct']} of {run['total']}"),
        ("KV on the device", report, lambda run: format_bytes(run["device_kv_bytes"])),
        ("KV on the host", report, lambda run: format_bytes(run["host_kv_bytes"])),
        ("tokens/s, prompts included", report, lambda run: f"{run['tokens_per_second']:.1f}"),
        ("stall fraction", report, lambda run: f"{run['stall_fraction']:.3f}"),
    ]
    after = f"after {far['prompt_tokens']} tokens"
    lines += [(f"{after}: {title}", far, show) for title, _, show in lines[:3]]
    for title, source, show in lines:
        figures.add_row(title, *(show(source[name]) for name in METHODS))
        if title == lines[0][0]:
            total = crossing["total"]
            right = [f"{crossing[f'{name}_correct']} of {total}" for name in METHODS]
            figures.add_row("right long answers", *right)
    console.print(figures)
    if report["platform"] == "cpu":
        console.print(CPU_NOTE, highlight=False)
