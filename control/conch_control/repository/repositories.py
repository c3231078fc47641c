"""The repositories of a server, listed as one.

Several repositories are listed in parallel (`Lister`), so that hanging storage delays only the calls that
need it: `scan` waits for all; `list_available` goes on without slow ones; `poll` does so too and is notified
when they answer.

Owns: the listers. Locks: one condition for all of them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path

from conch.core.clock import Clock, monotonic_ns
from conch.core.errors import AlreadyExistsError, ConchError
from conch.core.load_statistics import LoadStatistics
from conch_control.control_options import ControlOptions
from conch_control.repository.dependency_graph import read_composing_models
from conch_control.repository.lister import Lister, Listing, Ticket, reason_of
from conch_control.repository.mounted_repository import MountedRepository
from conch_control.repository.namespaces import ReadComposingModels, namespaced
from conch_control.repository.repository_kinds import open_repository
from conch_control.repository.source import DataOnly, ModelSource, Repository, Scan

log = logging.getLogger(__name__)


TIMEOUT_S = 1.0
"""Time for a repository to answer after another one has."""

_S = 1_000_000_000
CLOSE_S = 1.0


class Repositories:
    """The repositories of a server; thread-safe, but only one planner may `poll`.

    Args:
        repositories: The repositories; duplicates by location are dropped.
        read_composing_models: Reads an ensemble's composing models; given if models have namespaces.
        timeout_s: Time for a repository to answer after another one has, where the call must not wait long.
        clock: Monotonic nanoseconds.
        statistics: Counts listings that fail.
    """

    def __init__(
        self,
        repositories: Iterable[Repository],
        read_composing_models: ReadComposingModels | None = None,
        timeout_s: float = TIMEOUT_S,
        clock: Clock = monotonic_ns,
        statistics: LoadStatistics | None = None,
    ) -> None:
        self._statistics = LoadStatistics() if statistics is None else statistics
        self._read_composing_models = read_composing_models
        self._names: dict[str, tuple[str, ...]] = {}  # from the last successful listing, by location
        self._repositories = tuple({each.location: each for each in repositories}.values())
        self._added: dict[str, Repository] = {}  # by location; replaced, never changed
        self.timeout_ns = round(timeout_s * _S)
        self._clock = clock
        self._lost: set[str] = set()  # reported names of models of others that an operator's model has
        self._changed = threading.Condition()  # guards the next attributes and the listers
        self._closed = False
        # A single repository needs no lister.
        self.listers = tuple(
            Lister(each, self._changed, clock, self._statistics.repository_failed)
            for each in self._repositories
            if len(self._repositories) > 1
        )

        for each in self._repositories:
            self._statistics.repository_opened(each.location)

    def __iter__(self) -> Iterator[Repository]:
        return iter(self._repositories)

    def add(self, repository: Repository) -> None:
        """Adds a repository whose listing never takes long, as it has no lister.

        Raises:
            AlreadyExistsError: There is one at its location; the text is Triton's.
        """
        with self._changed:
            location = repository.location
            if location in self._added or any(each.location == location for each in self._repositories):
                raise AlreadyExistsError(f"model repository '{location}' has already been registered")
            self._added = {**self._added, location: repository}

    def remove(self, location: str) -> None:
        """Removes an added repository, if there is one at this location."""
        with self._changed:
            self._added = {key: each for key, each in self._added.items() if key != location}

    def check(self) -> None:
        """Checks that all repositories are usable. Raises InvalidArgumentError: one is not."""
        for repository in self._repositories:
            repository.check()

    def close(self) -> None:
        """Closes all repositories; hanging listings are abandoned."""
        with self._changed:
            self._closed = True
            for lister in self.listers:
                lister.close()
            self._changed.notify_all()
        for repository in self._repositories:
            repository.close()
        end = self._clock() + round(CLOSE_S * _S)
        for lister in self.listers:
            lister.join(max(end - self._clock(), 0) / _S)

    def scan(self) -> Scan:
        """Lists all repositories and waits for the slowest."""
        return self._scan_concurrently(wait_for_all=True) if self.listers else self._scan_sequentially()

    def list_available(self) -> Scan:
        """Lists all repositories without waiting long for slow ones.

        Slow ones count as unreadable, and are not waited for again until they answer.
        """
        return self._scan_concurrently(wait_for_all=False) if self.listers else self._scan_sequentially()

    def poll(self, on_late: Callable[[], None]) -> Scan:
        """As `list_available`, for repeated calls; waits longer for repositories that always take long.

        `on_late` is called on any thread when a repository answers after its timeout; `late` has the result.
        """
        return (
            self._scan_concurrently(wait_for_all=False, on_late=on_late)
            if self.listers
            else self._scan_sequentially()
        )

    def late(self) -> Scan:
        """Models of the repositories that answered late since the last call; others count as unreadable."""
        with self._changed:
            taken = {
                each: each.newest for each in self.listers if each.answered_late and each.newest is not None
            }
            for lister in self.listers:
                lister.answered_late = False
            scan = self._scanned(taken, self._clock())
            unseen = (
                ()
                if self._read_composing_models is not None
                else (each for each in self.listers if each not in taken)
            )
            # The name of an operator's model is not taken by one of others.
            elsewhere = {
                name
                for each in unseen
                for name in each.known.keys() & scan.models.keys()
                if not _of_others(each.known) or _of_others({name: scan.models[name]})
            }
        models = {name: source for name, source in scan.models.items() if name not in elsewhere}
        return replace(scan, models=models, duplicates=scan.duplicates | (scan.models.keys() & elsewhere))

    def _scan_sequentially(self) -> Scan:
        found: dict[str, Mapping[str, ModelSource]] = {}
        unreadable: dict[str, str] = {}
        for repository in (*self._repositories, *self._added.values()):
            try:
                found[repository.location] = repository.models()
            except (ConchError, OSError) as error:
                reason = reason_of(repository, error)
                log.error("failed to read model repository '%s': %s", repository.location, reason)
                self._statistics.repository_failed(repository.location)
                unreadable[repository.location] = reason
        return replace(self._merge(found), unreadable=unreadable)

    def _scan_concurrently(self, wait_for_all: bool, on_late: Callable[[], None] | None = None) -> Scan:
        with self._changed:
            began = self._clock()
            tickets: dict[Lister, Ticket] = {}
            timeouts: dict[Lister, int] = {}
            for lister in self.listers:
                if not wait_for_all:
                    longer = on_late is not None
                    timeouts[lister] = max(self.timeout_ns, 2 * lister.took_ns if longer else 0)
                if wait_for_all or not lister.busy or not lister.timed_out(timeouts[lister]):
                    tickets[lister] = lister.request()
                elif on_late is not None:
                    tickets[lister] = lister.current_ticket()  # good enough for polling: the scan has its age
            self._wait(tickets, timeouts)
            taken: dict[Lister, Listing] = {}
            for lister, ticket in tickets.items():
                listing = lister.result(ticket)
                if listing is not None:
                    taken[lister] = listing
                elif on_late is not None:
                    lister.notify_when_listed(ticket, on_late)
            return self._scanned(taken, began)

    def _wait(self, tickets: Mapping[Lister, Ticket], timeouts: Mapping[Lister, int]) -> None:
        """Waits for the listings; `timeouts`, in nanoseconds, count from the first answer."""
        first_answer_at: int | None = None
        while not self._closed:
            answers = {lister: lister.result(ticket) for lister, ticket in tickets.items()}
            now = self._clock()
            if first_answer_at is None and any(map(_has_succeeded, answers.values())):
                first_answer_at = now
            wait_ns: list[int | None] = []
            for lister, listing in answers.items():
                timeout_ns = timeouts.get(lister)
                if listing is not None or (timeout_ns is not None and lister.timed_out(timeout_ns)):
                    continue
                if timeout_ns is None or first_answer_at is None:
                    wait_ns.append(None)
                elif now < first_answer_at + timeout_ns:
                    wait_ns.append(first_answer_at + timeout_ns - now)
                else:
                    lister.mark_timed_out(timeout_ns)
            if not wait_ns:
                return
            self._changed.wait(min((each / _S for each in wait_ns if each is not None), default=None))

    def _scanned(self, taken: Mapping[Lister, Listing], began: int) -> Scan:
        unreadable: dict[str, str] = {}
        late: set[str] = set()
        remembered: dict[str, Mapping[str, ModelSource]] = {}
        found: dict[str, Mapping[str, ModelSource]] = {}
        for lister in self.listers:
            listing = taken.get(lister)
            if listing is not None and listing.models is not None:
                found[lister.location] = listing.models
                continue
            if listing is not None:
                unreadable[lister.location] = listing.error
            elif self._closed:
                unreadable[lister.location] = "it has been closed"
            else:
                remembered[lister.location] = lister.known
                late.add(lister.location)
                unreadable[lister.location] = f"has not answered for {lister.silent_ns / _S:.1f} s"
        found.update((location, each.models()) for location, each in self._added.items())
        oldest = min((each.began for each in taken.values() if each.models is not None), default=began)
        seen = self._merge(found)
        return replace(
            seen,
            unreadable=unreadable,
            late=frozenset(late),
            remembered=self._merge(remembered).models,
            age_ns=max(began - oldest, 0),
        )

    def _merge(self, found: Mapping[str, Mapping[str, ModelSource]]) -> Scan:
        """One scan from the models of each repository, by location and name."""
        if self._read_composing_models is None:
            models: dict[str, ModelSource] = {}
            duplicates: set[str] = set()
            for each in self._without_taken(found):
                duplicates.update(each.keys() & models.keys())
                models.update(each)
            for name in duplicates:
                del models[name]
            return Scan(models, frozenset(duplicates))
        # Names of unreadable repositories keep their meaning.
        known = {*self._added, *(each.location for each in self._repositories)}
        self._names |= {location: tuple(models) for location, models in found.items()}
        self._names = {location: names for location, names in self._names.items() if location in known}
        return namespaced(found, self._names, self._read_composing_models)

    def _without_taken(
        self, found: Mapping[str, Mapping[str, ModelSource]]
    ) -> Iterable[Mapping[str, ModelSource]]:
        """The models of each repository, without those of others that have the name of an operator's.

        Those who may register models would else unload, or replace, a model of the operator's by its name; a
        repository that is not readable now keeps its names.
        """
        others = {location for location, each in found.items() if _of_others(each)}
        if not others:
            return found.values()
        known = {**{each.location: each.known for each in self.listers}, **found}
        taken = {name for each in known.values() if not _of_others(each) for name in each}
        kept = []
        for location, each in found.items():
            lost = each.keys() & taken if location in others else frozenset[str]()
            for name in sorted(lost - self._lost):
                log.error(
                    "model repository '%s': ignoring model '%s', as the name is that of a model of another "
                    "repository",
                    location,
                    name,
                )
            self._lost |= lost
            kept.append({name: source for name, source in each.items() if name not in lost} if lost else each)
        return kept


def _of_others(models: Mapping[str, ModelSource]) -> bool:
    """True for the models of a repository that others may write to."""
    return any(isinstance(each, DataOnly) and bool(each.data_only) for each in islice(models.values(), 1))


def _has_succeeded(listing: Listing | None) -> bool:
    return listing is not None and listing.models is not None


def open_repositories(
    options: ControlOptions, others: Iterable[Repository] = (), statistics: LoadStatistics | None = None
) -> Repositories:
    """Opens all repositories without accessing them.

    Raises:
        InvalidArgumentError: A location is malformed, or needs a package that is not installed.
    """
    opened = [_open(location, options) for location in options.repositories]
    opened += others
    if not options.namespacing:
        return Repositories(opened, statistics=statistics)
    return Repositories(opened, lambda source: read_composing_models(source, options), statistics=statistics)


def _open(location: str | Path, options: ControlOptions) -> Repository:
    if isinstance(location, Path) and (options.model_name or options.repository_wait_s):
        return MountedRepository(location, options.model_name, options.repository_wait_s)
    return open_repository(location, options.storage)
