"""What must be settled before JAX's backend starts: platforms and the size of the device arena."""

from __future__ import annotations

import ctypes
import os
from importlib.util import find_spec

import host_kernels
from herald_jax.cli.console import Refused, note

# What the CUDA context and cuBLAS or cuDNN workspaces need outside XLA's arena.
LARGEST_FRACTION = 0.95
#: Platforms that JAX calls by another name once they run.
BACKENDS = {"cuda": "gpu", "rocm": "gpu"}


def prepare_platform(device_memory: int | None = None) -> None:
    """Sets the environment that JAX reads when its backend starts, then starts it.

    ``device_memory`` (bytes) becomes the size of XLA's arena on CUDA, so that the limit holds
    whatever the plan says; on the CPU it limits the plan alone. Then compiled programs are kept,
    see ``compile_cache``.

    Raises:
      Refused: the platform asked for is not there, the GPU is smaller than the limit, or
        HERALD_ISA, HERALD_THREADS or HERALD_BACKGROUND cannot be obeyed.
    """
    try:
        host_kernels.cpu_info()
        host_kernels.set_background(False)
    except ValueError as error:
        raise Refused(str(error)) from error
    platforms = os.environ.get("JAX_PLATFORMS", "")
    named = [name.strip() for name in platforms.split(",") if name.strip()]
    if named and "cpu" not in named:
        # Host callbacks receive arrays of the CPU backend.
        os.environ["JAX_PLATFORMS"] = f"{platforms},cpu"
        note(f"note: JAX_PLATFORMS={platforms} lacks cpu, which host callbacks need: added")
    total = cuda_memory() if uses_cuda(platforms) else None
    if device_memory is not None and total is not None:
        limit_arena(device_memory, total)
    import jax

    try:
        jax.devices()
        backend = jax.default_backend()
        # The CPU that was added must not stand in for a platform that is not there.
        if named and backend not in {BACKENDS.get(name, name) for name in named}:
            raise RuntimeError(f"JAX would run on the {backend} backend")
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise Refused(
            f"JAX_PLATFORMS={platforms or '(unset)'} gives no device: {reason}; unset it, set "
            "JAX_PLATFORMS=cpu, or install the cuda extra"
        ) from error
    from herald_jax.compile_cache import keep_compiled

    kept = keep_compiled()
    if kept.failed:
        note(f"note: {kept.reason}")


def uses_cuda(platforms: str) -> bool:
    """Whether JAX would take a CUDA device under this value of JAX_PLATFORMS."""
    wanted = not platforms or bool({"cuda", "gpu"} & set(platforms.split(",")))
    return wanted and any(find_spec(f"jax_cuda{n}_plugin") is not None for n in (12, 13))


def limit_arena(device_memory: int, total: int) -> None:
    """Has XLA's arena be ``device_memory`` of a device's ``total`` bytes.

    Raises:
      Refused: the device does not have that much to lend.
    """
    fraction = device_memory / total
    if fraction > LARGEST_FRACTION:
        raise Refused(
            f"--device-memory {device_memory / 1e9:.1f}GB is more than the GPU can lend: give at "
            f"most {int(LARGEST_FRACTION * total / 1e9)}GB of its {total / 1e9:.1f} GB"
        )
    # Both names at once are an error to XLA, and only its arena allocator obeys a limit.
    os.environ.pop("XLA_CLIENT_MEM_FRACTION", None)
    os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = repr(fraction)
    os.environ["XLA_PYTHON_CLIENT_ALLOCATOR"] = "default"


def cuda_memory() -> int | None:
    """Bytes of the first visible CUDA device, as the driver counts them; None without one."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, total = ctypes.c_int(), ctypes.c_size_t()
    failed = (
        driver.cuInit(0)
        or driver.cuDeviceGet(ctypes.byref(device), 0)
        or driver.cuDeviceTotalMem_v2(ctypes.byref(total), device)
    )
    return None if failed else total.value
