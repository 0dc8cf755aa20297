"""A rehearsal: code runs as always, but its programs are compiled instead of executed."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from herald_jax.engine.errors import WaitTimeout
from herald_jax.engine.worker import Worker, close_all

#: Compilers at once at most: each takes host memory, and a network has few programs.
MOST_COMPILERS = 16
#: Zeros up to this size are copied to the device sooner than a program that makes them compiles.
COPIED_BYTES = 4 << 20
#: Called with ("programs", done, total).
Progress = Callable[[str, int, int], None]
#: A program and what its arguments look like.
Key = tuple[Any, ...]

_CURRENT: ContextVar[Rehearsal | None] = ContextVar("rehearsal", default=None)


@dataclass(frozen=True)
class Compiled:
    """What is known of a program that is compiled.

    Attributes:
      name: of its body.
      scratch: bytes of the device that it needs beside its arguments: temporaries, and results that
        take the place of no argument. None where the compiler does not tell.
    """

    name: str
    scratch: int | None


def perform(program: Any, args: Sequence[Any], donate: Sequence[int] = ()) -> Any:
    """Calls a jitted program, or has it compiled where this thread rehearses.

    Args:
      donate: positions in ``args`` whose buffers it may reuse.
    """
    rehearsal = _CURRENT.get()
    return program(*args) if rehearsal is None else rehearsal.call(program, args, donate)


class Rehearsal:
    """Compiles what one thread calls, several programs at once; their results are zeros.

    ``jax.jit`` finds the executables when the thread calls the same programs again: lowering is
    cached with what was compiled of it. Other threads go on as always.

    Attributes:
      scratch: most bytes of ``Compiled.scratch`` among the programs called.
    """

    def __init__(self, known: dict[Key, Compiled], device: jax.Device, timeout: float) -> None:
        """Begins one; ``known``: programs compiled already, to which it adds."""
        self.known, self.device, self.timeout = known, device, timeout
        self._called: dict[Key, None] = {}
        self._compiling: dict[Key, tuple[str, Future[Any]]] = {}
        self._workers: list[Worker] = []

    @contextlib.contextmanager
    def of_this_thread(self) -> Iterator[None]:
        """Rehearses what this thread does in the body."""
        token = _CURRENT.set(self)
        try:
            yield
        finally:
            _CURRENT.reset(token)

    def call(self, program: Any, args: Sequence[Any], donate: Sequence[int]) -> Any:
        """Has a program compiled unless it is; returns zeros of the shapes that it returns."""
        leaves, tree = jax.tree.flatten(tuple(args))
        key = (program, tree, *map(_look, leaves))
        traced = program.trace(*args)
        self._called[key] = None
        if key not in self.known and key not in self._compiling:
            # Lowered by this thread: another one may have other settings of JAX, and the lowering
            # would be another then.
            compile_ = traced.lower().compile
            self._compiling[key] = program.__name__, self._submit(compile_)
        free: dict[Any, list[jax.Array]] = {}
        for leaf in jax.tree.leaves([args[at] for at in donate]):
            free.setdefault(_look(leaf), []).append(leaf)

        def stand_in(result: jax.ShapeDtypeStruct) -> jax.Array:
            # A donated buffer comes back, as it does from the program: nothing else has room.
            given = free.get(_look(result))
            return given.pop() if given else _zeros(result.shape, result.dtype, self.device)

        return jax.tree.map(stand_in, traced.out_info)

    def finish(self, progress: Progress | None) -> None:
        """Waits for the compilers.

        Raises:
          WaitTimeout: a program took longer than ``timeout`` seconds, counted from here.
        """
        total = len(self._compiling)
        deadline = time.monotonic() + self.timeout
        for done, (key, (name, future)) in enumerate(self._compiling.items()):
            if progress is not None:
                progress("programs", done, total)
            try:
                made = future.result(max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                raise WaitTimeout(
                    f"waited {self.timeout:g} s for the compiler of program {name}"
                ) from None
            self.known[key] = Compiled(name, _scratch(made))
        if progress is not None and total:
            progress("programs", total, total)

    def close(self) -> None:
        """Ends the compilers' threads; what none of them has begun is not compiled."""
        for _, future in self._compiling.values():
            future.cancel()
        close_all(self._workers)

    @property
    def scratch(self) -> int | None:
        """See the class; None where the compiler does not tell."""
        found = [self.known[key].scratch for key in self._called if key in self.known]
        told = [each for each in found if each is not None]
        return max(told) if told else None

    def _submit(self, task: Callable[[], Any]) -> Future[Any]:
        if len(self._workers) < min(MOST_COMPILERS, len(os.sched_getaffinity(0))):
            first = self._workers[0] if self._workers else None
            self._workers.append(Worker(f"compiler-{len(self._workers)}", shares=first))
        return self._workers[0].submit(task)


def _look(leaf: Any) -> tuple[Any, ...]:
    """What of an argument decides which executable runs."""
    return np.shape(leaf), getattr(leaf, "dtype", type(leaf))


def _scratch(made: jax.stages.Compiled) -> int | None:
    analysis = made.memory_analysis()
    if analysis is None:
        return None
    fresh = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return int(analysis.temp_size_in_bytes + max(0, fresh))


def _zeros(shape: tuple[int, ...], dtype: np.dtype, device: jax.Device) -> jax.Array:
    if math.prod(shape) * dtype.itemsize <= COPIED_BYTES:
        return jax.device_put(np.zeros(shape, dtype), device)
    return _filler(shape, dtype, device)()


@functools.lru_cache
def _filler(shape: tuple[int, ...], dtype: np.dtype, device: jax.Device) -> Callable[[], jax.Array]:
    return jax.jit(lambda: jnp.zeros(shape, dtype, device=device))
