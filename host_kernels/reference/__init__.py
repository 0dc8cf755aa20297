"""The kernels in plain NumPy: the definition of right.

Same names, arguments and checks as ``host_kernels``; ``threads`` is accepted and ignored.
"""

from host_kernels.reference.attend import (
    attend_rows,
    attend_select,
    importance,
    rerank,
    scores,
    select,
    top_k,
    top_rows,
)
from host_kernels.reference.index import (
    index_rows,
    index_scores,
    quantise,
    quantise_keys,
    quantise_queries,
    select_indexed,
    unpack,
)
from host_kernels.reference.rows import gather, gather_changes, store

__all__ = [
    "attend_rows",
    "attend_select",
    "gather",
    "gather_changes",
    "importance",
    "index_rows",
    "index_scores",
    "quantise",
    "quantise_keys",
    "quantise_queries",
    "rerank",
    "scores",
    "select",
    "select_indexed",
    "store",
    "top_k",
    "top_rows",
    "unpack",
]
