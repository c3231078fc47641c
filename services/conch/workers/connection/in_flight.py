"""What a worker has of the server, as the server keeps it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from conch.core.backend import Outcome
from conch.core.clock import monotonic_ns
from conch.core.errors import ConchError
from conch.core.request import InferenceRequest, Kept
from conch.core.scheduling.scheduler import Batch
from conch.workers.connection.worker_responses import OpenRequest


@dataclass(frozen=True, slots=True)
class InFlight:
    """A batch that a worker runs, or a request that it has kept of one.

    Attributes:
        since_ns: Monotonic time at which it was sent.
        request_ids: The ids that clients gave its requests.
    """

    since_ns: int
    request_ids: tuple[str, ...]


class SentBatch:
    """A batch that a worker runs.

    Attributes:
        number: Its number on the socket.
        batch: The batch.
        again: Which of its requests the worker knows already.
        numbers: The numbers of its requests.
        done: Takes the outcome.
        since_ns: Monotonic time at which it was sent.
        resent: Whether it has been sent twice, as the worker could not reach a GPU.
    """

    __slots__ = ("again", "batch", "done", "number", "numbers", "resent", "since_ns")

    def __init__(
        self,
        number: int,
        batch: Batch,
        again: list[bool],
        numbers: list[int],
        done: Callable[[Outcome], None],
        since_ns: int,
    ) -> None:
        self.number = number
        self.batch = batch
        self.again = again
        self.numbers = numbers
        self.done = done
        self.since_ns = since_ns
        self.resent = False


class KeptRequest(Kept):
    """Stands for what a worker keeps of a request that is to run again.

    Args:
        table: What the worker has.
        number: The request's number there.
    """

    __slots__ = ("number", "table")

    def __init__(self, table: InFlightTable, number: int) -> None:
        self.table = table
        self.number = number

    def end(self, request: InferenceRequest, error: ConchError) -> None:
        """See `Kept.end`."""
        entry = self.table.entry(self.number)
        if entry is not None:  # else what ends it is on its way to its client
            entry.fail(error)


class InFlightTable:
    """The batches that one worker runs, and the requests that it has and that are not over.

    Batches come on any thread, one at a time; their outcomes on the one that receives; the end on any.

    Most requests are answered with their batch. What hands over the responses of others is made when the
    first of them comes, or when somebody else asks for it.

    Args:
        opened: Makes what hands over the responses of a request, with its number.
        cancel: Tells the worker that nobody waits for a request any more, by its number.
        refuse: Ends a batch that has come when the table was closed.

    Attributes:
        batches: The batches, by their numbers.
        open: The requests that have not got their last response, by their numbers.
        again: The numbers of those that wait to run again.
    """

    def __init__(
        self,
        opened: Callable[[InferenceRequest, int], OpenRequest],
        cancel: Callable[[int], None],
        refuse: Callable[[SentBatch], None],
    ) -> None:
        self.batches: dict[int, SentBatch] = {}
        self.open: dict[int, InferenceRequest] = {}
        self.again: set[int] = set()
        self._entries: dict[int, OpenRequest] = {}  # of some of those
        self._opened = opened
        self._cancel = cancel
        self._refuse = refuse
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._closed = False
        self._last: list[InFlight] = []

    def enter(self, batch: Batch, done: Callable[[Outcome], None]) -> SentBatch | None:
        """Takes down a batch that is about to be sent.

        Returns:
            The batch; None if the table is closed.
        """
        requests = batch.requests
        following = self._numbers
        number = next(following)
        if self.again:
            known = [self._number(request) for request in requests]
            again, numbers = [one for one, _ in known], [each for _, each in known]
        else:
            again, numbers = [False] * len(requests), list(itertools.islice(following, len(requests)))
        sent = SentBatch(number, batch, again, numbers, done, monotonic_ns())
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

    def take(self, number: int) -> SentBatch | None:
        """Forgets a batch, but not its requests; None if it is not there any more."""
        with self._lock:
            return self.batches.pop(number, None)

    def request(self, number: int) -> InferenceRequest | None:
        """The request of a number, if it is not over."""
        return self.open.get(number)

    def entry(self, number: int) -> OpenRequest | None:
        """What hands over the responses of a request, if that is not over."""
        entry = self._entries.get(number)
        if entry is None:
            with self._lock:
                entry = self._entries.get(number)
                if entry is None and (request := self.open.get(number)) is not None:
                    entry = self._entries[number] = self._opened(request, number)
        return entry

    def over(self, numbers: Sequence[int]) -> None:
        """Forgets requests that have got their last response."""
        forget = self.open.pop
        with self._lock:
            for number in numbers:
                forget(number, None)
            if self._entries:
                for number in numbers:
                    self._entries.pop(number, None)

    def completed(self) -> Iterator[int]:
        """Forgets the requests that wait to run again and have been answered without the worker.

        Yields:
            The number of each, when it is forgotten.
        """
        for number in list(self.again):
            request = self.open.get(number)
            if request is None or request.completed:
                self.again.discard(number)
                self.over((number,))
                yield number

    def in_flight(self) -> list[InFlight]:
        """All that there is, the oldest first; what there was in the end, when the table is closed."""
        with self._lock:
            return self._last if self._closed else self._in_flight()

    def kept(self, batch: Batch) -> list[OpenRequest]:
        """The requests of a batch that is done which the worker has and has not answered."""
        requests = {id(request) for request in batch.requests if not request.rescheduled}
        numbers = [number for number, request in list(self.open.items()) if id(request) in requests]
        return [entry for number in numbers if (entry := self.entry(number)) is not None]

    def close(self) -> tuple[list[SentBatch], dict[int, OpenRequest]]:
        """Has nothing come in any more, and forgets everything; to be called once.

        Returns:
            The batches and the requests that there were, for the caller to answer.
        """
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
        """Whether the worker knows a request already, and its number there."""
        kept = getattr(request, "kept", None)
        if isinstance(kept, KeptRequest) and kept.table is self:
            request.kept = None
            self.again.discard(kept.number)
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
