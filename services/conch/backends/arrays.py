"""Base of backends that map arrays to arrays.

A batch is gathered to one array per input, run once and scattered to responses. Such a backend is about
thirty lines: a class with `default_model_file` and an `open` that returns a function of named arrays.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import ClassVar, Protocol, cast, runtime_checkable

import numpy as np

from conch.backends.device_arrays import DeviceFunction, DeviceGatherer
from conch.backends.gather import gather_for
from conch.backends.scatter import scatter_for
from conch.core.backend import (
    PENDING,
    Backend,
    BackendInstance,
    BackendModel,
    BatchOutcome,
    Done,
    Pending,
)
from conch.core.clock import monotonic_ns
from conch.core.execution.placement import Placement
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.scheduling.scheduler import Batch
from conch.core.spec import ModelSpec
from conch.core.tensor import ELEMENT_SIZES, NUMPY_DTYPES, POSITIONS, Array

_ALIGNMENT = 64  # as frameworks align their own memory
_LEAST_BYTES = 64 * 1024
"""Smallest total output, in bytes, for which avoiding the copy pays off."""

ArrayResults = Mapping[str, Array]
"""Outputs of a run by name."""

OnResults = Callable[[ArrayResults | BaseException], None]
"""Takes the results of a run that was started, or its error."""


class ArrayFunction(Protocol):
    """Computes outputs from inputs; called once at a time per instance, on any thread.

    A function with resources may have ``close()``, called once when its instance goes; one that compiles in
    its first runs has ``warmup_runs``, the least number of runs of each warm-up sample. One that uses GPU
    memory may also be a `conch.backends.device_arrays.DeviceFunction`.
    """

    def __call__(self, inputs: dict[str, Array], outputs: tuple[str, ...], /) -> Mapping[str, Array]:
        """Runs the model once.

        Args:
            inputs: An array per input of the requests (batch dimension first where the model has one, ragged
                inputs flat) and per input that the server makes, such as controls and states of a sequence
                batcher. Read-only: they may be the requests' own memory. BYTES are object arrays of `bytes`,
                BF16 arrays of uint16 with the elements' bits. Optional inputs that were left out are absent.
            outputs: The requested outputs in the config's order; states of a sequence batcher are always
                requested.

        Returns:
            At least the requested outputs. A later call must not write to their memory.
        """


class ArrayBackend(Backend):
    """A backend whose models are functions of arrays."""

    @abstractmethod
    def open(self, spec: ModelSpec, placement: Placement) -> ArrayFunction:
        """Creates the function of one instance.

        Raises:
            ConchError: The model cannot be loaded there; the text says why.
        """

    def load(self, spec: ModelSpec) -> BackendModel:
        """Loads a model version whose instances share nothing; override it where they do."""
        return _Model(self, spec)


class _Model(BackendModel):
    def __init__(self, backend: ArrayBackend, spec: ModelSpec) -> None:
        self._backend = backend
        self._spec = spec

    def create_instance(self, placement: Placement) -> BackendInstance:
        return ArrayInstance(self._spec, self._backend.open(self._spec, placement))


class AsyncArrayFunction(Protocol):
    """An array function whose runs another thread may complete; it has one run at a time."""

    def start(
        self,
        inputs: dict[str, Array],
        outputs: tuple[str, ...],
        places: Mapping[str, Array] | None,
        done: OnResults,
    ) -> ArrayResults | None:
        """Starts a run.

        Args:
            inputs: As for `ArrayFunction`; only the function keeps them until the run is over.
            outputs: The requested outputs.
            places: An array to fill for each requested output; None to return new ones.
            done: Called once with the results or an error if this returns None; from any thread and possibly
                before this returns. The next run may start within it.

        Returns:
            The results, as those of an `ArrayFunction`, if the run is over already.
        """


@runtime_checkable
class WritesInPlace(Protocol):
    """An array function that can write its outputs to given memory."""

    def run_into(self, inputs: dict[str, Array], outputs: dict[str, Array]) -> None:
        """Runs the model once.

        Args:
            inputs: As for a call.
            outputs: An array to fill for each requested output, of its shape.
        """


class PaddedFunction:
    """An `AsyncArrayFunction` of a model that runs batches of one size only; adds rows, and cuts them off."""

    def __init__(self, function: AsyncArrayFunction, size: int) -> None:
        self._function = function
        self._size = size

    def start(
        self,
        inputs: dict[str, Array],
        outputs: tuple[str, ...],
        places: Mapping[str, Array] | None,
        done: OnResults,
    ) -> ArrayResults | None:
        """Starts a run; the outputs of a padded one are new arrays."""
        rows = len(next(iter(inputs.values())))
        if rows == self._size:
            return self._function.start(inputs, outputs, places, done)

        def cut(results: ArrayResults) -> ArrayResults:
            return {name: array[:rows] for name, array in results.items()}

        def on_results(results: ArrayResults | BaseException) -> None:
            done(results if isinstance(results, BaseException) else cut(results))

        padded = {name: self._padded(array) for name, array in inputs.items()}
        results = self._function.start(padded, outputs, None, on_results)
        return None if results is None else cut(results)

    def close(self) -> None:
        """Closes the function."""
        closes = getattr(self._function, "close", None)
        if closes is not None:
            closes()

    def _padded(self, array: Array) -> Array:
        padded = np.zeros((self._size, *array.shape[1:]), array.dtype)
        padded[: len(array)] = array
        if array.dtype.hasobject:
            padded[len(array) :] = b""
        return padded


class _ArrayInstance(BackendInstance):
    """Gathers batches to arrays and scatters results to responses; subclasses run the function."""

    def __init__(self, spec: ModelSpec, function: object, writes_in_place: bool) -> None:
        self._closes = getattr(function, "close", None)
        self.warmup_runs = getattr(function, "warmup_runs", 1)
        self._batches = spec.max_batch_size > 0
        self._all = tuple(tensor.name for tensor in spec.model_outputs)
        states = () if spec.sequence is None else spec.sequence.states
        self._states = frozenset(state.output_name for state in states)
        self._gather = gather_for(spec)
        self.scatterer = scatter_for(spec)
        self._in_place = InPlaceOutputs(spec) if writes_in_place else None

    def close(self) -> None:
        """Closes the function if it has `close`."""
        closes, self._closes = self._closes, None
        if closes is not None:
            closes()

    def _places(
        self, requests: list[InferenceRequest], wanted: tuple[str, ...], inputs: dict[str, Array]
    ) -> dict[str, Array] | None:
        """Client memory for all wanted outputs; None unless all of them can be written there."""
        if self._in_place is None or len(requests) != 1 or requests[0].region_bindings is None:
            return None
        return self._in_place.places(requests[0], wanted, inputs)

    def wanted(self, requests: list[InferenceRequest]) -> tuple[str, ...]:
        """Outputs that any of the requests asks for, in the config's order."""
        first = requests[0].requested
        if first is None:
            return self._all
        names = {*first, *self._states}
        for request in requests:
            requested = request.requested
            if requested is None:
                return self._all
            if requested is not first:
                names.update(requested)
        return self._all if len(names) == len(self._all) else tuple([n for n in self._all if n in names])


