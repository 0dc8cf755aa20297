"""Copies between host and device: staging memory, asynchronous puts, deferred fetches."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

import host_kernels

PAGE = 4096


def put(array: np.ndarray, device: jax.Device) -> jax.Array:
    """Starts a copy of ``array`` to the device; the result is a copy, never a view.

    On an accelerator the source is read later: it must not change until the result is ready. On
    the CPU backend a plain put would alias NumPy memory, so a copy is forced.
    """
    if device.platform == "cpu":
        array = np.array(array, copy=True)
    return jax.device_put(array, device)


def start_fetch(arrays: Sequence[jax.Array]) -> None:
    """Starts device-to-host copies that later ``np.asarray`` calls complete; for small arrays."""
    for array in arrays:
        array.copy_to_host_async()


def fetched(array: jax.Array) -> jax.Array:
    """The same array in host memory, on its way there; for large ones.

    On CUDA that memory is pinned: a copy runs at the rate of the link, where one to ordinary memory
    runs at a twentieth of it.
    """
    (device,) = array.devices()
    if device.platform != "gpu":
        return array
    return jax.device_put(array, SingleDeviceSharding(device, memory_kind="pinned_host"))


class RegisteredArrays:
    """Zeroed NumPy arrays in one arena, each on pages of its own.

    On CUDA the memory is registered with the driver, without which a copy runs at a fraction of the
    PCIe rate.

    Attributes:
      arrays: in the order asked for; ``nbytes``: bytes reserved.
    """

    def __init__(
        self, wanted: Sequence[tuple[tuple[int, ...], np.dtype]], device: jax.Device
    ) -> None:
        """Allocates an array for each wanted (shape, dtype).

        Raises:
          MemoryError: the operating system refuses the memory.
        """
        self.device = device
        self.arrays: list[np.ndarray] = []
        self._registered: list[int] = []
        sizes = [int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in wanted]
        starts = [0, *itertools.accumulate(-(-size // PAGE) * PAGE for size in sizes)]
        self.nbytes = starts[-1]
        if not self.nbytes:
            return
        self._arena = host_kernels.Arena(self.nbytes)
        buffer = self._arena.buffer
        for start, size, (shape, dtype) in zip(starts, sizes, wanted, strict=False):
            self.arrays.append(buffer[start : start + size].view(dtype).reshape(shape))
        self._register(buffer)

    def _register(self, buffer: np.ndarray) -> None:
        client = self.device.client
        if self.device.platform != "gpu" or not hasattr(client, "dma_map"):
            return
        # An unregistered buffer still works, only slower; `herald doctor` shows the rate.
        with contextlib.suppress(RuntimeError, ValueError):
            client.dma_map(buffer.ctypes.data, buffer.nbytes)
            self._registered.append(buffer.ctypes.data)

    @property
    def registered(self) -> bool:
        """Whether the driver knows this memory."""
        return bool(self._registered)

    def close(self) -> None:
        """Unregisters the memory."""
        for pointer in self._registered:
            with contextlib.suppress(RuntimeError, ValueError):
                self.device.client.dma_unmap(pointer)
        self._registered = []
        self.arrays = []


class Copies:
    """Copies out of host memory by layer, until they are done and the memory may change."""

    def __init__(self, layers: int) -> None:
        self._started: list[list[jax.Array]] = [[] for _ in range(layers)]

    def started(self, layer: int, arrays: Sequence[jax.Array]) -> None:
        """Remembers the copies of a layer."""
        self._started[layer] = list(arrays)

    def reclaim(self, layer: int) -> None:
        """Waits until earlier copies out of a layer's buffers are done."""
        for array in self._started[layer]:
            # A donated array's buffer moved on to a later program, which waits for the copy.
            if not array.is_deleted():
                array.block_until_ready()
        self._started[layer] = []


class Staging:
    """Host buffers from which whole layers are filled, one K and one V array per layer."""

    def __init__(
        self, layers: int, shape: tuple[int, int, int, int], dtype: np.dtype, device: jax.Device
    ) -> None:
        """Allocates staging for ``layers`` layers of ``shape`` [N, R, H_kv, D]."""
        self.device = device
        self._memory = RegisteredArrays([(shape, np.dtype(dtype))] * (2 * layers), device)
        self.keys, self.values = self._memory.arrays[::2], self._memory.arrays[1::2]
        self._copies = Copies(layers)

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""
        return self._memory.nbytes

    @property
    def registered(self) -> bool:
        """Whether the driver knows this memory."""
        return self._memory.registered

    def reclaim(self, layer: int) -> None:
        """Waits until earlier copies out of a layer's buffers are done."""
        self._copies.reclaim(layer)

    def clear(self, slot: int) -> None:
        """Zeroes a slot's rows in every layer, once earlier copies of them are done."""
        for layer, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            self.reclaim(layer)
            keys[slot] = 0
            values[slot] = 0

    def send(self, layer: int) -> tuple[jax.Array, jax.Array]:
        """Starts the copies of one layer; returns its idle-pool K and V."""
        pair = put(self.keys[layer], self.device), put(self.values[layer], self.device)
        self._copies.started(layer, pair)
        return pair

    def close(self) -> None:
        """Unregisters the memory."""
        self._memory.close()
        self.keys, self.values = [], []
