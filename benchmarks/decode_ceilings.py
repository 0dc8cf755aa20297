"""What each resource would allow: tokens a second by design, the paper's Figure 5.

A design says where attention over the full KV runs and how often KV crosses the link. The rate of
the link is measured; what the device and the host allow comes from rows of ``benchmarks.decode``:
steps with selection switched off, and the time that selection takes.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from herald_jax.kv.device_cache import CacheShape
from herald_jax.kv.transfer import RegisteredArrays, put

RESOURCES = ("fetching KV", "device", "host")
#: What is copied to measure the link: arrays in flight, and bytes of each.
COPIES, COPY_BYTES = 8, 64 << 20


def link_rate(device: jax.Device) -> float:
    """Bytes a second from registered host memory to the device, several copies in flight."""
    memory = RegisteredArrays([((COPY_BYTES,), np.dtype(np.uint8))] * COPIES, device)
    try:
        seconds = []
        for _ in range(6):
            began = time.perf_counter()
            jax.block_until_ready([put(array, device) for array in memory.arrays])
            seconds.append(time.perf_counter() - began)
        return COPIES * COPY_BYTES / statistics.median(seconds[1:])
    finally:
        memory.close()


def fetched_bytes(shape: CacheShape, context: int) -> dict[str, int]:
    """Bytes of one slot that cross the link: "full", all KV; "selected", what is kept of it;
    "candidates", what is fetched where the device refines it."""
    layers, one = shape.exact_layers + shape.sparse_layers, shape.layer_bytes(1, 1)
    return {
        "full": layers * one * context,
        "selected": shape.sparse_layers * one * shape.selected,
        "candidates": shape.sparse_layers * one * shape.candidates,
    }


def designs(rows: list[dict[str, Any]], link: float) -> list[dict[str, Any]]:
    """A row for each design whose methods are among ``rows``, all of one shape and context.

    Args:
      rows: of ``benchmarks.decode``, with ``fetched_bytes``; ``link``: bytes a second.

    Returns:
      rows of "design" and tokens a second by resource, None where it takes no part; "limit" names
      the least.
    """
    # A file that goes on may have rows of before there was such a count.
    by_method = {row["method"]: row for row in rows if "fetched_bytes" in row}
    dense, merged = by_method.get("dense"), by_method.get("herald-merged")
    found = []

    def add(design: str, row: dict[str, Any], moved: float, host: float | None) -> None:
        fetching = row["block"] * link / moved if moved else None
        allowed = dict(
            zip(RESOURCES, (fetching, row["ideal_tokens_per_second"], host), strict=True)
        )
        known = {name: value for name, value in allowed.items() if value is not None}
        rounded = {
            name: None if value is None else round(value, 1) for name, value in allowed.items()
        }
        limit = min(known, key=lambda name: known[name])
        found.append({"design": design, **rounded, "limit": limit, "batch": row["batch"]})

    if dense is not None:
        add("all KV on the device", dense, 0, None)
    if dense is not None and merged is not None:
        passes = merged["steps"] + 1
        add("all KV fetched at every step", dense, passes * merged["fetched_bytes"]["full"], None)
        selected = passes * merged["fetched_bytes"]["selected"]
        add("selected KV fetched at every step", merged, selected, None)
    for method, design in (
        ("mage-offload-cpu", "once a block, selected with every query"),
        ("herald-draft", "once a block, selected with one query"),
        ("herald-merged", "once a block, merged query over an index"),
    ):
        if (row := by_method.get(method)) is not None:
            tokens = row["batch"] * row["block"]
            # Methods that select within a block are waited for; others run beside it.
            waited = row["stall_fraction"] * row["block_ms"] / 1e3
            seconds = row["retrieval_ms"] / 1e3 or waited
            host = tokens / seconds if seconds else None
            add(f"{method}: {design}", row, row["fetched_bytes"]["candidates"], host)
    return found


def draw(path: Path, found: list[dict[str, Any]]) -> None:
    """Draws a line a design and a point a resource; a ring marks the one that limits it."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(10, 0.6 * len(found) + 1.6), layout="constrained")
    for at, row in enumerate(reversed(found)):
        for color, resource in enumerate(RESOURCES):
            if row[resource] is None:
                continue
            label = resource if resource not in axis.get_legend_handles_labels()[1] else None
            axis.scatter(row[resource], at, s=60, color=f"C{color}", label=label, zorder=3)
            if row["limit"] == resource:
                axis.scatter(row[resource], at, s=220, facecolors="none", edgecolors="0.2")
    axis.set_yticks(range(len(found)), [row["design"] for row in reversed(found)])
    axis.set_xscale("log")
    axis.set_xlabel("tokens a second that a resource allows; a ring marks the least")
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path, dpi=130)
