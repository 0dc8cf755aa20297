"""Times dense decoding in PyTorch: one row a variant."""

from __future__ import annotations

import gc
import statistics
import time
from typing import Any, Protocol

import torch

from benchmarks.shapes import SHAPES
from benchmarks.torch_denoise import Block, Network, denoise, quotas
from benchmarks.torch_plain import Plain
from benchmarks.torch_tuned import Tuned
from benchmarks.torch_weights import Cache, Weights, check, random_cache, random_weights
from herald_jax.models.config import ModelConfig

WARM_UP_BLOCKS = 2
#: What fits a CPU within the minute of ``--quick``.
SMALL = ("tiny", "tiny-experts")


class Refusal(Exception):
    """One sentence: what cannot be measured here, and what could."""


class Measured(Network, Protocol):
    """A network with notes for its row."""

    notes: dict[str, Any]


def device_of(options: Any) -> torch.device:
    """The device to measure on, its memory limited as asked.

    Raises:
      Refusal: the network is too large for a CPU.
    """
    if not torch.cuda.is_available():
        if options.model not in SMALL:
            raise Refusal(
                f"--model {options.model} needs a CUDA device, which PyTorch does not find: "
                f"use --quick or --model {' or '.join(SMALL)}"
            )
        return torch.device("cpu")
    device = torch.device("cuda", 0)
    if options.device_memory is not None:
        whole = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, options.device_memory / whole), device)
    return device


def machine(device: torch.device) -> dict[str, Any]:
    """What to say of the environment beyond what every benchmark says."""
    import transformers

    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else "cpu",
        "platform": device.type,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "transformers": transformers.__version__,
    }


def check_memory(config: ModelConfig, options: Any, device: torch.device) -> None:
    """Refuses what cannot fit, before anything is made.

    Raises:
      Refusal: weights and cache alone are more than the device has.
    """
    if device.type != "cuda":
        return
    each = torch.finfo(getattr(torch, options.dtype)).bits // 8
    rows = options.context + config.block_size
    slot = 2 * rows * config.num_layers * config.num_kv_heads * config.head_dim * each
    weights = config.parameter_count * each
    free, _ = torch.cuda.mem_get_info(device)
    limit = min(free, options.device_memory or free)
    if weights + options.batch * slot > limit:
        fits = max(0, int(limit - weights) // slot)
        raise Refusal(
            f"--batch {options.batch} at --context {options.context} needs "
            f"{(weights + options.batch * slot) / 1e9:.1f} GB for weights and keys and values "
            f"but the device has {limit / 1e9:.1f} GB: "
            + (f"give --batch {fits} or less" if fits else "give a smaller --model or --context")
        )


def measure(options: Any, device: torch.device, rows: list[dict[str, Any]]) -> None:
    """Appends a row to ``rows`` for every variant asked for.

    Args:
      options: of ``pytorch_baseline``.

    Raises:
      Refusal: the network cannot be run, or a variant ran out of memory; the others have rows.
    """
    config = SHAPES[options.model]
    try:
        check(config)
    except ValueError as error:
        raise Refusal(f"--model {options.model}: {error}") from None
    check_memory(config, options, device)
    dtype = getattr(torch, options.dtype)
    capacity = options.context + config.block_size
    refusals = []
    try:
        weights = random_weights(config, dtype, device)
        cache = random_cache(config, options.batch, capacity, dtype, device)
    except torch.OutOfMemoryError:
        raise Refusal(_too_large("a network and its cache", options)) from None
    for name in options.variant:
        try:
            rows.append(_row(name, options, config, weights, cache, device))
        except torch.OutOfMemoryError:
            refusals.append(_too_large(f"--variant {name}", options))
        # After the exception has let go of what the variant made.
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if refusals:
        raise Refusal("; ".join(refusals))


def _too_large(what: str, options: Any) -> str:
    return (
        f"{what} ran out of device memory at --batch {options.batch} and --context "
        f"{options.context}: give a smaller batch"
    )


def _network(
    name: str, options: Any, config: ModelConfig, weights: Weights, cache: Cache, block: Block
) -> Measured:
    if name == "plain":
        return Plain(config, weights, cache, options.context, block)
    tuned = Tuned(config, weights, cache, [options.context] * options.batch, block)
    tuned.tune(not options.no_compile, not options.no_graph)
    return tuned


def _row(
    name: str,
    options: Any,
    config: ModelConfig,
    weights: Weights,
    cache: Cache,
    device: torch.device,
) -> dict[str, Any]:
    """Every block is denoised at the same place, so that one CUDA graph serves all of them."""
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    due = quotas(config.block_size, options.steps)
    block = Block.empty(options.batch, config.block_size, config.mask_token_id, device)
    began = time.perf_counter()
    seconds = []
    with torch.no_grad():
        network = _network(name, options, config, weights, cache, block)
        for _ in range(WARM_UP_BLOCKS):
            denoise(network, due)
        prepared = time.perf_counter() - began
        for _ in range(options.blocks):
            _synchronize(device)
            began = time.perf_counter()
            denoise(network, due)
            _synchronize(device)
            seconds.append(time.perf_counter() - began)
        if options.profile:
            profile(network, device)
    if bool(block.masked.any()):
        raise RuntimeError(f"{name}: a block is not final after its {len(due)} steps")
    median = statistics.median(seconds)
    return {
        "method": "dense",
        "implementation": f"pytorch-{name}",
        "model": options.model,
        "context": options.context,
        "batch": options.batch,
        "block": config.block_size,
        "steps": options.steps,
        "dtype": options.dtype,
        "blocks": options.blocks,
        "tokens_per_second": round(options.batch * config.block_size / median, 2),
        "block_ms": round(1e3 * median, 2),
        "block_ms_all": [round(1e3 * each, 2) for each in seconds],
        "step_ms": round(1e3 * median / (len(due) + 1), 3),
        "prepare_seconds": round(prepared, 1),
        "device_bytes": torch.cuda.max_memory_allocated(device) if cuda else None,
        "device_kv_bytes": sum(part.nbytes for part in cache.keys + cache.values),
        "device_memory_limit": options.device_memory,
        "torch": torch.__version__,
        **network.notes,
    }


def profile(network: Network, device: torch.device) -> None:
    """Prints what one step spends its time on."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as recorded

    kinds = [ProfilerActivity.CPU]
    kinds += [ProfilerActivity.CUDA] if device.type == "cuda" else []
    with recorded(activities=kinds) as taken:
        network.step()
        _synchronize(device)
    order = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
    print(taken.key_averages().table(sort_by=order, row_limit=20, max_name_column_width=70))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
