"""mage-offload-cpu: mage on the CPU, all queries of the block over the whole prefix."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

import host_kernels
from herald_jax.selection.job import SelectionJob
from herald_jax.selection.selector import HostBlockSelector


class MageOffloadCpu(HostBlockSelector):
    """What mage selects, where the KV is: B * G queries a KV head, exact attention and top-k."""

    name: ClassVar[str] = "mage-offload-cpu"
    summary: ClassVar[str] = "baseline: mage's step 0 on the CPU, with all queries of the block"

    def attend(
        self, layer: int, q: np.ndarray, voters: np.ndarray, job: SelectionJob
    ) -> np.ndarray:
        """See ``HostBlockSelector.attend``; positions that do not vote are a scan of their own."""
        out = np.zeros_like(q)
        votes = voters.sum(1)
        # A call has as many queries for every slot. All positions vote but in a first block, or
        # where a block's first token is known.
        for count in np.unique(votes):
            slots = np.flatnonzero(votes == count)
            _scan(layer, q, out, slots, voters[slots], job, job.budget[slots])
            if count < voters.shape[1]:
                _scan(layer, q, out, slots, ~voters[slots], job, np.zeros(len(slots), np.int32))
        return out


def _scan(
    layer: int,
    q: np.ndarray,
    out: np.ndarray,
    slots: np.ndarray,
    positions: np.ndarray,
    job: SelectionJob,
    budget: np.ndarray,
) -> None:
    """Attention of some positions of some slots; with a budget, they choose.

    Args:
      out: as ``q``, written.
      positions: bool [n, B], of each slot as many.
      budget: int32 [n], rows to select, or zeros.
    """
    heads, _, group, dim = q.shape[1:]
    at = np.nonzero(positions)[1].reshape(len(slots), 1, -1, 1, 1)
    asked = np.take_along_axis(q[slots], at, axis=2)
    indices = np.full_like(job.indices[layer, slots], -1)
    attended, status = host_kernels.attend_select(
        asked.reshape(len(slots), -1, dim),
        [job.extents[layer][slot] for slot in slots],
        job.attend_len[slots],
        job.select_len[slots],
        budget,
        indices,
        sinks=job.sinks,
    )
    attended[status != 0] = np.nan
    answers = out[slots]
    np.put_along_axis(answers, at, attended.reshape(len(slots), heads, -1, group, dim), axis=2)
    out[slots] = answers
    job.status[slots] = np.maximum(job.status[slots], status)
    if budget.any():
        job.indices[layer, slots] = indices
