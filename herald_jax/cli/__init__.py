"""The ``herald`` command. Each command has a file of its own and imports JAX when it runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import typer

from herald_jax.cli.console import Refused, note
from herald_jax.cli.convert import convert
from herald_jax.cli.demo import demo
from herald_jax.cli.doctor import doctor
from herald_jax.cli.generate import generate
from herald_jax.cli.plan import plan

app = typer.Typer(
    name="herald",
    help="Long-context block-diffusion LLM inference with the KV cache in host memory.\n\n"
    "Start with `herald demo`. Exit codes: 0 done, 1 a request failed (the others are "
    "delivered), 2 wrong use, 130 interrupted.",
    add_completion=False,
    rich_markup_mode="rich",
)
for command in (generate, demo, convert, plan, doctor):
    app.command()(command)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code: 0 done, 1 a request failed, 2 wrong use."""
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
    except (KeyboardInterrupt, typer.Abort):
        note("interrupted")
        return 130
    except Exception as error:
        # The parser's own errors; their classes have moved between releases of typer.
        if not hasattr(error, "format_message"):
            raise
        note(f"error: {error.format_message()}")
        return 2
    return code if isinstance(code, int) else 0


__all__ = ["app", "main"]
