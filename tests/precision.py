"""How exactly fp32 values can be known: a GPU multiplies with ten bits of mantissa if allowed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


def near(tight: float) -> float:
    """Tolerance where products of the default precision take part: ``tight`` holds on the CPU."""
    return tight if jax.default_backend() == "cpu" else max(tight, 2e-3)


def product_precisions(function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """The precision that each matrix product of a function asks for."""
    return [
        equation.params["precision"]
        for equation in _equations(jax.make_jaxpr(function)(*arguments).jaxpr)
        if equation.primitive.name == "dot_general"
    ]


def _equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            if hasattr(value, "jaxpr"):
                yield from _equations(value.jaxpr)
