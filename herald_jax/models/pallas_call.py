"""How kernels written in Pallas for Triton are called: compiled on a GPU, interpreted elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu


def on_gpu() -> bool:
    """Whether kernels are compiled; elsewhere only tests run them."""
    return jax.default_backend() == "gpu"


def power_of_two(number: int, least: int = 1) -> bool:
    """Whether a size is one that Triton takes: a power of two, and not less than ``least``."""
    return number >= least and number & (number - 1) == 0


def kernel_call(
    kernel: Callable[..., None],
    name: str,
    *,
    grid: tuple[int, ...],
    out_shape: Any,
    warps: int,
    stages: int,
) -> Callable[..., Any]:
    """The call of a kernel over a grid of programs; take it with the kernel's inputs.

    Args:
      name: what profilers show.
      out_shape: a ``jax.ShapeDtypeStruct``, or several.
      warps: threads of a program in 32s; ``stages``: steps of a loop that are in flight.
    """
    call: Callable[..., Any] = pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=out_shape,
        name=name,
        interpret=not on_gpu(),
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
    )
    return call
