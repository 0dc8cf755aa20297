"""What a denoising step costs on the device, beside the floor of its operations.

    python -m benchmarks.step --json step.json --plot step.png

One row a method, context and batch: the main stream denoises whole blocks over caches of random
numbers, with no retrieval beside it. ``step_ms`` is a block divided by its passes, T and the
commit, median over blocks. ``floor_ms`` adds up, over the operations of a step, the longer of
reading what it must read and computing what it must compute, at the ceilings measured in the same
run. ``--profile`` lists the kernels of one block by time.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.ceilings import Ceilings, ceilings
from benchmarks.environment import DTYPES, arguments, check_output, finish, write
from benchmarks.floor import operations
from benchmarks.kernel_times import kernel_times
from benchmarks.refusals import at_least, check_steps, read_points, refusals
from benchmarks.shapes import SHAPES, random_cache, random_stack
from herald_jax.diffusion.accept import AcceptRule
from herald_jax.engine.batch import Batch
from herald_jax.engine.config import EngineConfig, GenerationConfig
from herald_jax.engine.lookahead_programs import LookaheadPrograms
from herald_jax.engine.main_stream import MainStream
from herald_jax.engine.request import Request, Result, Slot
from herald_jax.engine.sizing import Sizing
from herald_jax.engine.stack import LayerStack
from herald_jax.engine.timeline import Timeline
from herald_jax.kv.budget import Budget
from herald_jax.kv.device_cache import CacheShape, DeviceCache
from herald_jax.models.config import ModelConfig
from herald_jax.selection import SELECTORS

WARM_UP_BLOCKS = 2
TIMEOUT = 300.0


class Bench:
    """The main stream of one method over random caches."""

    def __init__(
        self, config: ModelConfig, stack: LayerStack, method: str, options: Any, batch: int
    ) -> None:
        device = jax.devices()[0]
        engine = EngineConfig(
            method=method,
            budget=Budget(options.budget),
            max_batch=batch,
            candidates_ratio=None if method == "dense" else options.candidates_ratio,
        )
        sizing = Sizing(config, engine, jnp.dtype(options.dtype))
        self.config, self.options = config, options
        block, context = config.block_size, options.context
        self.shape: CacheShape = sizing.shape(method, context + 2 * block)
        cache = DeviceCache(self.shape, device)
        cache.exact = random_cache(cache.exact)
        cache.pool = random_cache(cache.pool)
        self.batch = Batch(self.shape, config.mask_token_id, engine.budget, engine.sinks, device)
        for index in range(batch):
            request = Request(str(index), np.zeros(context, np.int32), 2 * block)
            slot = Slot(request, None, Result(str(index)), start=context)
            slot.selected = self.shape.selected
            self.batch.slots[index] = slot
        self.rule = GenerationConfig(steps=options.steps).resolve(config.rule)
        self.main = MainStream(
            stack,
            LookaheadPrograms(
                config,
                sinks=engine.sinks,
                selected=self.shape.selected,
                rule=AcceptRule.of(self.rule),
                ban_mask=self.rule.ban_mask,
            ),
            cache,
            layer_group=options.layer_group,
            queue_depth=options.queue_depth,
            timeout=TIMEOUT,
            timeline=Timeline(False),
        )

    def block(self) -> int:
        """Denoises one block of every slot; returns the passes it took."""
        batch, accept = self.batch, AcceptRule.of(self.rule)
        rows = batch.kept_rows()
        rounds = accept.rounds(self.config.block_size, self.options.steps, None)
        done = self.main.denoise(
            batch.state(False),
            batch.decoding(self.rule),
            rows,
            rows,
            batch.kept_budget(),
            None,
            rounds,
        )
        return done.steps

    def row(self, method: str, ceiling: Ceilings) -> dict[str, Any]:
        """Times blocks."""
        times = []
        for index in range(WARM_UP_BLOCKS + self.options.blocks):
            began = time.perf_counter()
            steps = self.block()
            if index >= WARM_UP_BLOCKS:
                times.append((time.perf_counter() - began) / steps)
        config, options, shape = self.config, self.options, self.shape
        block = config.block_size
        attended = (options.context + block, 2 * block + shape.selected)
        # Before its t-th step a block has lost t/T of its masks; the commit needs no logits.
        masked = block * (options.steps + 1) / 2 / steps
        found = operations(config, shape, attended, masked)
        floor = sum(operation.seconds(ceiling) for operation in found)
        step = statistics.median(times)
        row = {
            "method": method,
            "model": options.model,
            "context": options.context,
            "batch": shape.slots,
            "block": block,
            "steps": options.steps,
            "passes": steps,
            "budget": options.budget,
            "dtype": options.dtype,
            "step_ms": round(1e3 * step, 3),
            "floor_ms": round(1e3 * floor, 3),
            "over_floor": round(step / floor, 3),
            "ideal_tokens_per_second": round(shape.slots * block / (steps * step), 1),
            "read_gb_per_s": round(ceiling.bytes_per_second / 1e9, 1),
            "matmul_tflops": round(ceiling.flops_per_second / 1e12, 1),
            "floor": {
                operation.name: round(1e3 * operation.seconds(ceiling), 3) for operation in found
            },
        }
        if options.profile:
            row["kernels"] = kernel_times(self.block, steps)
        return row


def draw(path: Path, rows: list[dict[str, Any]]) -> None:
    """Measured step and its floor by operation, side by side."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(9, 1.5 + 0.8 * len(rows)), layout="constrained")
    names = list(dict.fromkeys(name for row in rows for name in row["floor"]))
    for at, row in enumerate(rows):
        axis.barh(at - 0.2, row["step_ms"], height=0.36, color="0.4", label="step, measured")
        left = 0.0
        for index, name in enumerate(names):
            width = row["floor"].get(name, 0.0)
            axis.barh(at + 0.2, width, left=left, height=0.36, color=f"C{index}", label=name)
            left += width
    labels = [f"{r['method']}, batch {r['batch']}, {r['context'] // 1024}K" for r in rows]
    axis.set_yticks(range(len(rows)), labels)
    axis.invert_yaxis()
    axis.set_xlabel("milliseconds a step; lower bars: floor by operation")
    axis.set_title(f"{rows[0]['model']} shape, {rows[0]['dtype']}, T = {rows[0]['steps']}")
    handles, texts = axis.get_legend_handles_labels()
    known = dict(zip(texts, handles, strict=True))
    figure.legend(known.values(), known, ncols=3, loc="outside lower center", frameon=False)
    figure.savefig(path, dpi=130)


