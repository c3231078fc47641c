"""The interface of schedulers, and their decisions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from conch.core.compiled import mypyc_attr
from conch.core.request import InferenceRequest, RunTimes


class Batch:
    """Requests that run together: one object from the scheduler's decision to the last response.

    The scheduler makes it; the runner, the executor and the instance keep their state of it here.

    Attributes:
        requests: The requests, in queue order or, with the direct strategy, by row.
        size: Rows of all requests together.
        fillers: Number of requests that only fill a row (`InferenceRequest.filler`), one row each.
        instance: Number of the only instance that may run it; None for any.
        compute_start_ns: Monotonic time at which an instance took the batch.
        compute_input_end_ns: Monotonic time at which its inputs were ready for the model.
        compute_output_start_ns: Monotonic time at which the model had its results.
        compute_end_ns: Monotonic time at which all responses were made.
        bytes_copied: Bytes copied to gather inputs and scatter outputs.
        runs_on: The `BackendInstance` that the runner chose; unset before.
        state: The runner's `BatchState`; unset before an instance took the batch.
        settled: True once the batch has an outcome; later outcomes are dropped.
        log_times: Run times shared with the request log; None if no request is logged.
        execution: The `ExecutionRecord` of a decoupled model; None for others.
    """

    __slots__ = (
        "bytes_copied",
        "compute_end_ns",
        "compute_input_end_ns",
        "compute_output_start_ns",
        "compute_start_ns",
        "execution",
        "fillers",
        "instance",
        "log_times",
        "requests",
        "runs_on",
        "settled",
        "size",
        "state",
    )

    runs_on: Any
    state: Any

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
        self.settled = False
        self.log_times: RunTimes | None = None
        self.execution: Any = None


class WaitUntil:
    """Nothing to run before `time_ns`, or before another request is queued."""

    __slots__ = ("time_ns",)

    def __init__(self, time_ns: int) -> None:
        self.time_ns = time_ns


class Idle:
    """Nothing to run until another request is queued."""

    __slots__ = ()


IDLE = Idle()
"""The only instance of `Idle`."""

Decision = Batch | WaitUntil | Idle


class Timers(Protocol):
    """Expiries of queued requests or sequences, at which a scheduler is called."""

    @property
    def next_ns(self) -> int:
        """Lower bound of the next expiry, in monotonic ns; `NEVER` if nothing expires."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Scheduler(ABC):
    """A queue with a policy: no threads, no clock of its own, no locks.

    Callers serialise all calls, pass the time, and ask for a batch only while an instance is idle. A request
    is in exactly one place: queued here, in one batch, or finished; `cancel` and `expired` take it out only
    while it is queued. A scheduler whose batches name their instance knows from `complete` which are idle.

    Attributes:
        expiries: Times at which to call `expired`, before the next batch is taken.
        pending: Number of requests queued; without any there is no batch.
        eager: True if there is a batch at once whenever any request is queued.
    """

    __slots__ = ()

    expiries: Timers
    pending: int
    eager: bool

    @abstractmethod
    def submit(self, request: InferenceRequest, now_ns: int) -> None:
        """Queues a request. Raises ConchError: the queue does not take it."""

    @abstractmethod
    def due_ns(self, now_ns: int) -> int | None:
        """Time at which `next_batch` has a batch if no request comes; None for never. Due if <= `now_ns`."""

    @abstractmethod
    def next_batch(self, now_ns: int) -> Decision:
        """Decides what an idle instance runs next; a returned batch has left the queue."""

    def instance_dues(self, now_ns: int) -> Mapping[int, int]:
        """`due_ns` of each idle instance with a batch, by its number; empty if batches name no instance."""
        return {}

    def next_batch_of(self, number: int, now_ns: int) -> Decision:
        """As `next_batch`, for one idle instance, if batches name theirs."""
        raise NotImplementedError

    def complete(self, batch: Batch, now_ns: int) -> None:
        """Completes a batch, also a failed one; requests to run again have `rescheduled` set."""

    @abstractmethod
    def cancel(self, request: InferenceRequest) -> Sequence[InferenceRequest]:
        """Takes out a queued request, with those that need it, for the caller to complete."""

    @abstractmethod
    def expired(self, now_ns: int) -> list[InferenceRequest]:
        """Takes out expired requests, for the caller to complete."""

    def expiry_text(self, request: InferenceRequest) -> str:
        """The error text of a request that expired before its deadline."""
        return "Request timeout expired"

    @abstractmethod
    def drain(self) -> list[InferenceRequest]:
        """Takes out everything queued, for the caller to complete."""

    def begin_closing(self, now_ns: int) -> None:
        """Starts closing: from now on only requests that `continues` allows are submitted."""

    def continues(self, request: InferenceRequest) -> bool:
        """True if a request belongs to a live sequence that takes more requests."""
        return False

    def end_sequence(self, correlation_id: int | str) -> None:
        """Ends a live sequence without a further request, if there is one."""

    @property
    def live_sequences(self) -> int:
        """Number of live sequences; a close waits for them."""
        return 0
