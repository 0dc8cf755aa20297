"""The rows of the study of recall as a Markdown table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

#: Columns of the printed table.
SHOWN = ("recall", "median", "p10", "mass", "share", "weighted", "weighted_mass")


def table(rows: Sequence[dict[str, Any]], budget: float) -> str:
    """The pooled rows at one budget as a Markdown table, a part for each reference."""
    lines = [
        f"| task | context | reference | selection | {' | '.join(SHOWN)} |",
        "|---|---|---|---|" + "---|" * len(SHOWN),
    ]
    for row in rows:
        if row["budget"] != budget or row["layer"] != "all":
            continue
        numbers = " | ".join(f"{row[key]:.3f}" for key in SHOWN)
        about = f"{row['task']} | {row['context']} | {row['reference']} | {described(row)}"
        lines.append(f"| {about} | {numbers} |")
    return "\n".join(lines)


def described(row: dict[str, Any]) -> str:
    """What a row's selection is, in a few words."""
    words = [row["selector"]]
    if "step" in row:
        words.append(f"mean of {row['mean_of']} at {row['step']}")
        words.append("rotated" if row["rotation"] else "not rotated")
    if "parts" in row:
        words.append(f"{row['parts']} parts over the {row['attended']}")
        if not row["mass_outside"]:
            words.append("mass outside left out")
    if row["index"] != "exact":
        words.append(f"{row['index']} index")
    if row["candidates_ratio"] != 1:
        words.append(f"C/K {row['candidates_ratio']:g}")
        if row["index"] == "exact":
            words.append("refined" if row["refined"] else "before refinement")
    if row["bucketed_by"]:
        low, high = row["bucket"]
        words.append(f"where {row['bucketed_by']} has {low:g} to {high:g} (n = {row['n']})")
    return ", ".join(words)
