"""How much memory the process of a model may use, and what is said of it where that is not enough."""

from __future__ import annotations

import resource

_MEBIBYTE = 1 << 20
_hints: list[str] = []
"""What is said, where there is a limit; like the limit itself it belongs to the process."""


def limit_memory(mebibytes: int) -> None:
    """Limits what this process may allocate from here on, so that a model gets a `MemoryError`.

    It is the data of the process that is limited (``RLIMIT_DATA``): address space that is only reserved, as
    GPU libraries do, the files of libraries, and tensors that are shared with the server do not count.
    """
    most = mebibytes * _MEBIBYTE
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
    _hints[:] = [f" (the model's process may use {mebibytes} MiB: parameter 'CONCH_MEMORY_LIMIT_MB')"]


def memory_hint(error: BaseException) -> str:
    """What is added to the text of an exception of a model's."""
    return _hints[0] if _hints and isinstance(error, MemoryError) else ""
