"""Ordinary English that every Python installation has: its language reference and docstrings.

It fills documents between facts and is what masked language modelling is trained on. The text is
read from the running interpreter's standard library, so none of it is kept here; another Python
version has slightly other sentences.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import os
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

PLAIN = re.compile(r"[A-Z][A-Za-z0-9 ,;:'()\-/]{30,240}[.!?]")
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
FEWEST_WORDS = 7
HELD_OUT = 10


def _texts() -> Iterator[str]:
    try:
        from pydoc_data.topics import topics

        yield from topics.values()
    except ImportError:  # some distributions package it apart
        pass
    for path in _sources(Path(sysconfig.get_paths()["stdlib"])):
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError, OSError):
            continue
        for node in _statements(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield ast.get_docstring(node) or ""


def _sources(library: Path) -> Iterator[Path]:
    """Source files; folders left out are not even listed, as site-packages may be large."""
    for folder, inner, names in os.walk(library):
        inner[:] = [name for name in inner if name not in LEFT_OUT]
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """All statements: nothing with a docstring stands inside an expression, so those are passed."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            waiting += getattr(node, name, ())


def _plain(texts: Iterator[str]) -> Iterator[str]:
    for text in texts:
        for paragraph in re.split(r"\n\s*\n", text):
            line = " ".join(paragraph.split())
            for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z])", line):
                bare = re.sub(r"[\"*`]", "", sentence)
                if PLAIN.fullmatch(bare) and len(bare.split()) >= FEWEST_WORDS:
                    yield bare


class NoProse(RuntimeError):
    """The text of the standard library cannot be found."""


def sentences(held_out: bool = False) -> tuple[str, ...]:
    """Plain sentences in alphabetical order, each once.

    Args:
      held_out: the tenth that is never trained on, rather than the rest.

    Raises:
      NoProse: the standard library's text cannot be found.
    """
    return _split()[held_out]


@functools.cache
def _split() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The sentences to train on and those held out; read once, which takes seconds."""
    found = sorted(set(_plain(_texts())))
    if not found:
        raise NoProse(
            f"no prose: {sysconfig.get_paths()['stdlib']} has no source of Python's library; use a "
            "Python installed with its .py files"
        )
    kept = tuple(s for s in found if not _is_held_out(s))
    return kept, tuple(s for s in found if _is_held_out(s))


def _is_held_out(sentence: str) -> bool:
    return hashlib.sha256(sentence.encode()).digest()[0] % HELD_OUT == 0
