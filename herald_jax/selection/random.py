"""random: rows at random, to show what choosing is worth."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from herald_jax.selection.controls import ScoredControl


class Random(ScoredControl):
    """Uniformly random rows (and the sinks)."""

    name: ClassVar[str] = "random"
    summary: ClassVar[str] = "control: random rows and the sinks"

    def scores(self, layer: int, kv_heads: int, rows: int, seed: int) -> np.ndarray:
        """Seeded by request, layer and length, so that batch-mates change nothing."""
        return np.random.default_rng((seed, layer, rows)).random((kv_heads, rows), np.float32)
