"""A stand-in for NVIDIA's driver on machines without it, for what reads rows of host memory.

Work is done late, one piece of it whenever somebody looks whether it is done, and reads host memory
only then: who changes, unmaps or frees memory too early is found out.
"""

from __future__ import annotations

import ctypes
import itertools
import struct
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from herald_jax.kv import cuda_driver

NOT_READY, REFUSED = 600, 2


def plain(argument: Any) -> int:
    return int(getattr(argument, "value", argument) or 0)


def memory(address: int, shape: tuple[int, ...], dtype: Any = np.uint8) -> np.ndarray:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
    return raw.view(dtype).reshape(shape)


class FakeCuda:
    """The functions of libcuda that are used; whatever nobody may do is an AssertionError.

    Attributes:
      mapped: bytes by address of what the device may read.
      maps: that are still granted.
      copies, kernels: how often each was queued.
    """

    def __init__(self) -> None:
        self.mapped: dict[int, int] = {}
        self.maps = 1 << 30
        self.copies = self.kernels = 0
        self._streams: dict[int, deque[Callable[[], None]]] = {}
        self._passed: dict[int, bool] = {}
        self._handles = itertools.count(8, 8)
        self._lock = threading.RLock()

    def __getattr__(self, name: str) -> Callable[..., int]:
        """Calls that change nothing here."""
        if name in ("cuCtxSetCurrent", "cuModuleUnload", "cuCtxGetStreamPriorityRange"):
            return lambda *_: 0
        if name in ("cuModuleLoadData", "cuModuleGetFunction", "cuDevicePrimaryCtxRetain"):
            return self._make
        raise AttributeError(name)

    def _make(self, made: Any, *_: Any) -> int:
        made._obj.value = next(self._handles)
        return 0

    def cuGetErrorString(self, status: int, text: Any) -> int:
        text._obj.value = f"status {status}".encode()
        return 0

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        device._obj.value = ordinal
        return 0

    def cuDeviceGetAttribute(self, value: Any, which: int, device: Any) -> int:
        value._obj.value = 1
        return 0

    def cuMemHostRegister_v2(self, at: Any, size: Any, flags: int) -> int:
        self.maps -= 1
        if self.maps < 0:
            return REFUSED
        begin, end = plain(at), plain(at) + plain(size)
        for other, length in self.mapped.items():
            assert end <= other or other + length <= begin, "memory is mapped twice"
        self.mapped[begin] = plain(size)
        return 0

    def cuMemHostUnregister(self, at: Any) -> int:
        assert not any(self._streams.values()), "memory is unmapped while work is under way"
        del self.mapped[plain(at)]
        return 0

    def _check_mapped(self, at: int, size: int) -> None:
        inside = (begin <= at and at + size <= begin + n for begin, n in self.mapped.items())
        assert not size or any(inside), "the device reads memory that is not mapped"

    def cuStreamCreateWithPriority(self, stream: Any, *_: Any) -> int:
        self._make(stream)
        self._streams[stream._obj.value] = deque()
        return 0

    def cuStreamDestroy_v2(self, stream: Any) -> int:
        assert not self._streams.pop(plain(stream)), "a stream is destroyed while work is under way"
        return 0

    def _look(self, stream: int) -> bool:
        """Does one piece of work; whether nothing is left."""
        with self._lock:
            queue = self._streams[stream]
            if queue:
                queue.popleft()()
            return not queue

    def cuStreamQuery(self, stream: Any) -> int:
        return 0 if self._look(plain(stream)) else NOT_READY

    def cuEventCreate(self, event: Any, flags: int) -> int:
        return self._make(event)

    def cuEventRecord(self, event: Any, stream: Any) -> int:
        mark = plain(event)
        self._passed[mark] = False
        self._streams[plain(stream)].append(lambda: self._passed.update({mark: True}))
        return 0

    def cuEventQuery(self, event: Any) -> int:
        for stream in self._streams:
            self._look(stream)
        return 0 if self._passed[plain(event)] else NOT_READY

    def cuEventDestroy_v2(self, event: Any) -> int:
        return 0

    def cuMemcpyHtoDAsync_v2(self, to: Any, at: Any, size: Any, stream: Any) -> int:
        target, source, count = plain(to), plain(at), plain(size)
        self.copies += 1

        def copy() -> None:
            self._check_mapped(source, count)
            ctypes.memmove(target, source, count)

        self._streams[plain(stream)].append(copy)
        return 0

    def cuLaunchKernel(self, function: Any, *rest: Any) -> int:
        stream, params = rest[7], rest[8]
        # As the driver does, arguments are taken now.
        sizes = (8, 4, 4, 4, 4, 8, 8, 4, 4)
        numbers = [
            int.from_bytes(ctypes.string_at(params[n + 1], size), "little")
            for n, size in enumerate(sizes)
        ]
        slots = ctypes.string_at(params[0], 16 * numbers[1])
        self.kernels += 1
        self._streams[plain(stream)].append(lambda: self._read_rows(slots, *numbers))
        return 0

    def _read_rows(
        self,
        slots: bytes,
        indices: int,
        count: int,
        heads: int,
        capacity: int,
        lanes: int,
        keys: int,
        values: int,
        rows: int,
        offset: int,
    ) -> None:
        """What read_rows.cu does."""
        named = memory(indices, (count, heads, capacity), np.int32)
        pools = [memory(at, (count, rows, heads, 16 * lanes)) for at in (keys, values)]
        for n, (at, span, wanted) in enumerate(struct.iter_unpack("<Qii", slots)):
            self._check_mapped(at, heads * 2 * span * 16 * lanes if wanted else 0)
            for head, which in itertools.product(range(heads if wanted else 0), (0, 1)):
                extent = memory(at, (heads, 2, span, 16 * lanes))[head, which]
                chosen = extent[named[n, head, :wanted]]
                pools[which][n, offset : offset + wanted, head] = chosen


def install(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Puts one in the place of libcuda, and of the compiler."""
    fake = FakeCuda()
    monkeypatch.setattr(cuda_driver, "driver", lambda: fake)
    monkeypatch.setattr(cuda_driver, "_compiled", lambda *_: b"")
    return fake
