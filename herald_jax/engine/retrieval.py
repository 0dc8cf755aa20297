"""One block's retrieval: what it needs and what became of it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from herald_jax.engine.block_rows import BlockRows
from herald_jax.engine.step_programs import Queries
from herald_jax.selection import SelectionJob


@dataclass
class Retrieval:
    """Everything one block's retrieval needs and what became of it.

    Attributes:
      stored: of every thread the writing of the block before, which it did first; or empty.
      sent: of every sparse layer what its transfer sent, None until it did.
    """

    job: SelectionJob
    rows: list[BlockRows]
    representative: jax.Array | None
    positions: np.ndarray
    queries: Sequence[Future[Queries]] | None
    stored: list[Future[None]]
    sent: list[Any]
    waiting: list[int]
    failures: dict[int, str] = field(default_factory=dict)
    error: BaseException | None = None
    seconds: float = 0.0
    reached: int = 0
