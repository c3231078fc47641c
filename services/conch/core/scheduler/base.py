"""What every scheduler answers with, and the interface the instances drive it through."""

from __future__ import annotations

from typing import Protocol

from conch.core.request import InferenceRequest
from conch.core.scheduler.expiry import Expiries


class Batch:
    """Requests that run together, and the times of their execution.

    Attributes:
        requests: The requests, in the order they were queued.
        size: Rows of all requests together.
        compute_start_ns: Monotonic time at which an instance took the batch.
        compute_input_end_ns: When its inputs were ready for the model.
        compute_output_start_ns: When the model had its results.
        compute_end_ns: When all responses had been made.
        bytes_copied: Bytes copied to gather inputs and scatter outputs.
    """

    __slots__ = (
        "bytes_copied",
        "compute_end_ns",
        "compute_input_end_ns",
        "compute_output_start_ns",
        "compute_start_ns",
        "requests",
        "size",
    )

    def __init__(self, requests: list[InferenceRequest], size: int) -> None:
        self.requests = requests
        self.size = size
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


class Scheduler(Protocol):
    """A queue with a policy: no threads, no clock of its own, no locks.

    Callers serialise all calls and pass the time. A request is in exactly one place: queued here, in one
    batch, or finished; `cancel` and `expired` take it out only while it is queued here.

    Attributes:
        expiries: The queued requests that have a time to leave; `expired` is called when the first one's
            has come, before any other batch is asked for.
    """

    expiries: Expiries

    def submit(self, request: InferenceRequest, now_ns: int) -> None:
        """Queues a request.

        Raises:
            ConchError: The queue does not take it; the request was not queued.
        """

    def due_ns(self, now_ns: int) -> int | None:
        """When `next_batch` will have a batch: at once if not after `now_ns`, or never as things stand."""

    def next_batch(self, now_ns: int) -> Decision:
        """Decides what an idle instance does next; a returned batch has left the queue."""

    def complete(self, batch: Batch, now_ns: int) -> None:
        """Says that an instance has finished a batch."""

    def cancel(self, request: InferenceRequest) -> bool:
        """Takes a queued request out; False if it is not queued any more."""

    def expired(self, now_ns: int) -> list[InferenceRequest]:
        """Takes out the requests that may not wait any longer; the caller answers them."""

    @property
    def pending(self) -> int:
        """Number of requests queued."""
