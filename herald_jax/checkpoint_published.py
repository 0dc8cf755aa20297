"""Reads a Hugging Face folder straight onto the devices, without a conversion."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import jax
from jax.sharding import Sharding

from herald_jax.checkpoint_folder import CheckpointError

if TYPE_CHECKING:
    from checkpoints_convert.source import Source


def open_published(path: Path, dtype: str | None = None, *, rule: str | None = None) -> Source:
    """Opens a folder; ``dtype`` as in ``checkpoint.load``, ``rule`` instead of its own.

    Raises:
      CheckpointError: it cannot be read, or its network is not supported.
    """
    # Imported late: the converter writes through ``checkpoint``, which imports this file.
    from checkpoints_convert.source import open_folder

    try:
        return open_folder(path, dtype=dtype, rule=rule)
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error


def read(source: Source, place: Callable[[str, tuple[int, ...]], Sharding]) -> dict[str, jax.Array]:
    """Every parameter on its devices, by dotted path.

    Raises:
      CheckpointError: a tensor has values that are not finite.
    """
    arrays = {}
    for path, parameter in source.parameters.items():
        try:
            values = parameter.read()
        except OSError as error:
            raise CheckpointError(f"{source.folder} cannot be read: {error}") from error
        if problems := parameter.problems(values):
            raise CheckpointError(f"{source.folder} is damaged: {problems[0]}; download it again")
        if not values.flags.writeable:
            # A view of the mapped file, which a CPU's array would be as well: files may change.
            values = values.copy()
        # Waited for, or the host would hold all the parameters that are on their way.
        put = jax.device_put(values, place(path, parameter.shape))
        arrays[path] = jax.block_until_ready(put)
    return arrays
