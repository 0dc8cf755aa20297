"""``herald convert``: a Hugging Face checkpoint becomes one that ``--model`` takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from herald_jax.checkpoint_folder import is_hugging_face
from herald_jax.cli.console import Interrupted, Progress, Refused, note, refusals
from herald_jax.cli.options import Dtype, Json
from herald_jax.cli.rule_options import RuleName
from herald_jax.diffusion.rules import rule_named


def hint_to_convert(model: str, rule: str | None) -> None:
    """Says that a folder is read as it was published, and what was decided about it.

    Args:
      rule: the generation rule that was asked for, about which nothing needs saying.

    Raises:
      CheckpointError: it cannot be read.
    """
    if is_hugging_face(Path(model)):
        note(f"reading Hugging Face format; `herald convert {model} OUT` makes later starts faster")
        from herald_jax.checkpoint_published import open_published

        for text in open_published(Path(model), rule=rule).notes:
            note(f"note: {text}")


def convert(
    src: Annotated[
        str, typer.Argument(metavar="SRC", help="Folder with config.json and safetensors files.")
    ],
    out: Annotated[str, typer.Argument(metavar="OUT", help="Checkpoint directory to create.")],
    dtype: Annotated[Dtype, typer.Option(help="Dtype of the written weights.")] = Dtype.bfloat16,
    block_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="B",
            show_default="what the checkpoint states",
            help="Positions decoded together.",
        ),
    ] = None,
    rule: RuleName = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a checkpoint at OUT.")] = False,
    as_json: Json = False,
) -> None:
    """Convert a Hugging Face checkpoint, a few parameters in memory at a time.

    Nothing is downloaded and no code of the checkpoint runs. A published checkpoint is known by
    its folder's name: SDAR-8B-Chat-b32 decodes by blocks of 32. Examples:

    herald convert SDAR-8B-Chat sdar-8b

    herald convert SDAR-8B-Chat sdar-8b-f32 --dtype float32 --json
    """
    if src and not Path(src).is_dir():
        raise Refused(f"SRC {src} is not a folder: give a downloaded Hugging Face checkpoint")
    from checkpoints_convert.convert import convert as run

    try:
        with refusals(), Progress() as progress:
            if rule is not None:
                rule_named(rule)
            report = run(
                src,
                out,
                dtype=dtype.value,
                block_size=block_size,
                rule=rule,
                force=force,
                progress=lambda done, total, item: progress("items", done, total),
            )
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted: nothing was written to {out}") from None
    for text in report.notes:
        note(f"note: {text}")
    if as_json:
        typer.echo(json.dumps(report.as_json()))
    else:
        typer.echo(
            f"{report.out}: {report.config.family}, {report.parameters / 1e6:.1f} M parameters, "
            f"{report.nbytes / 1e6:.1f} MB {report.dtype}, {report.seconds:.1f} s, at most "
            f"{report.memory_bound / 1e6:.0f} MB of memory"
        )
