"""What a worker has of the server, as the server keeps it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from conch.core.backend import Outcome
from conch.core.clock import monotonic_ns
from conch.core.errors import ConchError
from conch.core.request import InferenceRequest, Kept
from conch.core.scheduler.base import Batch
from conch.workers.answers import OpenRequest


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
        entry = self.table.open.get(self.number)
        if entry is not None:  # else what ends it is on its way to its client
            entry.fail(error)


class InFlightTable:
    """The batches that one worker runs, and the requests that it has and that are not over.

    Batches come on any thread, one at a time; their outcomes on the one that receives; the end on any.

    Args:
        opened: Makes the entry of a request that is about to be sent, with its number.
        refuse: Ends a batch that has come when the table was closed.

    Attributes:
        batches: The batches, by their numbers.
        open: The requests that have not got their last response, by their numbers.
        again: The numbers of those that wait to run again.
    """

    def __init__(
        self,
        opened: Callable[[InferenceRequest, int], OpenRequest],
        refuse: Callable[[SentBatch], None],
    ) -> None:
        self.batches: dict[int, SentBatch] = {}
        self.open: dict[int, OpenRequest] = {}
        self.again: set[int] = set()
        self._opened = opened
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
            again, numbers = [False] * len(requests), [next(following) for _ in requests]
        sent = SentBatch(number, batch, again, numbers, done, monotonic_ns())
        with self._lock:
            closed = self._closed
            if not closed:
                self.batches[number] = sent
                for request, each in zip(requests, numbers, strict=True):
                    if not request.filler and not request.answered and each not in self.open:
                        self.open[each] = self._opened(request, each)
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
        entry = self.open.get(number)
        return None if entry is None else entry.request

    def answered(self) -> Iterator[int]:
        """Forgets the requests that wait to run again and have been answered without the worker.

        Yields:
            The number of each, when it is forgotten.
        """
        for number in list(self.again):
            entry = self.open.get(number)
            if entry is None or entry.request.answered:
                self.again.discard(number)
                self.open.pop(number, None)
                yield number

    def in_flight(self) -> list[InFlight]:
        """All that there is, the oldest first; what there was in the end, when the table is closed."""
        with self._lock:
            return self._last if self._closed else self._in_flight()

    def kept(self, batch: Batch) -> list[OpenRequest]:
        """The requests of a batch that is done which the worker has and has not answered."""
        requests = {id(request) for request in batch.requests if not request.rescheduled}
        return [entry for entry in list(self.open.values()) if id(entry.request) in requests]

    def close(self) -> tuple[list[SentBatch], dict[int, OpenRequest]]:
        """Has nothing come in any more, and forgets everything; to be called once.

        Returns:
            The batches and the requests that there were, for the caller to answer.
        """
        with self._lock:
            self._closed = True
            self._last = self._in_flight()
            batches, opened = list(self.batches.values()), dict(self.open)
            self.batches.clear()
            self.open.clear()
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
        left = [entry for number, entry in list(self.open.items()) if number not in numbers]
        kept = [InFlight(entry.since_ns, (entry.request.id,)) for entry in left if not entry.request.answered]
        return sorted(kept + batches, key=lambda each: each.since_ns)
