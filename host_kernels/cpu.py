"""Which instruction set the kernels run on, and what the memory gives."""

from __future__ import annotations

import os
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from host_kernels import _native
from host_kernels.checks import check_array, whole
from host_kernels.prefetch import apply_environment as apply_prefetch
from host_kernels.threads import resolve_threads, thread_count


class CpuInfo(TypedDict):
    """What ``cpu_info`` tells."""

    isa: str
    available: list[str]
    vendor: str
    model: str
    threads: int


_environment_read = False


def apply_environment() -> None:
    """Obeys HERALD_ISA and HERALD_PREFETCH, once, before the first kernel runs.

    Raises:
        ValueError: the one names an instruction set that is not available here, the other is no
            setting.
    """
    global _environment_read
    apply_prefetch()
    if _environment_read:
        return
    name = os.environ.get("HERALD_ISA")
    if name:
        try:
            _native.choose_isa(name)
        except ValueError as error:
            raise ValueError(f"HERALD_ISA: {error}") from None
    _environment_read = True


def set_isa(name: str) -> None:
    """Runs the kernels on the named instruction set from now on.

    Args:
        name: "scalar", "avx2", "avx512", "avx512_vnni", "avx512_bf16" or "amx".

    Raises:
        ValueError: unknown, left out of this build, or not offered by the CPU (CPUID) or the
            operating system (XCR0).
    """
    global _environment_read
    _native.choose_isa(name)
    _environment_read = True


def cpu_info() -> CpuInfo:
    """The instruction set in use, those available (fastest last), the CPU and the thread count."""
    apply_environment()
    vendor, model = _native.cpu_name()
    return {
        "isa": _native.active_isa(),
        "available": _native.available_isas(),
        "vendor": vendor,
        "model": model.strip(),
        "threads": thread_count(),
    }


def read_bandwidth(
    array: NDArray[np.uint8],
    *,
    threads: int | None = None,
    repeats: int = 3,
    streams: int = 1,
    prefetch: int = 0,
) -> float:
    """GB/s (1e9 bytes) of a plain read loop over ``array``, uint8 ``[bytes]``: best of ``repeats``.

    Args:
        array: what is read.
        threads: threads to use; each reads one contiguous share.
        repeats: passes over all of it.
        streams: sequential streams that a thread reads side by side.
        prefetch: bytes ahead of the loads that are asked for by instruction; 0 leaves that to the
            hardware.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it.
    """
    apply_environment()
    _check_bytes("array", array, repeats)
    for name, low, value, most in (("streams", 1, streams, 64), ("prefetch", 0, prefetch, 1 << 20)):
        if not low <= whole(name, value) <= most:
            raise ValueError(f"{name} must be between {low} and {most}, but is {value}")
    count = resolve_threads(threads)
    return _native.read_bandwidth(array, count, repeats, streams, prefetch) / 1e9


def copy_bandwidth(
    src: NDArray[np.uint8],
    dst: NDArray[np.uint8],
    *,
    threads: int | None = None,
    repeats: int = 3,
) -> float:
    """GB/s (1e9 bytes copied) from ``src`` to ``dst``, uint8 of one size: best of ``repeats``.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it.
    """
    apply_environment()
    _check_bytes("src", src, repeats)
    check_array("dst", dst, np.dtype(np.uint8), src.shape, written=True)
    return _native.copy_bandwidth(src, dst, resolve_threads(threads), repeats) / 1e9


def _check_bytes(name: str, array: NDArray[np.uint8], repeats: int) -> None:
    size = array.size if isinstance(array, np.ndarray) else 0
    check_array(name, array, np.dtype(np.uint8), (size,))
    if size < 256:
        raise ValueError(f"{name} must have at least 256 bytes, not {size}")
    if whole("repeats", repeats) < 1:
        raise ValueError(f"repeats must be at least 1, but is {repeats}")
