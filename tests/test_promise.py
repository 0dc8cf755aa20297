"""Values that a thread waits for while another makes them."""

from __future__ import annotations

import threading

import pytest

from herald_jax.engine.errors import EngineError, WaitTimeout
from herald_jax.engine.promise import Promises, await_promise, kept


def test_values_arrive_in_whatever_order_they_are_made():
    with Promises[str](3) as made:
        found = []
        waiting = threading.Thread(
            target=lambda: found.extend(await_promise(each, 10, "a value") for each in made.made)
        )
        waiting.start()
        made.keep(slice(2, None), ["c"])
        made.keep(slice(2), ["a", "b"])
        waiting.join(10)
    assert found == ["a", "b", "c"]
    assert [await_promise(each, 0, "a value") for each in kept(["d"])] == ["d"]


def test_a_failure_reaches_who_waits_and_keeps_what_was_there():
    made = Promises[str](2)

    def fails():
        with made:
            made.keep(slice(1), ["a"])
            raise EngineError("an error of the device")

    with pytest.raises(EngineError, match="of the device"):
        fails()
    assert await_promise(made.made[0], 0, "a value") == "a"
    with pytest.raises(EngineError, match=r"the main stream failed: .*of the device"):
        await_promise(made.made[1], 0, "a value")


def test_a_wait_is_not_for_ever_and_says_for_what():
    with (
        Promises[str](1) as made,
        pytest.raises(WaitTimeout, match=r"waited 0.01 s for the queries"),
    ):
        await_promise(made.made[0], 0.01, "the queries")
