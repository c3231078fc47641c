"""Counters of loads: durations of loads and swaps, and failures, also of listing repositories.

Threads and locks: any thread; one lock.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from conch.core.latencies import PLACES


@dataclass(frozen=True, slots=True)
class Spread:
    """A histogram of times.

    Attributes:
        places: Bucket n counts times from 2**(n-1) to below 2**n nanoseconds.
        ns: Sum of all times.
    """

    places: Sequence[int]
    ns: int


@dataclass(frozen=True, slots=True)
class LoadCounts:
    """A snapshot of `LoadStatistics`.

    Attributes:
        loads: Durations of successful loads, per version.
        swaps: Durations of loads that replaced ready versions, from leaving the queue to the swap.
        seconds: Duration of the newest load, by identifier and version.
        failures: Failed loads by identifier; 0 from the first load on.
        failed: Identifiers whose newest load failed.
        repository_errors: Failed listings by location of the repository.
    """

    loads: Spread
    swaps: Spread
    seconds: Mapping[tuple[str, int], float]
    failures: Mapping[str, int]
    failed: frozenset[str]
    repository_errors: Mapping[str, int]


class _Times:
    def __init__(self) -> None:
        self.places = [0] * PLACES
        self.ns = 0

    def add(self, ns: int) -> None:
        self.places[ns.bit_length()] += 1
        self.ns += ns

    def snapshot(self) -> Spread:
        return Spread(tuple(self.places), self.ns)


class LoadStatistics:
    """The load counters of one server; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loads = _Times()
        self._swaps = _Times()
        self._seconds: dict[tuple[str, int], float] = {}
        self._failures: dict[str, int] = {}
        self._failed: set[str] = set()
        self._repository_errors: dict[str, int] = {}

    def begun(self, name: str) -> None:
        """Starts the failures of a model at 0, so that the first one shows as an increase."""
        with self._lock:
            self._failures.setdefault(name, 0)

    def loaded(self, name: str, version: int, ns: int) -> None:
        """Counts a version that was loaded in `ns`."""
        with self._lock:
            self._loads.add(ns)
            self._seconds[name, version] = ns / 1e9

    def swapped(self, ns: int) -> None:
        """Counts a load that replaced versions in `ns`."""
        with self._lock:
            self._swaps.add(ns)

    def succeeded(self, name: str) -> None:
        """Records that the newest load of a model succeeded."""
        with self._lock:
            self._failed.discard(name)

    def failed(self, name: str, lasting: bool = True) -> None:
        """Counts a failed load; `lasting` marks the model as failed until a load succeeds."""
        with self._lock:
            self._failures[name] = self._failures.get(name, 0) + 1
            if lasting:
                self._failed.add(name)

    def unloaded(self, name: str) -> None:
        """Drops the counters of a model, so that unloaded models take no memory."""
        with self._lock:
            self._failures.pop(name, None)
            self._failed.discard(name)
            self._seconds = {key: value for key, value in self._seconds.items() if key[0] != name}

    def repository_opened(self, location: str) -> None:
        """Starts the errors of a repository at 0."""
        with self._lock:
            self._repository_errors.setdefault(location, 0)

    def repository_failed(self, location: str) -> None:
        """Counts a listing that failed."""
        with self._lock:
            self._repository_errors[location] = self._repository_errors.get(location, 0) + 1

    def snapshot(self) -> LoadCounts:
        """A copy."""
        with self._lock:
            return LoadCounts(
                self._loads.snapshot(),
                self._swaps.snapshot(),
                dict(self._seconds),
                dict(self._failures),
                frozenset(self._failed),
                dict(self._repository_errors),
            )
