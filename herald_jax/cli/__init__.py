"""The ``herald`` command. Each command has a file of its own and imports JAX when it runs."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import typer

from herald_jax.cli.console import Interrupted, OutputClosed, Refused, note
from herald_jax.cli.convert import convert
from herald_jax.cli.demo import demo
from herald_jax.cli.doctor import doctor
from herald_jax.cli.generate import generate
from herald_jax.cli.models import models
from herald_jax.cli.plan import plan

app = typer.Typer(
    name="herald",
    help="Long-context block-diffusion LLM inference with the KV cache in host memory.\n\n"
    "Start with `herald demo`. Exit codes: 0 done, 1 a request failed (the others are "
    "delivered), 2 wrong use, 130 interrupted, 141 stdout was closed.",
    add_completion=False,
    rich_markup_mode="rich",
)


def _guarded(command: Callable[..., Any]) -> Callable[..., Any]:
    """A command whose interruption and closed output reach ``main`` and not the parser."""

    @wraps(command)
    def run(*arguments: Any, **options: Any) -> Any:
        try:
            return command(*arguments, **options)
        except KeyboardInterrupt:
            raise Interrupted("interrupted") from None
        except BrokenPipeError:
            raise OutputClosed from None

    return run


for command in (generate, demo, convert, models, plan, doctor):
    app.command()(_guarded(command))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code.

    0 done, 1 a request failed, 2 wrong use or an unexpected error, 130 interrupted, 141 nobody
    reads stdout any more. The traceback of an unexpected error is printed if HERALD_TRACEBACK=1.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    # Its tokenizers warn of long prompts; the engine checks lengths with a sentence of its own.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    command = typer.main.get_command(app)
    try:
        # Without a command there is nothing to do but tell what there is.
        code = command.main(arguments or ["--help"], prog_name="herald", standalone_mode=False)
    except Refused as error:
        note(f"error: {error}")
        return 2
    except Interrupted as error:
        note(str(error))
        return 130
    except (KeyboardInterrupt, typer.Abort):
        note("interrupted")
        return 130
    except (OutputClosed, SystemExit):
        # The parser and the tables exit by themselves, and only for this reason.
        _forget_stdout()
        return 141
    except Exception as error:
        # The parser's own errors; their classes have moved between releases of typer.
        if hasattr(error, "format_message"):
            note(f"error: {error.format_message()}")
            return 2
        if os.environ.get("HERALD_TRACEBACK") == "1":
            traceback.print_exc()
        said = (str(error).splitlines() or ["no message"])[0]
        note(f"error: unexpected {type(error).__name__}: {said} (HERALD_TRACEBACK=1 shows where)")
        return 2
    return code if isinstance(code, int) else 0


def _forget_stdout() -> None:
    """Sends what is still buffered nowhere, so that nothing complains at exit."""
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.__stdout__.fileno())  # type: ignore[union-attr]
    except (OSError, ValueError, AttributeError):
        return


__all__ = ["app", "main"]
