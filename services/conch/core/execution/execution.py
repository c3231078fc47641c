"""Executes one batch: runs the instance, shapes its responses, counts, answers every request once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from conch.core.backend import BackendInstance, Outcome
from conch.core.clock import Clock
from conch.core.errors import (
    CancelledError,
    ConchError,
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    UnavailableError,
    as_conch_error,
    without_traceback,
)
from conch.core.execution.answers import Execution, OpenAnswers
from conch.core.execution.begun import Begun
from conch.core.execution.retry import retry_after_ms
from conch.core.execution.shaping import Shaper
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.scheduling.base import Batch
from conch.core.scheduling.sequence.state import SequenceStates
from conch.core.spec import ModelSpec
from conch.core.stats import QUEUE_FULL, QUEUED, RUNNING, TIMEOUT, ModelStatistics
from conch.core.verbose import REQUESTS
from conch.core.watch import RunTimes, note_open, note_run

log = logging.getLogger(__name__)

_NOT_ITERATIVE = (
    "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model is not configured to "
    "handle such a flag."
)


class _Failures(list[InferenceResponse | None]):
    """The responses to a batch that failed as a whole."""


class Executor:
    """Runs the batches of one model version.

    Args:
        spec: The model version.
        statistics: Where executions are counted.
        clock: Monotonic time in nanoseconds.

    Attributes:
        open: The requests that the model answers itself and has not answered yet.
        may_be_led: Whether polling threads may run batches. Not those of decoupled models: sending may block
            until a client has read, and it is the polling threads that send to it.
        cancels: To be set once a request that runs has been cancelled; nobody looks for them before.
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
        "may_be_led",
        "open",
    )

    def __init__(self, spec: ModelSpec, statistics: ModelStatistics, clock: Clock) -> None:
        self.open = OpenAnswers(statistics, clock, spec.decoupled)
        self.may_be_led = not spec.decoupled
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
        self._states = SequenceStates(spec) if sequence is not None and sequence.states else None

    def run(self, instance: BackendInstance, batch: Batch) -> None:
        """Runs a batch on an instance; never raises, every request of the batch gets an answer."""
        if instance.begins:
            came = threading.Event()
            begun = self.begin(instance, batch, lambda _: came.set())
            came.wait()
            begun.finish()
            begun.release()
            return
        times = self._start(batch)
        execution = self.open.begin(batch) if self._decoupled else None
        outcome: Outcome
        try:
            outcome = instance.execute(batch)
        except BaseException as error:  # a model that calls sys.exit() must not end the server's thread
            outcome = self._failures(batch, error)
        self._finish(batch, times, execution, outcome)

    def begin(
        self, instance: BackendInstance, batch: Batch, then: Callable[[Begun], None], here: bool = False
    ) -> Begun:
        """Begins a batch on an instance with `begins`; never raises.

        Args:
            instance: The instance.
            batch: The batch.
            then: Called once, from any thread and possibly before this returns, when the batch has run: the
                callee is to have it finished, which answers its requests.
            here: Whether the caller will wait for the outcome, if the instance lets it: `Begun.awaited`.
        """
        times = self._start(batch)
        execution = self.open.begin(batch) if self._decoupled else None
        begun = Begun(instance, batch, times, execution, self._finish, then)
        try:
            if here:
                begun.awaited = instance.begin_here(batch, begun)
            else:
                instance.begin(batch, begun)
        except BaseException as error:
            if not begun.settle(error):
                log.exception("model '%s' failed after it had answered a batch", self._spec.name)
        if self.cancels:
            # Who was cancelled before the instance could say whom to tell of it.
            for request in batch.requests:
                if request.cancelled:
                    self.tell_cancelled(request)
        return begun

    def tell_cancelled(self, request: InferenceRequest) -> None:
        """Lets the instance that runs a request know that it was cancelled, if it wants to."""
        try:
            request.tell_cancelled()
        except Exception:
            log.exception("an instance of model '%s' could not be told of a cancellation", self._spec.name)

    def _start(self, batch: Batch) -> RunTimes | None:
        """What comes before a batch runs."""
        batch.compute_start_ns = self._clock()
        if REQUESTS.on:
            REQUESTS.execute(batch, self._spec)
        # Some may be answered before the model returns.
        times = note_run(batch) if self._statistics.watched else None
        if self._shaper.reshapes_inputs:
            self._shape_inputs(batch.requests)
        return times

    def _finish(
        self, batch: Batch, times: RunTimes | None, execution: Execution | None, outcome: Outcome
    ) -> None:
        """What comes after a batch has run."""
        if execution is not None:
            self._finish_decoupled(batch, times, execution, outcome)
            return
        requests = batch.requests
        responses: Sequence[InferenceResponse | None]
        if type(outcome) is list and len(outcome) == len(requests):
            responses = outcome
        else:
            responses = self._checked(batch, outcome)
        if self._sequences:
            requests, responses = self._sequence(batch, responses)
        # By the model itself, or as it runs again.
        unanswered = None in responses
        apart = unanswered or (self.cancels and any(request.cancelled for request in requests))
        now = batch.compute_end_ns = self._clock()
        if not batch.compute_input_end_ns:
            batch.compute_input_end_ns = batch.compute_start_ns
        if not batch.compute_output_start_ns and not unanswered:
            batch.compute_output_start_ns = now
        if times is not None:
            times.complete(batch)
        failed = self._shape_all(requests, responses)
        # Counted before anything is sent: a client that has its answer finds it in the statistics.
        if apart:
            self._count_apart(batch, requests, responses)
        else:
            self._statistics.record_batch(batch, failed)
        for request, response in zip(requests, responses, strict=True):
            if response is not None:
                self._respond(request, response)

    @staticmethod
    def _respond(request: InferenceRequest, response: InferenceResponse) -> None:
        try:
            request.respond(response)
        except Exception:  # must not keep the others of the batch from their answers, nor end the thread
            log.exception("a response of model '%s' could not be handed over", request.model_name)

    def _finish_decoupled(
        self, batch: Batch, times: RunTimes | None, execution: Execution, outcome: Outcome
    ) -> None:
        """The same for a batch whose requests answer for themselves, possibly after this."""
        responses = self._checked(batch, outcome)
        failed = type(responses) is _Failures
        now = batch.compute_end_ns = self._clock()
        execution.end(now, failed)
        if times is not None:
            times.input_end_ns = batch.compute_input_end_ns  # its requests end one by one
        respond = getattr(batch, "end", self._respond)
        for request, response in zip(batch.requests, responses, strict=True):
            if request.rescheduled and response is None:
                refusal = self._runs_again(request, batch)
                if refusal is not None:
                    respond(request, InferenceResponse([], refusal))
                elif request.rescheduled:
                    run = execution.start_ns, execution.input_end_ns, now
                    self._statistics.record_success(request, run, again=True)
            if response is not None:
                if response.error is None:
                    self._shape(request, response)
                respond(request, response)

    def _checked(self, batch: Batch, outcome: Outcome) -> Sequence[InferenceResponse | None]:
        """One response, or None, for each request."""
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
        except Exception as error:  # also something that is no sequence
            return self._failures(batch, error)

    def _count_apart(
        self,
        batch: Batch,
        requests: Sequence[InferenceRequest],
        responses: Sequence[InferenceResponse | None],
    ) -> None:
        """Counts a batch whose requests do not all end here, or some of which were cancelled."""
        statistics = self._statistics
        now = batch.compute_end_ns
        times = batch.compute_start_ns, batch.compute_input_end_ns, now
        goes_on = not batch.compute_output_start_ns
        output_ns = 0 if goes_on else now - batch.compute_output_start_ns
        execution = self.open.execution(batch)
        refused: list[tuple[InferenceRequest, ConchError]] = []
        for request, response in zip(requests, responses, strict=True):
            error = None if response is None else response.error
            if response is None:
                if request.rescheduled:
                    error = self._runs_again(request, batch)
                    if error is not None:
                        refused.append((request, error))
                if request.rescheduled:
                    execution.end(now)
                    statistics.record_success(request, times, output_ns, again=True)
                    continue
                if error is None and self.open.adopt(request, execution):
                    if not goes_on:
                        execution.end(now)
                    if statistics.watched:
                        note_open(request)
                    continue
            ns = now - request.received_ns
            if request.cancelled:
                statistics.record_cancellation(ns, RUNNING)
            elif error is not None or getattr(request, "failed", False):
                statistics.record_failure(ns, True)
            else:
                execution.end(now)
                statistics.record_success(request, times, output_ns)
        for request, error in refused:
            request.fail(error)

    def expire(self, request: InferenceRequest, text: str) -> None:
        """Answers a request that may not wait any longer.

        Args:
            request: The request.
            text: What it is told, unless its client's own deadline has passed.
        """
        if request.answered:
            return
        now = self._clock()
        ns = now - request.received_ns
        error: ConchError
        if request.deadline_ns is not None and now >= request.deadline_ns:
            self._statistics.record_cancellation(ns, QUEUED)  # as it counts if gRPC is the first to notice
            # What a client says to itself at its deadline: this may reach it first, and must read the same.
            error = DeadlineExceededError("Deadline Exceeded")
        else:
            self._statistics.record_rejection(ns, TIMEOUT)
            error = UnavailableError(text)
        self.open.fail(request, error)

    def refuse(
        self, request: InferenceRequest, error: ConchError, pending: int, mean_batch_ns: int, instances: int
    ) -> None:
        """Counts a request that a full queue refused, and adds to its error when to try again.

        Args:
            request: The request.
            error: What it is told.
            pending: Requests in the queue.
            mean_batch_ns: How long a batch takes; 0 where none has finished yet.
            instances: Instances of the model.
        """
        statistics = self._statistics
        statistics.record_rejection(self._clock() - request.received_ns, QUEUE_FULL)
        error.retry_after_ms = retry_after_ms(
            mean_batch_ns, pending, statistics.requests_per_execution, instances
        )

    def _sequence(
        self, batch: Batch, responses: Sequence[InferenceResponse | None]
    ) -> tuple[list[InferenceRequest], Sequence[InferenceResponse | None]]:
        """The requests that clients made and their responses, which have given up their states."""
        requests = batch.requests
        if batch.fillers:
            pairs = [pair for pair in zip(requests, responses, strict=True) if not pair[0].filler]
            requests, responses = [request for request, _ in pairs], [response for _, response in pairs]
        if self._states is not None:
            for request, response in zip(requests, responses, strict=True):
                if response is not None:
                    self._states.collect(request, response)
        return requests, responses

    def _runs_again(self, request: InferenceRequest, batch: Batch) -> ConchError | None:
        """Makes a request that its model has rescheduled ready to run again.

        Returns:
            Why it does not, for its client; None where it does or nobody waits for it.
        """
        request.rescheduled = False
        if request.filler or request.answered:
            return None
        if request.cancelled:
            return CancelledError("")
        if not self._iterative:
            return InvalidArgumentError(_NOT_ITERATIVE)
        if batch.compute_end_ns - batch.compute_start_ns > self._longest_ns:
            return self._idle_error(request)
        request.rescheduled = True
        if self._shaper.reshapes_inputs:
            self._shaper.restore_inputs(request)
        return None

    def _idle_error(self, request: InferenceRequest) -> ConchError:
        """Says that a sequence has ended as nothing came of it for too long; begins with Triton's text."""
        return InvalidArgumentError(
            f"inference request for sequence {request.correlation_id} to model '{self._spec.name}' must "
            f"specify the START flag on the first request of the sequence: the sequence ended while its "
            f"request ran for longer than max_sequence_idle_microseconds, {self._longest_ns // 1000}"
        )

    def _shape_inputs(self, requests: Sequence[InferenceRequest]) -> None:
        for request in requests:
            self._shaper.shape_inputs(request)

    def _shape_all(
        self, requests: Sequence[InferenceRequest], responses: Sequence[InferenceResponse | None]
    ) -> list[InferenceRequest]:
        """Shapes the responses of a batch; returns the requests that have an error for a response."""
        failed: list[InferenceRequest] = []
        changes = self._shaper.changes
        for request, response in zip(requests, responses, strict=True):
            if response is None:
                continue
            if response.error is None and changes(request, response):
                self._shape(request, response)
            if response.error is not None:
                failed.append(request)
        return failed

    def _shape(self, request: InferenceRequest, response: InferenceResponse) -> None:
        try:
            self._shaper.shape_response(request, response)
        except Exception as error:  # outputs whose shapes do not hold what they say
            response.error = self._shown(error)
            response.outputs = []

    def _shown(self, error: BaseException) -> ConchError:
        if not isinstance(error, ConchError):
            log.error("model '%s' failed to execute", self._spec.name, exc_info=error)
        return as_conch_error(error)

    def _failures(self, batch: Batch, error: BaseException) -> _Failures:
        shown = without_traceback(self._shown(error))
        for request in batch.requests:
            request.rescheduled = False
        return _Failures(InferenceResponse([], shown) for _ in batch.requests)
