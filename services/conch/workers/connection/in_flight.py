"""Table of the batches and requests that a worker has.

Owns: batches and open requests by number. Threads and locks: one lock; batches come on any thread, one at
a time; outcomes come on the thread that reads. Used by: batch_sender, outcome_handler, worker_connection.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from conch.core.backend import Done
from conch.core.clock import monotonic_ns
from conch.core.errors import ConchError
from conch.core.request import InferenceRequest, Kept
from conch.core.scheduling.scheduler import Batch
from conch.workers.connection.worker_responses import OpenRequest


@dataclass(frozen=True, slots=True)
class InFlight:
    """A batch that a worker executes, or an open request of an earlier batch; for crash reports.

    Attributes:
        since_ns: When it was sent, monotonic.
        request_ids: Its requests' ids, from their clients.
    """

    since_ns: int
    request_ids: tuple[str, ...]


class SentBatch:
    """A batch that a worker executes.

    Attributes:
        number: Its number on the socket.
        known: For each request, whether the worker has it already (rescheduled requests).
        numbers: The numbers of its requests.
        done: Called with the outcome.
        since_ns: When it was sent, monotonic.
        resent: True if it was sent twice because the worker could not open its tensors.
    """

    __slots__ = ("batch", "done", "known", "number", "numbers", "resent", "since_ns")

    def __init__(
        self,
        number: int,
        batch: Batch,
        known: list[bool],
        numbers: list[int],
        done: Done,
        since_ns: int,
    ) -> None:
        self.number = number
        self.batch = batch
        self.known = known
        self.numbers = numbers
        self.done = done
        self.since_ns = since_ns
        self.resent = False


class KeptRequest(Kept):
    """What a worker keeps of a rescheduled request, as the scheduler sees it."""

    __slots__ = ("number", "table")

    def __init__(self, table: InFlightTable, number: int) -> None:
        self.table = table
        self.number = number

    def end(self, request: InferenceRequest, error: ConchError) -> None:
        """See `Kept.end`."""
        entry = self.table.entry(self.number)
        if entry is not None:  # otherwise its last response is under way
            entry.fail(error)


class InFlightTable:
    """The batches that one worker executes, and its open requests.

    Most requests complete with their batch; an `OpenRequest` exists only for the others, from their first
    response on.

    Args:
        opened: Makes the `OpenRequest` of a request and its number.
        cancel: Sends the cancellation of a request.
        refuse: Ends a batch that arrives at a closed table.

    Attributes:
        batches: By number.
        open: Requests without their last response, by number.
        rescheduled: Numbers of the requests that wait to run again.
    """

    def __init__(
        self,
        opened: Callable[[InferenceRequest, int], OpenRequest],
        cancel: Callable[[int], None],
        refuse: Callable[[SentBatch], None],
    ) -> None:
        self.batches: dict[int, SentBatch] = {}
        self.open: dict[int, InferenceRequest] = {}
        self.rescheduled: set[int] = set()
        self._entries: dict[int, OpenRequest] = {}  # of some of the open ones
        self._opened = opened
        self._cancel = cancel
        self._refuse = refuse
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._closed = False
        self._last: list[InFlight] = []

    def add(self, batch: Batch, done: Done) -> SentBatch | None:
        """Adds a batch that is about to be sent; None if the table is closed."""
        requests = batch.requests
        following = self._numbers
        number = next(following)
        if self.rescheduled:
            pairs = [self._number(request) for request in requests]
            known, numbers = [one for one, _ in pairs], [each for _, each in pairs]
        else:
            known, numbers = [False] * len(requests), list(itertools.islice(following, len(requests)))
        sent = SentBatch(number, batch, known, numbers, done, monotonic_ns())
        opened, cancel = self.open, self._cancel
        with self._lock:
            closed = self._closed
            if not closed:
                self.batches[number] = sent
                for request, each in zip(requests, numbers, strict=True):
                    if not request.filler and not request.completed:
                        opened[each] = request
                        request.on_cancel = partial(cancel, each)
        if closed:
            self._refuse(sent)
            return None
        return sent

    def remove(self, number: int) -> SentBatch | None:
        """Removes a batch, but not its requests; None if it is gone."""
        with self._lock:
            return self.batches.pop(number, None)

    def request(self, number: int) -> InferenceRequest | None:
        """An open request."""
        return self.open.get(number)

    def entry(self, number: int) -> OpenRequest | None:
        """The `OpenRequest` of an open request; made on demand."""
        entry = self._entries.get(number)
        if entry is None:
            with self._lock:
                entry = self._entries.get(number)
                if entry is None and (request := self.open.get(number)) is not None:
                    entry = self._entries[number] = self._opened(request, number)
        return entry

    def finish(self, numbers: Sequence[int]) -> None:
        """Removes requests that have their last response."""
        forget = self.open.pop
        with self._lock:
            for number in numbers:
                forget(number, None)
            if self._entries:
                for number in numbers:
                    self._entries.pop(number, None)

    def completed(self) -> Iterator[int]:
        """Removes rescheduled requests that completed without the worker; yields their numbers."""
        for number in list(self.rescheduled):
            request = self.open.get(number)
            if request is None or request.completed:
                self.rescheduled.discard(number)
                self.finish((number,))
                yield number

    def in_flight(self) -> list[InFlight]:
        """Batches and open requests, oldest first; of a closed table, those at its end."""
        with self._lock:
            return self._last if self._closed else self._in_flight()

    def kept(self, batch: Batch) -> list[OpenRequest]:
        """The open requests of a batch that is done."""
        requests = {id(request) for request in batch.requests if not request.rescheduled}
        numbers = [number for number, request in list(self.open.items()) if id(request) in requests]
        return [entry for number in numbers if (entry := self.entry(number)) is not None]

    def close(self) -> tuple[list[SentBatch], dict[int, OpenRequest]]:
        """Closes the table, once; returns batches and open requests, which the caller completes."""
        with self._lock:
            self._closed = True
            self._last = self._in_flight()
            batches, entries = list(self.batches.values()), self._entries
            opened = {
                number: entries.get(number) or self._opened(request, number)
                for number, request in self.open.items()
            }
            self.batches.clear()
            self.open.clear()
            self._entries = {}
        return batches, opened

    def _number(self, request: InferenceRequest) -> tuple[bool, int]:
        """True if the worker has a request already, and its number."""
        kept = getattr(request, "kept", None)
        if isinstance(kept, KeptRequest) and kept.table is self:
            request.kept = None
            self.rescheduled.discard(kept.number)
            return True, kept.number
        return False, next(self._numbers)

    def _in_flight(self) -> list[InFlight]:
        begun = list(self.batches.values())
        numbers = {number for each in begun for number in each.numbers}
        batches = [
            InFlight(each.since_ns, tuple(one.id for one in each.batch.requests if not one.filler))
            for each in begun
        ]
        left = {
            number: request
            for number, request in list(self.open.items())
            if number not in numbers and not request.completed
        }
        kept = [InFlight(self._since_ns(number), (request.id,)) for number, request in left.items()]
        return sorted(kept + batches, key=lambda each: each.since_ns)

    def _since_ns(self, number: int) -> int:
        entry = self._entries.get(number)
        return 0 if entry is None else entry.since_ns
