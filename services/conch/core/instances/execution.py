"""Executes one batch: runs the instance, shapes its responses, counts, answers every request once."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from conch.core.backend import BackendInstance
from conch.core.classification import classify
from conch.core.clock import Clock
from conch.core.errors import ConchError, InternalError, as_conch_error
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.scheduler.base import Batch
from conch.core.spec import ModelSpec
from conch.core.stats import ModelStatistics
from conch.core.validation import reshaped_shape

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
        self._skip = 1 if spec.max_batch_size > 0 else 0
        self._outputs = {tensor.name: tensor for tensor in spec.outputs}
        self._input_reshapes = {
            tensor.name: (tensor.dims, tensor.reshape) for tensor in spec.inputs if tensor.reshape is not None
        }
        self._reshapes = {
            tensor.name: (tensor.reshape, tensor.dims)
            for tensor in spec.outputs
            if tensor.reshape is not None
        }

    def run(self, instance: BackendInstance, batch: Batch) -> None:
        """Runs a batch on an instance; never raises, every request of the batch gets an answer."""
        clock = self._clock
        requests = batch.requests
        batch.compute_start_ns = clock()
        if self._input_reshapes:
            for request in requests:
                self._reshape_inputs(request)
        try:
            responses = instance.execute(batch)
            if responses is None:
                self._finish_decoupled(batch)
                return
            if len(responses) != len(requests):
                raise InternalError(
                    f"backend of model '{self._spec.name}' returned {len(responses)} responses for "
                    f"{len(requests)} requests"
                )
        except Exception as error:
            responses = self._failures(batch, error)
        failed = failed_ns = 0
        now = batch.compute_end_ns = clock()
        if not batch.compute_input_end_ns:
            batch.compute_input_end_ns = batch.compute_start_ns
        if not batch.compute_output_start_ns:
            batch.compute_output_start_ns = now
        for request, response in zip(requests, responses, strict=True):
            if response.error is not None:
                failed += 1
                failed_ns += now - request.received_ns
            elif request.requested is not None or self._reshapes:
                self._shape(request, response)
        # Counted before anything is sent: a client that has its answer finds it in the statistics.
        self._statistics.record_batch(batch, failed, failed_ns)
        for request, response in zip(requests, responses, strict=True):
            request.respond(response, True)

    def _reshape_inputs(self, request: InferenceRequest) -> None:
        inputs = request.inputs
        for name, (source, target) in self._input_reshapes.items():
            tensor = inputs.get(name)
            if tensor is not None:
                inputs[name] = tensor.reshaped(reshaped_shape(tensor.shape, target, source, self._skip))

    def _shape(self, request: InferenceRequest, response: InferenceResponse) -> None:
        """Drops outputs nobody asked for and undoes the config's reshape."""
        outputs = response.outputs
        if request.requested is not None:
            requested = request.requested
            outputs = [tensor for tensor in outputs if tensor.name in requested]
        if self._reshapes:
            for index, tensor in enumerate(outputs):
                reshape = self._reshapes.get(tensor.name)
                if reshape is None:
                    continue
                source, target = reshape
                if len(tensor.shape) != len(source) + self._skip:
                    response.error = InternalError(
                        f"unexpected shape for output '{tensor.name}' of model '{self._spec.name}': expected "
                        f"the dims {list(source)} of its reshape, got {list(tensor.shape)}"
                    )
                    return
                outputs[index] = tensor.reshaped(reshaped_shape(tensor.shape, target, source, self._skip))
        if request.classes is not None:
            try:
                outputs = [
                    classify(
                        tensor, request.classes[tensor.name], self._outputs.get(tensor.name), self._skip > 0
                    )
                    if tensor.name in request.classes
                    else tensor
                    for tensor in outputs
                ]
            except ConchError as error:
                response.error = error
                outputs = []
        response.outputs = outputs

    def _finish_decoupled(self, batch: Batch) -> None:
        """Counts a batch whose requests answer for themselves, possibly after this."""
        batch.compute_end_ns = batch.compute_output_start_ns = self._clock()
        batch.compute_input_end_ns = batch.compute_start_ns
        self._statistics.record_batch(batch, 0, 0)

    def _failures(self, batch: Batch, error: Exception) -> Sequence[InferenceResponse]:
        shown = as_conch_error(error)
        if not isinstance(error, ConchError):
            log.error("model '%s' failed to execute", self._spec.name, exc_info=error)
        return [InferenceResponse([], shown) for _ in batch.requests]
