"""Requests whose model sends the responses itself: during `execute`, after it, any number of times.

`ResponseTracker` wraps the responder of such a request. It counts the responses, counts the request at its
last one, and knows how many requests are open, so that a version that still responds is not freed.

Owns: the number of open requests of one model version.
Threads and locks: responses come on any thread. The tracker's lock guards the number; the lock of an
execution decides which thread completes a request (`_TrackedResponder.claim`) and counts the execution.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from conch.core.clock import Clock
from conch.core.errors import CancelledError, ConchError, DeadlineExceededError, QueueTimeoutError
from conch.core.model_statistics import QUEUED, TIMEOUT, ModelStatistics, RequestEnd
from conch.core.request import InferenceRequest, InferenceResponse, Responder
from conch.core.responder_layers import ResponderLayer
from conch.core.scheduling.scheduler import Batch
from conch.core.statistics_snapshot import ResponseKind


class ResponseTracker:
    """The open requests of one model version: those without a last response.

    Args:
        statistics: Counts requests and executions.
        clock: Monotonic time in nanoseconds.
        decoupled: True if each response is counted too.
    """

    def __init__(self, statistics: ModelStatistics, clock: Clock, decoupled: bool) -> None:
        self.statistics = statistics
        self.clock = clock
        self.decoupled = decoupled
        self._awaited: Callable[[], None] | None = None
        self._lock = threading.Lock()
        self._count = 0

    @property
    def count(self) -> int:
        """Number of open requests."""
        return self._count

    def await_none(self, then: Callable[[], None]) -> None:
        """Has `then` called whenever the last open request is complete from now on."""
        self._awaited = then

    def begin(self, batch: Batch) -> ExecutionRecord:
        """Tracks all requests of a batch that is about to run; its start time must be set."""
        execution = ExecutionRecord(self.statistics, batch)

        def wrap(responder: Responder) -> Responder:
            if isinstance(responder, _TrackedResponder):
                responder.run_again(execution)
                return responder
            self._add(1)
            return _TrackedResponder(self, execution, responder)

        for request in batch.requests:
            if not request.filler:
                request.wrap_responder(wrap, ResponderLayer.TRACKER)
        return execution

    def adopt(self, request: InferenceRequest, execution: ExecutionRecord) -> bool:
        """Tracks one request of a batch that has run; False if it is complete and the caller counts it."""
        if _is_completed(request):
            return False
        self._add(1)
        tracked = _TrackedResponder(self, execution, _unset_responder)

        def wrap(responder: Responder) -> Responder:
            tracked.responder = responder
            return tracked

        request.wrap_responder(wrap, ResponderLayer.TRACKER)
        # Another thread may have completed it meanwhile, by the old responder or by the tracked one.
        if _is_completed(request) and tracked.claim():
            self.remove()
            return False
        return True

    def expire(self, request: InferenceRequest, text: str) -> None:
        """Fails a request whose queue timeout or deadline has passed; `text` is for the former."""
        if request.completed:
            return
        now = self.clock()
        ns = now - request.received_ns
        error: ConchError
        if request.deadline_ns is not None and now >= request.deadline_ns:
            self.statistics.record_cancellation(ns, QUEUED)  # as counted where gRPC notices first
            # The text of the client's own error, which this may overtake.
            error = DeadlineExceededError("Deadline Exceeded")
        else:
            self.statistics.record_rejection(ns, TIMEOUT)
            error = QueueTimeoutError(text)
        self.fail(request, error)

    def fail(self, request: InferenceRequest, error: ConchError) -> None:
        """Fails a request that has left the queue; the caller counts it."""
        responder = request.responder
        owner = responder.claim() if isinstance(responder, _TrackedResponder) else None
        try:
            request.fail(error)
        finally:
            if owner is not None:
                self.remove()

    def remove(self) -> None:
        """Notes that a request has had its last response."""
        with self._lock:
            self._count -= 1
            none = not self._count
        if none and self._awaited is not None:
            self._awaited()

    def _add(self, count: int) -> None:
        with self._lock:
            self._count += count


class ExecutionRecord:
    """The execution of a batch, counted once: when it ends, or when its first request completes.

    It drops the batch then: one request that goes on must not keep the tensors of the others.
    """

    __slots__ = ("_batch", "_lock", "_statistics", "input_end_ns", "start_ns")

    def __init__(self, statistics: ModelStatistics, batch: Batch) -> None:
        self._statistics = statistics
        self._lock = threading.Lock()
        self._batch: Batch | None = batch
        self.start_ns = batch.compute_start_ns
        self.input_end_ns = 0

    def fail(self) -> None:
        """Has the execution not counted, unless it was counted."""
        with self._lock:
            batch, self._batch = self._batch, None
            if batch is not None:
                self.input_end_ns = batch.compute_input_end_ns or self.start_ns

    def end(self, now_ns: int) -> None:
        """Counts the execution, unless it was counted or failed."""
        with self._lock:
            batch, self._batch = self._batch, None
            if batch is None:
                return
            # Not set yet if a request completes before `execute` returns.
            self.input_end_ns = batch.compute_input_end_ns or self.start_ns
            self._statistics.record_execution(batch, now_ns)


class _TrackedResponder:
    """The responder of one request."""

    __slots__ = ("_cancelled", "_execution", "_failed", "_index", "_open", "_output_ns", "_since_ns",
                 "responder")  # fmt: skip

    def __init__(self, owner: ResponseTracker, execution: ExecutionRecord, responder: Responder) -> None:
        self._open: ResponseTracker | None = owner
        self._execution = execution
        self._index = 0
        self._output_ns = 0
        self._since_ns = execution.start_ns
        self._failed = False
        self._cancelled = False
        self.responder = responder

    def run_again(self, execution: ExecutionRecord) -> None:
        """Takes the record of a rescheduled request's next run; the times of the last one are counted."""
        self._execution = execution
        self._output_ns = 0

    def claim(self) -> ResponseTracker | None:
        """The tracker to notify of completion; None if another thread has taken it."""
        with self._execution._lock:
            owner, self._open = self._open, None
        return owner

    def __call__(self, request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
        owner = self._open
        if owner is None:
            self.responder(request, response, final)
            return
        now = owner.clock()
        failed = response is not None and response.error is not None
        self._failed = self._failed or failed
        if owner.decoupled:
            kind = self._kind(request, response, failed)
            output_start_ns = now
            if told_ns := getattr(request, "output_start_ns", 0):
                request.output_start_ns = 0
                if kind <= ResponseKind.FAIL:
                    output_start_ns = told_ns
            owner.statistics.record_response(self._index, kind, output_start_ns - self._since_ns)
            if not self._index and response is not None and not failed:
                owner.statistics.record_first_response(now - request.received_ns)
        # Counted before it is sent: a client that has its response finds it in the statistics.
        ends = final and self.claim() is not None
        if ends:
            self._count(owner.statistics, request, now)
        try:
            self.responder(request, response, final)
        finally:
            if ends:
                owner.remove()
        if owner.decoupled:
            self._since_ns = owner.clock()
            if kind <= ResponseKind.FAIL:
                output_ns = self._since_ns - output_start_ns
                self._output_ns += output_ns
                owner.statistics.record_response_output(self._index, kind, output_ns)
            self._index += 1

    def _kind(
        self, request: InferenceRequest, response: InferenceResponse | None, failed: bool
    ) -> ResponseKind:
        if request.cancelled:
            # The response that was in work then counts as what it is.
            in_work, self._cancelled = not self._cancelled, True
            if not in_work or response is None or isinstance(response.error, CancelledError):
                return ResponseKind.CANCEL
        if failed:
            return ResponseKind.FAIL
        return ResponseKind.EMPTY if response is None or not response.outputs else ResponseKind.SUCCESS

    def _count(self, statistics: ModelStatistics, request: InferenceRequest, now: int) -> None:
        execution = self._execution
        how = RequestEnd.FAILED if self._failed else RequestEnd.SUCCEEDED
        if request.cancelled:
            how = RequestEnd.CANCELLED
        elif not self._failed:
            execution.end(now)
        times = execution.start_ns, execution.input_end_ns, now
        # A worker's responses may still be sent, one after the other, while the next run begins.
        statistics.record_request(request, how, times, min(self._output_ns, now - execution.input_end_ns))


def _is_completed(request: InferenceRequest) -> bool:
    return request.completed  # read twice: another thread may complete it in between


def _unset_responder(request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
    """Placeholder for a responder that is set before it can be called."""
