"""oracle: exact selection at every step, the most that a budget can give."""

from __future__ import annotations

from typing import ClassVar

from herald_jax.selection.selector import CurrentBlockSelector


class Oracle(CurrentBlockSelector):
    """Every step attends the rows that its own queries find most important, and no others."""

    name: ClassVar[str] = "oracle"
    summary: ClassVar[str] = "control: every step's best rows by its own queries, very slow"
    every_step: ClassVar[bool] = True
