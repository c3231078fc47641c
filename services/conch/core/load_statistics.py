"""What is counted of loads: how long they take, how long replacing takes, how many fail."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from conch.core.latencies import PLACES


@dataclass(frozen=True, slots=True)
class Spread:
    """How some times are spread.

    Attributes:
        places: Place n counts times below 2**n nanoseconds and not below half that.
        ns: All of them together.
    """

    places: Sequence[int]
    ns: int


@dataclass(frozen=True, slots=True)
class LoadCounts:
    """What `LoadStatistics` held at one moment.

    Attributes:
        loads: How long it took to make each version that was made and put into service.
        swaps: How long loads took that replaced versions which served, from their turn to the swap.
        seconds: How long the newest load of each model version took, by what the model is published as and
            version.
        failures: Loads that failed, by what the model is, or would be, published as; 0 from the first load.
        failed: Those of them whose newest load has failed.
    """

    loads: Spread
    swaps: Spread
    seconds: Mapping[tuple[str, int], float]
    failures: Mapping[str, int]
    failed: frozenset[str]


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
    """The counters of one server's loads; any thread may use them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loads = _Times()
        self._swaps = _Times()
        self._seconds: dict[tuple[str, int], float] = {}
        self._failures: dict[str, int] = {}
        self._failed: set[str] = set()

    def begun(self, name: str) -> None:
        """Has the failures of a model begin at 0, so that its first one is seen as an increase."""
        with self._lock:
            self._failures.setdefault(name, 0)

    def loaded(self, name: str, version: int, ns: int) -> None:
        """Counts a version that was made in so many nanoseconds and serves from now on."""
        with self._lock:
            self._loads.add(ns)
            self._seconds[name, version] = ns / 1e9

    def swapped(self, ns: int) -> None:
        """Counts a load that has replaced versions, and took so many nanoseconds."""
        with self._lock:
            self._swaps.add(ns)

    def succeeded(self, name: str) -> None:
        """Notes that the newest load of a model has not failed."""
        with self._lock:
            self._failed.discard(name)

    def failed(self, name: str, lasting: bool = True) -> None:
        """Counts a load of a model that has failed.

        Args:
            name: The model.
            lasting: Whether the model is noted as failed until a load succeeds.
        """
        with self._lock:
            self._failures[name] = self._failures.get(name, 0) + 1
            if lasting:
                self._failed.add(name)

    def unloaded(self, name: str) -> None:
        """Forgets what is counted of one model: what comes and goes must not be kept for good."""
        with self._lock:
            self._failures.pop(name, None)
            self._failed.discard(name)
            self._seconds = {key: value for key, value in self._seconds.items() if key[0] != name}

    def snapshot(self) -> LoadCounts:
        """A copy."""
        with self._lock:
            return LoadCounts(
                self._loads.snapshot(),
                self._swaps.snapshot(),
                dict(self._seconds),
                dict(self._failures),
                frozenset(self._failed),
            )
