"""merged-drafted: the next block's own masked queries, over the draft, merged part by part."""

from __future__ import annotations

from typing import ClassVar, Literal

from herald_jax.selection.herald_merged import HeraldMerged


class MergedDrafted(HeraldMerged):
    """What the next block asks depends on what this one says, so the draft is read first.

    Beside step 1, the next block's B [MASK] tokens attend the draft and the active pool on the
    device. Their queries are merged over S parts of the block, and each knows how much of its mass
    lies on the draft and the block itself. All layers are then scanned independently, keys only.
    """

    name: ClassVar[str] = "merged-drafted"
    summary: ClassVar[str] = "next block's masked queries over draft and pool, keys-only scan"
    merge_step: ClassVar[Literal[0, 1] | None] = 1
    drafted: ClassVar[bool] = True
    segments: ClassVar[int] = 4
