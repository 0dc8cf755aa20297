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


def open_published(path: Path, dtype: str | None = None) -> Source:
    """Opens a folder; ``dtype`` as in ``checkpoint.load``.

    Raises:
      CheckpointError: it cannot be read, or its network is not supported.
    """
    # Imported late: the converter writes through ``checkpoint``, which imports this file.
    from checkpoints_convert.source import open_folder

    try:
        return open_folder(path, dtype=dtype)
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
        values = parameter.read()
        bad = parameter.not_finite(values)
        if bad:
            raise CheckpointError(
                f"{source.folder} is damaged: {bad[0]} has values that are not finite in "
                f"{source.dtype}; download it again"
            )
        # Copied, or a CPU's array would be a view of the file; and waited for, or the host would
        # hold the parameters that are on their way.
        put = jax.device_put(values, place(path, parameter.shape), may_alias=False)
        arrays[path] = jax.block_until_ready(put)
    return arrays
