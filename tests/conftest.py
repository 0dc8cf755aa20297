"""Shared settings: compiled programs are kept between tests, which differ little in shape."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile

# What is started in the background of a script ignores Ctrl-C, and hands that on to what it starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests compile much and compute little; results do not depend on this (fp32 tolerance aside).
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

# Nor on these, with which programs for the CPU compile in half the time. A process whose XLA does
# not know them ends at once, so one of its own is tried first; test processes inherit the answer.
QUICK = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
GIVEN = os.environ.get("XLA_FLAGS", "")
if QUICK not in GIVEN:
    flags = {"XLA_FLAGS": f"{GIVEN} {QUICK}".strip()}
    code = [sys.executable, "-c", "import jax; jax.devices()"]
    tried = os.environ | flags | {"JAX_PLATFORMS": "cpu"}
    if not subprocess.run(code, env=tried, capture_output=True, timeout=120).returncode:
        os.environ |= flags

# Nor on the threads of PyTorch and NumPy: beside other test processes they mostly wait for another.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Nor on how scans ask for memory: nothing is to be measured, or kept at home, by a test.
os.environ.setdefault("HERALD_PREFETCH", "none")

# Nor may a test leave compiled programs at home.
os.environ.setdefault("HERALD_COMPILE_CACHE", "off")

# Test processes inherit the environment, and so share one cache.
OWN_CACHE = "HERALD_TEST_CACHE" not in os.environ
if OWN_CACHE:
    os.environ["HERALD_TEST_CACHE"] = tempfile.mkdtemp(prefix="herald-test-cache-")

import jax  # noqa: E402 (reads the environment)
import pytest  # noqa: E402

jax.config.update("jax_compilation_cache_dir", os.environ["HERALD_TEST_CACHE"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
# With a limit JAX takes a lock: nobody reads half of what another process is writing.
jax.config.update("jax_compilation_cache_max_size", 8 << 30)


@pytest.fixture(autouse=True)
def close_engines():
    """Ends the threads and frees the buffers of every engine a test made."""
    from networks import OPEN

    yield
    while OPEN:
        OPEN.pop().close()


def pytest_sessionfinish(session):
    """The process that made the cache removes it."""
    if OWN_CACHE:
        shutil.rmtree(os.environ["HERALD_TEST_CACHE"], ignore_errors=True)


def pytest_collection_modifyitems(config, items):
    """GPU tests are skipped where there is none; oracle tests run only when asked for."""
    gpu = any(device.platform == "gpu" for device in jax.devices())
    for item in items:
        if "gpu" in item.keywords and not gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
