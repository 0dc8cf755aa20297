"""herald-merged: the next block's own masked queries, over the draft, merged part by part."""

from __future__ import annotations

from typing import ClassVar, Literal

from herald_jax.selection.merged import Merged


class HeraldMerged(Merged):
    """What the next block asks depends on what this one says, so the draft is read first.

    Beside step 1, every second [MASK] token of the next block attends the draft and the active
    pool on the device. Their queries are merged over S parts of the block, and each knows how much
    of its mass lies on the draft and the masks themselves. All layers are then scanned
    independently, keys only, and the device keeps the best of C > K candidates.
    """

    name: ClassVar[str] = "herald-merged"
    summary: ClassVar[str] = "next block's merged masks over draft and pool, keys-only scan"
    merge_step: ClassVar[Literal[0, 1] | None] = 1
    own_ratio: ClassVar[float] = 1.5
    drafted: ClassVar[bool] = True
    spacing: ClassVar[int] = 2
    segments: ClassVar[int] = 2
