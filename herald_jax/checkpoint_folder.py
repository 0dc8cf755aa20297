"""The folder of a checkpoint while it is written: it gets its name whole, or not at all.

The work goes on in a folder of its own beside the final one, whose name no other has and which a
file marks as ours. Nothing outside such a folder is ever deleted, and a folder without the mark is
never taken for one, whatever it is called.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

PREFIX = ".herald-unfinished-"
MARK = "unfinished-checkpoint"


class CheckpointError(ValueError):
    """A checkpoint cannot be written or read; the message is one sentence."""


def is_hugging_face(path: Path) -> bool:
    """Whether a folder holds a checkpoint as it was published, not one of this project."""
    others = (path / "herald.json", path / "params")
    return (path / "config.json").is_file() and not any(other.exists() for other in others)


def check_target(path: Path, *, force: bool) -> None:
    """Refuses a path that no checkpoint may be written to.

    Raises:
      CheckpointError: it names no folder, is taken by something else, or needs ``force``.
    """
    if path.name in ("", ".."):
        raise CheckpointError(f"{str(path)!r} does not name a new directory; give it a name")
    if path.parent.exists() and not path.parent.is_dir():
        raise CheckpointError(f"{path} cannot be written: {path.parent} is not a directory")
    if path.is_symlink() and not path.exists():
        raise CheckpointError(f"{path} is a link to nothing; remove it or choose another directory")
    if path.exists() and not force:
        raise CheckpointError(
            f"{path} already exists; choose another directory, or replace it with --force"
        )
    if path.exists() and not (path / "herald.json").is_file():
        raise CheckpointError(
            f"{path} exists and is not a checkpoint, so force will not replace it"
        )


def check_apart(source: Path, target: Path) -> None:
    """Refuses to write a checkpoint over, into or around the folder that it is made from.

    Raises:
      CheckpointError: the folders are not apart.
    """
    one, other = source.resolve(), target.resolve()
    if one == other or one in other.parents or other in one.parents:
        raise CheckpointError(
            f"{target} and {source} lie in one another; choose an output directory apart from "
            "the source"
        )


class AbandonedWrite(KeyboardInterrupt):
    """A second Ctrl-C: what was being written may still be written to by the store's threads."""


@contextmanager
def building(path: Path, *, force: bool = False) -> Iterator[Path]:
    """Gives an empty folder that becomes ``path`` when the block ends well, and else vanishes.

    Args:
      path: the directory to create.
      force: replace a checkpoint that is already there.

    Raises:
      CheckpointError: ``path`` is taken or cannot be written.
    """
    check_target(path, force=force)
    _clear_stale(path)
    check_target(path, force=force)
    with storing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=PREFIX, dir=path.parent))
    in_use = False
    try:
        with storing(path):
            # Held as long as this process lives: a mark that can be locked is a dead one's.
            mark = (work / MARK).open("x", encoding="utf-8")
            fcntl.flock(mark, fcntl.LOCK_EX)
            mark.write(path.name)
            mark.flush()
        with mark:
            new = work / "new"
            with storing(path):
                new.mkdir()
            yield new
            check_target(path, force=force)
            with storing(path):
                # Renames only: no moment has half of a checkpoint under the final name.
                if path.exists():
                    os.replace(path, work / "old")
                os.replace(new, path)
    except AbandonedWrite:
        # Removed by the next writer of this path, which knows it by its mark.
        in_use = True
        raise
    finally:
        if not in_use:
            shutil.rmtree(work, ignore_errors=True)


def _clear_stale(path: Path) -> None:
    """Removes what killed writers of ``path`` left: it may end in half an item."""
    for work in path.parent.glob(f"{PREFIX}*"):
        try:
            if work.is_symlink():
                continue
            with (work / MARK).open(encoding="utf-8") as mark:
                fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if mark.read() != path.name:
                    continue
                # Killed between its two renames: the old checkpoint is the only one there is.
                if (work / "old").exists() and not path.exists():
                    os.replace(work / "old", path)
                shutil.rmtree(work)
        except (OSError, ValueError):
            continue  # Not marked, still being written, or not ours to read.


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Holds Ctrl-C back until the block ends; a second one interrupts at once.

    The array store's threads go on writing after an interruption, into a folder that is gone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Signals reach the main thread only.
        return
    caught: list[tuple[int, FrameType | None]] = []

    def hold(number: int, frame: FrameType | None) -> None:
        caught.append((number, frame))
        if len(caught) > 1:
            raise AbandonedWrite

    before = signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before or signal.SIG_DFL)
    if caught and callable(before):
        before(*caught[0])


def first_line(error: BaseException) -> str:
    """The kind of an error and the first line it says."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


@contextmanager
def storing(path: Path) -> Iterator[None]:
    """Turns what the disk or the array store (which raises ValueError) says into one sentence."""
    try:
        yield
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise CheckpointError(f"{path} cannot be written: {reason}") from error
