"""The selector interface: who chooses the rows of the next block, and from what."""

from __future__ import annotations

import abc
from typing import ClassVar, Literal, NamedTuple

import numpy as np

from herald_jax.selection.job import SelectionJob

Style = Literal["layer-serial", "query-once", "current-block", "layer-ahead", "host-block"]


class Selector(abc.ABC):
    """One way to choose the critical subset of the prefix, once per block.

    The flags tell the engine what to prepare; ``style`` tells which subclass this is.

    Attributes:
      name: what ``--method`` calls it.
      summary: one line for ``--help`` and the docs.
      attends_draft: the draft's rows are written to the full pool and enter the softmax.
      refines: the engine may fetch C > K rows and keep the best K at step 0 of the next block,
        judged by that block's real queries.
      indexed: it scans keys alone, and may do so in their key index, if the job has one.
      between_blocks: what it selects comes to the device between two blocks, by a transfer.
      own_ratio: C / K unless asked otherwise.
      candidates_ratio: C / K of this instance.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    style: ClassVar[Style]
    attends_draft: ClassVar[bool] = False
    refines: ClassVar[bool] = False
    indexed: ClassVar[bool] = False
    between_blocks: ClassVar[bool] = False
    own_ratio: ClassVar[float] = 1.0

    def __init__(self, candidates_ratio: float | None = None) -> None:
        """``candidates_ratio``: C / K, at least 1, or None for the selector's own.

        Raises:
          ValueError: a ratio is given and the selector does not refine.
        """
        if candidates_ratio is not None and not self.refines:
            raise ValueError(
                f"--candidates-ratio {candidates_ratio:g} does not go with --method {self.name}, "
                "which keeps every row it fetches: leave it out, or use a method that refines, "
                "like herald-merged"
            )
        self.candidates_ratio = self.own_ratio if candidates_ratio is None else candidates_ratio

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
    between_blocks: ClassVar[bool] = True

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


class MergedQueries(NamedTuple):
    """Queries of one sparse layer, merged over positions; S of them stand in for each block.

    Attributes:
      q: float32 [N, H_kv * S * G, D], the S * G queries of a KV head together.
      elsewhere: float32 [N, H_kv * S * G], log of the attended mass (sum of exp(score)) outside
        the full pool, or None where it is left out.
    """

    q: np.ndarray
    elsewhere: np.ndarray | None


class QueryOnceSelector(Selector):
    """All layers select independently, from queries that are known at once (or from none).

    Attributes:
      merge_step: the step (0 or 1, which every block has) whose masked queries are merged for
        every sparse layer; None where no queries are needed.
      rotates: merged queries are rotated by B positions, to where the next block is.
      drafted: the queries are those of the next block's own [MASK] tokens instead, from a pass
        over the draft and the active pool beside step 1.
      spacing: of those [MASK] tokens one in so many runs (with ``drafted``).
      segments: S, the parts of the block that are merged apart (with ``drafted``).
    """

    style: ClassVar[Style] = "query-once"
    between_blocks: ClassVar[bool] = True
    merge_step: ClassVar[Literal[0, 1] | None] = None
    rotates: ClassVar[bool] = True
    drafted: ClassVar[bool] = False
    spacing: ClassVar[int] = 1
    segments: ClassVar[int] = 1

    @abc.abstractmethod
    def choose(self, layer: int, queries: MergedQueries | None, job: SelectionJob) -> None:
        """Selects ``job.candidates`` rows of one layer into ``job.indices[layer]``.

        Args:
          layer: index among the sparse layers.
          queries: of the slots of ``job``, if asked for.
          job: the block's job; ``job.status`` is updated.
        """


class CurrentBlockSelector(Selector):
    """Exact: a block's own masked queries score its whole prefix, on the device.

    There is no retrieval stream. Each sparse layer's whole KV comes from the host when a step
    needs it, and the K rows of highest importance are kept.

    Attributes:
      every_step: select at every step and attend the selection alone; otherwise select once, at
        step 0, which attends everything, and attend the selection from step 1 on.
      in_flight: layers whose whole KV is on the device or on its way there at once. With 1 the main
        stream waits for every layer: a reference to compare with, not a way to be fast. With more,
        the next layers are gathered and copied while one computes.
    """

    style: ClassVar[Style] = "current-block"
    every_step: ClassVar[bool]
    in_flight: ClassVar[int] = 1


class LayerAheadSelector(Selector):
    """Each layer's rows are chosen one layer ahead, at step 0 of the block, and reused by it.

    The queries that choose for layer l are its own projection, norm and rotation of layer l - 1's
    attention input, at the block's rows, and their mean over the masked rows. They meet a few
    channels of the keys, which stay on the device for the whole prefix, both turned by a matrix
    that was made for the request. Chosen rows are fetched while layer l - 1 computes.
    """

    style: ClassVar[Style] = "layer-ahead"

    @abc.abstractmethod
    def channels(self, head_dim: int) -> int:
        """P, the channels of a key that are kept on the device, at most D."""

    @abc.abstractmethod
    def projection(self, q: np.ndarray, k: np.ndarray) -> np.ndarray:
        """What turns queries and keys of one layer into their P channels.

        Args:
          q: [T, H_q, D] and ``k``: [T, H_kv, D], both with RoPE, of the last positions of a prompt
            and its first block as it will be decoded, [MASK] rows included.

        Returns:
          float32 [H_kv, D, P].
        """


class HostBlockSelector(Selector):
    """Exact, on the CPU: all queries of a block meet its whole prefix, layer by layer at step 0.

    A layer's queries depend on what the layer before attended, so the main stream waits for every
    layer's scan. Later steps attend the selection.
    """

    style: ClassVar[Style] = "host-block"

    @abc.abstractmethod
    def attend(
        self, layer: int, q: np.ndarray, voters: np.ndarray, job: SelectionJob
    ) -> np.ndarray:
        """Selects rows of one layer into ``job.indices[layer]`` and returns attention.

        Args:
          layer: index among the sparse layers.
          q: float32 [N, H_kv, B, G, D], the queries of all positions.
          voters: bool [N, B], the positions that choose, at least one of each slot.
          job: ``attend_len`` counts the block's own rows, which follow the committed ones;
            ``select_len`` ends before the tail; ``status`` is updated.

        Returns:
          float32 [N, H_kv, B, G, D], exact attention; NaN for a slot that failed.
        """