class ArrayInstance(_ArrayInstance):
    """Runs batches on an array function."""

    def __init__(self, spec: ModelSpec, function: ArrayFunction) -> None:
        super().__init__(spec, function, isinstance(function, WritesInPlace))
        self._function = function
        device_id = getattr(function, "device_id", None)
        self._device_gatherer = None if device_id is None else DeviceGatherer(spec, device_id)

    def execute(self, batch: Batch) -> Sequence[InferenceResponse]:
        """Gathers, runs and scatters; requests of a model without batching run one by one."""
        requests = batch.requests
        if self._batches or len(requests) == 1:
            return self._run(batch, requests)
        return [response for request in requests for response in self._run(batch, [request])]

    def _run(self, batch: Batch, requests: list[InferenceRequest]) -> list[InferenceResponse]:
        wanted = self.wanted(requests)
        if self._device_gatherer is not None:
            return self._run_on_device(self._device_gatherer, batch, requests, wanted)
        inputs = self._gather(batch, requests)
        batch.compute_input_end_ns = monotonic_ns()
        places = self._places(requests, wanted, inputs)
        if places is None:
            results = self._function(inputs, wanted)
        else:
            cast(WritesInPlace, self._function).run_into(inputs, places)
            results = places
        batch.compute_output_start_ns = monotonic_ns()
        return self.scatterer.split(requests, wanted, results)

    def _run_on_device(
        self, gather: DeviceGatherer, batch: Batch, requests: list[InferenceRequest], wanted: tuple[str, ...]
    ) -> list[InferenceResponse]:
        """Runs with inputs and outputs in device memory where possible."""
        function = cast(DeviceFunction, self._function)
        inputs = gather.inputs(batch, requests)
        places = gather.places(requests, wanted)
        batch.compute_input_end_ns = monotonic_ns()
        results = function.on_device(inputs, wanted, places)
        batch.compute_output_start_ns = monotonic_ns()
        return self.scatterer.split(requests, wanted, results)


