"""Waiting for the device, but not for ever."""

from __future__ import annotations

import time

import jax

from herald_jax.engine.errors import WaitTimeout


def wait_ready(array: jax.Array, timeout: float, what: str) -> None:
    """Waits for an array of the device, but not for ever.

    Raises:
      WaitTimeout: after ``timeout`` seconds, naming ``what`` was waited for.
    """
    deadline = time.monotonic() + timeout
    pause = 1e-5
    while not array.is_ready():  # type: ignore[attr-defined]
        if time.monotonic() > deadline:
            raise WaitTimeout(f"waited {timeout:g} s for {what}")
        time.sleep(pause)
        pause = min(pause * 2, 2e-4)
