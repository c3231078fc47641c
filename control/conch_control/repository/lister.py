"""Lists one repository: on a thread that may hang with the storage, and that nobody has to wait for.

At most one listing of a repository is under way. Who asks while one is, gets the next one, together with all
others who ask meanwhile: what somebody has written before asking has to be in it.
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
    """What a repository has said.

    Attributes:
        number: Counts the listings of the repository, from 1.
        began: When it began, in nanoseconds.
        models: The models by name; None if it could not be read.
        ended: When it ended, in nanoseconds.
        error: Why it could not be read.
    """

    number: int
    began: int
    ended: int
    models: Mapping[str, ModelSource] | None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Ticket:
    """What somebody waits for who has asked for a listing.

    Attributes:
        number: The first listing that has all that was there when it was asked for.
        failure: The first listing whose failure is an answer too: one that was under way already will do, as
            whoever asked has seen enough of it.
    """

    number: int
    failure: int


class Lister:
    """Lists one repository; all but `join` is to be called with the condition held.

    Args:
        repository: The repository.
        changed: Guards everything here, and is notified when a listing has ended.
        clock: Monotonic nanoseconds.

    Attributes:
        newest: The newest listing that has ended.
        known: The models at the last listing that succeeded.
        took_ns: How long a listing usually takes; an exception does not count for much.
        arrived: Whether a listing has succeeded of which somebody wanted to be told.
    """

    def __init__(self, repository: Repository, changed: threading.Condition, clock: Clock) -> None:
        self.newest: Listing | None = None
        self.known: Mapping[str, ModelSource] = {}
        self.took_ns = 0
        self.arrived = False
        self._repository = repository
        self._changed = changed
        self._clock = clock
        self._begun = 0  # how many listings have begun
        self._began = 0  # when the newest of them did
        self.requested_number = 0  # the last listing that anybody wants
        self._thread: threading.Thread | None = None
        self._closed = False
        self._given_up_ns = -1  # after how long somebody has gone on without it, since it could be read last
        self._told: tuple[Ticket, Callable[[], None]] | None = None

    @property
    def location(self) -> str:
        """Where the repository is."""
        return self._repository.location

    @property
    def busy(self) -> bool:
        """Whether a listing is under way."""
        return self._thread is not None

    @property
    def silent_ns(self) -> int:
        """For how long the listing under way has been."""
        return self._clock() - self._began if self.busy else 0

    def ask(self) -> Ticket:
        """Has it listed."""
        self.requested_number = self._begun + 1
        if self.busy:
            return Ticket(self.requested_number, self._begun)
        if not self._closed:
            thread = threading.Thread(target=self._run, name="conch-listing", daemon=True)
            self._begin()
            thread.start()
            self._thread = thread
        return Ticket(self.requested_number, self.requested_number)

    def under_way(self) -> Ticket:
        """For the listing under way, though it may not have what is there now."""
        return Ticket(self._begun, self._begun)

    def answer(self, ticket: Ticket) -> Listing | None:
        """The listing that says what was asked for; None if it has not ended."""
        newest = self.newest
        if newest is None:
            return None
        least = ticket.failure if newest.models is None else ticket.number
        return newest if newest.number >= least else None

    def hung(self, timeout_ns: int) -> bool:
        """Whether somebody with so much patience has gone on without it, and it could not be read since."""
        return self._given_up_ns >= timeout_ns

    def give_up(self, timeout_ns: int) -> None:
        """Says that somebody goes on without it, after having waited for so long."""
        if self.silent_ns < timeout_ns or self.hung(timeout_ns):
            return  # it has just begun to do what it was asked for
        if self._given_up_ns < 0:
            log.warning(
                "model repository '%s' has not answered for %.1f s: what concerns others goes on without it",
                self.location,
                self.silent_ns / _S,
            )
        self._given_up_ns = timeout_ns
        self._changed.notify_all()

    def tell(self, ticket: Ticket, on_late: Callable[[], None]) -> None:
        """Has somebody told when it can be read; on any thread, with nothing held. The last one counts."""
        self._told = ticket, on_late

    def close(self) -> None:
        """No listing begins any more."""
        self._closed = True

    def join(self, timeout_s: float) -> bool:
        """Waits for the end of the listing under way; returns whether it has ended."""
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
            with self._changed:
                again = self._end(Listing(self._begun, self._began, self._clock(), models, error))
                on_late = self._to_tell()
                self._changed.notify_all()
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
        except Exception as error:
            log.exception("failed to read model repository '%s'", self.location)
            return None, f"{type(error).__name__}: {error}"

    def _to_tell(self) -> Callable[[], None]:
        if self._told is None:
            return _nobody
        ticket, on_late = self._told
        listing = self.answer(ticket)
        if listing is None or listing.models is None:
            return _nobody
        self._told = None
        self.arrived = True
        return on_late

    def _end(self, listing: Listing) -> bool:
        """Takes a listing in; returns whether another one has begun."""
        self.newest = listing
        if listing.models is None:
            self.requested_number = (
                listing.number
            )  # who waits for the next one takes this failure for an answer
        else:
            self.known = listing.models
            if self._given_up_ns >= 0:
                log.info("model repository '%s' answers again", self.location)
            self._given_up_ns = -1
            self.took_ns = min(listing.ended - listing.began, 2 * self.took_ns + _S)
        if self.requested_number > self._begun and not self._closed:
            self._begin()
            return True
        self._thread = None
        return False


def _nobody() -> None:
    """Tells nobody anything."""


def reason_of(repository: Repository, error: ConchError | OSError) -> str:
    """Why a repository could not be read, without its name; a `ConchError` is about its credentials."""
    text = error.message if isinstance(error, ConchError) else str(error)
    return text.removeprefix(f"model repository '{repository.location}': ")
