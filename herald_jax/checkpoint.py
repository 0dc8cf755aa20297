"""Checkpoints of this project: Orbax arrays in items of bounded size, beside plain JSON files.

A checkpoint is a directory::

    config.json             the network in Hugging Face's words
    herald.json             format version, writer, dtype and every field of ModelConfig
    tokenizer files         copied unchanged
    params/embed            one Orbax item for the embedding,
    params/layer_000 ...    one for each layer,
    params/layer_001_experts_gate ...   where it has experts, one for each kind of theirs,
    params/final            and one for the final norm and the head

so that saving and restoring hold no more than one item in host memory. It is written beside its
final place and renamed at the end (``checkpoint_folder``): what has the final name is whole.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import Sharding, SingleDeviceSharding

from herald_jax import checkpoint_published
from herald_jax.checkpoint_folder import CheckpointError as CheckpointError
from herald_jax.checkpoint_folder import (
    building,
    first_line,
    is_hugging_face,
    storing,
    uninterrupted,
)
from herald_jax.diffusion.rules import rule_named
from herald_jax.models import registry
from herald_jax.models.config import ModelConfig
from herald_jax.models.decoder import Decoder

FORMAT_VERSION = 1
WRITER = "herald_jax 0.1"
DTYPES = ("bfloat16", "float32")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)

#: One sharding for every parameter, or a function of its dotted path and shape.
Placement = Sharding | Callable[[str, tuple[int, ...]], Sharding]


def item_of(path: str) -> str:
    """The Orbax item that holds the parameter at a dotted path."""
    first, *rest = path.split(".")
    if first == "layers":
        layer = f"layer_{int(rest[0]):03d}"
        # The experts of a layer together are many times as large as anything else.
        return f"{layer}_experts_{rest[3]}" if rest[1:3] == ["mlp", "experts"] else layer
    return "embed" if first == "embedding" else "final"


def by_item(paths: Mapping[str, Any]) -> dict[str, list[str]]:
    """Dotted paths grouped by item."""
    groups: dict[str, list[str]] = {}
    for path in paths:
        groups.setdefault(item_of(path), []).append(path)
    return groups


class Writer:
    """Writes the items of one checkpoint; made by ``writing``."""

    def __init__(self, folder: Path, path: Path) -> None:
        self._folder, self._path = folder, path

    def put(self, item: str, arrays: Mapping[str, Any]) -> None:
        """Stores one item.

        Args:
          item: a name from ``item_of``.
          arrays: dotted parameter path -> NumPy or JAX array.

        Raises:
          CheckpointError: the item cannot be written.
        """
        with storing(self._path), uninterrupted():
            target = self._folder.absolute() / "params" / item
            _orbax().save(target, dict(arrays))
            # It names the folder of this machine, and only object stores need it.
            (target / "commit_success.txt").unlink(missing_ok=True)

    def describe(
        self, config: ModelConfig, hf_config: Mapping[str, Any], dtype: str, tokenizer: Path | None
    ) -> None:
        """Writes the JSON descriptions and copies the tokenizer's files from a folder.

        Raises:
          CheckpointError: a file cannot be written.
        """
        header = {
            "format": FORMAT_VERSION,
            "writer": WRITER,
            "dtype": dtype,
            "model": dataclasses.asdict(config),
        }
        with storing(self._path):
            _write_json(self._folder / "config.json", hf_config)
            for name in TOKENIZER_FILES:
                if tokenizer is not None and (tokenizer / name).is_file():
                    shutil.copyfile(tokenizer / name, self._folder / name)
            _write_json(self._folder / "herald.json", header)


@contextmanager
def writing(path: str | Path, *, force: bool = False, needed_bytes: int = 0) -> Iterator[Writer]:
    """Opens a checkpoint for writing; it appears under ``path`` when the block ends well.

    Args:
      path: the directory to create.
      force: replace a checkpoint that is already there (never a directory of another kind).
      needed_bytes: refuse at once if the disk has less room than this.

    Raises:
      CheckpointError: ``path`` exists, cannot be written, or the disk is full.
    """
    path = Path(path)
    with building(path, force=force) as folder:
        with storing(path):
            (folder / "params").mkdir()
            free = shutil.disk_usage(folder).free
        if free < needed_bytes:
            raise CheckpointError(
                f"{path} needs {needed_bytes / 1e9:.1f} GB but only {free / 1e9:.1f} GB are free"
            )
        yield Writer(folder, path)


def save(
    path: str | Path,
    config: ModelConfig,
    model: Decoder,
    *,
    hf_config: Mapping[str, Any] | None = None,
    tokenizer: str | Path | None = None,
    force: bool = False,
) -> None:
    """Writes a network, item by item.

    Args:
      path: the directory to create.
      config: its configuration.
      model: the network; all its parameters share one dtype.
      hf_config: what ``config.json`` shall say; made from ``config`` if not given.
      tokenizer: a folder whose tokenizer files are copied beside.
      force: replace a checkpoint that is already there.

    Raises:
      CheckpointError: the checkpoint cannot be written.
    """
    values = registry.parameters(model)
    dtype = str(values["norm.scale"].dtype)
    size = sum(int(value.nbytes) for value in values.values())
    with writing(path, force=force, needed_bytes=size) as writer:
        for item, paths in by_item(values).items():
            writer.put(item, {name: values[name] for name in paths})
        folder = None if tokenizer is None else Path(tokenizer)
        writer.describe(config, hf_config or registry.to_hf(config), dtype, folder)


def read_config(path: str | Path) -> tuple[ModelConfig, str]:
    """The configuration and the stored dtype of a checkpoint, without its arrays.

    Raises:
      CheckpointError: ``path`` is no checkpoint, of this project or of Hugging Face.
    """
    path = Path(path)
    if is_hugging_face(path):
        source = checkpoint_published.open_published(path)
        return source.config, source.dtype
    if not path.exists():
        raise CheckpointError(
            f"{path} does not exist; download a Hugging Face checkpoint, or convert one with "
            "`herald convert SRC OUT`"
        )
    header_path = path / "herald.json"
    if not header_path.is_file():
        hint = f": give its folder {path.parent}" if path.name == "config.json" else ""
        raise CheckpointError(f"{path} is not a checkpoint (no herald.json){hint}")
    try:
        header = json.loads(header_path.read_text(encoding="utf-8"))
        version = header["format"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{header_path} cannot be read: {first_line(error)}") from error
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has checkpoint format {version}; this version reads "
            f"{FORMAT_VERSION}: convert it again"
        )
    try:
        config = ModelConfig.from_json(header["model"])
        registry.check(config)
        rule_named(config.rule, "rule")
        dtype = str(header["dtype"])
        check_dtype(dtype)
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{header_path} cannot be read: {first_line(error)}") from error
    return config, dtype


def load(
    path: str | Path, *, dtype: str | None = None, sharding: Placement | None = None
) -> tuple[ModelConfig, Decoder]:
    """Restores a network straight onto its devices, item by item.

    Args:
      path: a checkpoint directory, or a Hugging Face folder that was not converted.
      dtype: "bfloat16" or "float32"; the stored one if not given.
      sharding: where parameters go; the first device if not given.

    Returns:
      The configuration and the network.

    Raises:
      CheckpointError: there is no whole checkpoint at ``path``, or ``dtype`` is unknown.
    """
    path = Path(path).absolute()
    if dtype is not None:
        check_dtype(dtype)
    place = placement(sharding)
    if is_hugging_face(path):
        source = checkpoint_published.open_published(path, dtype)
        skeleton = registry.abstract(source.config, jnp.dtype(source.dtype))
        return source.config, registry.assemble(skeleton, checkpoint_published.read(source, place))
    config, stored = read_config(path)
    skeleton = registry.abstract(config, jnp.dtype(dtype or stored))
    shapes = registry.parameters(skeleton)
    values: dict[str, jax.Array] = {}
    for item, paths in by_item(shapes).items():
        wanted = {
            name: jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
                shapes[name].shape, shapes[name].dtype, sharding=place(name, shapes[name].shape)
            )
            for name in paths
        }
        try:
            restore = ocp.args.PyTreeRestore(
                item=wanted, restore_args=ocp.checkpoint_utils.construct_restore_args(wanted)
            )
            values.update(_orbax().restore(path / "params" / item, args=restore))
        except jax.errors.JaxRuntimeError:
            raise  # A full device, say: not the checkpoint's fault.
        except Exception as error:
            # The array store raises many kinds, plain Exception among them.
            raise CheckpointError(
                f"{path} is damaged: params/{item} cannot be restored "
                f"({first_line(error)}); convert it again"
            ) from error
    return config, registry.assemble(skeleton, values)


def placement(sharding: Placement | None) -> Callable[[str, tuple[int, ...]], Sharding]:
    """Where every parameter goes; the first device if nothing is said."""
    if callable(sharding):
        return sharding
    everywhere = sharding or SingleDeviceSharding(jax.devices()[0])
    return lambda _path, _shape: everywhere


def check_dtype(dtype: str) -> None:
    """Refuses a dtype that checkpoints do not hold.

    Raises:
      CheckpointError: naming the ones they do.
    """
    if dtype not in DTYPES:
        raise CheckpointError(f"dtype {dtype!r} is not supported; use {' or '.join(DTYPES)}")


def _orbax() -> ocp.Checkpointer:
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler())


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
