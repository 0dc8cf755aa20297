"""Where compiled programs are kept from one run to the next."""

from __future__ import annotations

import os
import tempfile
import zlib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

import host_kernels
from host_kernels.prefetch import cache_file

#: Bytes of programs that are kept; what was not used for longest goes first.
LARGEST_CACHE = 8 << 30
#: A folder, or "off".
VARIABLE = "HERALD_COMPILE_CACHE"


@dataclass(frozen=True)
class CompileCache:
    """What became of the cache of this process.

    Attributes:
      folder: where it is, None where nothing is kept.
      reason: why nothing is kept, in a sentence; empty otherwise.
      failed: it was to be kept and cannot be.
    """

    folder: Path | None
    reason: str = ""
    failed: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of all files in it."""
        if self.folder is None:
            return 0
        return sum(each.stat().st_size for each in self.folder.rglob("*") if each.is_file())


def keep_compiled() -> CompileCache:
    """Has JAX keep what it compiles, unless it was told where, or not to, already.

    The folder is that of ``HERALD_COMPILE_CACHE``, else herald_jax/programs in the user's cache
    folder. On the CPU nothing is kept unless a folder is named: code is bound to the features of
    one CPU there, a home may be shared by several kinds, and compiling takes seconds.

    It needs a backend, and never fails.
    """
    given = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    if given:
        return CompileCache(Path(given))
    asked, on_cpu = os.environ.get(VARIABLE, ""), jax.default_backend() == "cpu"
    if asked == "off":
        return CompileCache(None, f"{VARIABLE} is off")
    if not asked and on_cpu:
        return CompileCache(None, f"the device is the CPU and {VARIABLE} names no folder")
    try:
        folder = Path(asked).expanduser() if asked else cache_file().with_name("programs")
        if on_cpu:
            folder /= _cpu()
        # What is loaded from there is run: nobody else shall write there.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, RuntimeError) as error:
        return CompileCache(
            None,
            f"compiled programs cannot be kept, so the next run compiles again: {error}; set "
            f"{VARIABLE} to a folder that can be written, or to off",
            failed=True,
        )
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # Of many layers' small programs each compiles within JAX's threshold of a second.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    # With a limit JAX takes a lock, so that no process reads half of what another is writing: the
    # program would crash.
    if find_spec("filelock") is not None:
        jax.config.update("jax_compilation_cache_max_size", LARGEST_CACHE)
    # JAX decides once whether there is a cache, and may have compiled before.
    compilation_cache.reset_cache()
    return CompileCache(folder)


def _cpu() -> str:
    info = host_kernels.cpu_info()
    return f"cpu-{zlib.crc32(repr((info['model'], info['available'])).encode()):08x}"
