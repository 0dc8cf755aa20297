"""``herald plan``: what fits, decided from shapes alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from herald_jax.cli.console import Refused, note, refusals, tables
from herald_jax.cli.options import (
    MOST_TOKENS,
    BudgetFraction,
    BudgetTokens,
    CandidatesRatio,
    DeviceMemory,
    Dtype,
    ExactLayers,
    HostMemory,
    Json,
    KeyIndexName,
    KeyIndexOption,
    MaxBatch,
    Transfer,
    TransferName,
    check_text,
    read_budget,
    read_size,
)
from herald_jax.cli.platform import prepare_platform
from herald_jax.kv.host_memory import format_bytes
from herald_jax.selection import SELECTORS

if TYPE_CHECKING:
    from herald_jax.engine.sizing import Sizing
    from herald_jax.models.config import ModelConfig

#: Column title -> key of a method's row.
COLUMNS = {
    "weights": "weights",
    "exact KV": "exact_kv",
    "pools": "pools",
    "prefill": "prefill",
    "workspace": "workspace",
    "device": "device_bytes",
    "host pool": "host_pool",
    "key index": "key_index",
    "staging": "staging",
    "host": "host_bytes",
}


def plan(
    model: Annotated[
        str,
        typer.Option(
            metavar="DIR|embedded|config.json",
            help="A converted checkpoint, the model inside the package, or a Hugging Face "
            "config.json of a supported family. No weights are read.",
        ),
    ] = "embedded",
    max_context: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST_TOKENS,
            metavar="N",
            show_default="the model's",
            help="Longest prompt and answer in tokens.",
        ),
    ] = None,
    max_batch: MaxBatch = 8,
    budget: BudgetFraction = None,
    budget_tokens: BudgetTokens = None,
    candidates_ratio: CandidatesRatio = None,
    key_index: KeyIndexOption = None,
    exact_layers: ExactLayers = None,
    transfer: Transfer = None,
    block_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="B",
            help="Positions decoded together, instead of what a config.json or its name says.",
        ),
    ] = None,
    dtype: Annotated[
        Dtype | None,
        typer.Option(
            show_default="as stored, bfloat16 for others", help="Dtype of weights and KV."
        ),
    ] = None,
    device_memory: DeviceMemory = None,
    host_memory: HostMemory = None,
    as_json: Json = False,
) -> None:
    """Tell what each method needs for a batch, and the largest batch that fits.

    Examples:

    herald plan --model sdar-8b --device-memory 80GB --host-memory 400GB

    herald plan --model SDAR-8B-Chat/config.json --max-context 16384 --json
    """
    check_text(model, "--model", "name a checkpoint or leave it out")
    chosen_budget = read_budget(budget, budget_tokens)
    device_bytes = read_size(device_memory, "--device-memory")
    host_bytes = read_size(host_memory, "--host-memory")
    prepare_platform()
    with refusals():
        import jax

        from herald_jax.engine.config import EngineConfig
        from herald_jax.engine.sizing import Sizing

        config, stored = _read_model(model, block_size)
        kind = stored if dtype is None else dtype.value
        context = max_context or config.max_position_embeddings
        engine_config = EngineConfig(
            budget=chosen_budget,
            candidates_ratio=candidates_ratio,
            key_index=(key_index or KeyIndexName.int8).value,
            exact_layers=exact_layers,
            transfer=(transfer or TransferName.full).value,
            max_batch=max_batch,
            max_context=context,
            device_memory=device_bytes,
            host_memory=host_bytes,
        )
        sizing = Sizing(config, engine_config, _numpy_dtype(kind))
        rows = [_row(sizing, method, context) for method in ("dense", *SELECTORS)]
        chosen, reason = sizing.choose(context)
        on_cpu = jax.default_backend() == "cpu"
    report = {
        "model": model,
        "dtype": kind,
        "max_context": context,
        "max_batch": max_batch,
        "budget": str(chosen_budget),
        "device_memory": sizing.device_memory,
        "host_memory": sizing.host_memory,
        "auto": {
            "method": chosen,
            "reason": reason,
            "fits": next(row["fits"] for row in rows if row["method"] == chosen),
        },
        "methods": rows,
    }
    if as_json:
        typer.echo(json.dumps(report))
    else:
        _print(report)
    if on_cpu and dtype is None and kind != "float32":
        note(
            f"note: planned in {kind}; on this CPU `herald generate` takes float32 without --dtype"
        )


def _read_model(model: str, block_size: int | None) -> tuple[ModelConfig, str]:
    """Configuration and dtype of a checkpoint or of a Hugging Face config.json."""
    from checkpoints_convert.names import configure
    from herald_jax import checkpoint
    from herald_jax.engine.engine import EMBEDDED
    from herald_jax.models import registry

    path = EMBEDDED if model == "embedded" else Path(model)
    foreign = path / "config.json" if path.is_dir() else path
    if not foreign.is_file() or (path / "herald.json").is_file():
        if block_size is not None:
            raise Refused(
                "--block-size is for a Hugging Face config.json; a converted checkpoint keeps the "
                "one it was converted with"
            )
        return checkpoint.read_config(path)
    try:
        hf = json.loads(foreign.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise Refused(f"--model {foreign} cannot be read as JSON: {error}") from error
    if not isinstance(hf, dict):
        raise Refused(f"--model {foreign} is not a JSON object: give a config.json")
    # Memory depends on no rule, so nothing needs saying about it.
    rule = registry.find_family(hf).rule
    config, notes = configure(hf, foreign.parent, block_size=block_size, rule=rule)
    for said in notes:
        note(f"note: {said}")
    return config, "bfloat16"


def _numpy_dtype(name: str) -> Any:
    import jax.numpy as jnp

    return jnp.dtype(name)


def _row(sizing: Sizing, method: str, context: int) -> dict[str, Any]:
    """What one method needs, in bytes."""
    made = sizing.plan(sizing.shape(method, context))
    fits = made.device_bytes <= sizing.device_memory and made.host_bytes <= sizing.host_memory
    return {
        "method": method,
        "exact_layers": sizing.exact_layers(method),
        "weights": made.weights,
        "exact_kv": made.exact,
        "pools": made.pools,
        "prefill": made.prefill,
        "workspace": made.workspace,
        "device_bytes": made.device_bytes,
        "host_pool": made.host_pool,
        "key_index": made.key_index,
        "staging": made.staging,
        "host_bytes": made.host_bytes,
        "fits": fits,
        "largest_batch": sizing.largest_batch(method, context),
    }


def _print(report: dict[str, Any]) -> None:
    table = Table(
        title=f"{report['model']}, {report['dtype']}, {report['max_context']} tokens, batch "
        f"{report['max_batch']}, budget {report['budget']}"
    )
    # Names are to be copied.
    longest = max(len(row["method"]) for row in report["methods"])
    table.add_column("method", min_width=longest)
    for title in (*COLUMNS, "fits", "largest batch"):
        table.add_column(title, justify="right")
    for row in report["methods"]:
        sizes = [format_bytes(row[key]) for key in COLUMNS.values()]
        table.add_row(
            row["method"], *sizes, "yes" if row["fits"] else "no", str(row["largest_batch"])
        )
    console = tables()
    console.print(table)
    console.print(
        f"device memory {format_bytes(report['device_memory'])}, host memory "
        f"{format_bytes(report['host_memory'])}; auto takes {report['auto']['method']}: "
        f"{report['auto']['reason']}",
        highlight=False,
    )
    if not report["auto"]["fits"]:
        console.print(
            "That does not fit either: lower --max-context or --max-batch, or give more memory.",
            highlight=False,
        )
