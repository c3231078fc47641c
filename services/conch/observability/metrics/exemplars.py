"""`Exemplars`: the last traced request of each bucket of a model version's histograms of times.

A scrape in OpenMetrics shows them behind the bucket's count, so that a dashboard links a slow bucket to a
trace. Threads and locks: the tracer's thread adds, the thread of a scrape reads; a lock guards the entries.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Collection, Sequence
from typing import NamedTuple

from conch.observability.metrics.metric_families import EXPONENTS

FAMILIES = (
    "conch_request_duration_seconds",
    "conch_queue_duration_seconds",
    "conch_compute_input_duration_seconds",
    "conch_compute_infer_duration_seconds",
    "conch_compute_output_duration_seconds",
)
"""The histograms that have exemplars."""

_BUCKETS = len(EXPONENTS) + 1
_NS = 1e9
# As the histograms count: place n is for times below 2**n.
_BUCKET_OF = tuple(bisect_left(EXPONENTS, bits) for bits in range(EXPONENTS[-1] + 1))

Version = tuple[str, int]
"""A model's name and version."""


class Exemplar(NamedTuple):
    """A request in a bucket: ids of trace and span, nanoseconds, and seconds since 1970."""

    trace_id: int
    span_id: int
    ns: int
    seconds: float

    def __str__(self) -> str:
        ids = f'trace_id="{self.trace_id:032x}",span_id="{self.span_id:016x}"'
        return f" # {{{ids}}} {self.ns / _NS} {self.seconds:.3f}"


class Exemplars:
    """Remembers traced requests by model version, family and bucket."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[Version, list[list[Exemplar | None]]] = {}

    def add(
        self, version: Version, trace_id: int, span_id: int, durations: Sequence[int], seconds: float
    ) -> None:
        """Remembers a request.

        Args:
            version: The model version that counted it.
            trace_id: 128 bits.
            span_id: 64 bits.
            durations: Nanoseconds, in the order of `FAMILIES`; perhaps of the first one only.
            seconds: The time since 1970.
        """
        with self._lock:
            families = self._found.get(version)
            if families is None:
                families = self._found[version] = [[None] * _BUCKETS for _ in FAMILIES]
            for buckets, ns in zip(families, durations, strict=False):
                bits = ns.bit_length()
                place = _BUCKET_OF[bits] if bits < len(_BUCKET_OF) else _BUCKETS - 1
                buckets[place] = Exemplar(trace_id, span_id, ns, seconds)

    def attach(self, version: Version, family: str, samples: str) -> str:
        """The samples of a histogram of a model version, in OpenMetrics, with exemplars."""
        with self._lock:
            families = self._found.get(version)
            if families is None or family not in FAMILIES:
                return samples
            buckets = list(families[FAMILIES.index(family)])
        lines = samples.splitlines()
        lines[:_BUCKETS] = [f"{line}{found or ''}" for line, found in zip(lines, buckets, strict=False)]
        return "\n".join(lines) + "\n"

    def keep(self, versions: Collection[Version]) -> None:
        """Forgets other model versions."""
        with self._lock:
            self._found = {key: found for key, found in self._found.items() if key in versions}
