"""Everything about the native kernels but their results: choice, threads, memory, refusals."""

from __future__ import annotations

import gc
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import host_kernels as hk
from host_kernels import threads

BF16 = np.dtype(ml_dtypes.bfloat16)


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs ``code`` in a fresh interpreter that sees the same packages."""
    path = os.pathsep.join(p for p in sys.path if p)
    env = {**os.environ, "PYTHONPATH": path, **environment}
    return subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60
    )


def arguments(rows: int = 60) -> dict[str, Any]:
    """A valid call of ``attend_select``: two slots, two KV heads, four query heads, D = 32."""
    lengths = np.array([rows, rows - 9], np.int32)
    return {
        "q": np.ones((2, 4, 32), np.float32),
        "kv": [np.zeros((2, 2, rows, 32), BF16) for _ in range(2)],
        "attend_len": lengths,
        "select_len": lengths - 3,
        "budget": np.array([10, 4], np.int32),
        "indices": np.zeros((2, 2, 12), np.int32),
    }


# --- instruction sets ---------------------------------------------------------------------------


@pytest.mark.parametrize("isa", hk.cpu_info()["available"])
def test_environment_forces_an_instruction_set(isa: str) -> None:
    """kvcache-ai/ktransformers#507: illegal instruction on a CPU without AVX-512.

    Each variant is dispatched by CPUID and XCR0, can be forced, and runs in a process of its own;
    the masks themselves are tested natively on made-up CPUs.
    """
    code = (
        "import numpy as np, host_kernels as hk\n"
        "n = np.full(1, 50, np.int32); q = np.ones((1, 2, 16), np.float32)\n"
        "kv = [np.ones((1, 2, 50, 16), np.float32)]\n"
        "out, status = hk.attend_select(q, kv, n, n, n, np.zeros((1, 1, 50), np.int32))\n"
        "print(hk.cpu_info()['isa'], out.min(), out.max(), status[0])"
    )
    result = python(code, HERALD_ISA=isa)
    assert result.stdout.split() == [isa, "1.0", "1.0", "0"], result.stderr


def test_scalar_is_always_available_and_the_fastest_is_chosen() -> None:
    info = hk.cpu_info()
    assert info["available"][0] == "scalar"
    result = python("import host_kernels as hk; print(hk.cpu_info()['isa'])", HERALD_ISA="")
    assert result.stdout.strip() == info["available"][-1], result.stderr
    assert info["threads"] == hk.thread_count()


def test_unknown_instruction_set_is_refused_by_name() -> None:
    before = hk.cpu_info()["isa"]
    with pytest.raises(ValueError, match="'sse9' is not known; available here: scalar"):
        hk.set_isa("sse9")
    assert hk.cpu_info()["isa"] == before
    result = python("import host_kernels as hk; hk.cpu_info()", HERALD_ISA="sse9")
    assert "ValueError: HERALD_ISA: instruction set 'sse9' is not known" in result.stderr


# --- threads ------------------------------------------------------------------------------------


@pytest.fixture
def default_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("HERALD_THREADS", raising=False)
    hk.set_thread_count(None)
    yield
    hk.set_thread_count(None)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V1 = "4:cpu,cpuacct:/docker/abc\n3:memory:/docker/abc\n"


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "150000 100000\n"}, 1.5),
        (  # the parent's quota binds
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/cpu.max": "800000 100000\n",
                "sys/fs/cgroup/a/cpu.max": "300000 100000\n",
            },
            3,
        ),
        # in a container: the path is the host's, the mount is the group itself
        ({"proc/self/cgroup": "0::/gone\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 0.5),
        (
            {
                "proc/self/cgroup": V1,
                "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "400000\n",
                "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_period_us": "100000\n",
            },
            4,
        ),
        (  # version 1 says "no quota" with -1
            {
                "proc/self/cgroup": V1,
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": "nonsense\n"}, None),
    ],
)
def test_thread_count_follows_the_quota(
    tmp_path: Path, files: dict[str, str], quota: float | None
) -> None:
    """llvm#225493: thread pools sized to the machine instead of the control group."""
    root = write(tmp_path, files)
    assert threads.cgroup_cpus(root) == quota
    cpus = len(os.sched_getaffinity(0))
    want = cpus if quota is None else max(1, min(cpus, int(quota)))
    assert threads.default_thread_count(root) == want


def test_thread_count_follows_the_affinity() -> None:
    """llvm#225493, the other half: a process pinned to one CPU gets one thread."""
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "import host_kernels as hk; print(hk.thread_count())"
    )
    assert python(code, HERALD_THREADS="").stdout.strip() == "1"


