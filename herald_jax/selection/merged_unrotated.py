"""merged-unrotated: merged without the rotation, to show what it is worth."""

from __future__ import annotations

from typing import ClassVar

from herald_jax.selection.merged import Merged


class MergedUnrotated(Merged):
    """The merged query stays at the current block's positions."""

    name: ClassVar[str] = "merged-unrotated"
    summary: ClassVar[str] = "merged, its query not rotated to the next block"
    rotates: ClassVar[bool] = False
