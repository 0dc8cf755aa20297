"""How far ahead scans ask for memory, measured once on each machine.

On one maker's servers asking for every line ahead gains a fifth, on another's it costs a third, so
no setting is right everywhere. The measurement takes less than a second and is kept in a file.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple, TypedDict

from host_kernels import _native
from host_kernels.arena import Arena
from host_kernels.checks import whole
from host_kernels.threads import resolve_threads

HINTS = ("none", "t0", "t1", "nta")
MAX_DISTANCE, MAX_STREAMS = 65536, 4
FORM = (
    '"none", or HINT:DISTANCE[:STREAMS] with hint t0, t1 or nta, a distance of 64 to 65536 bytes '
    "in steps of 64 and 1 to 4 streams, such as t0:1024:1"
)

# Of the file: a change of what is measured or written makes old files worthless.
VERSION = 1
# Seconds after which no further round begins, and how many rounds tell enough.
PATIENCE, ROUNDS = 0.6, 13
# Bytes scanned by each thread in a sample, and by all at least.
SHARE, SMALLEST = 4 << 20, 32 << 20
# A setting further down the list must be this much faster: differences below are noise.
GAIN = 1.03


class Prefetch(NamedTuple):
    """What a scan asks for ahead of reading it.

    ``hint`` is the cache that a line is asked into ("t0": all levels, "t1": all but the first,
    "nta": past the caches) or "none"; ``distance`` how many bytes ahead; ``streams`` how many
    chunks are read in turns.
    """

    hint: str
    distance: int
    streams: int

    def __str__(self) -> str:
        if self == NONE:
            return "none"
        return f"{self.hint}:{self.distance}:{self.streams}"


NONE = Prefetch("none", 0, 1)
CANDIDATES = (
    NONE,
    Prefetch("none", 0, 4),
    *(Prefetch("t1", distance, 1) for distance in (8192, 16384, 2048)),
    *(Prefetch("t0", distance, 1) for distance in (8192, 1024)),
    Prefetch("t1", 8192, 2),
)


class Calibration(TypedDict):
    """What ``calibrate_prefetch`` tells."""

    setting: str
    # "HERALD_PREFETCH", "set_prefetch", "file", "measurement", or "CPU maker" where this CPU
    # cannot be measured.
    source: str
    gb_per_s: dict[str, float]
    file: str


_chosen: tuple[Prefetch, str] | None = None
_environment_read = False


def _parse(name: str, text: object) -> Prefetch:
    refusal = ValueError(f"{name} must be {FORM}; not {text!r}")
    if not isinstance(text, str):
        raise refusal
    if text == "none":
        return NONE
    hint, *numbers = text.split(":")
    if len(numbers) not in (1, 2) or not all(n.isascii() and n.isdigit() for n in numbers):
        raise refusal
    setting = Prefetch(hint, *(int(n[:9]) for n in [*numbers, "1"][:2]))
    return _checked(setting, refusal)


def _checked(setting: Prefetch, refusal: ValueError) -> Prefetch:
    hint, distance, streams = setting
    least, most = (0, 0) if hint == "none" else (64, MAX_DISTANCE)
    if (
        hint not in HINTS
        or not least <= whole("distance", distance) <= most
        or distance % 64
        or not 1 <= whole("streams", streams) <= MAX_STREAMS
    ):
        raise refusal
    return setting


def _use(setting: Prefetch, source: str) -> None:
    global _chosen
    _native.set_prefetch(HINTS.index(setting.hint), setting.distance, setting.streams)
    _chosen = setting, source


def apply_environment() -> None:
    """Obeys HERALD_PREFETCH, once, before the first kernel runs.

    Raises:
        ValueError: it is not a setting; the message says what is.
    """
    global _environment_read
    if _environment_read:
        return
    text = os.environ.get("HERALD_PREFETCH")
    if text:
        _use(_parse("HERALD_PREFETCH", text), "HERALD_PREFETCH")
    _environment_read = True


def prefetch_setting() -> Prefetch:
    """The setting in force.

    ``set_prefetch`` decides, else the environment variable HERALD_PREFETCH, else the last
    ``calibrate_prefetch``, else a guess from the CPU's maker.

    Raises:
        ValueError: HERALD_PREFETCH is not a setting.
    """
    apply_environment()
    hint, distance, streams = _native.prefetch()
    return Prefetch(HINTS[hint], distance, streams)


def set_prefetch(setting: Prefetch | str) -> None:
    """Scans ask for memory so from now on; results do not depend on it.

    Args:
        setting: a ``Prefetch`` or its text: "none", or HINT:DISTANCE[:STREAMS].

    Raises:
        TypeError, ValueError: no such setting; the message says what is one.
    """
    global _environment_read
    if isinstance(setting, Prefetch):
        checked = _checked(setting, ValueError(f"setting must be {FORM}; not {setting!r}"))
    else:
        checked = _parse("setting", setting)
    _use(checked, "set_prefetch")
    _environment_read = True


def cache_file() -> Path:
    """Where measurements are kept: $XDG_CACHE_HOME, or ~/.cache, and there herald_jax."""
    home = os.environ.get("XDG_CACHE_HOME")
    folder = Path(home) if home and Path(home).is_absolute() else Path("~/.cache").expanduser()
    return folder / "herald_jax" / "prefetch.json"


def calibrate_prefetch(*, refresh: bool = False) -> Calibration:
    """Puts the best setting of this machine in force, unless one was chosen by hand.

    The first time, the scan of keys is timed over memory that is in no cache, on all threads at
    once, with each setting in turn; this takes less than a second. The result is kept in
    ``cache_file()`` by CPU and instruction set. A file that cannot be read is measured anew, one
    that cannot be written is done without.

    Args:
        refresh: measure even if the file knows this machine.

    Returns:
        The setting, where it comes from, the median GB/s (1e9 bytes) of each setting measured
        (empty where it was chosen by hand), and the file.

    Raises:
        ValueError: HERALD_PREFETCH is not a setting.
        MemoryError: the system refuses the memory to scan.
    """
    apply_environment()
    file = cache_file()
    if _chosen is not None and _chosen[1] in ("HERALD_PREFETCH", "set_prefetch"):
        return _told(*_chosen, {}, file)
    machine = "|".join([*_native.cpu_name(), _native.active_isa()]).strip()
    known = {} if refresh else _read(file)
    rates, source = known.get(machine, {}), "file"
    if not rates:
        rates, source = _measure(), "measurement"
        if not rates:
            return _told(prefetch_setting(), "CPU maker", {}, file)
        _write(file, {**_read(file), machine: rates})
    _use(_best(rates), source)
    return _told(_best(rates), source, rates, file)


def _told(setting: Prefetch, source: str, rates: dict[str, float], file: Path) -> Calibration:
    return {"setting": str(setting), "source": source, "gb_per_s": rates, "file": str(file)}


def _best(rates: dict[str, float]) -> Prefetch:
    """The first of those that are as fast as the fastest, up to noise; simple ones come first."""
    enough = max(rates.values()) / GAIN
    return next(each for each in CANDIDATES if rates.get(str(each), 0.0) >= enough)


def _measure() -> dict[str, float]:
    """Median GB/s by setting; empty where this CPU cannot be measured."""
    threads = resolve_threads(None)
    buffer = Arena(max(SMALLEST, threads * SHARE)).buffer
    samples: dict[str, list[float]] = {str(each): [] for each in CANDIDATES}
    end = time.monotonic() + PATIENCE
    # In turns, so that a moment when the machine is busy tells against all of them.
    for _ in range(ROUNDS):
        for each in CANDIDATES:
            rate = _native.cold_scan_rate(
                buffer, HINTS.index(each.hint), each.distance, each.streams, threads
            )
            if rate <= 0:
                return {}
            samples[str(each)].append(rate / 1e9)
        if time.monotonic() > end:
            break
    return {name: round(statistics.median(values), 3) for name, values in samples.items()}


def _read(file: Path) -> dict[str, dict[str, float]]:
    """What the file knows, by machine; nothing where it is missing, damaged or of another time."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(content, dict) or content.get("version") != VERSION:
        return {}
    machines = content.get("gb_per_s")
    if not isinstance(machines, dict):
        return {}
    names = {str(each) for each in CANDIDATES}
    return {
        machine: rates
        for machine, rates in machines.items()
        if isinstance(rates, dict)
        and rates.keys() == names
        and all(isinstance(rate, float) and 0 < rate < 1e6 for rate in rates.values())
    }


def _write(file: Path, machines: dict[str, dict[str, float]]) -> None:
    """Replaces the file whole, so that whoever reads it meanwhile sees the old or the new one."""
    text = json.dumps({"version": VERSION, "gb_per_s": machines}, indent=1)
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as part:
                part.write(text + "\n")
            os.replace(name, file)
        except OSError:
            Path(name).unlink(missing_ok=True)
