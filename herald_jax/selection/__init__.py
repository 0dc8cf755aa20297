"""Which rows of the prefix the next block attends. The only room that names selectors."""

from __future__ import annotations

from herald_jax.selection.centre import Centre
from herald_jax.selection.herald_draft import HeraldDraft
from herald_jax.selection.herald_draft_indexed import HeraldDraftIndexed
from herald_jax.selection.herald_merged import HeraldMerged
from herald_jax.selection.infinigen import Infinigen
from herald_jax.selection.job import SelectionJob
from herald_jax.selection.mage import Mage
from herald_jax.selection.mage_offload import MageOffload
from herald_jax.selection.mage_offload_cpu import MageOffloadCpu
from herald_jax.selection.merged import Merged
from herald_jax.selection.merged_late import MergedLate
from herald_jax.selection.merged_unrotated import MergedUnrotated
from herald_jax.selection.oracle import Oracle
from herald_jax.selection.random import Random
from herald_jax.selection.selector import (
    CurrentBlockSelector,
    HostBlockSelector,
    LayerAheadSelector,
    LayerSerialSelector,
    MergedQueries,
    QueryOnceSelector,
    Selector,
)
from herald_jax.selection.window import Window

SELECTORS: dict[str, type[Selector]] = {
    selector.name: selector
    for selector in (
        HeraldDraft,
        HeraldDraftIndexed,
        HeraldMerged,
        Merged,
        MergedUnrotated,
        MergedLate,
        Mage,
        MageOffload,
        MageOffloadCpu,
        Infinigen,
        Oracle,
        Centre,
        Random,
        Window,
    )
}

#: What "auto" takes where the dense cache does not fit: the fastest that was measured.
BEYOND_DENSE = HeraldMerged.name


def check_method(
    name: str,
    candidates_ratio: float | None = None,
    key_index: str | None = None,
    transfer: str | None = None,
) -> None:
    """Refuses a method that is unknown, or that what is asked for does not go with.

    Args:
      candidates_ratio, key_index, transfer: None where they are not asked for.

    Raises:
      ValueError: with one sentence.
    """
    indexed = [each for each, selector in SELECTORS.items() if selector.indexed]
    if key_index is not None and name in ("dense", *SELECTORS) and name not in indexed:
        raise ValueError(
            f"--key-index {key_index} does not go with --method {name}, which scans no index: "
            f"leave it out, or use one of {', '.join(indexed)}"
        )
    sent = [each for each, selector in SELECTORS.items() if selector.between_blocks]
    if transfer is not None and name in ("dense", *SELECTORS) and name not in sent:
        raise ValueError(
            f"--transfer {transfer} does not go with --method {name}, which sends no selected rows "
            f"between blocks: leave it out, or use one of {', '.join(sent)}"
        )
    if name not in ("auto", "dense"):
        make_selector(name, candidates_ratio)
    elif candidates_ratio is not None:
        refining = ", ".join(name for name, selector in SELECTORS.items() if selector.refines)
        raise ValueError(
            f"--candidates-ratio {candidates_ratio:g} does not go with --method {name}: leave it "
            f"out, or use one of {refining}"
        )


def make_selector(name: str, candidates_ratio: float | None = None) -> Selector:
    """The selector behind a method name, with its own C / K or another.

    Raises:
      ValueError: the name is unknown (the message lists the known ones), or a ratio is given and
        the selector does not refine.
    """
    if name not in SELECTORS:
        known = ", ".join(["auto", "dense", *SELECTORS])
        raise ValueError(f"--method {name!r} is unknown: use one of {known}")
    return SELECTORS[name](candidates_ratio)


__all__ = [
    "BEYOND_DENSE",
    "SELECTORS",
    "CurrentBlockSelector",
    "HostBlockSelector",
    "LayerAheadSelector",
    "LayerSerialSelector",
    "MergedQueries",
    "QueryOnceSelector",
    "SelectionJob",
    "Selector",
    "check_method",
    "make_selector",
]
