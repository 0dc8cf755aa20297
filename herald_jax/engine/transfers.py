"""The transfer that a session's cache was made for, with waits that end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from herald_jax.engine.errors import EngineError, WaitTimeout
from herald_jax.engine.timeline import Timeline
from herald_jax.engine.wait import wait_ready
from herald_jax.kv.changes import ChangesTransfer
from herald_jax.kv.cuda_driver import CudaError
from herald_jax.kv.cuda_row_reader import CudaReader
from herald_jax.kv.device_cache import CacheShape, DeviceCache
from herald_jax.kv.direct import DirectTransfer
from herald_jax.kv.pool_transfer import FullTransfer, PoolTransfer
from herald_jax.kv.row_reader import HostReader, RowReader

#: Seconds between two looks at the device.
LOOK = 1e-4


def pool_transfer(
    cache: DeviceCache,
    parts: Sequence[tuple[int, int]],
    pool: np.ndarray,
    *,
    timeout: float,
    timeline: Timeline,
) -> PoolTransfer[Any]:
    """Allocates what ``cache.shape.transfer`` needs.

    Args:
      parts: the slots [first, last) of each part-batch.
      pool: all bytes of the full pool.
      timeline: counts waits at the boundary as stalls.

    Raises:
      MemoryError: the host refuses it.
      EngineError: the device cannot read host memory.
    """
    shape, device = cache.shape, cache.device

    def copied(array: jax.Array) -> None:
        began = time.perf_counter()
        wait_ready(array, timeout, "the copy of rows that are new to the device")
        timeline.stall_seconds += time.perf_counter() - began

    late = threading.Event()

    def wait(done: Callable[[], bool], what: str) -> None:
        # A device that hung once is looked at, but not waited for again.
        deadline = time.monotonic() + (0 if late.is_set() else timeout)
        try:
            while not done():
                if time.monotonic() > deadline:
                    late.set()
                    raise WaitTimeout(f"waited {timeout:g} s for {what}")
                time.sleep(LOOK)
        except CudaError as error:
            raise EngineError(f"the device failed, waiting for {what}: {error}") from error

    if shape.transfer == "changes":
        return ChangesTransfer(shape, parts, device, copied)
    if shape.transfer == "direct":
        try:
            reader = row_reader(shape, pool, device)
        except CudaError as error:
            raise EngineError(
                f"--transfer direct does not work on this machine: {error}; use --transfer full"
            ) from error
        return DirectTransfer(cache, parts, reader, wait)
    return FullTransfer(shape, parts, device)


def row_reader(shape: CacheShape, pool: np.ndarray, device: jax.Device) -> RowReader:
    """What reads rows for this device.

    Raises:
      CudaError: it cannot.
    """
    return HostReader() if device.platform == "cpu" else CudaReader(shape, pool, device)
