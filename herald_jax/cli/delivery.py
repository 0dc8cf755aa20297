"""Delivering the results of ``herald generate`` as they come, and counting them."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any

import typer

from herald_jax.cli.console import Progress, Refused, note
from herald_jax.cli.request_files import ResultFile
from herald_jax.kv.host_memory import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from herald_jax.engine.config import GenerationConfig
    from herald_jax.engine.engine import Engine
    from herald_jax.engine.request import Delta, Result


class Delivery:
    """One pass over the requests: delivers results as they come and keeps count."""

    def __init__(
        self,
        engine: Engine,
        *,
        single: bool,
        stream: bool,
        as_json: bool,
        results: ResultFile | None,
        planned: int,
    ) -> None:
        self.engine, self.single, self.stream, self.as_json = engine, single, stream, as_json
        self.results, self.planned = results, planned
        self.finished = self.failed = 0
        self.last: dict[str, Any] | None = None
        self._announced = False

    def __call__(
        self,
        work: list[dict[str, Any]],
        generation: GenerationConfig,
        chat: bool,
        labels: dict[str, Any],
    ) -> int:
        """Generates and prints; returns the exit code."""
        began = time.perf_counter()
        # A bar and lines on one terminal would overwrite each other.
        quiet = self.results is not None or (self.single and not self.stream)
        interrupted = False
        with Progress(bar=quiet and not self.stream) as progress:
            try:
                self._deliver(
                    self.engine.generate(
                        work,
                        generation,
                        stream=self.stream,
                        chat=chat,
                        progress=lambda kind, done, total: self._show(progress, kind, done, total),
                    )
                )
            except KeyboardInterrupt:
                interrupted = True
        if interrupted:
            note(self._interruption())
        self._summarize(time.perf_counter() - began, labels)
        return 130 if interrupted else int(self.failed > 0)

    def _show(self, progress: Progress, kind: str, done: int, total: int) -> None:
        if not self._announced:
            self._announced = True
            note(f"method: {self.engine.method} ({self.engine.method_reason})")
        if kind == "programs":
            if done == 0:
                note(f"compiling {total} programs")
            kind = "compiled programs"
        # An answer that appears word by word where progress would is its own progress.
        if not (self.stream and kind == "tokens" and (sys.stdout.isatty() or _one_place())):
            progress(kind, done, total)

    def _deliver(self, items: Iterator[Result | Delta]) -> None:
        from herald_jax.engine.request import Delta

        for item in items:
            if isinstance(item, Delta):
                self._print_delta(item)
            else:
                self._print_result(item)

    def _print_delta(self, delta: Delta) -> None:
        if self.single and not self.as_json:
            typer.echo(delta.text, nl=False)
        else:
            line = {"id": delta.id, "delta": delta.text, "token_ids": delta.token_ids}
            typer.echo(json.dumps(line, ensure_ascii=False))

    def _print_result(self, result: Result) -> None:
        if self.single and result.error is not None and not result.blocks:
            # One prompt that cannot even begin is a wrong use.
            raise Refused(result.error.removeprefix(f"request {result.id}: "))
        self.finished += 1
        self.last = result.to_json()
        if result.error is not None:
            self.failed += 1
            note(f"error: {result.error}")
        if self.results is not None:
            self.results.write(self.last)
        elif not self.single:
            typer.echo(json.dumps(self.last, ensure_ascii=False))
        elif not self.as_json:
            typer.echo("" if self.stream else result.text)

    def _interruption(self) -> str:
        kept = "printed" if self.results is None else f"kept in {self.results.path}"
        more = "" if self.results is None else "; the same command goes on from there"
        return f"interrupted: {self.finished} of {self.planned} results are {kept}{more}"

    def _summarize(self, seconds: float, labels: dict[str, Any]) -> None:
        summary = self.engine.summary(seconds) | labels
        summary |= {"requests": self.finished, "failed": self.failed}
        if self.as_json:
            if self.single and self.results is None:
                summary["result"] = self.last
            typer.echo(json.dumps(summary, ensure_ascii=False))
            return
        note(
            f"{self.finished} results, {summary['tokens']} tokens in {seconds:.1f} s "
            f"({summary['tokens_per_second']:.1f} tokens/s), KV: "
            f"{format_bytes(summary['device_kv_bytes'])} on the device, "
            f"{format_bytes(summary['host_kv_bytes'])} on the host"
        )


def _one_place() -> bool:
    """Whether stdout and stderr go to one file."""
    try:
        out, err = (os.fstat(stream.fileno()) for stream in (sys.stdout, sys.stderr))
    except (OSError, ValueError):
        return False
    return (out.st_dev, out.st_ino) == (err.st_dev, err.st_ino)
