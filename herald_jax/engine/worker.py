"""A daemon thread that runs one task after another."""

from __future__ import annotations

import atexit
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

GRACE_SECONDS = 1.0
_WORKERS: weakref.WeakSet[Worker] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """No worker may be in native code when the interpreter ends."""
    for worker in list(_WORKERS):
        if worker.alive:
            worker.close()


class Worker:
    """Runs submitted tasks in order on its own thread; dies with the process, never holds it."""

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
        self._tasks = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        _WORKERS.add(self)

    def _run(self) -> None:
        while (item := self._tasks.get()) is not None:
            future, task = item
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

    def close(self) -> None:
        """Ends the thread after what is queued; one that hangs is left behind after a second."""
        self._tasks.put(None)
        self._thread.join(timeout=GRACE_SECONDS)
