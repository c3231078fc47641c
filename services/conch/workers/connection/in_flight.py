"""Table of the batches and requests that a worker has.

Owns: batches and open requests by number. Threads and locks: one lock; batches come on any thread, several
at a time where none is rescheduled (`BackendInstance.most_batches`); outcomes come on the I/O loop.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from conch.core.backend import Done
from conch.core.clock import monotonic_ns
from conch.core.request import InferenceRequest
from conch.core.scheduling.scheduler import Batch
from conch.ipc.codec import batch_of, number_of
from conch.workers.connection.worker_responses import OpenRequest


@dataclass(frozen=True, slots=True)
class InFlight:
    """A batch that a worker executes, or an open request of an earlier batch; for crash reports.

    Attributes:
        since_ns: Monotonic time at which it was sent.
        request_ids: Its requests' ids, from their clients.
    """

    since_ns: int
    request_ids: tuple[str, ...]


class SentBatch:
    """A batch that a worker executes.

    Attributes:
        number: Its number on the socket.
        batch: The batch.
        done: Called with the outcome.
        since_ns: Monotonic time at which it was sent.
        instance: Number of the worker's instance that runs it.
        former_numbers: Former numbers of rescheduled requests, by index; None if it has none.
        ended: Numbers of its requests that have their last response.
        resent: True if it was sent twice because the worker could not open its tensors.
    """

    __slots__ = ("batch", "done", "ended", "former_numbers", "instance", "number", "resent", "since_ns")

    def __init__(self, number: int, batch: Batch, done: Done, since_ns: int, instance: int = 0) -> None:
        self.number = number
        self.batch = batch
        self.done = done
        self.since_ns = since_ns
        self.instance = instance
        self.former_numbers: dict[int, int] | None = None
        self.ended: set[int] = set()
        self.resent = False

    def number_at(self, index: int) -> int:
        """The number of one of its requests."""
        number = number_of(self.number, index)
        return number if self.former_numbers is None else self.former_numbers.get(index, number)

    @property
    def numbers(self) -> list[int]:
        """The numbers of its requests."""
        return [self.number_at(index) for index in range(len(self.batch.requests))]


class KeptRequest(NamedTuple):
    """A rescheduled request that a worker keeps: its number in the worker's table."""

    table: InFlightTable
    number: int


