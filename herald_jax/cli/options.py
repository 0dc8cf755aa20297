"""Options that several commands share, and how their texts are read."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from herald_jax.cli.console import Refused
from herald_jax.kv.budget import Budget
from herald_jax.kv.host_memory import parse_bytes

#: Beyond what any machine holds, and within what arrays of int32 count.
MOST_TOKENS, MOST_REQUESTS = 2**31 - 1, 65536


class TransferName(StrEnum):
    """How selected rows come to the device."""

    full = "full"
    changes = "changes"
    direct = "direct"


class Dtype(StrEnum):
    """Dtypes of weights and KV cache."""

    bfloat16 = "bfloat16"
    float32 = "float32"


class KeyIndexName(StrEnum):
    """What a keys-only scan reads."""

    int8 = "int8"
    int4 = "int4"
    none = "none"


Model = Annotated[
    str,
    typer.Option(
        metavar="DIR|embedded",
        help="A converted checkpoint (see `herald convert`), a Hugging Face folder as it was "
        "published, or the model inside the package.",
    ),
]
BudgetFraction = Annotated[
    float | None,
    typer.Option(
        "--budget",
        metavar="F",
        show_default="0.05",
        help="Share of the context each sparse layer attends, in (0, 1].",
    ),
]
BudgetTokens = Annotated[
    int | None,
    typer.Option(
        max=MOST_TOKENS,
        metavar="K",
        help="A fixed number of attended positions instead of --budget.",
    ),
]
CandidatesRatio = Annotated[
    float | None,
    typer.Option(
        metavar="R",
        show_default="the method's",
        help="Rows fetched per row kept, 1 or more, for methods that refine on the device.",
    ),
]
KeyIndexOption = Annotated[
    KeyIndexName | None,
    typer.Option(
        help="What methods that scan keys alone read: int8, the default, an index a quarter of K "
        "and V in size, kept beside them; int4, one half of that, coarser, for hosts that the scan "
        "keeps waiting; none, the exact keys: less host memory, twice the bytes of int8 to scan.",
    ),
]
ExactLayers = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        show_default="the model's",
        help="Leading layers whose whole KV stays on the device.",
    ),
]
MaxBatch = Annotated[
    int,
    typer.Option(min=1, max=MOST_REQUESTS, metavar="N", help="Most requests decoded together."),
]
Transfer = Annotated[
    TransferName | None,
    typer.Option(
        show_default="full",
        help="How selected rows come to the device between blocks; answers are the same. full: all "
        "of them are copied; changes: those that the block before did not select, since the others "
        "are there already; direct: into a pool that stays there, read by the device itself when "
        "time is short, faster where the host is the limit (very long contexts, few steps).",
    ),
]
DeviceMemory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        show_default="what the device offers",
        help="Device memory to use, like 80GB: enforced on CUDA, a planning limit on the CPU.",
    ),
]
HostMemory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        show_default="what is free, less a reserve",
        help="Host memory for the KV cache, like 100GB.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the outcome as JSON on stdout.")]


def check_text(text: str | None, option: str, wanted: str = "give at least one character") -> None:
    """Refuses a text that is empty (saying what is wanted) or was not UTF-8 on the command line.

    Raises:
      Refused: naming the option.
    """
    if text is None:
        return
    if not text:
        raise Refused(f"{option} is empty: {wanted}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Refused(f"{option} is not UTF-8 text: character {error.start} is bad") from error


def read_size(text: str | None, option: str) -> int | None:
    """Bytes from "80GB" or the like.

    Raises:
      Refused: naming the option.
    """
    try:
        return None if text is None else parse_bytes(text)
    except ValueError as error:
        raise Refused(f"{option} {error}") from error


def read_budget(fraction: float | None, tokens: int | None) -> Budget:
    """The budget behind --budget and --budget-tokens, which exclude each other.

    Raises:
      Refused: both are given, or the value is outside its range.
    """
    if fraction is not None and tokens is not None:
        raise Refused("--budget and --budget-tokens exclude each other: give one of them")
    try:
        return Budget(tokens=tokens) if fraction is None else Budget(fraction=fraction)
    except ValueError as error:
        raise Refused(str(error)) from error
