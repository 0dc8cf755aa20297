"""``herald doctor``: what this machine offers and whether it computes right."""

from __future__ import annotations

import json
import os
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import typer

import host_kernels
from herald_jax.cli.console import note, refusals
from herald_jax.cli.options import Json
from herald_jax.cli.platform import prepare_platform
from herald_jax.kv.host_memory import cgroup_room, format_bytes, host_memory_room
from host_kernels import threads as host_threads

if TYPE_CHECKING:
    import jax

BANDWIDTH_BUFFER, BANDWIDTH_SHARE = 1 << 30, 0.05
TRANSFER_BYTES = 256 << 20
# bfloat16 has 8 bits of significand; outputs here are averages of values around 1.
TOLERANCE = 0.02
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def doctor(as_json: Json = False) -> int:
    """Look at devices, instruction sets, threads, memory and bandwidth, and test attention.

    Exit code 1 says that attention on the device computes wrong values. Examples:

    herald doctor

    HERALD_ISA=avx2 HERALD_THREADS=4 herald doctor --json
    """
    prepare_platform()
    with refusals():
        report = examine()
    typer.echo(json.dumps(report) if as_json else "\n".join(_lines(report)))
    if report["attention"]["agrees"]:
        return 0
    note(
        f"error: {report['attention']['implementation']} attention on "
        f"{report['devices'][0]['kind']} differs from plain XLA by "
        f"{report['attention']['largest_difference']:.3g}: update jaxlib or the driver"
    )
    return 1


def examine() -> dict[str, Any]:
    """Everything the report says, as plain JSON values."""
    import jax

    device = jax.devices()[0]
    kernels = host_kernels.cpu_info()
    available, limit = psutil.virtual_memory().available, cgroup_room()
    free, room = min(available, available if limit is None else limit), host_memory_room()
    return {
        "versions": {
            "herald_jax": _version(),
            "python": platform.python_version(),
            "jax": version("jax"),
            "jaxlib": version("jaxlib"),
        },
        "devices": [
            {
                "platform": each.platform,
                "kind": each.device_kind,
                "memory_bytes": (each.memory_stats() or {}).get("bytes_limit"),
            }
            for each in jax.devices()
        ],
        "cpu": kernels["model"],
        "instruction_set": {
            "chosen": kernels["isa"],
            "available": kernels["available"],
            "forced": "HERALD_ISA" in os.environ,
        },
        "threads": {"count": kernels["threads"], "from": _thread_source()},
        "huge_pages": _huge_pages(),
        "compile_cache": _compile_cache(),
        "prefetch": dict(host_kernels.calibrate_prefetch()),
        "host_memory": {
            "available": available,
            "cgroup_room": limit,
            "reserve": free - room,
            "kv_room": room,
        },
        "bandwidth": _bandwidth(room),
        "transfer": _transfer(device),
        "direct": _direct(device),
        "attention": _attention(device.platform),
        "experts": _experts(device.platform),
    }


def _version() -> str:
    try:
        return version("herald-jax")
    except PackageNotFoundError:
        return "not installed"


def _thread_source() -> str:
    if os.environ.get("HERALD_THREADS"):
        return "HERALD_THREADS"
    cpus, quota = len(os.sched_getaffinity(0)), host_threads.cgroup_cpus()
    if quota is not None and int(quota) < cpus:
        return f"cgroup quota of {quota:g} CPUs"
    return f"affinity to {cpus} CPUs"


def _huge_pages() -> dict[str, Any]:
    setting = HUGE_PAGES.read_text().split() if HUGE_PAGES.is_file() else []
    chosen = [word.strip("[]") for word in setting if word.startswith("[")]
    arena = host_kernels.Arena(8 << 20)
    return {
        "setting": chosen[0] if chosen else "none",
        "granted": arena.huge_pages,
        "notice": arena.notice,
    }


def _compile_cache() -> dict[str, Any]:
    """Where compiled programs are kept, and their size."""
    from herald_jax.compile_cache import keep_compiled

    kept = keep_compiled()
    return {
        "folder": None if kept.folder is None else str(kept.folder),
        "reason": kept.reason,
        "bytes": kept.nbytes,
    }


def _bandwidth(room: int) -> dict[str, Any]:
    """GB/s of the kernels' threads over a buffer far larger than any cache, memory permitting."""
    size = max(64 << 20, min(BANDWIDTH_BUFFER, int(BANDWIDTH_SHARE * room)))
    half = size // 2
    buffer = host_kernels.Arena(2 * half).buffer
    return {
        "buffer_bytes": 2 * half,
        "read_gb_per_s": round(host_kernels.read_bandwidth(buffer), 2),
        "copy_gb_per_s": round(host_kernels.copy_bandwidth(buffer[:half], buffer[half:]), 2),
    }


def _direct(device: jax.Device) -> dict[str, Any] | None:
    """GB/s at which an accelerator reads rows of host memory; None where the device is the CPU."""
    if device.platform == "cpu":
        return None
    from herald_jax.kv.cuda_driver import CudaError
    from herald_jax.kv.cuda_row_reader import read_rate

    try:
        return {"rows_gb_per_s": round(read_rate(device), 2), "reason": ""}
    except CudaError as error:
        return {"rows_gb_per_s": None, "reason": str(error)}


