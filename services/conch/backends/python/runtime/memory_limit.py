"""Memory limit of a model's worker process, and the hint that its `MemoryError` carries.

Used by: `tracebacks`, `completion_role`, `worker_loop`.
"""

from __future__ import annotations

import resource

_MEBIBYTE = 1 << 20
_hints: list[str] = []
"""The hint if a limit is set; like the limit it is per process."""


def limit_memory(mebibytes: int) -> None:
    """Limits the allocations of this process, so that a model gets a `MemoryError`.

    Sets ``RLIMIT_DATA``. Reserved address space (as of GPU libraries), library files and tensors shared with
    the server do not count.
    """
    most = mebibytes * _MEBIBYTE
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
    _hints[:] = [f" (the model's process may use {mebibytes} MiB: parameter 'CONCH_MEMORY_LIMIT_MB')"]


def memory_hint(error: BaseException) -> str:
    """Suffix for the text of a model's exception."""
    return _hints[0] if _hints and isinstance(error, MemoryError) else ""
