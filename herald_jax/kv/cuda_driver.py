"""The few functions of NVIDIA's driver and runtime compiler that JAX does not offer.

A kernel that runs beside the programs of XLA, which has one compute stream, needs a stream of its
own; host memory that it reads needs to be mapped for the device.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

#: Of ``cuMemHostRegister``: known to every context, and mapped for the device.
PORTABLE, MAPPED = 1, 2
#: Of ``cuStreamCreateWithPriority``: does not wait for the default stream.
NON_BLOCKING = 1
NOT_READY = 600
#: Of ``cuEventCreate``.
NO_TIMING = 2
MAJOR, MINOR = 75, 76


class CudaError(RuntimeError):
    """The driver or the compiler refused something."""


@functools.cache
def driver() -> ctypes.CDLL:
    """libcuda.

    Raises:
      CudaError: the machine has none.
    """
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaError(f"NVIDIA's driver could not be loaded: {error}") from None
    library.cuInit(0)
    return library


def check(status: int, what: str) -> None:
    """Raises CudaError unless ``status`` says that all is well."""
    if status:
        text = ctypes.c_char_p()
        driver().cuGetErrorString(status, ctypes.byref(text))
        said = text.value.decode() if text.value else f"error {status}"
        raise CudaError(f"{what}: {said}")


class Context:
    """The context of a device that XLA uses too, for calls from any thread."""

    def __init__(self, ordinal: int) -> None:
        """``ordinal``: of the device, as the process sees them.

        Raises:
          CudaError: there is no such device.
        """
        library = driver()
        self.device = ctypes.c_int()
        check(library.cuDeviceGet(ctypes.byref(self.device), ordinal), "the device was not found")
        self._context = ctypes.c_void_p()
        check(
            library.cuDevicePrimaryCtxRetain(ctypes.byref(self._context), self.device),
            "the device's context could not be had",
        )

    def enter(self) -> ctypes.CDLL:
        """The driver, with this context current on the calling thread."""
        library = driver()
        check(library.cuCtxSetCurrent(self._context), "the context could not be entered")
        return library

    @property
    def architecture(self) -> str:
        """Such as "sm_90"."""
        library, found = self.enter(), []
        for which in (MAJOR, MINOR):
            value = ctypes.c_int()
            check(
                library.cuDeviceGetAttribute(ctypes.byref(value), which, self.device),
                "the device's architecture is unknown",
            )
            found.append(value.value)
        return f"sm_{found[0]}{found[1]}"

    def map(self, buffer: np.ndarray) -> None:
        """Pins host memory and maps it for the device, which finds it at the same address."""
        status = self.enter().cuMemHostRegister_v2(
            ctypes.c_void_p(buffer.ctypes.data), ctypes.c_size_t(buffer.nbytes), PORTABLE | MAPPED
        )
        check(status, f"{buffer.nbytes} bytes of host memory could not be mapped for the device")

    def unmap(self, buffer: np.ndarray) -> None:
        """Takes ``map`` back."""
        self.enter().cuMemHostUnregister(ctypes.c_void_p(buffer.ctypes.data))


def _ended(status: int) -> bool:
    if status == NOT_READY:
        return False
    check(status, "the device failed")
    return True


class Mark:
    """A place in a stream's queue."""

    def __init__(self, context: Context, stream: ctypes.c_void_p) -> None:
        """Marks the end of the queue."""
        self._context, self._event = context, ctypes.c_void_p()
        library = context.enter()
        check(library.cuEventCreate(ctypes.byref(self._event), NO_TIMING), "no event could be made")
        check(library.cuEventRecord(self._event, stream), "the event could not be recorded")

    def passed(self) -> bool:
        """Whether all that was queued before it has ended.

        Raises:
          CudaError: it failed.
        """
        return _ended(self._context.enter().cuEventQuery(self._event))

    def __del__(self) -> None:
        with contextlib.suppress(CudaError):
            self._context.enter().cuEventDestroy_v2(self._event)


