"""How much memory and time does converting a 16-billion-parameter checkpoint take?

    python -m benchmarks.conversion --kill --json conversion.json

Makes a sharded Hugging Face folder of a published shape in a temporary directory, converts it in a
process of its own, and samples that process: anonymous memory is what it holds beyond the page
cache, where the mapped source lies. ``--kill`` first kills a conversion half-way and checks what is
left. The exit code is 1 if the memory is not below ``--limit`` or the bound that was announced.

The tensors are holes in sparse files (``--values zeros``), or all the same random numbers
(``--values random``: one region of each file serves all its tensors), which do not compress and so
need room for the whole output.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from benchmarks.environment import arguments, check_output, write
from benchmarks.shapes import SHAPES
from checkpoints_convert.source import open_folder
from herald_jax import checkpoint
from herald_jax.checkpoint_folder import PREFIX, CheckpointError
from herald_jax.models import registry
from herald_jax.models.config import ModelConfig

SAMPLE_SECONDS = 0.005
SHARDS = 4


def make_folder(folder: Path, config: ModelConfig, values: str) -> None:
    """Writes config.json, an index and shards that hold every tensor of a network."""
    folder.mkdir()
    family = registry.family_of(config)
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for path, leaf in registry.parameters(registry.abstract(config, jnp.bfloat16)).items():
        layer, ways = family.stored(config, path)
        kind = "F32" if leaf.dtype == jnp.float32 else "BF16"
        shape = ways[0].shape(leaf.shape)
        tensors |= {name: (kind, shape) for name in ways[0].names(layer)}
    names = list(tensors)
    where = {name: index * SHARDS // len(names) for index, name in enumerate(names)}
    files = {shard: f"model-{shard + 1:05d}.safetensors" for shard in range(SHARDS)}
    for shard, file in files.items():
        header, end = {}, 0
        for name in (name for name in names if where[name] == shard):
            kind, shape = tensors[name]
            first = end if values == "zeros" else 0
            last = first + math.prod(shape) * (4 if kind == "F32" else 2)
            header[name] = {"dtype": kind, "shape": shape, "data_offsets": [first, last]}
            end = max(end, last)
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            if values == "random":
                _fill(stream, end)
            stream.truncate(8 + len(text) + end)
    index = {"weight_map": {name: files[shard] for name, shard in where.items()}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(registry.to_hf(config)))


def _fill(stream: Any, size: int) -> None:
    """Writes bfloat16 numbers whose repetition lies beyond what a compressor looks back."""
    numbers = np.random.default_rng(0).normal(size=1 << 24).astype(ml_dtypes.bfloat16).tobytes()
    for start in range(0, size, len(numbers)):
        stream.write(numbers[: size - start])


def convert(
    source: Path, out: Path, log: Path, *, timeout: float, kill_after: int | None = None
) -> tuple[dict[str, Any] | None, dict[str, int]]:
    """Converts in a child and samples it.

    Args:
      source, out: the folders.
      log: a file for what the child says.
      timeout: seconds after which the child is killed and the benchmark fails.
      kill_after: items after which the child is killed on purpose.

    Returns:
      The child's report (None if it was killed) and its peaks in bytes: ``anonymous`` memory and
      ``resident`` memory, which includes mapped files.

    Raises:
      RuntimeError: the child failed, or took longer than the timeout.
    """
    command = [sys.executable, "-m", "checkpoints_convert", str(source), str(out), "--json"]
    peaks = {"anonymous": 0, "resident": 0}
    deadline = time.monotonic() + timeout
    with log.open("w+") as said, tempfile.TemporaryFile("w+") as printed:
        # An accelerator would add buffers of its own; a conversion needs none.
        environment = os.environ | {"JAX_PLATFORMS": "cpu"}
        child = subprocess.Popen(command, stdout=printed, stderr=said, env=environment)
        try:
            while child.poll() is None:
                _sample(child.pid, peaks)
                if kill_after is not None and _items(log) >= kill_after:
                    child.send_signal(signal.SIGKILL)
                    child.wait(timeout=60)
                    return None, peaks
                if time.monotonic() > deadline:
                    raise RuntimeError(f"the conversion took longer than {timeout:g} s (--timeout)")
                time.sleep(SAMPLE_SECONDS)
        finally:
            if child.poll() is None:
                child.kill()
                child.wait(timeout=60)
        if child.returncode:
            raise RuntimeError(f"the conversion failed: {log.read_text()[-2000:]}")
        printed.seek(0)
        return json.load(printed), peaks


def _sample(process: int, peaks: dict[str, int]) -> None:
    try:
        text = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return  # It ended in between.
    fields = dict(line.split(":", 1) for line in text.splitlines())
    for name, key in (("anonymous", "RssAnon"), ("resident", "VmHWM")):
        if key in fields:
            peaks[name] = max(peaks[name], int(fields[key].split()[0]) * 1024)


def _items(log: Path) -> int:
    return sum(line.startswith("[") for line in log.read_text().splitlines())


def killed_half_way(source: Path, out: Path, items: int, timeout: float) -> int:
    """Kills a conversion in the middle; returns how many items it had written.

    Raises:
      RuntimeError: something that loads was left behind.
    """
    log = out.parent / "killed.log"
    report, _ = convert(source, out, log, timeout=timeout, kill_after=items // 2)
    left = list(out.parent.glob(f"{PREFIX}*"))
    if report is not None or out.exists() or not left:
        raise RuntimeError(f"the conversion was not killed half-way; {out.parent} has {left}")
    for folder in (*left, *(one / "new" for one in left)):
        try:
            checkpoint.read_config(folder)
        except CheckpointError:
            continue
        raise RuntimeError(f"{folder} of a killed conversion can be loaded")
    return _items(log)


def measure(config: ModelConfig, options: Any, folder: Path) -> dict[str, Any]:
    """One row: a conversion of one shape, after a killed one if asked for."""
    source, out = folder / "published", folder / "converted"
    make_folder(source, config, options.values)
    parameters = open_folder(source, dtype="bfloat16").parameters
    items = checkpoint.by_item(parameters)
    largest = max(sum(parameters[path].nbytes for path in paths) for paths in items.values())
    row: dict[str, Any] = {
        "shape": options.shape,
        "layers": config.num_layers,
        "parameters": config.parameter_count,
        "values": options.values,
        "items": len(items),
        "largest_item_bytes": largest,
    }
    if options.kill:
        row["killed_after_items"] = killed_half_way(source, out, len(items), options.timeout)
    report, peaks = convert(source, out, folder / "log", timeout=options.timeout)
    assert report is not None
    if left := list(folder.glob(f"{PREFIX}*")):
        raise RuntimeError(f"a clean run left {left} behind")
    written = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    limit = min(options.limit, report["memory_bound"] + options.base)
    return row | {
        "bytes": report["nbytes"],
        "disk_bytes": written,
        "seconds": report["seconds"],
        "gb_per_s": round(report["nbytes"] / report["seconds"] / 1e9, 3),
        "memory_bound": report["memory_bound"],
        "peak_anonymous_bytes": peaks["anonymous"],
        "peak_resident_bytes": peaks["resident"],
        "limit_bytes": limit,
        "within": peaks["anonymous"] < limit,
    }


def main() -> int:
    """Measures; 0 if the memory stayed within the limit."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--shape", default="llada2.0-mini", choices=SHAPES)
    parser.add_argument("--values", default="zeros", choices=("zeros", "random"))
    parser.add_argument("--kill", action="store_true", help="kill a conversion half-way before")
    parser.add_argument("--limit", type=int, default=4 * 10**9, help="bytes of anonymous memory")
    parser.add_argument("--base", type=int, default=10**9, help="bytes the libraries may take")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds for one conversion")
    parser.add_argument("--folder", type=Path, help="for the temporary directory")
    options = parser.parse_args()
    try:
        check_output(options.json)
        if options.folder is not None and not options.folder.is_dir():
            raise NotADirectoryError(f"--folder {options.folder} is not a folder")
    except OSError as error:
        parser.error(str(error))
    config = SHAPES[options.shape]
    if options.quick:
        # The largest items are still there, and so is the memory they need.
        config = dataclasses.replace(config, num_layers=2)
    with tempfile.TemporaryDirectory(prefix="herald-conversion-", dir=options.folder) as folder:
        row = measure(config, options, Path(folder))
    settings = {key: str(value) for key, value in vars(options).items()}
    write(options.json, settings, [row])
    return 0 if row["within"] else 1


if __name__ == "__main__":
    sys.exit(main())
