"""Native CPU kernels over the KV cache in host memory.

They know arrays, not JAX and not models. ``host_kernels.reference`` is the NumPy twin: the
definition of right.
"""

try:
    from host_kernels import _native  # noqa: F401
except ImportError as error:
    from pathlib import Path

    raise ImportError(
        f"{Path(__file__).parent} has no compiled part for this Python: in a checkout run "
        "`pip install -e .`, with an installed package start Python outside the checkout"
    ) from error

from host_kernels.arena import Arena
from host_kernels.changes import gather_changes
from host_kernels.checks import Extents, Indexes, IndexKind
from host_kernels.cpu import CpuInfo, copy_bandwidth, cpu_info, read_bandwidth, set_isa
from host_kernels.kernels import attend_rows, attend_select, gather, select, store, top_k
from host_kernels.key_index import index_rows, index_shape, rerank, select_indexed
from host_kernels.prefetch import Prefetch, calibrate_prefetch, prefetch_setting, set_prefetch
from host_kernels.threads import set_background, set_thread_count, thread_count

__all__ = [
    "Arena",
    "CpuInfo",
    "Extents",
    "IndexKind",
    "Indexes",
    "Prefetch",
    "attend_rows",
    "attend_select",
    "calibrate_prefetch",
    "copy_bandwidth",
    "cpu_info",
    "gather",
    "gather_changes",
    "index_rows",
    "index_shape",
    "prefetch_setting",
    "read_bandwidth",
    "rerank",
    "select",
    "select_indexed",
    "set_background",
    "set_isa",
    "set_prefetch",
    "set_thread_count",
    "store",
    "thread_count",
    "top_k",
]
