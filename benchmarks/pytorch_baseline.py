"""What does dense decoding give without this project? The same schedule in PyTorch.

    python -m benchmarks.pytorch_baseline --model llada2.0-mini --context 16384 --batch 8 \
        --json pytorch.json --plot pytorch.png

One row a variant: ``plain``, the class of transformers as it comes, and ``tuned``, written for
speed. Shapes, the distribution of weights, the rule and what is counted are those of ``dense`` in
``benchmarks.overlap``: B positions from masks in T steps, exactly B / T of them a step, and one
commit. The prefix is random keys and values. Needs torch (the extra ``oracle``).
"""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

from benchmarks.environment import arguments, check_output, write
from benchmarks.shapes import SHAPES

VARIANTS = ("plain", "tuned")


def draw(path: Path, rows: list[dict[str, Any]]) -> None:
    """Tokens per second, a bar a variant."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6, 1 + 0.8 * len(rows)), layout="constrained")
    names = [row["implementation"] for row in rows]
    bars = axis.barh(names, [row["tokens_per_second"] for row in rows], height=0.6)
    axis.bar_label(bars, fmt="{:,.0f}", padding=3)
    axis.invert_yaxis()
    axis.margins(x=0.15)
    axis.set_xlabel("tokens/s")
    row = rows[0]
    axis.set_title(
        f"Dense, {row['model']} shape, batch {row['batch']}, {row['context']:,} tokens of "
        f"context, T = {row['steps']}, {row['dtype']}",
        fontsize="medium",
    )
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def main(arguments_: list[str] | None = None) -> None:
    """Runs the benchmark."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--model", choices=SHAPES, default="llada2.0-mini")
    parser.add_argument("--variant", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--context", type=int, default=16384, help="tokens before the block")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=5, help="measured blocks")
    parser.add_argument("--steps", type=int, default=20, help="T, denoising steps per block")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--device-memory", type=int, default=None, help="bytes")
    parser.add_argument("--no-compile", action="store_true", help="tuned: without torch.compile")
    parser.add_argument("--no-graph", action="store_true", help="tuned: without CUDA graphs")
    parser.add_argument("--profile", action="store_true", help="print the top kernels of a step")
    options = parser.parse_args(arguments_)
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            parser.error(f"{package} is not installed: pip install -e '.[oracle]'")
    import jax

    # JAX only describes the machine here: on the GPU it would take most of the memory.
    jax.config.update("jax_platforms", "cpu")
    from benchmarks import torch_measure

    if options.quick:
        vars(options).update(context=1024, batch=2, blocks=2)
        if options.model not in torch_measure.SMALL:
            options.model = torch_measure.SMALL[0]
    rows: list[dict[str, Any]] = []
    settings = {key: str(value) for key, value in vars(options).items()}
    settings["shape"] = str(dataclasses.asdict(SHAPES[options.model]))
    size = SHAPES[options.model].block_size
    try:
        for name in ("context", "batch", "blocks", "steps"):
            if getattr(options, name) < 1:
                raise ValueError(f"--{name} {getattr(options, name)} is too small: give 1 or more")
        if options.context % size:
            raise ValueError(
                f"--context {options.context} is not whole blocks: give a multiple of {size}"
            )
        check_output(options.json, options.plot)
        device = torch_measure.device_of(options)
        if device.type == "cpu":
            # What a CPU multiplies in bfloat16 it mostly converts.
            options.dtype = settings["dtype"] = "float32"
        torch_measure.measure(options, device, rows)
    except (ValueError, OSError, torch_measure.Refusal) as error:
        if rows:
            write(options.json, settings, rows, torch_measure.machine(device))
        parser.error(str(error))
    for row in rows:
        shown = ("implementation", "tokens_per_second", "block_ms", "step_ms")
        print({key: row[key] for key in shown}, flush=True)
    write(options.json, settings, rows, torch_measure.machine(device))
    if options.plot:
        draw(options.plot, rows)


if __name__ == "__main__":
    main()
