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
#: Of ``cuDeviceGetAttribute``: parts of the architecture's number, and whether memory that was
#: registered has the host's address on the device.
MAJOR, MINOR, SAME_ADDRESS = 75, 76, 91
#: What an architecture that the compiler does not know yet can run.
OLDEST = "compute_80"


class CudaError(RuntimeError):
    """The driver or the compiler refused something."""


@functools.cache
def driver() -> ctypes.CDLL:
    """libcuda.

    Raises:
      CudaError: the machine has none, or it does not start.
    """
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaError(f"NVIDIA's driver could not be loaded: {error}") from None
    if status := library.cuInit(0):
        raise CudaError(f"NVIDIA's driver could not be started: error {status}")
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
          CudaError: there is no such device, or it finds host memory at other addresses.
        """
        library = driver()
        self.device = ctypes.c_int()
        check(library.cuDeviceGet(ctypes.byref(self.device), ordinal), "the device was not found")
        self._context = ctypes.c_void_p()
        check(
            library.cuDevicePrimaryCtxRetain(ctypes.byref(self._context), self.device),
            "the device's context could not be had",
        )
        if not self._attribute(SAME_ADDRESS):
            raise CudaError("the device finds host memory at other addresses than the host")

    def enter(self) -> ctypes.CDLL:
        """The driver, with this context current on the calling thread."""
        library = driver()
        check(library.cuCtxSetCurrent(self._context), "the context could not be entered")
        return library

    @property
    def architecture(self) -> str:
        """Such as "sm_90"."""
        return f"sm_{self._attribute(MAJOR)}{self._attribute(MINOR)}"

    def _attribute(self, which: int) -> int:
        value = ctypes.c_int()
        check(
            self.enter().cuDeviceGetAttribute(ctypes.byref(value), which, self.device),
            "the device does not tell what it is",
        )
        return value.value

    def map(self, buffer: np.ndarray) -> None:
        """Pins host memory and maps it for the device, which finds it at the same address."""
        status = self.enter().cuMemHostRegister_v2(
            ctypes.c_void_p(buffer.ctypes.data), ctypes.c_size_t(buffer.nbytes), PORTABLE | MAPPED
        )
        check(status, f"{buffer.nbytes} bytes of host memory could not be mapped for the device")

    def unmap(self, buffer: np.ndarray) -> None:
        """Takes ``map`` back.

        Raises:
          CudaError: the driver refuses.
        """
        status = self.enter().cuMemHostUnregister(ctypes.c_void_p(buffer.ctypes.data))
        check(status, "host memory could not be unmapped")


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
    """What the driver loads for a CUDA source and one architecture.

    Raises:
      CudaError: the compiler is missing, or what it said first.
    """
    try:
        return _translated(source, [f"--gpu-architecture={architecture}", *more], "CUBIN")
    except CudaError:
        # The driver translates what is older than the device.
        return _translated(source, [f"--gpu-architecture={OLDEST}", *more], "PTX")


def _translated(source: str, options: list[str], form: str) -> bytes:
    library, program = _compiler(), ctypes.c_void_p()
    told = [option.encode() for option in [*options, "--std=c++17"]]

    def run(name: str, *arguments: Any) -> None:
        if status := getattr(library, f"nvrtc{name}")(*arguments):
            said = _log(library, program) or f"{name} failed with {status}"
            raise CudaError(f"the kernel was not compiled: {said}")

    run("CreateProgram", ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None)
    try:
        run("CompileProgram", program, len(told), (ctypes.c_char_p * len(told))(*told))
        size = ctypes.c_size_t()
        run(f"Get{form}Size", program, ctypes.byref(size))
        image = ctypes.create_string_buffer(size.value)
        run(f"Get{form}", program, image)
        return image.raw
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _log(library: ctypes.CDLL, program: ctypes.c_void_p) -> str:
    """The first line of what the compiler said."""
    size = ctypes.c_size_t()
    if not program or library.nvrtcGetProgramLogSize(program, ctypes.byref(size)):
        return ""
    text = ctypes.create_string_buffer(size.value + 1)
    library.nvrtcGetProgramLog(program, text)
    return next(iter(text.value.decode(errors="replace").strip().splitlines()), "")
