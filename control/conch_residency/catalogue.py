"""The models that can be loaded, and what is remembered of those that were asked for.

A model that was never asked for has only its source. A remembered size belongs to the state of the files that
was loaded. A failed load is remembered for 1, 2, 4 to 60 s, or until the files change: meanwhile requests
get its error. Pure; the caller serialises the calls.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from conch.core.errors import ConchError, without_traceback
from conch.core.model_statistics import ModelStatistics
from conch.core.statistics_snapshot import VersionStatistics
from conch_control.repository.layout import Fingerprint
from conch_control.repository.source import ModelSource, Scan
from conch_residency.residency_state import SavedModel
from conch_residency.segments import Room

_S = 1_000_000_000
_LONGEST_NS = 60 * _S
RESCAN_NS = 5 * _S
"""Least time between two listings for unknown names."""


Totals = tuple[tuple[int, bytes], ...]
"""Statistics by version."""


@dataclass(slots=True)
class Failure:
    """A failed load; `state` is that of the files, None if unknown."""

    error: ConchError
    tries: int
    until_ns: int
    state: Fingerprint | None


@dataclass(slots=True)
class Memory:
    """Measurements and last load of a model that was requested.

    Attributes:
        size: Its measured memory; None if it was never measured.
        digest: Digest of the files that were measured.
        load_ns: Duration of its last load; 0 if it was never loaded.
        failure: Its last load, if that failed.
        cold_starts: Requests that have waited for its loads.
        totals: Statistics of its versions before it was evicted; see `ModelStatistics.keep`.
    """

    size: Room | None = None
    digest: int = 0
    load_ns: int = 0
    failure: Failure | None = None
    cold_starts: int = 0
    totals: Totals = ()


_NOTHING = Memory()


def digest_of(state: Fingerprint) -> int:
    """A digest of a model's files by path, size, and ETag or time; the same in each run.

    The inode is left out: it changes where a container starts again.
    """
    kept = [(path, size, last if isinstance(last, str) else time) for path, size, time, last in state]
    return int.from_bytes(hashlib.blake2b(repr(kept).encode(), digest_size=8).digest())


class Catalogue:
    """The models of all repositories.

    Attributes:
        scan: The last listing.
    """

    def __init__(self) -> None:
        self.scan = Scan({})
        self._scanned_ns: int | None = None
        self._rescan = False
        self._memories: dict[str, Memory] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.scan.models or name in self.scan.duplicates or name in self.scan.remembered

    def __len__(self) -> int:
        return len(self.scan.models)

    def replace(self, scan: Scan, now: int) -> None:
        """Takes a new listing; forgets models that are not in it, unless a repository can't be read."""
        self.scan, self._scanned_ns, self._rescan = scan, now, False
        if not scan.unreadable:
            self._memories = {name: each for name, each in self._memories.items() if name in self}

    def unknown(self) -> None:
        """Records that an unknown name was asked for."""
        self._rescan = True

    def rescan_due(self, now: int) -> bool:
        """True if an unknown name calls for a new listing."""
        return self._rescan and (self._scanned_ns is None or now >= self._scanned_ns + RESCAN_NS)

    def source(self, name: str) -> ModelSource | None:
        """A model; None if it is unknown or in several repositories."""
        return self.scan.source(name)

    def load_ns(self, name: str) -> int:
        """Duration of a model's last load; 0 if it was never loaded."""
        return self._memories.get(name, _NOTHING).load_ns

    def size(self, name: str, state: Fingerprint) -> Room | None:
        """Measured memory of a model with these files; None if there is none."""
        known = self._memories.get(name, _NOTHING)
        return known.size if known.size is not None and known.digest == digest_of(state) else None

    def last_size(self, name: str) -> Room | None:
        """Measured memory of a model, whatever its files are now; None if there is none."""
        return self._memories.get(name, _NOTHING).size

    def measured(self, name: str, state: Fingerprint, size: Room) -> None:
        """Remembers a size."""
        memory = self._memory(name)
        memory.size, memory.digest = size, digest_of(state)

    def grown(self, name: str, size: Room) -> None:
        """Remembers a later measurement of a model that has a size."""
        memory = self._memory(name)
        if memory.size is not None:
            memory.size = size

    def sizes(self) -> dict[str, SavedModel]:
        """Sizes, digests and load times of the measured models, to save for a restart."""
        return {
            name: SavedModel(memory.digest, memory.size, memory.load_ns)
            for name, memory in self._memories.items()
            if memory.size is not None
        }

    def remember(self, models: Mapping[str, SavedModel]) -> None:
        """Takes what the last run has measured."""
        for name, saved in models.items():
            if name in self:
                memory = self._memory(name)
                memory.size, memory.digest, memory.load_ns = saved.size, saved.digest, saved.load_ns

    def loaded(self, name: str, load_ns: int) -> None:
        """Remembers a load that succeeded; 0 if its duration is unknown."""
        memory = self._memory(name)
        memory.load_ns, memory.failure = load_ns or memory.load_ns, None

    def cold_started(self, name: str, requests: int) -> None:
        """Counts requests that have waited for a load."""
        self._memory(name).cold_starts += requests

    def cold_starts(self, name: str) -> int:
        """Requests that have waited for a model's loads."""
        return self._memories.get(name, _NOTHING).cold_starts

    def failed(self, name: str, error: ConchError, state: Fingerprint | None, now: int) -> None:
        """Remembers a load that failed."""
        memory = self._memory(name)
        before = memory.failure
        tries = 1 if before is None or before.state != state else before.tries + 1
        pause_ns = min(_S << min(tries - 1, 10), _LONGEST_NS)
        memory.failure = Failure(without_traceback(error), tries, now + pause_ns, state)

    def failure(self, name: str, now: int) -> ConchError | None:
        """The error of a load that failed too recently for another try."""
        failure = self._memories.get(name, _NOTHING).failure
        return None if failure is None or now >= failure.until_ns else failure.error

    def load_failed(self, name: str) -> bool:
        """True if the last load of a model failed and its files have not changed, as far as is known."""
        return self._memories.get(name, _NOTHING).failure is not None

    def failed_states(self, now: int) -> dict[str, Fingerprint]:
        """States of the files of models with a `failure`."""
        return {
            name: memory.failure.state
            for name, memory in self._memories.items()
            if memory.failure is not None
            and memory.failure.state is not None
            and now < memory.failure.until_ns
        }

    def changed(self, name: str) -> None:
        """Forgets a failure: the files have changed."""
        self._memory(name).failure = None

    def keep_totals(self, name: str, totals: Totals) -> None:
        """Keeps the statistics of a model that leaves memory."""
        self._memory(name).totals = totals

    def take_totals(self, name: str) -> Totals:
        """The kept statistics of a model that is in memory again, which has them from now on."""
        memory = self._memory(name)
        totals, memory.totals = memory.totals, ()
        return totals

    def totals(self, name: str) -> list[VersionStatistics]:
        """The kept statistics of a model, or of all for an empty name."""
        names = [name] if name else sorted(self._memories)
        found = []
        for each in names:
            for version, totals in self._memories.get(each, _NOTHING).totals:
                statistics = ModelStatistics()
                statistics.add_kept(totals)
                found.append(VersionStatistics(each, version, statistics.snapshot()))
        return found

    def _memory(self, name: str) -> Memory:
        return self._memories.setdefault(name, Memory())
