"""Figures of residency on demand, for metrics."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from conch.core.load_statistics import Spread, Times


@dataclass(frozen=True, slots=True)
class ResidentModel:
    """A model in memory.

    Attributes:
        bytes: Memory that it counts, by device: ``cpu``, and ``gpu:0`` for each GPU with a budget.
        cold_starts: Requests that have waited for its loads, also for those before its evictions.
    """

    bytes: Mapping[str, int]
    cold_starts: int


@dataclass(frozen=True, slots=True)
class ResidencyCounts:
    """A snapshot of `ResidencyStatistics`, with what is in memory.

    Attributes:
        models: Models in memory.
        limits: Memory that all models together may take, by device.
        catalogue: Models of the repositories.
        waiting: Requests that wait for a load.
        cold_starts: Requests that had to wait for a load, by result.
        start_times: Times from the first request for a model to the end of its load.
        queue_times: Times from the first request for a model to the beginning of its load.
        evictions: Evictions by reason.
        ages: Times from the load of a model to its eviction.
        thrash: Pairs of models that have evicted each other again and again.
    """

    models: Mapping[str, ResidentModel]
    limits: Mapping[str, int]
    catalogue: int
    waiting: int
    cold_starts: Mapping[str, int]
    start_times: Spread
    queue_times: Spread
    evictions: Mapping[str, int]
    ages: Spread
    thrash: int


class ResidencyStatistics:
    """The counters of one server; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cold_starts: Counter[str] = Counter()
        self._evictions: Counter[str] = Counter()
        self._starts, self._queued, self._ages = Times(), Times(), Times()
        self.thrash = 0

    def ended(self, result: str) -> None:
        """Counts a request that has waited: ``loaded``, ``failed``, ``timeout`` or ``rejected``."""
        with self._lock:
            self._cold_starts[result] += 1

    def queued(self, ns: int) -> None:
        """Records the time before a load began."""
        with self._lock:
            self._queued.add(ns)

    def loaded(self, ns: int) -> None:
        """Records the time until a load was done."""
        with self._lock:
            self._starts.add(ns)

    def evicted(self, reason: str, age_ns: int) -> None:
        """Counts an eviction: ``room``, ``idle``, ``memory`` or ``unload``."""
        with self._lock:
            self._evictions[reason] += 1
            self._ages.add(age_ns)

    def snapshot(
        self, models: Mapping[str, ResidentModel], limits: Mapping[str, int], catalogue: int, waiting: int
    ) -> ResidencyCounts:
        """The counters, with the given figures."""
        with self._lock:
            return ResidencyCounts(
                models,
                limits,
                catalogue,
                waiting,
                dict(self._cold_starts),
                self._starts.snapshot(),
                self._queued.snapshot(),
                dict(self._evictions),
                self._ages.snapshot(),
                self.thrash,
            )
