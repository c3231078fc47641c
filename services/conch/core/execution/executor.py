"""Executes one batch: starts it on its instance, and settles each of its requests once it has an outcome.

`finish` is the same for all models, in three steps: it settles the requests, counts them, and sends.

1. Settling shapes the responses and finds how each request ends (`RequestEnd`). A request without a response
   may run again, or its model responds later; a `ResponseTracker` counts it then, with its last response. All
   requests of a decoupled model are tracked so from the start, and are open for this module.
2. Counting takes one call for all requests, before any is sent: a client that has its response finds it in
   the statistics.
3. Sending hands each response to its responder.

Threads and locks: none of its own; batches of several instances run at the same time. The states of a batch
are the runner's.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from conch.core.backend import BackendInstance, BatchOutcome, Done, Pending
from conch.core.clock import Clock
from conch.core.compiled import mypyc_attr
from conch.core.engine_text import without_places
from conch.core.errors import (
    CancelledError,
    ConchError,
    InternalError,
    InvalidArgumentError,
    message_of,
    without_details,
    without_traceback,
)
from conch.core.execution.response_tracker import ExecutionRecord, ResponseTracker
from conch.core.execution.shaping import Shaper
from conch.core.model_statistics import QUEUE_FULL, ModelStatistics, RequestEnd
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.request_log import REQUESTS, complete_run, note_open, note_run
from conch.core.scheduling.scheduler import Batch
from conch.core.scheduling.sequence.implicit_state import SequenceStates
from conch.core.spec import ModelSpec

log = logging.getLogger(__name__)

_NOT_ITERATIVE = (
    "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model is not configured to "
    "handle such a flag."
)


_LEAST_RETRY_MS = 1
_MOST_RETRY_MS = 10_000
_UNKNOWN_RETRY_MS = 1_000


def retry_after_ms(mean_batch_ns: int, pending: int, requests_per_batch: float, instances: int) -> int:
    """Estimates the milliseconds until a queue is worked off; see `Executor.refuse`."""
    if not mean_batch_ns:
        return _UNKNOWN_RETRY_MS
    batches = pending / max(requests_per_batch, 1.0)
    ms = mean_batch_ns * batches / max(instances, 1) / 1e6
    return round(min(max(ms, _LEAST_RETRY_MS), _MOST_RETRY_MS))


@mypyc_attr(native_class=False)
class _Failures(list[InferenceResponse | None]):
    """The responses to a batch that failed as a whole."""


class Executor:
    """Runs the batches of one model version.

    Args:
        spec: The model version.
        statistics: Counts executions.
        clock: Monotonic time in nanoseconds.

    Attributes:
        tracker: The requests that the model completes itself.
        cancels: Set once a running request has been cancelled; until then requests are not checked for it.
    """

    __slots__ = (
        "_clock",
        "_decoupled",
        "_iterative",
        "_longest_ns",
        "_sequences",
        "_shaper",
        "_spec",
        "_states",
        "_statistics",
        "cancels",
        "tracker",
    )

    def __init__(self, spec: ModelSpec, statistics: ModelStatistics, clock: Clock) -> None:
        self.tracker = ResponseTracker(statistics, clock, spec.decoupled)
        self._decoupled = spec.decoupled
        self.cancels = False
        self._spec = spec
        self._statistics = statistics
        self._clock = clock
        self._shaper = Shaper(spec)
        sequence = spec.sequence
        self._sequences = sequence is not None
        self._iterative = sequence is not None and sequence.iterative
        self._longest_ns = 0 if sequence is None else sequence.max_idle_ns
        self._states = (
            SequenceStates(spec) if sequence is not None and sequence.states and not spec.decoupled else None
        )

    def run(self, instance: BackendInstance, batch: Batch) -> None:
        """Runs a batch on an instance and completes its requests; they fail if the model raises."""
        outcomes: list[BatchOutcome] = []
        arrived = threading.Event()

        def done(_: Batch, outcome: BatchOutcome) -> None:
            outcomes.append(outcome)
            arrived.set()

        batch.runs_on = instance
        batch.compute_start_ns = self._clock()
        if not self.start(batch, done):
            arrived.wait()
            self.finish(batch, outcomes[0])

    def start(self, batch: Batch, done: Done) -> bool:
        """Starts a batch on the instance that it runs on; its requests fail if the model raises.

        Args:
            batch: The batch, with its instance and start time.
            done: Takes the outcome if it comes later, and has the batch finished.

        Returns:
            True if the batch has run; its requests are settled, and open where responses may follow.
        """
        if REQUESTS.on:
            REQUESTS.execute(batch, self._spec)
        if self._statistics.watched:  # before the model runs: it may complete some requests at once
            batch.log_times = note_run(batch)
        if self._shaper.reshapes_inputs:
            for request in batch.requests:
                self._shaper.shape_inputs(request)
        if self._decoupled:
            batch.execution = self.tracker.begin(batch)
        outcome: BatchOutcome | Pending
        try:
            outcome = batch.runs_on.start(batch, done)
        except BaseException as error:  # boundary: models, one of which may call sys.exit()
            if batch.settled:
                log.exception("model '%s' failed after it had answered a batch", self._spec.name)
            outcome = self._failures(batch, error)
        if isinstance(outcome, Pending) or batch.settled:
            if self.cancels:
                # Cancelled before the instance could set `on_cancel`.
                for request in batch.requests:
                    if request.cancelled:
                        self.notify_cancelled(request)
            return False
        batch.settled = True
        self.finish(batch, outcome)
        return True

    def finish(self, batch: Batch, outcome: BatchOutcome) -> None:
        """Shapes, counts and sends the responses of a batch that has run; never raises."""
        try:
            requests, execution = batch.requests, batch.execution
            responses: Sequence[InferenceResponse | None]
            if type(outcome) is list and len(outcome) == len(requests):
                responses = outcome
            else:
                responses = self._checked(batch, outcome)
            if self._sequences:
                requests, responses = self._sequence(batch, responses)
            now = batch.compute_end_ns = self._clock()
            unanswered = None in responses
            if execution is None:
                batch.compute_input_end_ns = batch.compute_input_end_ns or batch.compute_start_ns
                if not unanswered:
                    batch.compute_output_start_ns = batch.compute_output_start_ns or now
            if batch.log_times is not None:
                complete_run(batch, batch.log_times, execution is not None)
            # 1. Settle. All requests of most batches succeed.
            ends = [RequestEnd.SUCCEEDED] * len(requests)
            if unanswered:
                execution = execution or ExecutionRecord(self._statistics, batch)
                responses = self._settle_unanswered(batch, requests, responses, ends, execution)
            self._settle_answered(requests, responses, ends)
            # 2. Count, before anything is sent.
            if execution is not None:
                ends = self._end_execution(batch, execution, ends)
            self._statistics.record_batch(batch, ends, execution is None)
            # 3. Send.
            for request, response in zip(requests, responses, strict=True):
                if response is not None:
                    try:
                        request.respond(response)
                    except Exception:  # boundary: responders; the other requests get their responses
                        log.exception("a response of model '%s' could not be delivered", request.model_name)
        except Exception as error:  # boundary: outcomes of backends; the instance gets its next batch
            log.exception("a batch that was done could not be finished")
            self._fail_all(batch, error)

    @staticmethod
    def _fail_all(batch: Batch, error: Exception) -> None:
        for request in batch.requests:
            request.rescheduled = False
            try:
                sentence = f"{request.log_prefix}the request could not be handled"
                request.fail(without_details(error, sentence))
            except Exception:  # boundary: responders
                log.exception("a request of a batch that could not be finished could not be answered")

    def _settle_answered(
        self,
        requests: Sequence[InferenceRequest],
        responses: Sequence[InferenceResponse | None],
        ends: list[RequestEnd],
    ) -> None:
        """Shapes the responses, and sets the ends of requests with one that did not succeed."""
        reshapes = self._shaper.reshapes_outputs
        for index, (request, response) in enumerate(zip(requests, responses, strict=True)):
            if response is None:
                continue
            if response.error is None:
                shapes = reshapes or request.classes is not None
                if not shapes and request.requested is not None:
                    for tensor in response.outputs:  # mostly just the requested ones: nothing to shape
                        if tensor.name not in request.requested:
                            shapes = True
                if shapes:
                    self._shape(request, response)
            if request.cancelled:
                ends[index] = RequestEnd.CANCELLED
            elif response.error is not None:
                ends[index] = RequestEnd.FAILED

    def _settle_unanswered(
        self,
        batch: Batch,
        requests: Sequence[InferenceRequest],
        responses: Sequence[InferenceResponse | None],
        ends: list[RequestEnd],
        execution: ExecutionRecord,
    ) -> list[InferenceResponse | None]:
        """Sets the ends of requests without a response; returns the responses with errors added."""
        settled = list(responses)
        for index, request in enumerate(requests):
            if settled[index] is None:
                end = self._end_of_unanswered(batch, request, execution)
                if isinstance(end, RequestEnd):
                    ends[index] = end
                else:
                    settled[index] = InferenceResponse([], end)
        return settled

    def _end_of_unanswered(
        self, batch: Batch, request: InferenceRequest, execution: ExecutionRecord
    ) -> RequestEnd | ConchError:
        """End of a request that has no response after its batch, or the error to answer it with."""
        rescheduled, request.rescheduled = request.rescheduled, False
        if rescheduled and not (request.filler or request.completed):
            return self._run_again(batch, request)
        if execution is batch.execution:
            return RequestEnd.OPEN  # decoupled: tracked from the start
        if self.tracker.adopt(request, execution):
            if self._statistics.watched:
                note_open(request)
            return RequestEnd.OPEN
        # Complete: its model has sent the response.
        if request.cancelled:
            return RequestEnd.CANCELLED
        return RequestEnd.FAILED if request.failed else RequestEnd.SUCCEEDED

    def _run_again(self, batch: Batch, request: InferenceRequest) -> RequestEnd | ConchError:
        """Prepares a request to run again; returns that end, or an error if it may not."""
        if request.cancelled:
            return CancelledError("")
        if not self._iterative:
            return InvalidArgumentError(_NOT_ITERATIVE)
        if batch.compute_end_ns - batch.compute_start_ns > self._longest_ns:
            return self._idle_error(request)
        request.rescheduled = True
        if self._shaper.reshapes_inputs:
            self._shaper.restore_inputs(request)
        return RequestEnd.RUNS_AGAIN

    @staticmethod
    def _end_execution(batch: Batch, execution: ExecutionRecord, ends: list[RequestEnd]) -> list[RequestEnd]:
        """Counts the execution of a batch apart from its requests, now or not yet; returns their ends."""
        if execution is batch.execution:
            # A decoupled model: the execution ends with the batch, and the tracked responder of each request
            # counts the request, also if it has failed.
            execution.end(batch.compute_end_ns)
            return [end if end is RequestEnd.RUNS_AGAIN else RequestEnd.OPEN for end in ends]
        # Any other model that has left requests without a response: the execution ends with the batch if a
        # request has succeeded or runs again. With open requests alone it also does if their outputs began;
        # otherwise the first response of one of them ends it. If all requests failed or were cancelled, it is
        # not counted.
        ending = {RequestEnd.SUCCEEDED, RequestEnd.RUNS_AGAIN}
        if batch.compute_output_start_ns:
            ending.add(RequestEnd.OPEN)
        if not ending.isdisjoint(ends):
            execution.end(batch.compute_end_ns)
        return ends

    def notify_cancelled(self, request: InferenceRequest) -> None:
        """Notifies the instance that runs a request of its cancellation."""
        try:
            request.notify_cancelled()
        except Exception:  # boundary: backends
            log.exception("an instance of model '%s' was not notified of a cancellation", self._spec.name)

    def _checked(self, batch: Batch, outcome: BatchOutcome) -> Sequence[InferenceResponse | None]:
        """Checks that there is one response, or None, for each request."""
        if outcome is None:
            return [None] * len(batch.requests)
        if type(outcome) is _Failures:
            return outcome
        if isinstance(outcome, BaseException):
            return self._failures(batch, outcome)
        try:
            if len(outcome) == len(batch.requests):
                return outcome
            raise InternalError(
                f"backend of model '{self._spec.name}' returned {len(outcome)} responses for "
                f"{len(batch.requests)} requests"
            )
        except Exception as error:  # boundary: backends, whose outcome may be no sequence at all
            return self._failures(batch, error)

    def refuse(
        self, request: InferenceRequest, error: ConchError, pending: int, mean_batch_ns: int, instances: int
    ) -> None:
        """Counts a request that a full queue refused, and sets when to retry.

        Args:
            request: The request.
            error: The error; gets the time.
            pending: Requests in the queue.
            mean_batch_ns: Mean time of a batch; 0 before the first one.
            instances: Number of instances.
        """
        statistics = self._statistics
        statistics.record_rejection(self._clock() - request.received_ns, QUEUE_FULL)
        error.retry_after_ms = retry_after_ms(
            mean_batch_ns, pending, statistics.requests_per_execution, instances
        )

    def _sequence(
        self, batch: Batch, responses: Sequence[InferenceResponse | None]
    ) -> tuple[list[InferenceRequest], Sequence[InferenceResponse | None]]:
        """Removes fillers, and moves states from the responses to their sequences."""
        requests = batch.requests
        if batch.fillers:
            for request in requests:
                request.rescheduled = request.rescheduled and not request.filler
            pairs = [pair for pair in zip(requests, responses, strict=True) if not pair[0].filler]
            requests, responses = [request for request, _ in pairs], [response for _, response in pairs]
        if self._states is not None:
            for request, response in zip(requests, responses, strict=True):
                if response is not None:
                    self._states.collect(request, response)
        return requests, responses

    def _idle_error(self, request: InferenceRequest) -> ConchError:
        """The error for a sequence that idled for too long; begins with Triton's text."""
        return InvalidArgumentError(
            f"inference request for sequence {request.correlation_id} to model '{self._spec.name}' must "
            f"specify the START flag on the first request of the sequence: the sequence ended while its "
            f"request ran for longer than max_sequence_idle_microseconds, {self._longest_ns // 1000}"
        )

    def _shape(self, request: InferenceRequest, response: InferenceResponse) -> None:
        try:
            self._shaper.shape_response(request, response)
        except Exception as error:  # boundary: models, whose outputs may not fit their shapes
            response.error = self._client_error(error)
            response.outputs = []

    def _client_error(self, error: BaseException) -> ConchError:
        if isinstance(error, ConchError):
            return error
        log.error("model '%s' failed to execute", self._spec.name, exc_info=error)
        return InternalError(without_places(message_of(error)) or type(error).__name__)

    def _failures(self, batch: Batch, error: BaseException) -> _Failures:
        shown = without_traceback(self._client_error(error))
        if batch.execution is not None:
            batch.execution.fail()
        for request in batch.requests:
            request.rescheduled = False
        return _Failures(InferenceResponse([], shown) for _ in batch.requests)
