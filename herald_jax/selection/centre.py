"""centre: the representative query without a draft, to show what the draft is worth."""

from __future__ import annotations

from typing import ClassVar

from herald_jax.selection.herald_draft import HeraldDraft


class Centre(HeraldDraft):
    """The same scan over committed blocks alone (block n omitted, paper Fig. 7)."""

    name: ClassVar[str] = "centre"
    summary: ClassVar[str] = "herald-draft without the draft: committed blocks alone"
    attends_draft: ClassVar[bool] = False
