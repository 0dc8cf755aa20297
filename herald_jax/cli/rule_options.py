"""Options of ``herald generate`` that name a generation rule and change it."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from herald_jax.cli.console import Refused
from herald_jax.diffusion.rules import CHOICES, RULES, check_options, rule_named

PANEL = "Generation rule"


def _option(help_text: str, *names: str, metavar: str | None = None, default: str = "") -> Any:
    return typer.Option(
        *names,
        metavar=metavar,
        help=help_text,
        show_default=default or "the rule's",
        rich_help_panel=PANEL,
    )


RuleName = Annotated[
    str | None,
    _option(
        f"How positions are accepted (`herald models` explains): {', '.join(RULES)}.",
        "--rule",
        metavar="NAME",
        default="the model's",
    ),
]
Threshold = Annotated[
    float | None, _option("Accept positions whose confidence is above this.", metavar="P")
]
Steps = Annotated[
    int | None,
    _option(
        "Accept exactly B / T positions a step instead of --threshold; with --rule or --strategy, "
        "at least so many.",
        metavar="T",
    ),
]
StrategyName = Annotated[
    str | None,
    _option(f"Which positions: {', '.join(CHOICES['strategy'])}.", "--strategy", metavar="NAME"),
]
CompareName = Annotated[
    str | None,
    _option(
        "Confidence above the threshold (gt), equal too (ge), or as good as the best too (near).",
        "--compare",
        metavar="NAME",
    ),
]
FallbackName = Annotated[
    str | None,
    _option(
        f"Who accepts where too few pass: {', '.join(CHOICES['fallback'])}.",
        "--fallback",
        metavar="NAME",
    ),
]
ConfidenceName = Annotated[
    str | None,
    _option(
        "Confidence before (unfiltered) or after (filtered) --top-k and --top-p.",
        "--confidence",
        metavar="NAME",
    ),
]
NoClampQuota = Annotated[
    bool,
    typer.Option(
        "--no-clamp-quota",
        help="Let a quota beyond the masked positions rewrite known ones, as SDAR's script does.",
        rich_help_panel=PANEL,
    ),
]
SmallBlock = Annotated[
    int | None, _option("Fill the block in parts of S positions, left to right.", metavar="S")
]
EditThreshold = Annotated[
    float | None,
    _option(
        "Replace accepted tokens where another is more confident than this; 1 never does.",
        metavar="P",
    ),
]
MaxPostSteps = Annotated[
    int | None, _option("Rounds of edits after the last mask, at most.", metavar="N")
]
EntropyBound = Annotated[
    float | None,
    _option("Total entropy of a step for --strategy entropy_bounded, in nats.", metavar="E"),
]
Temperature = Annotated[float | None, _option("0 is greedy.", metavar="T")]
TopK = Annotated[int | None, _option("Sample from the K likeliest tokens; 0 is off.", metavar="K")]
TopP = Annotated[
    float | None,
    _option("Sample from the likeliest tokens of mass P; 1 is off.", metavar="P"),
]
AllowMask = Annotated[
    bool,
    typer.Option(
        "--allow-mask",
        help="Let the network propose [MASK], as the authors' code does; such a position stays "
        "masked.",
        rich_help_panel=PANEL,
    ),
]


def read_rule(no_clamp_quota: bool, allow_mask: bool, **options: Any) -> dict[str, Any]:
    """The rule's options of ``GenerationConfig``, of which None is the rule's.

    Raises:
      Refused: a value is no good, or two options exclude each other.
    """
    named = options["rule"] is not None or options["strategy"] is not None
    if options["threshold"] is not None and options["steps"] is not None and not named:
        raise Refused(
            "--threshold and --steps exclude each other: give one of them, or name the --rule or "
            "--strategy that takes both"
        )
    try:
        check_options(options)
        if options["rule"] is not None:
            rule_named(options["rule"])
    except ValueError as error:
        raise Refused(str(error)) from error
    clamp, ban = False if no_clamp_quota else None, False if allow_mask else None
    return options | {"clamp_quota": clamp, "ban_mask": ban}
