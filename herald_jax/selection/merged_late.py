"""merged-late: merged from step 1, to show what waiting for the first tokens is worth."""

from __future__ import annotations

from typing import ClassVar, Literal

from herald_jax.selection.merged import Merged


class MergedLate(Merged):
    """Step 1 has seen what step 0 accepted; retrieval starts one step later for it."""

    name: ClassVar[str] = "merged-late"
    summary: ClassVar[str] = "merged, from step 1's queries at positions still masked"
    merge_step: ClassVar[Literal[0, 1] | None] = 1
