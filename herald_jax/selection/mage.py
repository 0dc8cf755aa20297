"""mage: exact selection at step 0 of every block, reused by its later steps."""

from __future__ import annotations

from typing import ClassVar

from herald_jax.selection.selector import CurrentBlockSelector


class Mage(CurrentBlockSelector):
    """All-[MASK] guided: the first step attends everything and selects (arXiv 2602.14209)."""

    name: ClassVar[str] = "mage"
    summary: ClassVar[str] = "baseline: step 0 attends the whole prefix and selects, no overlap"
    every_step: ClassVar[bool] = False
