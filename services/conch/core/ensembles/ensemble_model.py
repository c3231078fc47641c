"""A loaded version of an ensemble, as front ends and other ensembles see it.

Threads and locks: any thread; one lock counts the executions in flight.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from conch.core.admission import Admission
from conch.core.clock import Clock, monotonic_ns
from conch.core.ensembles.ensemble_execution import EnsembleExecution
from conch.core.ensembles.fitting import Fitting, fitted
from conch.core.ensembles.flow import Correlation, EnsembleAnswer
from conch.core.ensembles.plan import EnsemblePlan
from conch.core.ensembles.step_places import Places
from conch.core.errors import CancelledError, ConchError
from conch.core.execution.shaping import Shaper
from conch.core.model_statistics import RUNNING, ModelStatistics, RequestEnd
from conch.core.registry import Registry
from conch.core.request import InferenceRequest, InferenceResponse, Parameter
from conch.core.request_log import REQUESTS, note_run
from conch.core.response_errors import unsendable
from conch.core.scheduling.scheduler import Batch
from conch.core.servable import ClosedError, InlineClaim, Readiness, WorkerStatus
from conch.core.spec import ModelSpec
from conch.core.statistics_snapshot import Gauges
from conch.core.validation import RequestValidator


class EnsembleModel:
    """One version of an ensemble. Queues and instances are those of its models.

    Attributes:
        spec: Its model spec.
        statistics: Its counters. The time from receipt to answer counts as inference.
        version_text: The version number as the protocol carries it.
        plan: Plan of its tensors.
        admission: Admits the requests of its steps.
        fitting: Makes them.
        places: Places of responses of its decoupled steps.
        clock: Monotonic time in nanoseconds.
    """

    def __init__(
        self, spec: ModelSpec, plan: EnsemblePlan, registry: Registry, clock: Clock = monotonic_ns
    ) -> None:
        self.spec = spec
        self.statistics = ModelStatistics(self._gauges)
        self.version_text = str(spec.version)
        self.plan = plan
        self._registry = registry
        self.admission = Admission(registry, "ensemble-step")
        self.fitting = Fitting(plan, self.admission)
        self.places = Places(plan.max_inflight)
        self.clock = clock
        self._validate = RequestValidator(spec)
        self._shaper = Shaper(spec)
        self._batches = spec.max_batch_size > 0
        self._ranks = {tensor.name: len(tensor.backend_dims) + self._batches for tensor in spec.outputs}
        self._lock = threading.Lock()
        self._drained = threading.Condition(self._lock)
        self._closing = False
        self._open: dict[InferenceRequest, EnsembleExecution] = {}

    @property
    def readiness(self) -> Sequence[Readiness]:
        """The readiness checks of its models, except unloaded ones."""
        found: list[Readiness] = []
        for step in self.plan.steps:
            try:
                found += self._registry.resolve(step.model_name, step.version).readiness
            except ConchError:
                continue
        return found

    @property
    def workers(self) -> Sequence[WorkerStatus]:
        """None: they belong to its models."""
        return ()

    @property
    def notes(self) -> Sequence[str]:
        """None: they belong to its models."""
        return ()

    @property
    def pending(self) -> int:
        """None: requests wait in the queues of its models."""
        return 0

    def submit(self, request: InferenceRequest, may_claim: bool = False) -> InlineClaim | None:
        """Validates a request and submits its first steps; see `Servable.submit`.

        Raises:
            InvalidArgumentError: The request does not fit the ensemble.
            ClosedError: The version takes no more requests.
        """
        self._validate(request)
        request.model = self
        if REQUESTS.on:
            REQUESTS.begin(request, self)
        request.queued_ns = self.clock()
        execution = EnsembleExecution(self, request)
        with self._lock:
            if self._closing:
                raise ClosedError
            self._open[request] = execution
        if self._shaper.reshapes_inputs:
            self._shaper.shape_inputs(request)
        return execution.start(may_claim)

    def cancel(self, request: InferenceRequest) -> bool:
        """Fails a request with CANCELLED, and cancels its running steps."""
        request.cancelled = True
        with self._lock:
            execution = self._open.get(request)
        if execution is not None:
            execution.cancel()
        return False

    @property
    def live_sequences(self) -> int:
        """None: sequences live in its models."""
        return 0

    def continues(self, request: InferenceRequest) -> bool:
        """False: sequences live in its models."""
        return False

    def end_sequence(self, correlation_id: int | str) -> None:
        """Ends the sequence in each of its models, except unloaded ones."""
        for step in self.plan.steps:
            try:
                model = self._registry.resolve(step.model_name, step.version)
            except ConchError:
                continue
            model.end_sequence(correlation_id)

    def close(self, timeout_s: float | None = None) -> bool:
        """Refuses new requests and waits for open ones; see `Servable.close`."""
        with self._lock:
            self._closing = True
            return self._drained.wait_for(lambda: not self._open, timeout_s)

    def fail_queued(self, error: ConchError) -> int:
        """Fails all open requests: each may still wait in a queue."""
        with self._lock:
            executions = list(self._open.values())
        return sum(execution.fail(error) for execution in executions)

    def answer(self, request: InferenceRequest, answer: EnsembleAnswer) -> None:
        """Sends an answer of a request; see `Owner`."""
        response = (
            None if answer.outputs is None and answer.error is None else self._response(request, answer)
        )
        if answer.final:
            self._count(request, response)  # first: a client that has its response finds it counted
        request.respond(response, answer.final)

    def ended(self, execution: EnsembleExecution) -> None:
        """Removes a drained execution; see `Owner`."""
        with self._lock:
            del self._open[execution.request]
            if self._closing and not self._open:
                self._drained.notify_all()

    def _response(self, request: InferenceRequest, answer: EnsembleAnswer) -> InferenceResponse:
        if answer.outputs is None:
            return InferenceResponse([], answer.error)
        ranks = self._ranks
        response = InferenceResponse(
            [fitted(tensor, name, ranks[name], self._batches) for name, tensor in answer.outputs.items()],
            None,
            _parameters(answer.correlation) if answer.outputs else None,  # Triton has them by tensor
        )
        if request.classes is not None or self._shaper.reshapes_outputs:
            try:
                self._shaper.shape_response(request, response)
            except Exception as error:  # boundary: models, whose outputs may not fit their shapes
                return InferenceResponse([], unsendable(request.model_name, response, error))
            if response.error is not None:
                return InferenceResponse([], response.error)
        return response

    def _gauges(self) -> Gauges:
        return Gauges(running=len(self._open))

    def _count(self, request: InferenceRequest, response: InferenceResponse | None) -> None:
        now = self.clock()
        batch = Batch([request], request.batch_size)
        batch.compute_start_ns = batch.compute_input_end_ns = request.queued_ns
        batch.compute_output_start_ns = batch.compute_end_ns = now
        if self.statistics.watched:
            note_run(batch)
        if response is not None and response.error is not None:
            if request.cancelled and isinstance(response.error, CancelledError):
                self.statistics.record_cancellation(now - request.received_ns, RUNNING)
            else:
                self.statistics.record_failure(now - request.received_ns)
            return
        self.statistics.record_batch(batch, [RequestEnd.SUCCEEDED])


def _parameters(correlation: Correlation) -> dict[str, Parameter]:
    """The sequence parameters that Triton adds to every response of an ensemble."""
    sequence_id = correlation.sequence_id
    if isinstance(sequence_id, int) and sequence_id >= 2**63:
        sequence_id -= 2**64  # the protocol carries an unsigned number in a signed field
    return {
        "sequence_id": sequence_id,
        "sequence_start": correlation.start,
        "sequence_end": correlation.end,
    }
