"""Executes one batch: runs the instance, shapes its responses, counts, answers every request once."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from conch.core.backend import BackendInstance
from conch.core.clock import Clock
from conch.core.errors import (
    ConchError,
    DeadlineExceededError,
    InternalError,
    UnavailableError,
    as_conch_error,
    without_traceback,
)
from conch.core.instances.retry import retry_after_ms
from conch.core.instances.shaping import Shaper
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.scheduler.base import Batch
from conch.core.spec import ModelSpec
from conch.core.stats import ModelStatistics

log = logging.getLogger(__name__)


class Executor:
    """Runs the batches of one model version.

    Args:
        spec: The model version.
        statistics: Where executions are counted.
        clock: Monotonic time in nanoseconds.
    """

    def __init__(self, spec: ModelSpec, statistics: ModelStatistics, clock: Clock) -> None:
        self._spec = spec
        self._statistics = statistics
        self._clock = clock
        self._shaper = Shaper(spec)

    def run(self, instance: BackendInstance, batch: Batch) -> None:
        """Runs a batch on an instance; never raises, every request of the batch gets an answer."""
        clock = self._clock
        requests = batch.requests
        batch.compute_start_ns = clock()
        shaper = self._shaper
        if shaper.reshapes_inputs:
            for request in requests:
                shaper.shape_inputs(request)
        try:
            responses: Sequence[InferenceResponse | None] | None = instance.execute(batch)
            if responses is None:
                self._finish_decoupled(batch)
                return
            if len(responses) != len(requests):
                raise InternalError(
                    f"backend of model '{self._spec.name}' returned {len(responses)} responses for "
                    f"{len(requests)} requests"
                )
        except BaseException as error:  # a model that calls sys.exit() must not end the server's thread
            responses = self._failures(batch, error)
        failed = failed_ns = failed_rows = 0
        now = batch.compute_end_ns = clock()
        if not batch.compute_input_end_ns:
            batch.compute_input_end_ns = batch.compute_start_ns
        if not batch.compute_output_start_ns:
            batch.compute_output_start_ns = now
        for request, response in zip(requests, responses, strict=True):
            if response is None:
                continue  # the model answers this one itself
            if response.error is None and (request.requested is not None or shaper.reshapes_outputs):
                self._shape(request, response)
            if response.error is not None:
                failed += 1
                failed_ns += now - request.received_ns
                failed_rows += request.batch_size
        # Counted before anything is sent: a client that has its answer finds it in the statistics.
        self._statistics.record_batch(batch, failed, failed_ns, failed_rows)
        for request, response in zip(requests, responses, strict=True):
            if response is not None:
                request.respond(response, True)

    def expire(self, request: InferenceRequest, text: str) -> None:
        """Answers a request that may not wait any longer.

        Args:
            request: The request.
            text: What it is told, unless its client's own deadline has passed.
        """
        now = self._clock()
        self._statistics.record_failure(now - request.received_ns)
        error: ConchError
        if request.deadline_ns is not None and now >= request.deadline_ns:
            # What a client says to itself at its deadline: this may reach it first, and must read the same.
            error = DeadlineExceededError("Deadline Exceeded")
        else:
            error = UnavailableError(text)
        request.fail(error)

    def refuse(self, error: ConchError, pending: int, mean_batch_ns: int, instances: int) -> None:
        """Counts a request that a full queue refused, and adds to its error when to try again.

        Args:
            error: What the request is told.
            pending: Requests in the queue.
            mean_batch_ns: How long a batch takes; 0 where none has finished yet.
            instances: Instances of the model.
        """
        requests_per_batch = self._statistics.record_rejection()
        error.retry_after_ms = retry_after_ms(mean_batch_ns, pending, requests_per_batch, instances)

    def _finish_decoupled(self, batch: Batch) -> None:
        """Counts a batch whose requests answer for themselves, possibly after this."""
        batch.compute_end_ns = batch.compute_output_start_ns = self._clock()
        batch.compute_input_end_ns = batch.compute_start_ns
        self._statistics.record_batch(batch, 0, 0)

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

    def _failures(self, batch: Batch, error: BaseException) -> Sequence[InferenceResponse]:
        shown = without_traceback(self._shown(error))
        return [InferenceResponse([], shown) for _ in batch.requests]
