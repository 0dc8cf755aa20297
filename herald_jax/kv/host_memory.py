"""How much host memory this process may take: the container's limit, not the machine's."""

from __future__ import annotations

from pathlib import Path

import psutil

RESERVE_FRACTION = 0.05
RESERVE_FLOOR = 1 << 30


def _read_limit(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    # cgroup v1 writes a number near 2**63 where v2 writes "max".
    return int(text) if text.isdigit() and int(text) < 1 << 60 else None


def cgroup_room(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes left under the cgroup's memory limit (v2, then v1), or None without a limit."""
    pairs = [
        (root / "memory.max", root / "memory.current"),
        (root / "memory/memory.limit_in_bytes", root / "memory/memory.usage_in_bytes"),
    ]
    for limit_path, used_path in pairs:
        limit, used = _read_limit(limit_path), _read_limit(used_path)
        if limit is not None:
            return max(0, limit - (used or 0))
    return None


def host_memory_room() -> int:
    """Bytes the KV cache may take by default.

    The smaller of what the kernel calls available and what the cgroup leaves, less a reserve of 5%
    (at least 1 GiB) for weights being loaded, staging and everything else in the process.
    """
    room = psutil.virtual_memory().available
    limit = cgroup_room()
    if limit is not None:
        room = min(room, limit)
    return max(0, room - max(RESERVE_FLOOR, int(room * RESERVE_FRACTION)))


def parse_bytes(text: str) -> int:
    """Reads "80GB" (1e9), "64GiB" (2**30), "512MB" or a plain number of bytes.

    Raises:
      ValueError: with one sentence when the text is none of these.
    """
    units = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
    units |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40, "b": 1, "": 1}
    cleaned = text.strip().lower().replace(" ", "")
    number = cleaned.rstrip("abcdefghijklmnopqrstuvwxyz")
    unit = cleaned[len(number) :]
    try:
        value = float(number) * units[unit]
    except (ValueError, KeyError):
        raise ValueError(f"{text!r} is not a size: write it like 80GB, 64GiB or 512MB") from None
    if not 0 < value < 1 << 60:
        raise ValueError(f"{text!r} is not a usable size: it must be above 0 bytes")
    return int(value)


def format_bytes(count: int | float) -> str:
    """1234567 -> "1.23 MB" (powers of 1000)."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 1000:
            return f"{value:.0f} B" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1000
    return f"{value:.2f} TB"
