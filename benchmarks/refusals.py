"""Options of benchmarks that cannot be used: said in a sentence, before anything is computed."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from herald_jax.cli.console import Refused
from herald_jax.cli.console import refusals as told


@contextlib.contextmanager
def refusals(parser: argparse.ArgumentParser) -> Iterator[None]:
    """Ends the program with exit code 2 and the sentence of what is refused in the body."""
    try:
        with told():
            yield
    except Refused as error:
        parser.error(str(error))


def at_least(options: Any, least: int, *names: str) -> None:
    """Refuses smaller numbers, also in lists; None stands for a default.

    Raises:
      ValueError: naming the option.
    """
    for name in names:
        value = getattr(options, name)
        for number in value if isinstance(value, list) else [value]:
            if number is not None and number < least:
                flag = name.replace("_", "-")
                raise ValueError(f"--{flag} {number} is too small: give {least} or more")


def check_methods(methods: Sequence[str]) -> None:
    """Refuses methods that are unknown, and the one that stands for another.

    Raises:
      ValueError: with one sentence.
    """
    from herald_jax.selection import check_method

    for method in methods:
        check_method(method)
        if method == "auto":
            raise ValueError("auto is no method to measure: name dense or another")


def check_steps(steps: int | None, model: Any) -> None:
    """Refuses a T that a network cannot follow.

    Raises:
      ValueError: naming the option.
    """
    from herald_jax.engine.config import GenerationConfig, check_rule

    check_rule(GenerationConfig(steps=steps).resolve(model.rule), model)


def read_limit(text: str) -> int | None:
    """Bytes of ``--device-memory``, like "80GB"; None for "all".

    Raises:
      Refused: it is neither.
    """
    from herald_jax.cli.options import read_size

    return None if text == "all" else read_size(text, "--device-memory")


def read_points(texts: Sequence[str]) -> list[tuple[str, int]]:
    """Methods and batches from texts like "dense:8".

    Raises:
      ValueError: one is no method and number of slots.
    """
    points = []
    for text in texts:
        method, _, batch = text.partition(":")
        if not (batch.isascii() and batch.isdigit() and int(batch)):
            raise ValueError(f"--points {text} is no METHOD:BATCH: give one like dense:8")
        points.append((method, int(batch)))
    check_methods([method for method, _ in points])
    return points