def _transfer(device: jax.Device) -> dict[str, Any] | None:
    """GB/s between staging memory and an accelerator; None where the device is the CPU."""
    if device.platform == "cpu":
        return None
    from herald_jax.kv.transfer import Staging

    staging = Staging(1, (1, TRANSFER_BYTES // 4096, 1, 1024), np.dtype(np.float16), device)
    try:
        staging.reclaim(0)
        up, down = [], []
        for _ in range(3):
            began = time.perf_counter()
            pair = staging.send(0)
            staging.reclaim(0)
            up.append(time.perf_counter() - began)
            began = time.perf_counter()
            _ = [np.asarray(array) for array in pair]
            down.append(time.perf_counter() - began)
        return {
            "staging_registered": staging.registered,
            "host_to_device_gb_per_s": round(TRANSFER_BYTES / min(up) / 1e9, 2),
            "device_to_host_gb_per_s": round(TRANSFER_BYTES / min(down) / 1e9, 2),
        }
    finally:
        staging.close()


def _attention(platform_name: str) -> dict[str, Any]:
    """Whether the attention that bfloat16 takes here agrees with plain XLA in float32.

    Some device and kernel pairs have given wrong values without an error elsewhere (public report
    sglang#19508), so this is looked at and not assumed.
    """
    import jax
    import jax.numpy as jnp

    from herald_jax.models.attention import attend, default_implementation

    slots, block, rows, heads, kv_heads, dim = 2, 32, 256, 8, 2, 128
    shapes = [(slots, block, heads, dim), *2 * [(slots, rows, kv_heads, dim)]]
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (
        jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)
    )
    lengths = jnp.asarray([rows, rows - 29], jnp.int32)
    wide_q, wide_k, wide_v = (array.astype(jnp.float32) for array in (q, k, v))
    wanted = attend(wide_q, wide_k, wide_v, lengths, implementation="xla")
    difference = jnp.abs(attend(q, k, v, lengths).astype(jnp.float32) - wanted).max()
    return {
        "implementation": default_implementation(k.dtype, dim),
        "platform": platform_name,
        "largest_difference": round(float(difference), 6),
        "agrees": bool(difference < TOLERANCE),
    }


def _experts(platform_name: str) -> dict[str, Any]:
    """What multiplies the experts of a mixture in bfloat16 here, and why."""
    import jax.numpy as jnp

    from herald_jax.models.moe import default_implementation

    try:
        name, reason = default_implementation(jnp.dtype(jnp.bfloat16), platform_name)
    except ValueError as error:
        return {"implementation": None, "reason": str(error)}
    return {"implementation": name, "reason": reason}


def _prefetch_line(found: dict[str, Any]) -> str:
    rates = ", ".join(f"{name} {rate:.1f}" for name, rate in found["gb_per_s"].items())
    told = f"; cold scan, GB/s: {rates}; kept in {found['file']}" if rates else ""
    return f"{found['setting']} (from {found['source']}{told})"


def _direct_line(found: dict[str, Any] | None) -> str:
    if found is None:
        return "none: the device is the CPU"
    if found["reason"]:
        return f"--transfer direct does NOT work: {found['reason']}"
    return f"the device reads rows of host memory at {found['rows_gb_per_s']} GB/s"


def _lines(report: dict[str, Any]) -> list[str]:
    """The report for people."""
    devices = ", ".join(
        f"{each['kind']} ({each['platform']}"
        + (f", {format_bytes(each['memory_bytes'])}" if each["memory_bytes"] else "")
        + ")"
        for each in report["devices"]
    )
    isa, memory, rates = report["instruction_set"], report["host_memory"], report["bandwidth"]
    limit, transfer = memory["cgroup_room"], report["transfer"]
    attention, cache = report["attention"], report["compile_cache"]
    rows = {
        "versions": ", ".join(f"{name} {text}" for name, text in report["versions"].items()),
        "devices": devices,
        "CPU": report["cpu"],
        "instruction set": f"{isa['chosen']} ({'HERALD_ISA; ' if isa['forced'] else ''}available: "
        f"{', '.join(isa['available'])})",
        "threads": f"{report['threads']['count']} ({report['threads']['from']})",
        "huge pages": f"{'granted' if report['huge_pages']['granted'] else 'not granted'} "
        f"(system setting: {report['huge_pages']['setting']})"
        + (f"; {report['huge_pages']['notice']}" if report["huge_pages"]["notice"] else ""),
        "prefetch": _prefetch_line(report["prefetch"]),
        "compiled": f"kept in {cache['folder']}, {format_bytes(cache['bytes'])}"
        if cache["folder"]
        else f"not kept: {cache['reason']}",
        "host memory": f"{format_bytes(memory['available'])} available, cgroup leaves "
        f"{'no limit' if limit is None else format_bytes(limit)}, reserve "
        f"{format_bytes(memory['reserve'])}, KV may take {format_bytes(memory['kv_room'])}",
        "memory rate": f"read {rates['read_gb_per_s']} GB/s, copy {rates['copy_gb_per_s']} GB/s",
        "transfer": "none: the device is the CPU"
        if transfer is None
        else f"to device {transfer['host_to_device_gb_per_s']} GB/s, from device "
        f"{transfer['device_to_host_gb_per_s']} GB/s, staging "
        f"{'registered' if transfer['staging_registered'] else 'NOT registered (slower)'}",
        "direct": _direct_line(report["direct"]),
        "attention": f"bfloat16 {attention['implementation']} "
        f"{'agrees with' if attention['agrees'] else 'DIFFERS from'} plain XLA (largest "
        f"difference {attention['largest_difference']:g})",
        "experts": f"bfloat16 {report['experts']['implementation'] or 'NONE'} "
        f"({report['experts']['reason']})",
    }
    return [f"{name:<16} {text}" for name, text in rows.items()]
