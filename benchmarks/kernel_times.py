"""Which kernels the device spends its time in, read from JAX's own profiler."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax


def kernel_times(run: Callable[[], Any], parts: int) -> dict[str, float]:
    """Milliseconds by kernel name of one call of ``run``, divided by ``parts``; longest first.

    Empty where the device's kernels leave no trace, as on the CPU backend.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        found = list(Path(folder).rglob("*.trace.json.gz"))
        events = json.loads(gzip.decompress(found[0].read_bytes()))["traceEvents"] if found else []
    devices = {
        event["pid"]
        for event in events
        if event.get("name") == "process_name" and "/device:" in event["args"]["name"]
    }
    total: dict[str, float] = defaultdict(float)
    for event in events:
        if event.get("ph") == "X" and event["pid"] in devices:
            total[event["name"]] += event["dur"] / 1e3 / parts
    ordered = sorted(total.items(), key=lambda item: -item[1])
    return {name: round(milliseconds, 4) for name, milliseconds in ordered}
