"""Types of the native module; see src/bindings.cc. Private: use the wrappers in host_kernels."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_Floats = NDArray[np.float32]
_Ints = NDArray[np.int32]
_Bytes = NDArray[np.uint8]
_Rows = NDArray[Any]

def attend(
    query: _Floats,
    kv: Sequence[_Rows],
    heads: int,
    attend_len: _Ints,
    select_len: _Ints,
    budget: _Ints,
    indices: _Ints,
    sinks: int,
    recent: int,
    self_key: _Floats | None,
    self_value: _Floats | None,
    elsewhere: _Floats | None,
    log_rest: _Floats | None,
    scale: float,
    output: _Floats | None,
    status: _Ints,
    threads: int,
) -> None: ...
def attend_rows(
    query: _Floats,
    kv: Sequence[_Rows],
    indices: _Ints,
    counts: _Ints,
    tail_begin: _Ints,
    tail_end: _Ints,
    self_key: _Floats | None,
    self_value: _Floats | None,
    scale: float,
    output: _Floats,
    status: _Ints,
    threads: int,
) -> None: ...
def index_rows(
    kv: Sequence[_Rows], index: Sequence[_Rows], start: _Ints, counts: _Ints, threads: int
) -> None: ...
def rerank(
    query: _Floats,
    kv: Sequence[_Rows],
    candidates: _Ints,
    counts: _Ints,
    budget: _Ints,
    indices: _Ints,
    sinks: int,
    recent: int,
    elsewhere: _Floats | None,
    scale: float,
    status: _Ints,
    threads: int,
) -> None: ...
def top_k(values: _Floats, indices: _Ints) -> None: ...
def gather_changes(
    kv: Sequence[_Rows],
    indices: _Ints,
    counts: _Ints,
    previous: _Ints,
    previous_counts: _Ints,
    source: _Ints,
    keys: _Rows,
    values: _Rows,
    threads: int,
) -> int: ...
def gather(
    kv: Sequence[_Rows],
    indices: _Ints,
    counts: _Ints,
    keys: _Rows,
    values: _Rows,
    row_offset: int,
    threads: int,
) -> None: ...
def store(
    kv: Sequence[_Rows],
    start: _Ints,
    counts: _Ints,
    keys: _Rows,
    values: _Rows,
    threads: int,
) -> None: ...
def set_background(on: bool) -> None: ...
def arena(nbytes: int, huge_pages: bool, threads: int) -> tuple[_Bytes, bool, str]: ...
def read_bandwidth(data: _Bytes, threads: int, repeats: int, streams: int, ahead: int) -> float: ...
def copy_bandwidth(source: _Bytes, target: _Bytes, threads: int, repeats: int) -> float: ...
def isa_names() -> list[str]: ...
def available_isas() -> list[str]: ...
def active_isa() -> str: ...
def choose_isa(name: str) -> None: ...
def cpu_name() -> tuple[str, str]: ...
def prefetch() -> tuple[int, int, int]: ...
def set_prefetch(hint: int, distance: int, streams: int) -> None: ...
def cold_scan_rate(
    buffer: _Bytes, hint: int, distance: int, streams: int, threads: int
) -> float: ...
def heap_top_k(values: _Floats, count: int) -> _Ints: ...
def compute_roof(type: str, threads: int) -> float: ...
def clock_rate() -> float: ...