@pytest.mark.usefixtures("default_threads")
def test_thread_count_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hk.thread_count() == threads.default_thread_count()
    monkeypatch.setenv("HERALD_THREADS", "3")
    assert hk.thread_count() == 3
    hk.set_thread_count(5)
    assert hk.thread_count() == 5
    hk.set_thread_count(None)
    for text in ("many", "0", "-2", "1e3"):
        monkeypatch.setenv("HERALD_THREADS", text)
        with pytest.raises(ValueError, match="HERALD_THREADS"):
            hk.thread_count()
    with pytest.raises(ValueError, match="n must be between"):
        hk.set_thread_count(0)
    with pytest.raises(TypeError, match="n must be a whole number"):
        hk.set_thread_count(True)


def ticks_during(call: Callable[[], Any]) -> float:
    """The longest pause, in seconds, of another Python thread while ``call`` runs."""
    pauses, done = [0.0], threading.Event()

    def tick() -> None:
        last = time.perf_counter()
        while not done.is_set():
            time.sleep(0.001)
            now = time.perf_counter()
            pauses.append(now - last)
            last = now

    ticker = threading.Thread(target=tick, daemon=True)
    ticker.start()
    try:
        call()
    finally:
        done.set()
        ticker.join(timeout=10)
    return max(pauses)


def slow_calls() -> dict[str, Callable[[int], Callable[[], Any]]]:
    """Per kernel: a call whose duration grows with its argument, most of it in native code."""
    rows = 6000
    kv = np.ones((2, 2, rows, 128), np.float32)
    out = np.zeros((1, rows, 2, 128), np.float32)
    rows_each = np.full(1, rows, np.int32)
    indices = np.tile(np.arange(rows, dtype=np.int32), (1, 2, 1))
    data = np.zeros(32 << 20, np.uint8)
    target = data.copy()

    def attend(kernel: Callable[..., Any], k: int) -> Callable[[], Any]:
        q, n, chosen = (
            np.repeat(x, k, axis=0) for x in (np.ones((1, 8, 128), np.float32), rows_each, indices)
        )
        return lambda: kernel(q, [kv] * k, n, n, n // 2, chosen, threads=1)

    def move(kernel: Callable[..., Any], k: int, which: np.ndarray) -> Callable[[], Any]:
        n, chosen, keys, values = (np.repeat(x, k, axis=0) for x in (rows_each, which, out, out))
        return lambda: kernel([kv] * k, chosen, n, keys, values, threads=1)

    return {
        "attend_select": lambda k: attend(hk.attend_select, k),
        "select": lambda k: attend(hk.select, k),
        "gather": lambda k: move(hk.gather, k, indices),
        "store": lambda k: move(hk.store, k, 0 * rows_each),
        "read_bandwidth": lambda k: lambda: hk.read_bandwidth(data, threads=1, repeats=4 * k),
        "copy_bandwidth": lambda k: (
            lambda: hk.copy_bandwidth(data, target, threads=1, repeats=4 * k)
        ),
        "Arena": lambda k: lambda: hk.Arena(k << 25, huge_pages=False, threads=1),
    }


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", list(slow_calls()))
def test_gil_is_released(name: str) -> None:
    """rapidsai/rapidsmpf PR#188: a blocking native call keeps the GIL and the server freezes."""
    before = hk.cpu_info()["isa"]
    hk.set_isa("scalar")
    try:
        for k in (1, 2, 4, 8, 16, 32):
            call = slow_calls()[name](k)
            start = time.perf_counter()
            pause = ticks_during(call)
            seconds = time.perf_counter() - start
            if seconds > 0.2:
                break
    finally:
        hk.set_isa(before)
    assert pause < 0.7 * seconds, f"paused {pause:.3f} of {seconds:.3f} s"


def test_many_python_threads_share_the_pool() -> None:
    given = arguments(500)
    given["kv"] = [np.random.default_rng(0).standard_normal((2, 2, 500, 32)).astype(BF16)] * 2
    want, _ = hk.attend_select(**given)
    wrong: list[int] = []

    def work(count: int) -> None:
        for _ in range(30):
            mine = {**given, "indices": given["indices"].copy()}
            out, _ = hk.attend_select(**mine, threads=count)
            if not np.array_equal(out, want):
                wrong.append(count)

    workers = [threading.Thread(target=work, args=(1 + i % 3,)) for i in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=60)
        assert not worker.is_alive()
    assert not wrong


def _child(queue: multiprocessing.Queue[Any]) -> None:
    out, status = hk.attend_select(**arguments(), threads=3)
    queue.put((float(out.sum()), status.tolist()))


@pytest.mark.parametrize("allowed", ["on", "off"])
def test_workers_go_to_the_background(allowed: str) -> None:
    """Workers obey with their next job, the caller stays; results are the same."""
    policy = "SCHED_IDLE" if allowed == "on" else "SCHED_OTHER"
    code = (
        "import os, pathlib, numpy as np, host_kernels as hk\n"
        "def policies():\n"
        "    found = []\n"
        "    for task in pathlib.Path('/proc/self/task').iterdir():\n"
        "        if (task / 'comm').read_text().startswith('herald-'):\n"
        "            found.append(os.sched_getscheduler(int(task.name)))\n"
        "    return found\n"
        "def call():\n"
        "    kv = [np.random.default_rng(0).normal(size=(4, 2, 900, 32)).astype(np.float32)]\n"
        "    n = np.full(1, 900, np.int32); index = np.zeros((1, 4, 50), np.int32)\n"
        "    hk.select(np.ones((1, 8, 32), np.float32), kv, n, n, n // 18, index, threads=3)\n"
        "    return index\n"
        "before = call(); assert set(policies()) == {os.SCHED_OTHER}, policies()\n"
        "hk.set_background(True); after = call()\n"
        f"assert len(policies()) == 2 and set(policies()) == {{os.{policy}}}, policies()\n"
        "assert os.sched_getscheduler(0) == os.SCHED_OTHER\n"
        "assert (before == after).all()\n"
        "hk.set_background(False); assert (call() == before).all()\n"
    )
    done = python(code, HERALD_BACKGROUND=allowed)
    assert done.returncode == 0, done.stderr


def test_background_that_is_neither_on_nor_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERALD_BACKGROUND", "maybe")
    with pytest.raises(ValueError, match="HERALD_BACKGROUND"):
        hk.set_background(True)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")
def test_child_process_gets_a_pool_of_its_own() -> None:
    hk.attend_select(**arguments(), threads=3)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_child, args=(queue,))
    child.start()
    assert queue.get(timeout=30) == (0.0, [0, 0])
    child.join(timeout=30)
    assert child.exitcode == 0


