"""What a mixture-of-experts layer costs, by implementation and number of tokens.

    python -m benchmarks.experts --json experts.json --plot experts.png

One row an implementation, number of tokens and routing: ``uniform`` at random, or ``skewed``, all
tokens on the same k experts. Times are medians over groups of calls after warm-up, of ``mix``
alone (sort, gather, products, sum). ``relative_error`` is against the plain reference in float32
over the same weights. ``read_ms`` is one reading of all weights, measured in the same run with a
sum, times the share of the experts that are taken.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.environment import arguments, check_output, write
from benchmarks.shapes import SHAPES, random_array
from herald_jax.models import moe

CALLS, GROUPS = 8, 7
#: Tokens whose result is compared with float32.
COMPARED = 64


def median_ms(run: Callable[..., jax.Array], *operands: jax.Array) -> float:
    """Milliseconds of a call, median over groups; the first call compiles and does not count."""
    run(*operands).block_until_ready()
    seconds = []
    for _ in range(GROUPS):
        began = time.perf_counter()
        for _ in range(CALLS):
            made = run(*operands)
        made.block_until_ready()
        seconds.append((time.perf_counter() - began) / CALLS)
    return 1e3 * statistics.median(seconds)


def routing(tokens: int, experts: int, taken: int, skewed: bool) -> jax.Array:
    """int32 [tokens, taken], different experts for each token."""
    if skewed:
        return jnp.broadcast_to(jnp.arange(taken, dtype=jnp.int32), (tokens, taken))
    noise = jax.random.uniform(jax.random.key(tokens), (tokens, experts))
    return jax.lax.top_k(noise, taken)[1].astype(jnp.int32)


def measure(options: Any) -> list[dict[str, Any]]:
    """Every row that applies on this machine."""
    config = SHAPES[options.model]
    mixture = config.experts
    assert mixture is not None
    dtype = jnp.dtype(options.dtype)
    count, hidden, inner = mixture.count, config.hidden_size, mixture.intermediate_size
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = [(count, hidden, inner)] * 2 + [(count, inner, hidden)]
    weights = [random_array(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]
    wide = [part.astype(jnp.float32) for part in weights]
    read = jax.jit(lambda *parts: sum(part.sum(dtype=jnp.float32) for part in parts))
    whole_ms = median_ms(read, *weights)
    rows = []
    for tokens in options.tokens:
        for skewed in (False, True):
            x = random_array(jax.random.key(1), (tokens, hidden), dtype) * hidden**0.5
            ids = routing(tokens, count, mixture.per_token, skewed)
            shares = jax.random.uniform(jax.random.key(2), ids.shape, jnp.float32)
            few = [part[:COMPARED] for part in (x.astype(jnp.float32), shares, ids)]
            exact = np.asarray(jax.jit(_plain)(*few, *wide))
            touched = len(np.unique(ids)) / count
            for name in options.implementations:
                reason = moe.obstacle(name, dtype, None, count, hidden, inner)
                if reason is not None:
                    print(f"{name}: skipped, {reason}", flush=True)
                    continue
                run = jax.jit(functools.partial(moe.mix, implementation=name))
                made = np.asarray(run(x, shares, ids, *weights)[:COMPARED].astype(jnp.float32))
                rows.append(
                    {
                        "implementation": name,
                        "model": options.model,
                        "tokens": tokens,
                        "routing": "skewed" if skewed else "uniform",
                        "dtype": options.dtype,
                        "ms": round(median_ms(run, x, shares, ids, *weights), 4),
                        "read_ms": round(whole_ms * touched, 4),
                        "relative_error": float(
                            np.linalg.norm(made - exact) / np.linalg.norm(exact)
                        ),
                    }
                )
                print(rows[-1], flush=True)
    return rows


def _plain(*operands: jax.Array) -> jax.Array:
    return moe.mix(*operands, implementation="reference")


def draw(path: Path, rows: list[dict[str, Any]]) -> None:
    """Time against tokens: a line an implementation and routing, and the reading of weights."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for routed, style in (("uniform", "-"), ("skewed", "--")):
        for index, name in enumerate(sorted({row["implementation"] for row in rows})):
            line = [r for r in rows if r["implementation"] == name and r["routing"] == routed]
            points = [[row["tokens"] for row in line], [row["ms"] for row in line]]
            axis.plot(*points, style, marker="o", color=f"C{index}", label=f"{name}, {routed}")
    line = [row for row in rows if row["routing"] == "uniform"]
    floor = sorted({(row["tokens"], row["read_ms"]) for row in line})
    axis.plot(*zip(*floor, strict=True), ":", color="grey", label="reading the weights")
    axis.set(xscale="log", yscale="log", xlabel="tokens", ylabel="milliseconds a layer")
    axis.set_xticks(sorted({row["tokens"] for row in rows}))
    axis.xaxis.set_major_formatter("{x:.0f}")
    axis.minorticks_off()
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
    axis.set_title(f"Mixture of experts of {rows[0]['model']}, {rows[0]['dtype']}")
    figure.savefig(path, dpi=130)


def main() -> None:
    """Runs the benchmark."""
    parser = arguments(__doc__.splitlines()[0])
    shaped = [name for name, config in SHAPES.items() if config.experts is not None]
    parser.add_argument("--model", choices=shaped, default="llada2.0-mini")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 32, 256, 512, 1024, 2240])
    parser.add_argument(
        "--implementations",
        nargs="+",
        choices=get_args(moe.Implementation),
        default=["grouped", "kernels"],
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    options = parser.parse_args()
    if options.quick:
        vars(options).update(model="tiny-experts", tokens=[1, 32, 128], dtype="float32")
    try:
        if min(options.tokens) < 1:
            raise ValueError(f"--tokens {min(options.tokens)} cannot be routed: give 1 or more")
        check_output(options.json, options.plot)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    rows = measure(options)
    if not rows:
        parser.error("none of --implementations runs here")
    write(options.json, {key: str(value) for key, value in vars(options).items()}, rows)
    if options.plot:
        draw(options.plot, rows)


if __name__ == "__main__":
    main()
