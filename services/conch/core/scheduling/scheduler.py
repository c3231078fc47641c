"""What every scheduler answers with, and the interface the instances drive it through."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from conch.core.request import InferenceRequest, InferenceResponse


class Batch:
    """Requests that run together, and the times of their execution.

    Attributes:
        requests: The requests, in the order they were queued or, where rows belong to sequences, by row.
        size: Rows of all requests together.
        fillers: How many of the requests only fill a row (`InferenceRequest.filler`), one row each.
        instance: Number of the one instance that may run it; None where any may.
        compute_start_ns: Monotonic time at which an instance took the batch.
        compute_input_end_ns: When its inputs were ready for the model.
        compute_output_start_ns: When the model had its results.
        compute_end_ns: When all responses had been made.
        bytes_copied: Bytes copied to gather inputs and scatter outputs.
        end: Hands over what ends a request of a decoupled model's batch that has failed, or a request of one
            that must not run again, where that has to come after what the request is still being sent; unset
            where it does not.
    """

    __slots__ = (
        "bytes_copied",
        "compute_end_ns",
        "compute_input_end_ns",
        "compute_output_start_ns",
        "compute_start_ns",
        "end",
        "fillers",
        "instance",
        "requests",
        "size",
    )

    end: Callable[[InferenceRequest, InferenceResponse], None]

    def __init__(self, requests: list[InferenceRequest], size: int, instance: int | None = None) -> None:
        self.requests = requests
        self.size = size
        self.fillers = 0
        self.instance = instance
        self.compute_start_ns = 0
        self.compute_input_end_ns = 0
        self.compute_output_start_ns = 0
        self.compute_end_ns = 0
        self.bytes_copied = 0


class WaitUntil:
    """Nothing to run yet; ask again at `time_ns`, or when another request has come."""

    __slots__ = ("time_ns",)

    def __init__(self, time_ns: int) -> None:
        self.time_ns = time_ns


class Idle:
    """Nothing to run until another request comes."""

    __slots__ = ()


IDLE = Idle()
"""The one answer of a scheduler that has nothing queued."""

Decision = Batch | WaitUntil | Idle


class Timers(Protocol):
    """What a scheduler wants to be called for at a certain time."""

    @property
    def next_ns(self) -> int:
        """No time comes before this monotonic one; it may be too early, and is `NEVER` for none at all."""


class Scheduler(ABC):
    """A queue with a policy: no threads, no clock of its own, no locks.

    Callers serialise all calls and pass the time. A request is in exactly one place: queued here, in one
    batch, or finished; `cancel` and `expired` take it out only while it is queued here. Callers ask for a
    batch only while an instance is idle; a scheduler whose batches name their instance sees by itself, from
    the batches that it gave and that were completed, which ones are.

    Attributes:
        expiries: When `expired` is to be called, before any other batch is asked for.
    """

    __slots__ = ()

    expiries: Timers

    @abstractmethod
    def submit(self, request: InferenceRequest, now_ns: int) -> None:
        """Queues a request.

        Raises:
            ConchError: The queue does not take it; the request was not queued.
        """

    @abstractmethod
    def due_ns(self, now_ns: int) -> int | None:
        """When `next_batch` will have a batch: at once if not after `now_ns`, or never as things stand."""

    @abstractmethod
    def next_batch(self, now_ns: int) -> Decision:
        """Decides what an idle instance does next; a returned batch has left the queue."""

    def instance_dues(self, now_ns: int) -> Mapping[int, int]:
        """When each idle instance will have a batch, as `due_ns`, by number; those that never will left out.

        Nothing where batches do not name their instance.
        """
        return {}

    def next_batch_of(self, number: int, now_ns: int) -> Decision:
        """As `next_batch`, for one idle instance, where batches name theirs."""
        raise NotImplementedError

    def complete(self, batch: Batch, now_ns: int) -> None:
        """Says that an instance has finished a batch.

        Called also where it failed. Requests of it that are to run again have `rescheduled` set.
        """

    @abstractmethod
    def cancel(self, request: InferenceRequest) -> Sequence[InferenceRequest]:
        """Takes a queued request out, with those that can't be served without it.

        Returns:
            What was taken out, for the caller to answer; nothing if it is not queued any more.
        """

    @abstractmethod
    def expired(self, now_ns: int) -> list[InferenceRequest]:
        """Takes out the requests that may not wait any longer; the caller answers them."""

    def expiry_text(self, request: InferenceRequest) -> str:
        """What a request is told that has expired before its client's own deadline."""
        return "Request timeout expired"

    @abstractmethod
    def drain(self) -> list[InferenceRequest]:
        """Takes out everything queued; the caller answers it."""

    @property
    @abstractmethod
    def pending(self) -> int:
        """Number of requests queued."""

    def begin_closing(self, now_ns: int) -> None:
        """Says that from now on only requests that `continues` allows are submitted."""

    def continues(self, request: InferenceRequest) -> bool:
        """Whether a request belongs to something begun here, so that only this scheduler can take it."""
        return False

    @property
    def held(self) -> int:
        """What has been begun and may have further requests, such as sequences; a close waits for it."""
        return 0
