"""Which rows of the prefix the next block attends. The only room that names selectors."""

from __future__ import annotations

from herald_jax.selection.centre import Centre
from herald_jax.selection.controls import Random, Window
from herald_jax.selection.herald_draft import HeraldDraft
from herald_jax.selection.herald_merged import HeraldMerged
from herald_jax.selection.job import SelectionJob
from herald_jax.selection.selector import LayerSerialSelector, QueryOnceSelector, Selector

SELECTORS: dict[str, type[Selector]] = {
    selector.name: selector for selector in (HeraldDraft, HeraldMerged, Centre, Random, Window)
}


def make_selector(name: str) -> Selector:
    """The selector behind a method name.

    Raises:
      ValueError: the name is unknown; the message lists the known ones.
    """
    if name not in SELECTORS:
        known = ", ".join(["auto", "dense", *SELECTORS])
        raise ValueError(f"--method {name!r} is unknown: use one of {known}")
    return SELECTORS[name]()


__all__ = [
    "SELECTORS",
    "LayerSerialSelector",
    "QueryOnceSelector",
    "SelectionJob",
    "Selector",
    "make_selector",
]
