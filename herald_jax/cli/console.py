"""What is said on stderr: refusals, notes and progress. Stdout belongs to results."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

LINE_EVERY_SECONDS = 2.0


class Refused(Exception):
    """A wrong use; the message is one sentence that names the option or file and what would do."""


class Interrupted(Exception):
    """The user stopped a command; the message is one sentence on what is left."""


class OutputClosed(Exception):
    """Nobody reads stdout any more."""


@contextmanager
def refusals() -> Iterator[None]:
    """Turns what the rooms below say about a user's input or machine into ``Refused``.

    They raise ``ValueError`` for wrong options, files and requests, ``EngineError`` and
    ``MemoryError`` for what does not fit; XLA reports a full device as a runtime error.
    """
    from herald_jax.engine.errors import EngineError

    try:
        yield
    except BrokenPipeError:
        raise  # Nobody reads stdout any more: not an error.
    except (ValueError, EngineError, MemoryError, OSError) as error:
        raise Refused(str(error)) from error
    except RuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise Refused(
            "the device ran out of memory: lower --max-batch or --max-context, use a smaller "
            f"--budget or another --method ({str(error).splitlines()[0][:160]})"
        ) from error


def tables() -> Console:
    """Where tables for people are printed: stdout, wide enough for every column if it is a file.

    Raises:
      OutputClosed: there is no stdout.
    """
    if sys.stdout is None:
        raise OutputClosed
    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else 200)


def note(text: str) -> None:
    """One line on stderr, above the bar if there is one."""
    _console().print(text, markup=False, highlight=False, soft_wrap=True)


def _console() -> Console:
    # Made anew each time: stderr may be another file than it was at import.
    return Console(file=sys.stderr)


class Progress:
    """Progress of named phases: a bar on a terminal, now and then a line elsewhere.

    Use it as a context manager and call it with (label, done, total).
    """

    def __init__(self, *, bar: bool = True) -> None:
        """``bar``: whether a bar may be drawn, which also needs stderr to be a terminal."""
        self._bar: Bar | None = None
        self._last: dict[str, float] = {}
        if bar and sys.stderr.isatty():
            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                console=_console(),
                transient=True,
                redirect_stdout=False,
            )
        self._tasks: dict[str, int] = {}

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, label: str, done: int, total: int) -> None:
        """Shows that ``done`` of ``total`` are done in the phase ``label``."""
        if self._bar is not None:
            if label not in self._tasks:
                self._tasks[label] = self._bar.add_task(label, total=total)
            self._bar.update(self._tasks[label], completed=done, total=total)  # type: ignore[arg-type]
            return
        now, last = time.monotonic(), self._last.get(label)
        if last is None or done >= total or now - last >= LINE_EVERY_SECONDS:
            self._last[label] = now
            note(f"{label}: {done}/{total}")
