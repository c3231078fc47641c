"""Measures the load of the server and of its model versions, at most once a second.

Owns: the counters at the last measurement, by model version; a later one replaces them.
Threads and locks: any thread; one lock, taken for a measurement only.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from conch.core.clock import Clock, monotonic_ns
from conch.core.registry import Registry
from conch.core.servable import Servable

WINDOW_NS: Final = 1_000_000_000
"""Least time between two measurements."""


@dataclass(frozen=True, slots=True)
class Load:
    """One measurement, over the time since the one before it.

    Attributes:
        saturation: By the identity of a version's statistics, the share of its instances' time in which they
            ran batches, from 0 to 1. A version without instances, such as an ensemble, has none.
        requests_per_s: Requests of all versions that ended, steps of ensembles and calls between models too.
        errors_per_s: Failed requests of all versions, without cancelled ones.
        pending: Requests that wait for their execution, at the time of the measurement.
        running: Requests that are being executed, at the same time.
    """

    saturation: Mapping[object, float] = field(default_factory=dict)
    requests_per_s: float = 0.0
    errors_per_s: float = 0.0
    pending: int = 0
    running: int = 0

    @property
    def utilization(self) -> float:
        """The saturation of the busiest version; 0 without any."""
        return max(self.saturation.values(), default=0.0)


class LoadMeter:
    """Measures when it is read, if the last measurement is a second old; its creation starts the first one.

    Args:
        registry: The models.
        clock: Monotonic time in nanoseconds.
    """

    def __init__(self, registry: Registry, clock: Clock = monotonic_ns) -> None:
        self._registry = registry
        self._clock = clock
        self._lock = threading.Lock()
        self._load = Load()
        self._measured_ns = clock()
        # Keyed by identity, not by model: must not keep an unloaded model alive until the next measurement.
        self._counts: Mapping[object, tuple[int, int, int]] = {}

    def read(self) -> Load:
        """The last measurement, or a new one; all 0 in the first second."""
        if self._clock() - self._measured_ns >= WINDOW_NS:
            with self._lock:
                now = self._clock()
                window_ns = now - self._measured_ns
                if window_ns >= WINDOW_NS:  # else another thread has just measured
                    self._load = self._measure(window_ns)
                    self._measured_ns = now
        return self._load

    def _measure(self, window_ns: int) -> Load:
        counts: dict[object, tuple[int, int, int]] = {}
        saturation: dict[object, float] = {}
        pending = running = ended = failed = 0
        for model in self._models():
            statistics = model.statistics
            identity, gauges = statistics.identity, statistics.gauges()
            counts[identity] = now = (gauges.busy_ns, *statistics.ended)
            # A version that was loaded since the last measurement starts at 0.
            before = self._counts.get(identity, (0, 0, 0))
            if gauges.instances:
                share = (now[0] - before[0]) / (window_ns * gauges.instances)
                saturation[identity] = min(max(share, 0.0), 1.0)
            ended += now[1] - before[1]
            failed += now[2] - before[2]
            pending += gauges.pending
            running += gauges.running
        self._counts = counts
        seconds = window_ns / 1e9
        return Load(saturation, ended / seconds, failed / seconds, pending, running)

    def _models(self) -> Iterator[Servable]:
        for entry in self._registry.entries.values():
            yield from entry.ready.values()
