"""What one thread computes with before another one has made all of it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Generic, TypeVar

from herald_jax.engine.errors import EngineError, WaitTimeout

T = TypeVar("T")


class Promises(Generic[T]):
    """Values that the body of a with statement sets, for others who wait for them.

    Should the body fail, whoever waits fails with it.
    """

    def __init__(self, count: int) -> None:
        """``count`` values, none of them set."""
        self.made: list[Future[T]] = [Future() for _ in range(count)]

    def __enter__(self) -> Promises[T]:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            return
        for each in self.made:
            if not each.done():
                # Of their own: an exception that several threads raise has the traces of all.
                each.set_exception(EngineError(f"the main stream failed: {error!r}"))

    def keep(self, part: slice, values: Sequence[T]) -> None:
        """Sets some of the values."""
        for each, value in zip(self.made[part], values, strict=True):
            each.set_result(value)


def kept(values: Sequence[T]) -> list[Future[T]]:
    """Values that are there already."""
    with Promises[T](len(values)) as promised:
        promised.keep(slice(None), values)
    return promised.made


def await_promise(made: Future[T], timeout: float, what: str) -> T:
    """The value, once it is set.

    Raises:
      WaitTimeout: after ``timeout`` seconds, naming ``what`` was waited for.
      EngineError: whoever had to set it failed.
    """
    try:
        return made.result(timeout)
    except TimeoutError:
        raise WaitTimeout(f"waited {timeout:g} s for {what}") from None
