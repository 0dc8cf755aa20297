"""Host memory for the KV cache."""

from __future__ import annotations

import logging

import numpy as np
from numpy.typing import NDArray

from host_kernels import _native
from host_kernels.checks import whole
from host_kernels.threads import resolve_threads

_log = logging.getLogger(__name__)
_told = False


def _tell(notice: str) -> None:
    """Warns once a process: what holds for one arena holds for the next."""
    global _told
    if notice and not _told:
        _log.warning("huge pages: %s; scans of small pages are up to a fifth slower", notice)
        _told = True


class Arena:
    """Zeroed memory of our own, aligned to 2 MiB, on huge pages where the system grants them.

    Pages are touched by several threads when the arena is made, so nothing is left to fault in
    while a request runs. The memory lives as long as the arena or any view of ``buffer``.
    """

    def __init__(self, nbytes: int, *, huge_pages: bool = True, threads: int | None = None) -> None:
        """Maps ``nbytes`` bytes.

        Raises:
            TypeError: ``nbytes`` is not a whole number.
            ValueError: ``nbytes`` is negative.
            MemoryError: the system refuses the mapping.
        """
        nbytes = whole("nbytes", nbytes)
        if nbytes < 0:
            raise ValueError(f"nbytes must not be negative, but is {nbytes}")
        refused = f"the system refuses to map {nbytes} bytes of host memory; ask for less"
        if nbytes >= 1 << 63:
            raise MemoryError(refused)
        try:
            self._buffer, self._huge, self._notice = _native.arena(
                nbytes, huge_pages, resolve_threads(threads)
            )
        except MemoryError:
            raise MemoryError(refused) from None
        _tell(self._notice)

    @property
    def buffer(self) -> NDArray[np.uint8]:
        """All bytes, uint8 ``[nbytes]``; views of it keep the memory alive."""
        return self._buffer

    @property
    def huge_pages(self) -> bool:
        """Whether huge pages back the arena, as far as the system tells."""
        return self._huge

    @property
    def notice(self) -> str:
        """Why huge pages do not back all of the arena; empty where they do or none were asked."""
        return self._notice

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self._buffer.size