class AsyncArrayInstance(_ArrayInstance):
    """Starts batches on an asynchronous array function."""

    blocks: ClassVar[bool] = False

    def __init__(self, spec: ModelSpec, function: AsyncArrayFunction) -> None:
        super().__init__(spec, function, True)
        self._function = function

    def start(self, batch: Batch, done: Done) -> BatchOutcome | Pending:
        """Gathers and starts a batch; requests of a model without batching run one after the other."""
        requests = batch.requests
        single = self._batches or len(requests) == 1
        groups = [requests] if single else [[request] for request in requests]
        return _StartedBatch(self, batch, groups, done).proceed()

    def start_run(
        self, batch: Batch, requests: list[InferenceRequest], wanted: tuple[str, ...], done: OnResults
    ) -> ArrayResults | None:
        """Gathers requests and starts the function on them."""
        inputs = self._gather(batch, requests)
        batch.compute_input_end_ns = monotonic_ns()
        return self._function.start(inputs, wanted, self._places(requests, wanted, inputs), done)


class _StartedBatch:
    """A batch of an `AsyncArrayInstance`; it has the groups of requests that are still to run."""

    __slots__ = ("_batch", "_done", "_groups", "_instance", "_responses", "_wanted")

    def __init__(
        self, instance: AsyncArrayInstance, batch: Batch, groups: list[list[InferenceRequest]], done: Done
    ) -> None:
        self._instance = instance
        self._batch = batch
        self._groups = groups
        self._done = done
        self._wanted: tuple[str, ...] = ()
        self._responses: list[InferenceResponse] = []

    def proceed(self) -> BatchOutcome | Pending:
        """Runs the groups in turn; `PENDING` once a run is completed later."""
        while self._groups:
            requests = self._groups[0]
            self._wanted = self._instance.wanted(requests)
            results = self._instance.start_run(self._batch, requests, self._wanted, self._on_results)
            if results is None:
                return PENDING
            self._take(results)
        return self._responses

    def _on_results(self, results: ArrayResults | BaseException) -> None:
        """Completes a run, on any thread."""
        outcome: BatchOutcome | Pending
        try:
            if isinstance(results, BaseException):
                raise results
            self._take(results)
            outcome = self.proceed()
        except BaseException as error:  # top of a thread of the engine
            outcome = error
        if not isinstance(outcome, Pending):
            self._done(self._batch, outcome)

    def _take(self, results: ArrayResults) -> None:
        """Scatters the results of the first group."""
        self._batch.compute_output_start_ns = monotonic_ns()
        self._responses += self._instance.scatterer.split(self._groups.pop(0), self._wanted, results)


class InPlaceOutputs:
    """Finds the output memory for a model that can write in place."""

    def __init__(self, spec: ModelSpec) -> None:
        self._batches = spec.max_batch_size > 0
        # Outputs that are split, or kept as sequence state, differ from what the client gets.
        plain = not (spec.batch_outputs or spec.padding or spec.sequence)
        self._outputs = {
            tensor.name: (tensor.backend_dims, tensor.datatype)
            for tensor in spec.model_outputs
            if plain
            and min(tensor.backend_dims, default=0) >= 0
            and tensor.datatype in ELEMENT_SIZES
            and tensor.datatype in NUMPY_DTYPES
            and tensor.datatype not in POSITIONS  # the model may read back what it wrote
        }

    def places(
        self, request: InferenceRequest, wanted: tuple[str, ...], inputs: dict[str, Array]
    ) -> dict[str, Array] | None:
        """Arrays in client memory for all outputs of a batch's only request; None unless all fit there."""
        bindings = request.region_bindings
        # Another consumer of the response, such as a cache, must not see client memory.
        if bindings is None or request.responder is not bindings:
            return None
        first = next(iter(request.inputs.values()), None)
        if self._batches and first is None:
            return None  # all inputs are optional, so the row count is unknown
        rows = (first.shape[0],) if self._batches and first is not None else ()
        places: dict[str, Array] = {}
        total = 0
        for name in wanted:
            found = self._outputs.get(name)
            if found is None:
                return None
            dims, datatype = found
            shape = (*rows, *dims)
            size = prod(shape) * ELEMENT_SIZES[datatype]
            buffer = bindings.buffer(name, size)
            if buffer is None or not size:
                return None
            place = np.frombuffer(buffer, NUMPY_DTYPES[datatype]).reshape(shape)
            if place.__array_interface__["data"][0] % _ALIGNMENT:
                return None
            # The model may read inputs after it starts to write outputs.
            others = (*inputs.values(), *places.values())
            if any(np.may_share_memory(place, other) for other in others):
                return None
            places[name] = place
            total += size
        return places if total >= _LEAST_BYTES else None
