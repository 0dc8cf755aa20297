"""How many threads the kernels use.

The number comes from the CPUs this process may run on and from the control group's quota, never
from the size of the machine: a pool larger than the quota is throttled (llvm#225493).
"""

from __future__ import annotations

import os
from pathlib import Path

from host_kernels import _native

_chosen: int | None = None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _group_folders(root: Path, controller: str) -> list[Path]:
    """The control group of this process for ``controller`` ("" for version 2), and its parents."""
    mount = root / "sys/fs/cgroup"
    folders = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, names, path = [*line.split(":", 2), "", ""][:3]
        if (names.split(",") if names else [""]).count(controller) == 0:
            continue
        base = mount if not controller else mount / names
        if controller and not base.is_dir():
            base = mount / controller
        relative = Path(path.lstrip("/"))
        folders += [base / parent for parent in (relative, *relative.parents)]
    # Inside a container the path may name the host's tree while the mount is the group itself.
    folders += [mount] if not controller else [mount / controller]
    return folders


def cgroup_cpus(root: Path = Path("/")) -> float | None:
    """The smallest CPU quota of this process's control groups, versions 1 and 2; None without one.

    Args:
        root: where ``proc`` and ``sys`` are mounted.
    """
    quotas = []
    for folder in _group_folders(root, ""):
        fields = _read(folder / "cpu.max").split()
        if len(fields) == 2 and fields[0].isdigit() and fields[1].isdigit() and int(fields[1]):
            quotas.append(int(fields[0]) / int(fields[1]))
    for folder in _group_folders(root, "cpu"):
        quota = _read(folder / "cpu.cfs_quota_us").strip()
        period = _read(folder / "cpu.cfs_period_us").strip()
        if quota.isdigit() and period.isdigit() and int(period):
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def default_thread_count(root: Path = Path("/")) -> int:
    """CPUs in this process's affinity mask or whole CPUs of its quota, whichever is less; >= 1."""
    cpus = len(os.sched_getaffinity(0))
    quota = cgroup_cpus(root)
    return max(1, cpus if quota is None else min(cpus, int(quota)))


def _checked(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number of threads, not {value!r}")
    if not 1 <= value <= 1024:
        raise ValueError(f"{name} must be between 1 and 1024, but is {value}")
    return value


def thread_count() -> int:
    """Threads a call uses unless it says otherwise.

    ``set_thread_count`` decides, else the environment variable HERALD_THREADS, else affinity and
    quota.

    Raises:
        ValueError: HERALD_THREADS is not a number between 1 and 1024.
    """
    if _chosen is not None:
        return _chosen
    text = os.environ.get("HERALD_THREADS")
    if not text:
        return default_thread_count()
    if not text.strip().isdigit():
        raise ValueError(f"HERALD_THREADS must be a whole number of threads, not {text!r}")
    return _checked("HERALD_THREADS", int(text))


def set_thread_count(n: int | None) -> None:
    """Sets the default number of threads; None returns to the environment and the machine.

    Raises:
        TypeError, ValueError: ``n`` is not a whole number between 1 and 1024.
    """
    global _chosen
    _chosen = None if n is None else _checked("n", n)


def set_background(on: bool) -> None:
    """Whether kernel threads run only on cores that no other thread wants at the moment.

    For processes whose other threads keep a device busy: one of them that wakes up then runs at
    once. The calling thread, which works along, stays as it is. A thread obeys with its next job;
    where the system refuses, it goes on as it was. Results do not change. On a host whose cores
    others keep busy they would hardly ever run: there the environment variable HERALD_BACKGROUND,
    set to "off", leaves them as they are.

    Raises:
        ValueError: HERALD_BACKGROUND is neither "on" nor "off".
    """
    allowed = os.environ.get("HERALD_BACKGROUND", "on")
    if allowed not in ("on", "off"):
        raise ValueError(f'HERALD_BACKGROUND must be "on" or "off", not {allowed!r}')
    _native.set_background(on and allowed == "on")


def resolve_threads(threads: int | None) -> int:
    """``threads`` checked, or the default."""
    return thread_count() if threads is None else _checked("threads", threads)
