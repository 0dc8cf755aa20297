"""merged: herald-merged at C = K, to show what the refinement is worth."""

from __future__ import annotations

from typing import ClassVar

from herald_jax.selection.herald_merged import HeraldMerged


class Merged(HeraldMerged):
    """What the merged query selects is attended as it is."""

    name: ClassVar[str] = "merged"
    summary: ClassVar[str] = "herald-merged without refinement (C = K)"
    own_ratio: ClassVar[float] = 1.0