# --- memory -------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, 1, 4096, (2 << 20) + 5])
@pytest.mark.parametrize("huge_pages", [True, False])
def test_arena(nbytes: int, huge_pages: bool) -> None:
    arena = hk.Arena(nbytes, huge_pages=huge_pages, threads=2)
    buffer = arena.buffer
    assert (buffer.dtype, buffer.shape, arena.nbytes) == (np.uint8, (nbytes,), nbytes)
    assert isinstance(arena.huge_pages, bool)
    assert huge_pages or not arena.huge_pages
    assert not buffer.any()
    if nbytes:
        assert buffer.ctypes.data % (2 << 20) == 0
    del arena
    gc.collect()
    buffer[:] = 3  # a view keeps the memory
    assert int(buffer.sum()) == 3 * nbytes


def test_arena_gives_its_memory_back() -> None:
    def mapped() -> int:
        return int(Path("/proc/self/statm").read_text().split()[0]) * 4096

    before = mapped()
    arena = hk.Arena(256 << 20, threads=2)
    assert mapped() >= before + (256 << 20)
    del arena
    gc.collect()
    assert mapped() < before + (128 << 20)


def test_arena_may_outlive_the_interpreter() -> None:
    """Nobody closed it: it is freed while modules are cleared, which must not wait for ever."""
    done = python("import host_kernels as hk\narena = hk.Arena(1 << 22)\nview = arena.buffer[5:]\n")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("nbytes", [1 << 60, (1 << 63) - 1, 1 << 63, 1 << 80])
def test_arena_refused(nbytes: int) -> None:
    with pytest.raises(MemoryError, match=f"refuses to map {nbytes} bytes"):
        hk.Arena(nbytes)


def test_arena_negative() -> None:
    with pytest.raises(ValueError, match="nbytes must not be negative"):
        hk.Arena(-1)


def test_bandwidth() -> None:
    data = hk.Arena(32 << 20).buffer
    assert 0.1 < hk.read_bandwidth(data) < 10_000
    target = np.empty_like(data)
    data[:] = 5
    assert 0.1 < hk.copy_bandwidth(data, target, threads=2, repeats=1) < 10_000
    assert (target == 5).all()
    with pytest.raises(ValueError, match="at least 256 bytes"):
        hk.read_bandwidth(data[:255])
    with pytest.raises(ValueError, match="repeats"):
        hk.read_bandwidth(data, repeats=0)
    with pytest.raises(TypeError, match="src must have dtype uint8"):
        hk.copy_bandwidth(data.view(np.float32), target)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dst must have shape"):
        hk.copy_bandwidth(data, target[1:])


def test_the_interpreter_may_end_while_threads_are_in_kernels():
    """They neither hold it up nor bring the process down."""
    code = (
        "import threading, time, numpy as np, host_kernels as hk\n"
        "kv = [np.ones((4, 2, 9000, 64), np.float32)]\n"
        "n = np.array([9000], np.int32)\n"
        "def loop():\n"
        "    q = np.ones((1, 32, 64), np.float32)\n"
        "    chosen = np.zeros((1, 4, 10), np.int32)\n"
        "    while True:\n"
        "        hk.attend_select(q, kv, n, n, n * 0 + 10, chosen, threads=1)\n"
        "for _ in range(4):\n"
        "    threading.Thread(target=loop, daemon=True).start()\n"
        "time.sleep(0.2)\n"
    )
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stderr) == (0, "")
