"""A daemon thread that runs one task after another."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class Worker:
    """Runs submitted tasks in order on its own thread; dies with the process, never holds it."""

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
        self._tasks = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (item := self._tasks.get()) is not None:
            future, task = item
            try:
                future.set_result(task())
            except BaseException as error:
                future.set_exception(error)

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
        """Lets the thread end after what is queued."""
        self._tasks.put(None)