def main() -> None:
    """Runs the benchmark."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--model", choices=SHAPES, default="llada2.0-mini")
    parser.add_argument(
        "--points", nargs="+", default=["dense:28", "herald-merged:70"], metavar="METHOD:BATCH"
    )
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--steps", type=int, default=20, help="T, denoising steps per block")
    parser.add_argument("--blocks", type=int, default=5, help="measured blocks")
    parser.add_argument("--budget", type=float, default=0.05)
    parser.add_argument("--candidates-ratio", type=float, default=1.0, help="C / K of the pools")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--layer-group", type=int, default=1)
    parser.add_argument("--queue-depth", type=int, default=2)
    parser.add_argument("--profile", action="store_true", help="kernels of a step by time")
    options = parser.parse_args()
    if options.quick:
        vars(options).update(
            model="tiny",
            points=["dense:2", "herald-merged:2"],
            context=1024,
            blocks=2,
            dtype="float32",
        )
    config = SHAPES[options.model]
    with refusals(parser):
        at_least(options, 1, "steps", "blocks", "layer_group")
        at_least(options, 0, "queue_depth")
        at_least(options, config.block_size, "context")
        EngineConfig(budget=Budget(options.budget), candidates_ratio=options.candidates_ratio)
        check_steps(options.steps, config)
        points = read_points(options.points)
        for method, _ in points:
            if method != "dense" and SELECTORS[method].style not in ("layer-serial", "query-once"):
                raise ValueError(
                    f"--points {method} selects within its steps, which are not all alike: "
                    "benchmarks.decode measures it"
                )
        check_output(options.json, options.plot)
    ceiling = ceilings(jnp.dtype(options.dtype), 512 if options.quick else 8192)
    stack = random_stack(config, options.dtype)
    settings = {key: str(value) for key, value in vars(options).items()}
    rows: list[dict[str, Any]] = []
    for method, batch in points:
        rows.append(Bench(config, stack, method, options, batch).row(method, ceiling))
        print({k: v for k, v in rows[-1].items() if k != "kernels"}, flush=True)
        for name, milliseconds in list(rows[-1].get("kernels", {}).items())[:60]:
            print(f"{milliseconds:9.4f} ms a step  {name}", flush=True)
        write(options.json, settings, rows) if options.json else None
    finish(options, settings, rows, draw)


if __name__ == "__main__":
    main()
