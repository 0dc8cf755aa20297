"""The selector interface: who chooses the rows of the next block, and from what."""

from __future__ import annotations

import abc
from typing import ClassVar, Literal

import numpy as np

from herald_jax.selection.job import SelectionJob

Style = Literal["layer-serial", "query-once"]


class Selector(abc.ABC):
    """One way to choose the critical subset of the prefix, once per block.

    The flags tell the engine what to prepare; ``style`` tells which subclass this is.

    Attributes:
      name: what ``--method`` calls it.
      summary: one line for ``--help`` and the docs.
      attends_draft: the draft's rows are written to the full pool and enter the softmax.
      candidates_ratio: C / K; above 1 the engine fetches C rows and keeps the best K at step 0 of
        the next block, judged by that block's real queries.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    style: ClassVar[Style]
    attends_draft: ClassVar[bool] = False
    candidates_ratio: ClassVar[float] = 1.0

    def prefill_scores(
        self, layer: int, kv_heads: int, rows: int, select_len: int, seed: int
    ) -> np.ndarray | None:
        """Scores that replace the masked queries' importance for the first generated block.

        Returns:
          float32 [kv_heads, rows], or None to select by the masked queries on the device.
        """
        del layer, kv_heads, rows, select_len, seed
        return None


class LayerSerialSelector(Selector):
    """Selection inside a forward pass of the representative query, layer by layer.

    The representative is the [MASK] token at the centre of the next block.
    """

    style: ClassVar[Style] = "layer-serial"

    @abc.abstractmethod
    def attend(
        self,
        layer: int,
        q: np.ndarray,
        self_k: np.ndarray,
        self_v: np.ndarray,
        job: SelectionJob,
    ) -> np.ndarray:
        """Selects rows of one layer into ``job.indices[layer]`` and returns attention.

        Runs inside a host callback: NumPy and native code only. Calling it twice with the same
        arguments gives the same result.

        Args:
          layer: index among the sparse layers.
          q: float32 [N, H_q, D]; ``self_k``, ``self_v``: float32 [N, H_kv, D], the
            representative's own key and value.
          job: the block's job; ``job.status`` is updated.

        Returns:
          float32 [N, H_q, D], exact attention over the rows that enter the softmax.
        """


class QueryOnceSelector(Selector):
    """All layers select independently, from queries that are known at once (or from none).

    Attributes:
      needs_queries: the merged queries of step 0 are captured for every sparse layer.
    """

    style: ClassVar[Style] = "query-once"
    needs_queries: ClassVar[bool] = False

    @abc.abstractmethod
    def choose(self, layer: int, q: np.ndarray | None, job: SelectionJob) -> None:
        """Selects ``job.candidates`` rows of one layer into ``job.indices[layer]``.

        Args:
          layer: index among the sparse layers.
          q: float32 [N, H_q, D], merged queries rotated to the next block, if asked for.
          job: the block's job; ``job.status`` is updated.
        """