class InFlightTable:
    """The batches that one worker executes, and its open requests: those without their last response.

    Most requests complete with their batch; an `OpenRequest` exists only for the others, from their first
    response on.

    Args:
        opened: Makes the `OpenRequest` of a request and its number.
        cancel: Sends the cancellation of a request.
        refuse: Ends a batch that arrives at a closed table.

    Attributes:
        batches: By number.
        rescheduled: Numbers of the requests that wait to run again.
    """

    def __init__(
        self,
        opened: Callable[[InferenceRequest, int], OpenRequest],
        cancel: Callable[[int], None],
        refuse: Callable[[SentBatch], None],
    ) -> None:
        self.batches: dict[int, SentBatch] = {}
        self.rescheduled: set[int] = set()
        self._unfinished: dict[int, InferenceRequest] = {}  # open after their batch, or running again
        self._entries: dict[int, OpenRequest] = {}  # of some of the open ones
        self._opened = opened
        self._cancel = cancel
        self._refuse = refuse
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._closed = False
        self._last: list[InFlight] = []

    def add_batch(self, batch: Batch, done: Done, instance: int = 0) -> SentBatch | None:
        """Adds a batch that is about to be sent; None if the table is closed."""
        sent = SentBatch(next(self._numbers), batch, done, monotonic_ns(), instance)
        if self.rescheduled:
            kept = {index: getattr(each, "backend_state", None) for index, each in enumerate(batch.requests)}
            for index, each in kept.items():
                if isinstance(each, KeptRequest) and each.table is self:
                    sent.former_numbers = sent.former_numbers or {}
                    sent.former_numbers[index] = each.number
                    batch.requests[index].backend_state = None
                    self.rescheduled.discard(each.number)
        with self._lock:
            closed = self._closed
            if not closed:
                self.batches[sent.number] = sent
        if closed:
            self._refuse(sent)
            return None
        for index, request in enumerate(batch.requests):
            if request.completed:
                sent.ended.add(sent.number_at(index))
            else:
                request.on_cancel = self._cancelled
        return sent

    def end_batch(self, sent: SentBatch, left: Sequence[int] = ()) -> bool:
        """Removes a batch; requests with the indexes `left` stay open. False if the batch is not there."""
        with self._lock:
            if self.batches.pop(sent.number, None) is None:
                return False
            if sent.former_numbers is not None or self._entries:
                for index, number in enumerate(sent.numbers):
                    if index not in left:
                        self._unfinished.pop(number, None)
                        self._entries.pop(number, None)
            for index in left:
                number, request = sent.number_at(index), sent.batch.requests[index]
                if number not in sent.ended and not request.filler:
                    self._unfinished[number] = request
        return True

    @property
    def open(self) -> dict[int, InferenceRequest]:
        """All open requests, by number."""
        executing = [number for sent in list(self.batches.values()) for number in sent.numbers]
        numbers = dict.fromkeys([*self._unfinished, *executing])
        found = {number: self.request(number) for number in numbers}
        return {number: request for number, request in found.items() if request is not None}

    def request(self, number: int) -> InferenceRequest | None:
        """An open request."""
        request = self._unfinished.get(number)
        if request is None:
            batch, index = batch_of(number)
            sent = self.batches.get(batch)
            if sent is None or index >= len(sent.batch.requests) or number in sent.ended:
                return None
            request = sent.batch.requests[index]
            if sent.number_at(index) != number:
                return None
        return None if request.filler else request

    def entry(self, number: int) -> OpenRequest | None:
        """The `OpenRequest` of an open request; made on demand."""
        entry = self._entries.get(number)
        if entry is None:
            with self._lock:
                entry = self._entries.get(number)
                if entry is None and (request := self.request(number)) is not None:
                    entry = self._entries[number] = self._opened(request, number)
        return entry

    def finish(self, number: int) -> None:
        """Removes a request that has its last response."""
        with self._lock:
            self._entries.pop(number, None)
            self._unfinished.pop(number, None)
            for sent in self.batches.values():
                sent.ended.add(number)

    def completed(self) -> Iterator[int]:
        """Removes rescheduled requests that completed without the worker; yields their numbers."""
        for number in list(self.rescheduled):
            request = self.request(number)
            if request is None or request.completed:
                self.rescheduled.discard(number)
                self.finish(number)
                yield number

    def in_flight(self) -> list[InFlight]:
        """Batches and open requests, oldest first; of a closed table, those at its end."""
        with self._lock:
            return self._last if self._closed else self._in_flight()

    def open_requests_of(self, batch: Batch) -> list[OpenRequest]:
        """The open requests of a batch that is done."""
        requests = {id(request) for request in batch.requests if not request.rescheduled}
        numbers = [number for number, request in list(self._unfinished.items()) if id(request) in requests]
        return [entry for number in numbers if (entry := self.entry(number)) is not None]

    def close(self) -> tuple[list[SentBatch], dict[int, OpenRequest]]:
        """Closes the table, once; returns batches and open requests, which the caller completes."""
        with self._lock:
            self._closed = True
            self._last = self._in_flight()
            batches = list(self.batches.values())
            opened = {
                number: self._entries.get(number) or self._opened(request, number)
                for number, request in self.open.items()
            }
            self.batches.clear()
            self._unfinished.clear()
            self._entries = {}
        return batches, opened

    def _cancelled(self, request: InferenceRequest) -> None:
        """Sends the cancellation of an open request."""
        with self._lock:
            numbers = [number for number, each in self._unfinished.items() if each is request]
            for sent in self.batches.values():
                numbers += [
                    sent.number_at(index) for index, each in enumerate(sent.batch.requests) if each is request
                ]
        for number in dict.fromkeys(numbers):
            self._cancel(number)

    def _in_flight(self) -> list[InFlight]:
        begun = list(self.batches.values())
        executing = {number for each in begun for number in each.numbers}
        batches = [
            InFlight(each.since_ns, tuple(one.id for one in each.batch.requests if not one.filler))
            for each in begun
        ]
        left = {
            number: request
            for number, request in self._unfinished.items()
            if number not in executing and not request.completed
        }
        kept = [InFlight(self._since_ns(number), (request.id,)) for number, request in left.items()]
        return sorted(kept + batches, key=lambda each: each.since_ns)

    def _since_ns(self, number: int) -> int:
        entry = self._entries.get(number)
        return 0 if entry is None else entry.since_ns
