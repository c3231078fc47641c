"""The live sequences: which place each one has, who waits for one, and who follows under the same id.

A sequence lives from the request that starts it until the one that ends it has run. It then has a place on
one instance, its seat, or waits for one in the backlog; a seat that is given up goes to whoever has waited
longest. A sequence whose id is still in use follows the one that uses it: it begins, with nothing but its
turn at the end of the backlog, when that one is gone, so that a model never sees two of one id.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence

from conch.core.request import InferenceRequest
from conch.core.scheduling.scheduler import Batch, Decision
from conch.core.tensor import Tensor


class LiveSequence:
    """A sequence that has begun and not ended.

    Attributes:
        correlation_id: Its id.
        identity: The inputs that tell a model its id.
        states: The tensors the server keeps for it, by input.
        final: Whether it takes no more requests, whatever becomes of those it has.
        queue: Its requests that wait, in order.
        running: Whether a request of it is in a batch.
        begun: Whether any request of it has ever been in a batch.
        ended: Whether it takes no more requests.
        live: Whether it is in a table.
        seats: The instance it has a place on, or None.
        slot: Its place there.
        followers: Sequences that wait for its id, or None.
        inputs: With a request that may run again: its inputs as they came.
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
    """The places of one instance, and those requests of the sequences on them that could run now.

    Attributes:
        number: The instance's number.
        free: How many places nobody has.
        busy: Whether the instance runs a batch.
    """

    def __init__(self, number: int, places: int) -> None:
        self.number = number
        self.free = places
        self.busy = False

    def take(self, sequence: LiveSequence) -> None:
        """Gives a place to a sequence; there is a free one."""
        self.free -= 1
        sequence.seats = self

    def leave(self, sequence: LiveSequence) -> None:
        """Frees the place of a sequence that has nothing ready."""
        self.free += 1
        sequence.seats = None

    @abstractmethod
    def ready(self, request: InferenceRequest) -> None:
        """Says that the first request of a sequence could run."""

    @abstractmethod
    def withdraw(self, request: InferenceRequest) -> None:
        """Takes a ready request back."""

    @abstractmethod
    def due_ns(self, now_ns: int) -> int | None:
        """When a batch is to run, not after `now_ns` if at once; None with nothing ready."""

    @abstractmethod
    def next_batch(self, now_ns: int) -> Decision:
        """A batch of ready requests, which are ready no more; called when one is due."""

    def fill(self, batch: Batch) -> None:
        """Puts fillers into a batch, once its requests have all their inputs."""


class SequenceTable:
    """All live sequences of a model.

    Args:
        seats: The places of each instance.

    Attributes:
        by_id: For each id the sequence whose turn it is.
        live: How many there are, followers included.
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
        """The last sequence that began with an id."""
        sequence = self.by_id.get(correlation_id)
        if sequence is None or not sequence.followers:
            return sequence
        return next(reversed(sequence.followers))

    def add(self, sequence: LiveSequence) -> LiveSequence | None:
        """Adds a sequence; what used its id before takes no more requests.

        Returns:
            The sequence that has been given a seat by this, if any: this one or another.
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
        return self.release(first)

    def release(self, sequence: LiveSequence) -> LiveSequence | None:
        """Forgets a sequence with nothing queued or running, and gives its seat away.

        Returns:
            The sequence that has been given a seat by this, if any.
        """
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
        heir, _ = followers.popitem(last=False)
        heir.followers = followers
        self.by_id[heir.correlation_id] = heir
        # Never both: with a backlog there was no seat but the one it has just been given.
        return self._admit(heir) or seated

    def _admit(self, sequence: LiveSequence) -> LiveSequence | None:
        """Gives a sequence a seat, on the instance with the most free ones, or puts it in the backlog."""
        seats = max(self._seats, key=_free)
        if not seats.free:
            self._backlog[sequence] = None
            return None
        seats.take(sequence)
        return sequence


def _free(seats: Seats) -> int:
    return seats.free
