"""What a checkpoint's name says and its config.json does not: block sizes and generation rules."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from herald_jax.diffusion.rules import rule_named
from herald_jax.models import hf_config, registry
from herald_jax.models.config import ModelConfig
from herald_jax.models.family import Checkpoint, Family


def configure(
    hf: Mapping[str, Any], folder: Path, *, block_size: int | None = None, rule: str | None = None
) -> tuple[ModelConfig, tuple[str, ...]]:
    """Reads a config.json, completed by the name of its folder.

    What is given here comes first, then what the file states, then what the name says, then the
    family's table.

    Args:
      hf: the parsed config.json.
      folder: where it lies.
      block_size, rule: what the user asks for.

    Returns:
      The configuration, and a note on everything the name decided or contradicts.

    Raises:
      ValueError: the network is of no supported family or kind.
    """
    family = registry.find_family(hf)
    named = published(folder, family)
    own = hf_config.table(hf, "herald")
    notes = []
    stated = hf_config.first(own.get("block_size"), hf.get("block_size"))
    sizes = sorted({one.block_size for one in family.checkpoints if one.block_size is not None})
    if named is None and block_size is None and stated is None and sizes:
        notes.append(
            f"nothing says the block size: it decodes by {family.block_size}; others of its family "
            f"need --block-size {' or '.join(map(str, sizes))}"
        )
    if named is not None and named.block_size is not None and block_size is None:
        if stated is None:
            block_size = named.block_size
            notes.append(f"block_size {block_size} is taken from the name {named.name}")
        elif stated != named.block_size:
            notes.append(
                f"the name {named.name} says block_size {named.block_size}, config.json says "
                f"{stated}: kept {stated}"
            )
    if named is not None and named.rule is not None and rule is None and own.get("rule") is None:
        rule = named.rule
        notes.append(f"rule {rule} is taken from the name {named.name}")
    others = {one.rule for one in family.checkpoints if one.rule is not None}
    if named is None and rule is None and own.get("rule") is None and others:
        notes.append(
            f"nothing says the generation rule: it decodes by {family.rule}; others of its family "
            f"need --rule {' or '.join(sorted(others))}"
        )
    config = registry.from_hf(hf, block_size=block_size, rule=rule)
    rule_named(config.rule, "config.json: rule")
    return config, tuple(notes)


def published(folder: Path, family: Family) -> Checkpoint | None:
    """The published checkpoint that a folder is named after.

    The folder has its name, or is a revision in the hub's cache
    (``models--OWNER--NAME/snapshots/REVISION``).
    """
    # Not resolved: a link may have the name, and what it leads to another.
    path = Path(os.path.abspath(folder))
    names = [path.name]
    if path.parent.name == "snapshots":
        names.append(path.parent.parent.name.rpartition("--")[2])
    return next((found for name in names if (found := family.checkpoint(name))), None)
