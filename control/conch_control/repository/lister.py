"""Lists one repository on a thread of its own, which may hang with the storage.

At most one listing runs. A request during a listing gets the next one, shared with all requests made
meanwhile, so that it includes everything written before the request:

1. Thread A requests a listing; number 1 starts.
2. Thread B writes a model and requests a listing; B's ticket is for number 2, as 1 may have missed the model.
3. Listing 1 ends; A continues, and number 2 starts. If 1 failed, its failure answers B too.

Threads: `conch-listing`. Locks: the condition of `Repositories`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from conch.core.clock import Clock
from conch.core.errors import ConchError
from conch_control.repository.source import ModelSource, Repository

log = logging.getLogger(__name__)

_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Listing:
    """Result of a listing.

    Attributes:
        began: Start, in nanoseconds.
        ended: End, in nanoseconds.
        models: Models by name; None if it failed.
    """

    number: int
    began: int
    ended: int
    models: Mapping[str, ModelSource] | None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Ticket:
    """A request for a listing.

    Attributes:
        number: First listing that includes everything written before the request.
        failure: First listing whose failure answers the request.
    """

    number: int
    failure: int


class Lister:
    """Lists one repository. Call all methods but `join` with the condition held.

    Args:
        repository: The repository.
        changed: Guards the state; notified when a listing ends.
        clock: Monotonic nanoseconds.
        on_failure: Called with the location when a listing has failed, on its thread, without locks.

    Attributes:
        newest: Last finished listing.
        known: Models of the last successful listing.
        took_ns: Usual duration of a listing; outliers count little.
        answered_late: A listing succeeded after a request had timed out.
    """

    def __init__(
        self,
        repository: Repository,
        changed: threading.Condition,
        clock: Clock,
        on_failure: Callable[[str], None],
    ) -> None:
        self._on_failure = on_failure
        self.newest: Listing | None = None
        self.known: Mapping[str, ModelSource] = {}
        self.took_ns = 0
        self.answered_late = False
        self._repository = repository
        self._changed = changed
        self._clock = clock
        self._begun = 0  # number of the newest listing
        self._began = 0  # its start
        self.requested_number = 0  # number of the last requested listing
        self._thread: threading.Thread | None = None
        self._closed = False
        self._timed_out_ns = -1  # longest timeout that has expired since the last success
        self._late_callback: tuple[Ticket, Callable[[], None]] | None = None

    @property
    def location(self) -> str:
        """Location of the repository."""
        return self._repository.location

    @property
    def busy(self) -> bool:
        """True while a listing runs."""
        return self._thread is not None

    @property
    def silent_ns(self) -> int:
        """Duration of the running listing."""
        return self._clock() - self._began if self.busy else 0

    def request(self) -> Ticket:
        """Requests a listing."""
        self.requested_number = self._begun + 1
        if self.busy:
            return Ticket(self.requested_number, self._begun)
        if not self._closed:
            thread = threading.Thread(target=self._run, name="conch-listing", daemon=True)
            self._begin()
            thread.start()
            self._thread = thread
        return Ticket(self.requested_number, self.requested_number)

    def current_ticket(self) -> Ticket:
        """A ticket for the running listing, which may be outdated."""
        return Ticket(self._begun, self._begun)

    def result(self, ticket: Ticket) -> Listing | None:
        """The listing for a ticket; None if it has not finished."""
        newest = self.newest
        if newest is None:
            return None
        least = ticket.failure if newest.models is None else ticket.number
        return newest if newest.number >= least else None

    def timed_out(self, timeout_ns: int) -> bool:
        """True if a request with this timeout has given up since the last success."""
        return self._timed_out_ns >= timeout_ns

    def mark_timed_out(self, timeout_ns: int) -> None:
        """Records that a request has given up after this timeout."""
        if self.silent_ns < timeout_ns or self.timed_out(timeout_ns):
            return  # it has just started
        if self._timed_out_ns < 0:
            log.warning(
                "model repository '%s' has not answered for %.1f s: what concerns others goes on without it",
                self.location,
                self.silent_ns / _S,
            )
        self._timed_out_ns = timeout_ns
        self._changed.notify_all()

    def notify_when_listed(self, ticket: Ticket, on_late: Callable[[], None]) -> None:
        """Sets a callback for the next success after the ticket; it runs on any thread, without locks."""
        self._late_callback = ticket, on_late

    def close(self) -> None:
        """Starts no more listings."""
        self._closed = True

    def join(self, timeout_s: float) -> bool:
        """Waits for the running listing; returns False on timeout."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
        return thread is None or not thread.is_alive()

    def _begin(self) -> None:
        self._begun += 1
        self._began = self._clock()

    def _run(self) -> None:
        while True:
            models, error = self._list()
            if models is None:
                self._on_failure(self.location)
            with self._changed:
                again = self._end(Listing(self._begun, self._began, self._clock(), models, error))
                on_late = self._take_callback()
                self._changed.notify_all()
            if on_late is not None:
                on_late()
            if not again:
                return

    def _list(self) -> tuple[Mapping[str, ModelSource] | None, str]:
        try:
            return self._repository.models(), ""
        except (ConchError, OSError) as error:
            reason = reason_of(self._repository, error)
            log.error("failed to read model repository '%s': %s", self.location, reason)
            return None, reason
        except Exception:  # boundary: the repository may be of another package
            log.exception("failed to read model repository '%s'", self.location)
            return None, "it could not be read"

    def _take_callback(self) -> Callable[[], None] | None:
        if self._late_callback is None:
            return None
        ticket, on_late = self._late_callback
        listing = self.result(ticket)
        if listing is None or listing.models is None:
            return None
        self._late_callback = None
        self.answered_late = True
        return on_late

    def _end(self, listing: Listing) -> bool:
        """Stores a listing; returns True if another one has started."""
        self.newest = listing
        if listing.models is None:
            self.requested_number = listing.number  # a failure also answers requests for the next listing
        else:
            self.known = listing.models
            if self._timed_out_ns >= 0:
                log.info("model repository '%s' answers again", self.location)
            self._timed_out_ns = -1
            self.took_ns = min(listing.ended - listing.began, 2 * self.took_ns + _S)
        if self.requested_number > self._begun and not self._closed:
            self._begin()
            return True
        self._thread = None
        return False


def reason_of(repository: Repository, error: ConchError | OSError) -> str:
    """Reason for which a repository is unreadable, without its name."""
    text = error.message if isinstance(error, ConchError) else str(error)
    return text.removeprefix(f"model repository '{repository.location}': ")
