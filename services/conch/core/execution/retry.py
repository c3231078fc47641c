"""When a request that met a full queue had better be sent again."""

from __future__ import annotations

_LEAST_MS = 1
_MOST_MS = 10_000
_UNKNOWN_MS = 1_000


def retry_after_ms(mean_batch_ns: int, pending: int, requests_per_batch: float, instances: int) -> int:
    """How long a queue takes to be worked off, in milliseconds, as far as one can tell.

    Args:
        mean_batch_ns: How long a batch takes; 0 where none has finished yet.
        pending: Requests in the queue.
        requests_per_batch: How many of them run together.
        instances: How many batches run beside each other.
    """
    if not mean_batch_ns:
        return _UNKNOWN_MS
    batches = pending / max(requests_per_batch, 1.0)
    ms = mean_batch_ns * batches / max(instances, 1) / 1e6
    return round(min(max(ms, _LEAST_MS), _MOST_MS))
