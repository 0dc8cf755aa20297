"""Where compiled programs are kept."""

from __future__ import annotations

import stat
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from herald_jax.compile_cache import LARGEST_CACHE, VARIABLE, keep_compiled


@pytest.fixture
def untold(monkeypatch, tmp_path):
    """JAX without a cache, and a home of its own; afterwards the tests' cache is back."""
    names = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_compilation_cache_max_size",
    )
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update(names[0], None)
    jax.config.update(names[2], -1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(VARIABLE, raising=False)
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_on_an_accelerator_it_is_the_users_cache_folder(untold, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    kept = keep_compiled()
    assert kept.folder == untold / "herald_jax/programs"
    assert stat.S_IMODE(kept.folder.stat().st_mode) == 0o700
    assert jax.config.jax_compilation_cache_dir == str(kept.folder)
    assert jax.config.jax_compilation_cache_max_size == LARGEST_CACHE, (
        "without it JAX locks nothing"
    )
    monkeypatch.setenv(VARIABLE, "elsewhere")
    assert keep_compiled() == kept, "told already"


@pytest.mark.parametrize(("asked", "why"), [(None, "is the CPU"), ("off", "is off")])
def test_nothing_is_kept(untold, monkeypatch, asked, why):
    if asked:
        monkeypatch.setenv(VARIABLE, asked)
    kept = keep_compiled()
    assert (kept.folder, kept.failed, kept.nbytes) == (None, False, 0)
    assert why in kept.reason
    assert jax.config.jax_compilation_cache_dir is None


def test_a_named_folder_serves_the_next_process(untold, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(untold / "named"))
    kept = keep_compiled()
    assert kept.folder is not None
    assert kept.folder.parent == untold / "named", "a CPU's programs lie apart from another's"
    hits = []
    jax.monitoring.register_event_listener(
        lambda name, **_: hits.append(name) if name.endswith("cache_hits") else None
    )
    try:
        for _ in range(2):
            # Another function each time, as another process would have.
            jax.jit(lambda x: jnp.tanh(x) * 2.5 - 1)(jnp.ones(7))
            assert kept.nbytes > 0
    finally:
        jax.monitoring.clear_event_listeners()
    assert hits


def test_what_cannot_be_written_is_said(untold, monkeypatch):
    taken = untold / "file"
    taken.touch()
    monkeypatch.setenv(VARIABLE, str(taken / "folder"))
    kept = keep_compiled()
    assert kept.folder is None
    assert kept.failed
    assert str(Path(taken, "folder")) in kept.reason
    assert VARIABLE in kept.reason
