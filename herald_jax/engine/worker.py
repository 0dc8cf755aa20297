"""A daemon thread that runs one task after another."""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from herald_jax.engine.errors import WaitTimeout

GRACE_SECONDS = 1.0
_WORKERS: weakref.WeakSet[Worker] = weakref.WeakSet()


@atexit.register
def _close_at_exit() -> None:
    """No worker may be in native code when the interpreter ends."""
    close_all([worker for worker in _WORKERS if worker.alive])


def close_all(workers: Sequence[Worker]) -> None:
    """Ends threads after what is queued; those that hang are left behind after a second in all."""
    for worker in workers:
        worker.end()
    deadline = time.monotonic() + GRACE_SECONDS
    for worker in workers:
        worker.join(max(0.0, deadline - time.monotonic()))


class Worker:
    """Runs submitted tasks in order on its own thread; dies with the process, never holds it."""

    def __init__(self, name: str, *, shares: Worker | None = None) -> None:
        """Starts the thread; ``shares``: a worker whose tasks it runs too, whoever is free."""
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
        self._tasks = queue.SimpleQueue() if shares is None else shares._tasks
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        _WORKERS.add(self)

    def _run(self) -> None:
        while (item := self._tasks.get()) is not None:
            future, task = item
            # Whoever submitted a task may have cancelled it meanwhile.
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(task())
                except BaseException as error:
                    future.set_exception(error)
            # What a task refers to must not wait for the next one, nor be freed by this thread
            # while the interpreter ends: freeing device arrays then aborts the process.
            del item, future, task

    def submit(self, task: Callable[[], Any]) -> Future[Any]:
        """Queues ``task``; the future carries its result or exception."""
        future: Future[Any] = Future()
        self._tasks.put((future, task))
        return future

    @property
    def alive(self) -> bool:
        """Whether the thread still runs."""
        return self._thread.is_alive()

    def end(self) -> None:
        """Has the thread end after what is queued."""
        self._tasks.put(None)

    def join(self, timeout: float) -> None:
        """Waits until the thread has ended, or for so many seconds."""
        self._thread.join(timeout)

    def close(self) -> None:
        """Ends the thread after what is queued; one that hangs is left behind after a second."""
        close_all([self])


def wait_done(
    futures: Sequence[Future[Any]],
    workers: Sequence[Worker],
    timeout: float,
    unfinished: Callable[[str], str],
) -> None:
    """Waits until tasks, each with the worker that runs it, have ended in whatever way.

    Args:
      timeout: seconds in all.
      unfinished: what to say, given "is still running" or "was lost".

    Raises:
      WaitTimeout: one did not end in time, or its thread was lost.
    """
    deadline = time.monotonic() + timeout
    for future, worker in zip(futures, workers, strict=False):
        while not future.done():
            if time.monotonic() > deadline or not worker.alive:
                raise WaitTimeout(unfinished("is still running" if worker.alive else "was lost"))
            with contextlib.suppress(TimeoutError):
                future.exception(timeout=0.5)
