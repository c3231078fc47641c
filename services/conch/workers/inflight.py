"""What a worker has of the server, as the server keeps it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from conch.core.backend import Outcome
from conch.core.request import InferenceRequest
from conch.core.scheduler.base import Batch
from conch.workers import wire


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
        batch: The batch.
        again: Which of its requests the worker knows already.
        numbers: The numbers of its requests.
        done: Takes the outcome.
        since_ns: Monotonic time at which it was sent.
        resent: Whether it has been sent twice, as the worker could not reach a GPU.
    """

    __slots__ = ("again", "batch", "done", "numbers", "resent", "since_ns")

    def __init__(
        self,
        batch: Batch,
        again: list[bool],
        numbers: list[int],
        done: Callable[[Outcome], None],
        since_ns: int,
    ) -> None:
        self.batch = batch
        self.again = again
        self.numbers = numbers
        self.done = done
        self.since_ns = since_ns
        self.resent = False


class Receives(Protocol):
    """A link, for who has the turn to receive from it."""

    def wait_for(self, turn: Turn, timeout_ns: int) -> None:
        """Receives until a batch is done; gives the turn back."""

    def give_back(self) -> None:
        """Gives the turn back."""


class Turn:
    """The turn to receive, while a batch runs; see `Awaited`.

    Args:
        link: Whose it is.
        done: Takes the outcome of the batch.

    Attributes:
        ended: Whether there is an outcome.
    """

    __slots__ = ("_done", "_link", "ended")

    def __init__(self, link: Receives, done: Callable[[Outcome], None]) -> None:
        self._link = link
        self._done = done
        self.ended = False

    def __call__(self, outcome: Outcome) -> None:
        """Takes the outcome."""
        self.ended = True
        self._done(outcome)

    def wait(self, timeout_ns: int) -> None:
        """See `Awaited.wait`."""
        self._link.wait_for(self, timeout_ns)

    def leave(self) -> None:
        """See `Awaited.leave`."""
        self._link.give_back()


def flags_of(request: InferenceRequest, again: bool) -> int:
    """The flags of a request's record."""
    flags = 0
    if request.sequence_start:
        flags |= wire.SEQUENCE_START
    if request.sequence_end:
        flags |= wire.SEQUENCE_END
    if request.filler:
        flags |= wire.FILLER
    if request.cancelled:
        flags |= wire.CANCELLED
    if again:
        flags |= wire.AGAIN
    if request.empty_final:
        flags |= wire.EMPTY_FINAL
    return flags
