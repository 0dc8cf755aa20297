"""``herald models``: the families and checkpoints this version knows, from the registry."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from herald_jax.cli.console import Refused, tables
from herald_jax.cli.options import Json
from herald_jax.diffusion.rules import RULES

if TYPE_CHECKING:
    from herald_jax.models.family import Family


def models(
    as_json: Json = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print Markdown tables, as the documentation has.")
    ] = False,
) -> None:
    """List model families, the checkpoints known by name, generation rules, and what was verified.

    A folder of any supported family can be converted, whatever its name. A known name tells what
    config.json leaves out: the block size of SDAR's variants, the generation rule of LLaDA2.1.
    Examples:

    herald models

    herald models --json
    """
    if as_json and markdown:
        raise Refused("--json and --markdown exclude each other: give one of them")
    from herald_jax.models.registry import FAMILIES

    described = [describe(family) for family in FAMILIES.values()]
    rules = {name: f"{rule.summary} ({rule.source})" for name, rule in RULES.items()}
    if as_json:
        typer.echo(json.dumps({"families": described, "rules": rules}))
    elif markdown:
        typer.echo("\n".join(markdown_lines(described)))
    else:
        _print(described, rules)


def describe(family: Family) -> dict[str, Any]:
    """A family as plain JSON values."""
    return {
        "family": family.name,
        "title": family.title,
        "model_types": list(family.model_types),
        "block_size": family.block_size,
        "mask_token_id": family.mask_token_id,
        "stop_token_ids": None if family.stop_token_ids is None else list(family.stop_token_ids),
        "rule": family.rule,
        "verified": {
            "oracle": family.verified.oracle,
            "tolerance": family.verified.tolerance,
            "rules": list(family.verified.rules),
        },
        "checkpoints": [
            {
                "name": one.name,
                "parameters": one.parameters,
                "block_size": one.block_size or family.block_size,
                "rule": one.rule or family.rule,
            }
            for one in family.checkpoints
        ],
    }


FAMILY_TITLES = (
    "family",
    "networks",
    "model_type",
    "block",
    "mask id",
    "stop ids",
    "rule",
)
VERIFIED_TITLES = ("family", "logits equal", "answers equal a PyTorch loop under")
CHECKPOINT_TITLES = ("checkpoint", "family", "parameters", "block", "rule")


def family_rows(described: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """A row of ``FAMILY_TITLES`` for each family."""
    return [
        (
            one["family"],
            one["title"],
            ", ".join(one["model_types"]),
            _or_file(one["block_size"]),
            _or_file(one["mask_token_id"]),
            _or_file(one["stop_token_ids"] and ", ".join(map(str, one["stop_token_ids"]))),
            one["rule"],
        )
        for one in described
    ]


def verified_rows(described: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """A row of ``VERIFIED_TITLES`` for each family."""
    return [
        (
            one["family"],
            f"{one['verified']['oracle']} within {one['verified']['tolerance']:g} (fp32)",
            ", ".join(one["verified"]["rules"]) or "not compared",
        )
        for one in described
    ]


def checkpoint_rows(described: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """A row of ``CHECKPOINT_TITLES`` for each published checkpoint."""
    return [
        (
            each["name"],
            one["family"],
            f"{each['parameters'] / 1e9:.2f} B",
            str(each["block_size"]),
            each["rule"],
        )
        for one in described
        for each in one["checkpoints"]
    ]


def _or_file(value: object) -> str:
    return "of config.json" if value is None else str(value)


def markdown_lines(described: list[dict[str, Any]]) -> list[str]:
    """All tables but that of rules, in Markdown."""
    lines: list[str] = []
    tables = (
        (FAMILY_TITLES, family_rows(described)),
        (VERIFIED_TITLES, verified_rows(described)),
        (CHECKPOINT_TITLES, checkpoint_rows(described)),
    )
    for titles, rows in tables:
        lines += [
            "",
            *(f"| {' | '.join(row)} |" for row in (titles, ("---",) * len(titles), *rows)),
        ]
    return lines[1:]


def _print(described: list[dict[str, Any]], rules: dict[str, str]) -> None:
    console = tables()
    for title, titles, rows in (
        ("Families", FAMILY_TITLES, family_rows(described)),
        ("Verified", VERIFIED_TITLES, verified_rows(described)),
        ("Checkpoints known by name", CHECKPOINT_TITLES, checkpoint_rows(described)),
        ("Generation rules", ("rule", "what it does"), list(rules.items())),
    ):
        table = Table(title=title)
        for name in titles:
            table.add_column(name, overflow="fold")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    console.print(
        "Compared on random networks through `herald convert`, answers token for token with a "
        "PyTorch loop under the rules named; published weights were not at hand.",
        highlight=False,
    )
