"""Copies between host and device: staging memory, asynchronous puts, deferred fetches."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import jax
import numpy as np

import host_kernels


def put(array: np.ndarray, device: jax.Device) -> jax.Array:
    """Starts a copy of ``array`` to the device; the result is a copy, never a view.

    On an accelerator the source is read later: it must not change until the result is ready. On
    the CPU backend a plain put would alias NumPy memory, so a copy is forced.
    """
    if device.platform == "cpu":
        array = np.array(array, copy=True)
    return jax.device_put(array, device)


def start_fetch(arrays: Sequence[jax.Array]) -> None:
    """Starts device-to-host copies that later ``np.asarray`` calls complete."""
    for array in arrays:
        array.copy_to_host_async()


class Staging:
    """Host buffers from which the idle pool is filled, one K and one V array per sparse layer.

    Rows follow the sparse pool: ``[own block (B) | tail (B) | selected (K)]``. On CUDA the memory
    is registered with the driver, without which a copy runs at a fraction of the PCIe rate.
    """

    def __init__(
        self, layers: int, shape: tuple[int, int, int, int], dtype: np.dtype, device: jax.Device
    ) -> None:
        """Allocates staging for ``layers`` layers of ``shape`` [N, R, H_kv, D]."""
        self.device = device
        count = int(np.prod(shape)) * np.dtype(dtype).itemsize
        stride = -(-count // 4096) * 4096
        self.nbytes = 2 * layers * stride
        self.keys: list[np.ndarray] = []
        self.values: list[np.ndarray] = []
        self._registered: list[int] = []
        self._copies: list[list[jax.Array]] = [[] for _ in range(layers)]
        if not layers:
            return
        self._arena = host_kernels.Arena(self.nbytes)
        buffer = self._arena.buffer
        for index in range(2 * layers):
            part = buffer[index * stride : index * stride + count].view(dtype).reshape(shape)
            (self.keys if index % 2 == 0 else self.values).append(part)
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

    def reclaim(self, layer: int) -> None:
        """Waits until earlier copies out of a layer's buffers are done."""
        for array in self._copies[layer]:
            # A donated array's buffer moved on to a later program, which waits for the copy.
            if not array.is_deleted():
                array.block_until_ready()
        self._copies[layer] = []

    def clear(self, slot: int) -> None:
        """Zeroes a slot's rows in every layer, once earlier copies of them are done."""
        for layer, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            self.reclaim(layer)
            keys[slot] = 0
            values[slot] = 0

    def send(self, layer: int) -> tuple[jax.Array, jax.Array]:
        """Starts the copies of one layer; returns its idle-pool K and V."""
        pair = put(self.keys[layer], self.device), put(self.values[layer], self.device)
        self._copies[layer] = list(pair)
        return pair

    def close(self) -> None:
        """Unregisters the memory."""
        for pointer in self._registered:
            with contextlib.suppress(RuntimeError, ValueError):
                self.device.client.dma_unmap(pointer)
        self._registered = []
        self.keys, self.values, self._copies = [], [], []
