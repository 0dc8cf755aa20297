"""What a measurement was made on, written into every result."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import host_kernels

#: Options that name files and folders of the machine.
OUTPUTS = ("json", "plot", "folder")
#: Of weights and KV.
DTYPES = ("bfloat16", "float32")


def environment() -> dict[str, Any]:
    """Hardware, versions and commit."""
    import jax

    cpu = host_kernels.cpu_info()
    device = jax.devices()[0]
    root = Path(__file__).parents[1]
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        commit = "unknown"
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "cpu": cpu["model"],
        "isa": cpu["isa"],
        "threads": host_kernels.thread_count(),
        "python": platform.python_version(),
        "jax": version("jax"),
        "commit": commit,
    }


def arguments(description: str) -> argparse.ArgumentParser:
    """The options every benchmark has."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write settings and rows to this file")
    parser.add_argument("--plot", type=Path, help="write a picture to this file")
    parser.add_argument("--quick", action="store_true", help="a small case, within a minute")
    return parser


def check_output(result: Path | None, plot: Path | None = None) -> None:
    """Makes the folders of what will be written at the end, or refuses now.

    Raises:
      OSError: a path cannot be written.
      ValueError: what draws the plot is not installed.
    """
    for path in (result, plot):
        if path is None:
            continue
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a folder: name a file in it")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise type(error)(f"{path.parent} cannot be made: {error.strerror}") from None
        if not os.access(path.parent, os.W_OK):
            raise PermissionError(f"{path.parent} cannot be written to")
        known = path.exists()
        try:
            # Only opening tells, where the caller may write everywhere.
            path.open("ab").close()
        except OSError as error:
            raise type(error)(f"{path} cannot be written: {error.strerror}") from None
        if not known:
            path.unlink()
    if plot is not None and find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install 'herald-jax[eval]', or leave it out")


def whole_lines(path: Path) -> list[str]:
    """Lines of a file that is appended to; half a line of an interrupted run is cut off it."""
    lines = path.read_text().splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("\n")]
    if whole != lines:
        path.write_text("".join(whole))
    return whole


def finish(
    options: argparse.Namespace,
    settings: dict[str, Any],
    rows: list[dict[str, Any]],
    draw: Callable[[Path, list[dict[str, Any]]], None],
) -> None:
    """Prints the result unless it was written to a file, and draws it if asked."""
    if not options.json:
        write(None, settings, rows)
    if options.plot:
        draw(options.plot, rows)


def write(
    path: Path | None,
    settings: dict[str, Any],
    rows: list[dict[str, Any]],
    machine: dict[str, Any] | None = None,
) -> None:
    """Writes ``{"environment", "settings", "rows"}``, or prints it without a path.

    Where output went is no setting of a measurement and is left out. ``machine`` is said of the
    environment in place of what JAX sees, where something else was measured.
    """
    settings = {key: value for key, value in settings.items() if key not in OUTPUTS}
    surroundings = environment() | (machine or {})
    head = json.dumps({"environment": surroundings, "settings": settings}, indent=2)
    # A row a line: there may be thousands.
    lines = ",\n".join("    " + json.dumps(row) for row in rows)
    text = head.removesuffix("\n}") + ',\n  "rows": [\n' + lines + "\n  ]\n}\n"
    if path is None:
        print(text)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    # What a link names is replaced, not the link.
    path = path.resolve()
    if path.exists() and not path.is_file():
        # A device or a pipe, such as /dev/null, has to stay one.
        path.write_text(text)
        return
    # Whoever is interrupted meanwhile keeps what was there.
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(text)
    unfinished.replace(path)
