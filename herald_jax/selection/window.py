"""window: the most recent rows, to show what looking back is worth."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from herald_jax.selection.controls import ScoredControl


class Window(ScoredControl):
    """The most recent rows (and the sinks)."""

    name: ClassVar[str] = "window"
    summary: ClassVar[str] = "control: the most recent rows and the sinks"

    def scores(self, layer: int, kv_heads: int, rows: int, seed: int) -> np.ndarray:
        """Position is the score."""
        return np.broadcast_to(np.arange(rows, dtype=np.float32), (kv_heads, rows))
