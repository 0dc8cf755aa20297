"""Hugging Face safetensors to a checkpoint of this project, one Orbax item at a time.

Host memory: the peak above what the process held before is at most ``memory_bound`` bytes,
whatever the size of the network: a few copies of the largest Orbax item (the embedding, the head,
a plain layer, or one kind of a layer's experts), never the network.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from checkpoints_convert.parameter import Parameter
from checkpoints_convert.report import ConversionError, ConversionReport
from checkpoints_convert.source import open_folder
from herald_jax import checkpoint
from herald_jax.checkpoint import CheckpointError
from herald_jax.checkpoint_folder import check_apart, check_target
from herald_jax.models.config import ModelConfig

#: Called with items done, items in all, and the item just written.
Progress = Callable[[int, int, str], None]


def convert(
    src: str | Path,
    out: str | Path,
    *,
    dtype: str = "bfloat16",
    block_size: int | None = None,
    rule: str | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> ConversionReport:
    """Converts a Hugging Face checkpoint folder.

    The folder's ``config.json`` is read as data; code that it names (``auto_map``) is neither
    run nor copied. Tokenizer files and chat template are copied beside the arrays.

    Args:
      src: a folder with ``config.json`` and one or more safetensors files.
      out: the checkpoint directory to create.
      dtype: "bfloat16" or "float32", of the written arrays; bfloat16 sources are kept bit by bit,
        and routers' biases are float32 whatever is asked for.
      block_size: B to decode with, instead of the checkpoint's own.
      rule: name of the generation rule to decode by, instead of the checkpoint's own.
      force: replace a checkpoint at ``out``.
      progress: called after every item.

    Raises:
      CheckpointError: ``src`` cannot be read, ``out`` cannot be written, or ``dtype`` is unknown.
      ValueError: the network is of no supported family or kind.
      ConversionError: all missing, unexpected, mis-shaped and unreadable tensors, at once; else
        all that have values which are not finite.
    """
    start = time.monotonic()
    for name, given in (("SRC", src), ("OUT", out)):
        if not str(given):
            raise CheckpointError(f"{name} is empty; name a directory")
    src, out = Path(src), Path(out)
    checkpoint.check_dtype(dtype)
    check_target(out, force=force)
    check_apart(src, out)
    source = open_folder(src, dtype=dtype, block_size=block_size, rule=rule)
    parameters = source.parameters
    items = checkpoint.by_item(parameters)
    sizes = [sum(parameters[path].nbytes for path in paths) for paths in items.values()]
    with checkpoint.writing(out, force=force, needed_bytes=sum(sizes)) as writer:
        problems: list[str] = []
        # After a bad tensor the others are only looked at, for one report of them all.
        for done, (item, paths) in enumerate(items.items(), start=1):
            problems += _convert_item(
                item, {path: parameters[path] for path in paths}, None if problems else writer
            )
            _give_back_freed_memory()
            if progress:
                progress(done, len(items), item)
        if problems:
            raise ConversionError(src, problems=problems)
        writer.describe(source.config, _settled(source.hf, source.config), dtype, src)
    return ConversionReport(
        source=str(src),
        out=str(out),
        config=source.config,
        dtype=dtype,
        tensors=len({name for parameter in parameters.values() for name in parameter.names}),
        parameters=sum(parameter.size for parameter in parameters.values()),
        nbytes=sum(sizes),
        memory_bound=memory_bound(sizes),
        seconds=round(time.monotonic() - start, 3),
        notes=source.notes + _without_tokenizer(src),
    )


def _without_tokenizer(src: Path) -> tuple[str, ...]:
    """A note where nothing of a tokenizer was there to be copied."""
    if any((src / name).is_file() for name in ("tokenizer.json", "vocab.json")):
        return ()
    return (f"{src} has no tokenizer.json: `herald generate` needs it beside the weights",)


def memory_bound(sizes: Iterable[int]) -> int:
    """Bytes of host memory that a conversion adds at most: four of the largest item, and 64 MiB.

    The item lies there in its final layout, as views of the source file (one tensor at a time, if
    it is not what is written) and, partly compressed, in the array store's buffers.

    Args:
      sizes: bytes of every item, as written.
    """
    return 4 * max(sizes) + (64 << 20)


def _convert_item(
    item: str, parameters: Mapping[str, Parameter], writer: checkpoint.Writer | None
) -> list[str]:
    """Reads an item and writes it, unless there is no writer or it has problems: returns those."""
    arrays = {path: parameter.read() for path, parameter in parameters.items()}
    problems = [
        problem for path, array in arrays.items() for problem in parameters[path].problems(array)
    ]
    if writer is not None and not problems:
        writer.put(item, arrays)
    return problems


def _give_back_freed_memory() -> None:
    """Has the allocator return what the array store freed.

    Its threads compress into memory that glibc keeps for each of them: a gigabyte and a half after
    some layers of experts. Other allocators have no such call and are left alone.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _settled(hf: Mapping[str, Any], config: ModelConfig) -> dict[str, Any]:
    """config.json as converted: what was decided here, and no reference to code."""
    kept = {key: value for key, value in hf.items() if key != "auto_map"}
    # The table of our own comes first when it is read again, whatever a family calls its keys.
    own = dict(kept.get("herald") or {}) | {"block_size": config.block_size, "rule": config.rule}
    return kept | {
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "tie_word_embeddings": config.tie_word_embeddings,
        "herald": own,
    }
