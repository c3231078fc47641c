"""The live sequences: their seats on instances, the backlog, sequences with the same id, and expiry times.

A sequence lives from its START request until its END request has run. It has a place on one instance, its
seat, or waits for one in the backlog; a freed seat goes to the oldest sequence there. A sequence whose id is
in use follows the sequence that uses it: it is seated, from the end of the backlog, once that one has ended.
So a model never sees two sequences of one id.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence

from conch.core.request import InferenceRequest
from conch.core.scheduling.queue import NEVER, Expiries
from conch.core.scheduling.scheduler import Batch, Decision
from conch.core.tensor import Tensor


class LiveSequence:
    """A sequence that has started and not ended.

    Attributes:
        correlation_id: Its id.
        identity: The control inputs with its id.
        states: Its implicit states, by input.
        final: True if it takes no more requests, even if its queued ones are cancelled.
        queue: Its queued requests, in order.
        running: True if a request of it is in a batch.
        begun: True if a request of it has ever been in a batch.
        ended: True if it takes no more requests.
        live: True if it is in a table.
        seats: The instance of its seat, or None.
        slot: Its seat there.
        followers: Sequences that wait for its id, or None.
        inputs: Original inputs of a request that may run again.
    """

    __slots__ = (
        "begun",
        "correlation_id",
        "ended",
        "final",
        "followers",
        "identity",
        "inputs",
        "live",
        "queue",
        "running",
        "seats",
        "slot",
        "states",
    )

    def __init__(
        self,
        correlation_id: int | str,
        identity: dict[str, Tensor],
        states: dict[str, Tensor],
        final: bool = False,
    ) -> None:
        self.correlation_id = correlation_id
        self.identity = identity
        self.states = states
        self.final = self.ended = final
        self.queue: deque[InferenceRequest] = deque()
        self.running = False
        self.begun = False
        self.live = False
        self.seats: Seats | None = None
        self.slot = 0
        self.followers: OrderedDict[LiveSequence, None] | None = None
        self.inputs: dict[str, Tensor] | None = None


class Seats(ABC):
    """The seats of one instance, and the ready requests of their sequences.

    Attributes:
        number: The instance's number.
        free: Number of free seats.
        busy: True if the instance runs a batch.
    """

    def __init__(self, number: int, places: int) -> None:
        self.number = number
        self.free = places
        self.busy = False

    def take(self, sequence: LiveSequence) -> None:
        """Gives a free seat to a sequence."""
        self.free -= 1
        sequence.seats = self

    def leave(self, sequence: LiveSequence) -> None:
        """Frees the seat of a sequence with nothing ready."""
        self.free += 1
        sequence.seats = None

    @abstractmethod
    def ready(self, request: InferenceRequest) -> None:
        """Makes the first request of a sequence ready."""

    @abstractmethod
    def withdraw(self, request: InferenceRequest) -> None:
        """Takes a ready request back."""

    @abstractmethod
    def due_ns(self, now_ns: int) -> int | None:
        """Time at which a batch is due, `now_ns` or earlier for at once; None with nothing ready."""

    @abstractmethod
    def next_batch(self, now_ns: int) -> Decision:
        """Takes a batch of ready requests; called when one is due."""

    def fill(self, batch: Batch) -> None:
        """Adds fillers to a batch, once its requests have all inputs."""


class SequenceTable:
    """All live sequences of a model.

    Args:
        seats: The seats of each instance.

    Attributes:
        by_id: The current sequence of each id.
        live: Number of live sequences, with followers.
    """

    def __init__(self, seats: Sequence[Seats]) -> None:
        self._seats = tuple(seats)
        self._backlog: OrderedDict[LiveSequence, None] = OrderedDict()
        self.by_id: dict[int | str, LiveSequence] = {}
        self.live = 0

    def __iter__(self) -> Iterator[LiveSequence]:
        for sequence in self.by_id.values():
            yield sequence
            yield from sequence.followers or ()

    def newest(self, correlation_id: int | str) -> LiveSequence | None:
        """The last sequence started with an id."""
        sequence = self.by_id.get(correlation_id)
        if sequence is None or not sequence.followers:
            return sequence
        return next(reversed(sequence.followers))

    def add_sequence(self, sequence: LiveSequence) -> LiveSequence | None:
        """Adds a sequence; earlier ones of its id take no more requests.

        Returns the sequence that is seated by this, if any: this one or another.
        """
        self.live += 1
        sequence.live = True
        first = self.by_id.setdefault(sequence.correlation_id, sequence)
        if first is sequence:
            return self._admit(sequence)
        if first.followers is None:
            first.followers = OrderedDict()
        newest = next(reversed(first.followers), first)
        newest.ended = newest.final = True
        first.followers[sequence] = None
        if first.queue or first.running:
            return None
        return self.release_sequence(first)

    def release_sequence(self, sequence: LiveSequence) -> LiveSequence | None:
        """Removes a sequence with nothing queued or running; returns the one that gets its seat, if any."""
        self.live -= 1
        sequence.live = False
        first = self.by_id[sequence.correlation_id]
        if first is not sequence:
            assert first.followers is not None
            del first.followers[sequence]
            return None
        seated: LiveSequence | None = None
        seats = sequence.seats
        if seats is None:
            del self._backlog[sequence]
        else:
            seats.leave(sequence)
            if self._backlog:
                seated, _ = self._backlog.popitem(last=False)
                seats.take(seated)
        followers = sequence.followers
        if not followers:
            del self.by_id[sequence.correlation_id]
            return seated
        sequence.followers = None
        follower, _ = followers.popitem(last=False)
        follower.followers = followers
        self.by_id[follower.correlation_id] = follower
        # Never both: with a backlog, the only free seat was this one.
        return self._admit(follower) or seated

    def _admit(self, sequence: LiveSequence) -> LiveSequence | None:
        """Seats a sequence on the instance with the most free seats, or puts it in the backlog."""
        seats = max(self._seats, key=_free)
        if not seats.free:
            self._backlog[sequence] = None
            return None
        seats.take(sequence)
        return sequence


def _free(seats: Seats) -> int:
    return seats.free


_LEAST_PAUSE_NS = 1_000_000
"""Least pause between checks for idle sequences while there are none."""


class SequenceTimers:
    """The times of one model's sequences.

    While any sequence lives, `next_ns` is no later than the time at which one could become idle for too long.
    So sequences that become idle wake no thread, which checks about once in `max_idle_ns`.

    Args:
        max_idle_ns: Longest idle time of a sequence, in nanoseconds.

    Attributes:
        next_ns: Lower bound of all times.
    """

    def __init__(self, max_idle_ns: int) -> None:
        self.next_ns = NEVER
        self._max_idle_ns = max_idle_ns
        self._waiting = Expiries()
        # With the time at which they became idle, ascending.
        self._idle: OrderedDict[LiveSequence, int] = OrderedDict()

    def began(self, now_ns: int) -> None:
        """Notes that a sequence has started."""
        end_ns = now_ns + self._max_idle_ns
        self.next_ns = min(self.next_ns, end_ns)

    def rest(self, sequence: LiveSequence, now_ns: int) -> None:
        """Notes that a sequence is idle."""
        self._idle[sequence] = now_ns

    def wake(self, sequence: LiveSequence) -> None:
        """Notes that a sequence is not idle."""
        self._idle.pop(sequence, None)

    def watch(self, request: InferenceRequest, time_ns: int) -> None:
        """Adds a request that expires at a time."""
        self._waiting.add(request, time_ns)
        self.next_ns = min(self.next_ns, time_ns)

    def unwatch(self, request: InferenceRequest) -> None:
        """Discards a request, if it is known."""
        self._waiting.discard(request)

    def take_requests(self, now_ns: int) -> list[InferenceRequest]:
        """Takes out expired requests."""
        return self._waiting.take(now_ns)

    def take_idle(self, now_ns: int) -> list[LiveSequence]:
        """Takes out the sequences that have been idle for too long."""
        taken: list[LiveSequence] = []
        while self._idle:
            sequence, since_ns = next(iter(self._idle.items()))
            if since_ns + self._max_idle_ns > now_ns:
                break
            del self._idle[sequence]
            taken.append(sequence)
        return taken

    def reset(self, now_ns: int, live: int) -> None:
        """Computes `next_ns`, after all due requests and sequences were taken, with `live` sequences."""
        next_ns = self._waiting.next_ns
        if self._idle:
            next_ns = min(next_ns, next(iter(self._idle.values())) + self._max_idle_ns)
        elif live:
            next_ns = min(next_ns, now_ns + max(self._max_idle_ns, _LEAST_PAUSE_NS))
        self.next_ns = next_ns
