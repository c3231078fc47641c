"""Requests that their model answers itself: during `execute`, after it, any number of times.

Something stands between such a request and its responder. It counts the responses, counts the request
when it gets its last one, and knows how many have not got theirs, so that a version that still answers
is not freed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from conch.core.clock import Clock
from conch.core.errors import ConchError
from conch.core.request import InferenceRequest, InferenceResponse, Kept, Responder
from conch.core.response_stats import ResponseKind
from conch.core.scheduling.base import Batch
from conch.core.stats import RUNNING, ModelStatistics


class OpenAnswers:
    """The requests of one model version that it answers itself and that have not got their last response.

    Args:
        statistics: Where they and their executions are counted.
        clock: Monotonic time in nanoseconds.
        decoupled: Whether each of their responses is counted too.

    Attributes:
        on_none: Called when the last of them has been answered; from any thread.
    """

    def __init__(self, statistics: ModelStatistics, clock: Clock, decoupled: bool) -> None:
        self.statistics = statistics
        self.clock = clock
        self.decoupled = decoupled
        self.on_none: Callable[[], None] = _nothing
        self._lock = threading.Lock()
        self._count = 0

    @property
    def count(self) -> int:
        """How many there are."""
        return self._count

    def begin(self, batch: Batch) -> Execution:
        """Watches over all requests of a batch that is about to run; its start must be set."""
        execution = self.execution(batch)

        def between(responder: Responder) -> Responder:
            if isinstance(responder, _Answers):
                responder.goes_on(execution)  # the request has run before
                return responder
            self._add(1)
            return _Answers(self, execution, responder)

        for request in batch.requests:
            if not request.filler:
                request.intercept(between)
        return execution

    def execution(self, batch: Batch) -> Execution:
        """The execution of a batch, for `adopt`; its start must be set."""
        return Execution(self.statistics, batch)

    def adopt(self, request: InferenceRequest, execution: Execution) -> bool:
        """Watches over one request of a batch that has run.

        Returns:
            Whether it has still to be answered, and is counted then. If not, the caller counts it.
        """
        if _is_answered(request):
            return False
        self._add(1)
        answers = _Answers(self, execution, _nobody)

        def between(responder: Responder) -> Responder:
            answers.responder = responder
            return answers

        request.intercept(between)
        # If it is answered by now, its responder may have been called in the old way or in the new one.
        if _is_answered(request) and answers.claim():
            self.remove()
            return False
        return True

    def fail(self, request: InferenceRequest, error: ConchError) -> None:
        """Answers a request that has left the queue with an error; the caller counts it, nobody here does."""
        answers = request.responder
        owner = answers.claim() if isinstance(answers, _Answers) else None
        kept = getattr(request, "kept", None)
        try:
            if isinstance(kept, Kept):
                kept.end(request, error)
            else:
                request.fail(error)
        finally:
            if owner is not None:
                self.remove()

    def remove(self) -> None:
        """Says that a request has had its last response."""
        with self._lock:
            self._count -= 1
            none = not self._count
        if none:
            self.on_none()

    def _add(self, count: int) -> None:
        with self._lock:
            self._count += count


class Execution:
    """The execution of a batch, counted once: when it ends, or when the first request of it is done.

    It keeps the batch no longer than that: one request that goes on must not keep the others' tensors.
    """

    __slots__ = ("_batch", "_lock", "_statistics", "input_end_ns", "start_ns")

    def __init__(self, statistics: ModelStatistics, batch: Batch) -> None:
        self._statistics = statistics
        self._lock = threading.Lock()
        self._batch: Batch | None = batch
        self.start_ns = batch.compute_start_ns
        self.input_end_ns = 0

    def end(self, now_ns: int, failed: bool = False) -> None:
        """Counts the execution, unless it has been counted or has failed."""
        with self._lock:
            batch, self._batch = self._batch, None
            if batch is None:
                return
            # A request that is done before `execute` returns finds some of the times not set yet.
            input_end = self.input_end_ns = batch.compute_input_end_ns or self.start_ns
            output_start = batch.compute_output_start_ns or now_ns
            if not failed:
                self._statistics.record_execution(
                    batch, input_end - self.start_ns, output_start - input_end, now_ns - output_start
                )


class _Answers:
    """The responder of one request."""

    __slots__ = ("_execution", "_failed", "_index", "_open", "_output_ns", "_since_ns", "responder")

    def __init__(self, owner: OpenAnswers, execution: Execution, responder: Responder) -> None:
        self._open: OpenAnswers | None = owner
        self._execution = execution
        self._index = 0
        self._output_ns = 0
        self._since_ns = execution.start_ns
        self._failed = False
        self.responder = responder

    def goes_on(self, execution: Execution) -> None:
        """Says that the request runs again: its last run is the one whose times are still to be counted."""
        self._execution = execution

    def claim(self) -> OpenAnswers | None:
        """Whom to tell that the request is done; None if somebody else does."""
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
            kind = _kind(request, response, failed)
            owner.statistics.record_response(self._index, kind, now - self._since_ns)
            if not self._index and response is not None and not failed:
                owner.statistics.record_first_response(now - request.received_ns)
        # Counted before anything is sent: a client that has its answer finds it in the statistics.
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
                output_ns = self._since_ns - now
                self._output_ns += output_ns
                owner.statistics.record_response_output(self._index, kind, output_ns)
            self._index += 1

    def _count(self, statistics: ModelStatistics, request: InferenceRequest, now: int) -> None:
        ns = now - request.received_ns
        if request.cancelled:
            statistics.record_cancellation(ns, RUNNING)
        elif self._failed:
            statistics.record_failure(ns, True)
        else:
            execution = self._execution
            execution.end(now)
            times = execution.start_ns, execution.input_end_ns, now
            statistics.record_success(request, times, self._output_ns)


def _is_answered(request: InferenceRequest) -> bool:
    return request.answered  # asked twice, as another thread may answer it in between


def _kind(request: InferenceRequest, response: InferenceResponse | None, failed: bool) -> ResponseKind:
    if request.cancelled:
        return ResponseKind.CANCEL
    if failed:
        return ResponseKind.FAIL
    return ResponseKind.EMPTY if response is None or not response.outputs else ResponseKind.SUCCESS


def _nothing() -> None:
    """What is called where nobody waits."""


def _nobody(request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
    """Stands in for a responder that is set before it can be called."""