class Kernel:
    """One function of a CUDA source, and a stream of its own to run it on."""

    def __init__(
        self, context: Context, source: Path, name: str, options: Sequence[str] = ()
    ) -> None:
        """Compiles and loads it; ``options``: of the compiler.

        Raises:
          CudaError: the compiler is missing or refuses it, or the driver does.
        """
        self.context = context
        image = _compiled(source.read_text(), context.architecture, tuple(options))
        library = context.enter()
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        check(library.cuModuleLoadData(ctypes.byref(self._module), image), f"{name} was not loaded")
        check(
            library.cuModuleGetFunction(ctypes.byref(self._function), self._module, name.encode()),
            f"{name} was not found",
        )
        least, greatest = ctypes.c_int(), ctypes.c_int()
        library.cuCtxGetStreamPriorityRange(ctypes.byref(least), ctypes.byref(greatest))
        self._stream = ctypes.c_void_p()
        check(
            library.cuStreamCreateWithPriority(ctypes.byref(self._stream), NON_BLOCKING, greatest),
            "no stream could be made",
        )

    def launch(
        self,
        blocks: int,
        threads: int,
        arguments: Sequence[Any],
    ) -> None:
        """Queues the kernel; returns at once.

        Args:
          blocks, threads: of the grid, and of a block.
          arguments: of the function, in order, of ctypes.

        Raises:
          CudaError: the driver refuses.
        """
        pointers = (ctypes.c_void_p * len(arguments))(
            *(ctypes.addressof(argument) for argument in arguments)
        )
        status = self.context.enter().cuLaunchKernel(
            self._function, blocks, 1, 1, threads, 1, 1, 0, self._stream, pointers, None
        )
        check(status, "the kernel could not be launched")

    def copy(self, source: np.ndarray, target: int) -> None:
        """Queues a copy of mapped host memory to an address of the device; returns at once.

        Raises:
          CudaError: the driver refuses.
        """
        status = self.context.enter().cuMemcpyHtoDAsync_v2(
            ctypes.c_uint64(target),
            ctypes.c_void_p(source.ctypes.data),
            ctypes.c_size_t(source.nbytes),
            self._stream,
        )
        check(status, "the copy could not be started")

    def done(self) -> bool:
        """Whether all that was launched has ended.

        Raises:
          CudaError: it failed.
        """
        return _ended(self.context.enter().cuStreamQuery(self._stream))

    def mark(self) -> Mark:
        """A place in the queue, behind all that was launched so far."""
        return Mark(self.context, self._stream)

    def close(self) -> None:
        """Frees stream and module."""
        library = self.context.enter()
        library.cuStreamDestroy_v2(self._stream)
        library.cuModuleUnload(self._module)


@functools.cache
def _compiler() -> ctypes.CDLL:
    spec = importlib.util.find_spec("nvidia")
    folders = list(spec.submodule_search_locations or []) if spec else []
    # Where the packages of jax[cuda] put it; else where the system looks.
    found = [str(path) for folder in folders for path in Path(folder).glob("*/lib/libnvrtc.so.*")]
    for name in [*sorted(found, reverse=True), "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"]:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise CudaError("NVIDIA's runtime compiler (libnvrtc) was not found: it comes with jax[cuda]")


@functools.cache
def _compiled(source: str, architecture: str, more: tuple[str, ...]) -> bytes:
    """The binary of a CUDA source for one architecture.

    Raises:
      CudaError: the compiler is missing, or its message.
    """
    library, program = _compiler(), ctypes.c_void_p()
    options = [f"--gpu-architecture={architecture}", "--std=c++17", *more]
    library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None)
    try:
        status = library.nvrtcCompileProgram(
            program,
            len(options),
            (ctypes.c_char_p * len(options))(*(option.encode() for option in options)),
        )
        if status:
            raise CudaError(f"the kernel was not compiled: {_log(library, program)}")
        size = ctypes.c_size_t()
        library.nvrtcGetCUBINSize(program, ctypes.byref(size))
        image = ctypes.create_string_buffer(size.value)
        library.nvrtcGetCUBIN(program, image)
        return image.raw
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _log(library: ctypes.CDLL, program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, text)
    return text.value.decode(errors="replace").strip()
