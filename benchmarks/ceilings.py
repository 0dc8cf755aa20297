"""What the device reaches at best: reading its memory, and multiplying large matrices."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Ceilings:
    """What the device reaches, measured beside what is compared with it.

    Attributes:
      bytes_per_second: reading device memory.
      flops_per_second: a large matrix product.
    """

    bytes_per_second: float
    flops_per_second: float


def ceilings(dtype: Any, size: int) -> Ceilings:
    """Best of several readings of a large array, and of several products of ``size`` squared."""

    def best(run: Any, *operands: jax.Array) -> float:
        run(*operands).block_until_ready()
        seconds = []
        for _ in range(5):
            began = time.perf_counter()
            for _ in range(4):
                made = run(*operands)
            made.block_until_ready()
            seconds.append((time.perf_counter() - began) / 4)
        return min(seconds)

    square = jax.random.normal(jax.random.key(0), (size, size), dtype)
    product = best(jax.jit(jnp.matmul), square, square)
    large = jnp.zeros((16, size, size), dtype)
    read = best(jax.jit(lambda x: x.max(axis=0)), large)
    return Ceilings(17 / 16 * large.nbytes / read, 2 * size**3 / product)
