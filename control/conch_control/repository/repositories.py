"""The repositories of a server, looked at as one.

Where there are several they are listed side by side, each on a thread of its own (`Lister`), so that a hanging
storage is in nobody's way who does not need it. How long to wait is up to who looks: `scan` waits for all,
`glance` goes on without those that are slow, and `follow` does too, and is told when they have answered.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping

from conch.core.clock import Clock, monotonic_ns
from conch.core.errors import ConchError
from conch_control.repository.lister import Lister, Listing, Ticket, reason_of
from conch_control.repository.source import ModelSource, Repository, Scan

log = logging.getLogger(__name__)

PATIENCE_S = 1.0
"""How long a repository may take when another one has answered."""

_S = 1_000_000_000
_CLOSE_S = 1.0


class Repositories:
    """The repositories of a server. Any thread may use them, but only one planner may follow them.

    Args:
        repositories: Each of them; one whose location is there already counts once.
        patience_s: How long to wait for one when another one has answered, where that is to be short.
        clock: Monotonic nanoseconds.
    """

    def __init__(
        self,
        repositories: Iterable[Repository],
        patience_s: float = PATIENCE_S,
        clock: Clock = monotonic_ns,
    ) -> None:
        self._repositories = tuple({each.location: each for each in repositories}.values())
        self._patience_ns = round(patience_s * _S)
        self._clock = clock
        self._changed = threading.Condition()  # guards what follows, and the listers
        self._closed = False
        # One repository holds up nobody but those who need it.
        self._listers = tuple(
            Lister(each, self._changed, clock) for each in self._repositories if len(self._repositories) > 1
        )

    def __iter__(self) -> Iterator[Repository]:
        return iter(self._repositories)

    def check(self) -> None:
        """Checks that all repositories can be used.

        Raises:
            InvalidArgumentError: One of them can't.
        """
        for repository in self._repositories:
            repository.check()

    def close(self) -> None:
        """Gives up what the repositories hold; nothing may be served from them any more.

        A listing that hangs for good is left to itself.
        """
        with self._changed:
            self._closed = True
            for lister in self._listers:
                lister.close()
            self._changed.notify_all()
        for repository in self._repositories:
            repository.close()
        end = self._clock() + round(_CLOSE_S * _S)
        for lister in self._listers:
            lister.join(max(end - self._clock(), 0) / _S)

    def scan(self) -> Scan:
        """Looks for models in all of them, and waits until the last one has said what it has."""
        return self._scan_side_by_side(patient=True) if self._listers else self._scan_one()

    def glance(self) -> Scan:
        """Looks for models in all of them, but does not wait long for those that are slower than others.

        They count as unreadable then, and are not waited for again until they have answered.
        """
        return self._scan_side_by_side(patient=False) if self._listers else self._scan_one()

    def follow(self, everything: bool, on_late: Callable[[], None]) -> Scan:
        """As `glance`, for the one who looks again and again.

        Args:
            everything: Whether each model will be looked at. If so, what a slow repository has said since the
                last such look is taken as it is, instead of having it listed anew.
            on_late: Called, on any thread, when one has answered that this scan has gone on without.
        """
        if not self._listers:
            return self._scan_one()
        return self._scan_side_by_side(patient=False, everything=everything, on_late=on_late)

    def _scan_one(self) -> Scan:
        found: list[Mapping[str, ModelSource]] = []
        unreadable: dict[str, str] = {}
        for repository in self._repositories:
            try:
                found.append(repository.models())
            except (ConchError, OSError) as error:
                reason = reason_of(error)
                log.error("failed to read model repository '%s': %s", repository.location, reason)
                unreadable[repository.location] = reason
        models, duplicates = _together(found)
        return Scan(models, duplicates, unreadable)

    def _scan_side_by_side(
        self, patient: bool, everything: bool = False, on_late: Callable[[], None] | None = None
    ) -> Scan:
        with self._changed:
            began = self._clock()
            taken: dict[Lister, Listing] = {}
            tickets: dict[Lister, Ticket] = {}
            for lister in self._listers:
                newest = lister.newest
                if everything and lister.arrived and newest is not None and newest.models is not None:
                    taken[lister] = newest
                elif patient or not (lister.hung and lister.busy):
                    tickets[lister] = lister.ask()
            self._wait(tickets, patient, bool(taken))
            for lister, ticket in tickets.items():
                listing = lister.answer(ticket)
                if listing is not None:
                    taken[lister] = listing
            if on_late is not None:
                for lister in self._listers:
                    if lister not in taken:
                        lister.tell(on_late)
                    elif everything:
                        lister.take()
            return self._scanned(taken, began)

    def _wait(self, tickets: Mapping[Lister, Ticket], patient: bool, answered: bool) -> None:
        """Waits until everything has been said that is worth waiting for."""
        give_up_at: int | None = None
        while not self._closed:
            waited = []
            for lister, ticket in tickets.items():
                listing = lister.answer(ticket)
                if listing is None:
                    if patient or not lister.hung:
                        waited.append(lister)
                elif listing.models is not None:
                    answered = True
            if not waited:
                return
            if not patient and answered and give_up_at is None:
                give_up_at = self._clock() + self._patience_ns
            if give_up_at is None:
                self._changed.wait()
                continue
            left = give_up_at - self._clock()
            if left <= 0:
                for lister in waited:
                    lister.give_up(self._patience_ns)
                return
            self._changed.wait(left / _S)

    def _scanned(self, taken: Mapping[Lister, Listing], began: int) -> Scan:
        unreadable: dict[str, str] = {}
        late: set[str] = set()
        remembered: dict[str, ModelSource] = {}
        found: list[Mapping[str, ModelSource]] = []
        for lister in self._listers:
            listing = taken.get(lister)
            if listing is not None and listing.models is not None:
                found.append(listing.models)
                continue
            if listing is not None:
                unreadable[lister.location] = listing.error
            elif self._closed:
                unreadable[lister.location] = "it has been closed"
            else:
                remembered.update(lister.known)
                late.add(lister.location)
                unreadable[lister.location] = f"has not answered for {lister.silent_ns / _S:.1f} s"
        models, duplicates = _together(found)
        oldest = min((each.began for each in taken.values() if each.models is not None), default=began)
        return Scan(models, duplicates, unreadable, frozenset(late), remembered, max(began - oldest, 0))


def _together(
    found: Iterable[Mapping[str, ModelSource]],
) -> tuple[Mapping[str, ModelSource], frozenset[str]]:
    """The models that only one repository has, and the names that more than one has."""
    models: dict[str, ModelSource] = {}
    duplicates: set[str] = set()
    for each in found:
        duplicates.update(each.keys() & models.keys())
        models.update(each)
    for name in duplicates:
        del models[name]
    return models, frozenset(duplicates)
