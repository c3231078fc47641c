"""The base of backends that map arrays to arrays: batches are gathered, run once and scattered here.

Such a backend is about thirty lines: a class with a `default_model_file` and an `open` that returns a
function from named arrays to named arrays. Everything about requests stays in this module.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from conch.core.backend import Backend, BackendInstance, BackendModel
from conch.core.clock import monotonic_ns
from conch.core.errors import InternalError
from conch.core.instances.placement import Placement
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.scheduler.base import Batch
from conch.core.spec import ModelSpec, TensorSpec
from conch.core.tensor import ELEMENT_SIZES, NUMPY_DTYPES, Array, Tensor, datatype_of
from conch.core.validation import shape_text


class ArrayFunction(Protocol):
    """Computes outputs from inputs; one call at a time per instance, on any thread.

    A function that holds something may have a method ``close()``, called once when its instance goes.
    """

    def __call__(self, inputs: dict[str, Array], outputs: tuple[str, ...], /) -> Mapping[str, Array]:
        """Runs the model once.

        Args:
            inputs: An array for each input the requests have, batch dimension first where the model has
                one. They may be the requests' own memory, so they are read-only. BYTES come as object
                arrays of `bytes`. Optional inputs that were left out are absent. Controls and states of a
                sequence batcher are inputs like all others.
            outputs: The outputs somebody wants, in the config's order; others would be thrown away. The
                states of a sequence batcher are always wanted.

        Returns:
            At least the outputs wanted. Their memory must not be written again by a later call.
        """


class ArrayBackend(Backend):
    """A backend whose models are functions of arrays."""

    @abstractmethod
    def open(self, spec: ModelSpec, placement: Placement) -> ArrayFunction:
        """Makes the function of one instance.

        Raises:
            ConchError: The model can't be loaded there; the text says why.
        """

    def load(self, spec: ModelSpec) -> BackendModel:
        """Loads a model version whose instances share nothing; override where they do."""
        return _Model(self, spec)


class _Model(BackendModel):
    def __init__(self, backend: ArrayBackend, spec: ModelSpec) -> None:
        self._backend = backend
        self._spec = spec

    def create_instance(self, placement: Placement) -> BackendInstance:
        return ArrayInstance(self._spec, self._backend.open(self._spec, placement))


class ArrayInstance(BackendInstance):
    """Runs batches on an array function."""

    def __init__(self, spec: ModelSpec, function: ArrayFunction) -> None:
        self._spec = spec
        self._function = function
        self._batches = spec.max_batch_size > 0
        self._outputs = {tensor.name: tensor for tensor in spec.model_outputs}
        self._all = tuple(self._outputs)
        states = () if spec.sequence is None else spec.sequence.states
        self._states = frozenset(state.output_name for state in states)
        # Datatype and dims of the last good result by output: most results are like the one before.
        self._passed: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {}

    def execute(self, batch: Batch) -> Sequence[InferenceResponse]:
        """Gathers, runs and scatters; requests that can't share a call get one each."""
        requests = batch.requests
        if self._batches or len(requests) == 1:
            return self._run(batch, requests)
        return [response for request in requests for response in self._run(batch, [request])]

    def close(self) -> None:
        """Closes the function, if it can be closed."""
        close = getattr(self._function, "close", None)
        if close is not None:
            close()

    def _run(self, batch: Batch, requests: list[InferenceRequest]) -> list[InferenceResponse]:
        wanted = self._wanted(requests)
        inputs = _gather(batch, requests)
        batch.compute_input_end_ns = monotonic_ns()
        results = self._function(inputs, wanted)
        batch.compute_output_start_ns = monotonic_ns()
        rows = [_rows(request) for request in requests] if self._batches else None
        total = None if rows is None else sum(rows)
        arrays = [self._checked(name, results, total) for name in wanted]
        if rows is None or len(requests) == 1:
            return [InferenceResponse([_tensor(spec, array) for spec, array in arrays])]
        responses: list[InferenceResponse] = []
        start = 0
        for request, count in zip(requests, rows, strict=True):
            end = start + count
            requested = request.requested
            responses.append(
                InferenceResponse(
                    [
                        _tensor(spec, array[start:end])
                        for spec, array in arrays
                        if requested is None or spec.name in requested or spec.name in self._states
                    ]
                )
            )
            start = end
        return responses

    def _wanted(self, requests: list[InferenceRequest]) -> tuple[str, ...]:
        """The outputs any of the requests wants, in the config's order."""
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

    def _checked(self, name: str, results: Mapping[str, Array], rows: int | None) -> tuple[TensorSpec, Array]:
        """One output of the function with its config, if it is what that promises."""
        spec = self._outputs[name]
        array = results.get(name)
        if array is None:
            raise InternalError(f"model '{self._spec.name}' did not return output '{name}'")
        shape = array.shape
        tail = shape if rows is None else shape[1:]
        if (array.dtype, tail) == self._passed.get(name) and (rows is None or shape[0] == rows):
            return spec, array
        self._check(spec, array, rows)
        self._passed[name] = (array.dtype, tail)
        return spec, array

    def _check(self, spec: TensorSpec, array: Array, rows: int | None) -> None:
        """Compares an output with its config."""
        name = spec.name
        if array.dtype != NUMPY_DTYPES.get(spec.datatype) and datatype_of(array) != spec.datatype:
            raise InternalError(
                f"output '{name}' of model '{self._spec.name}' has datatype {datatype_of(array)}, but the "
                f"model configuration specifies {spec.datatype}"
            )
        dims = spec.backend_dims
        shape = array.shape if rows is None else array.shape[1:]
        fits = shape == dims or (
            len(shape) == len(dims) and all(want in (-1, got) for want, got in zip(dims, shape, strict=True))
        )
        if not fits or (rows is not None and not array.ndim):
            expected = dims if rows is None else (-1, *dims)
            raise InternalError(
                f"output '{name}' of model '{self._spec.name}' has shape {shape_text(array.shape)}, but the "
                f"model configuration specifies {shape_text(expected)}"
            )
        if rows is not None and array.shape[0] != rows:
            raise InternalError(
                f"output '{name}' of model '{self._spec.name}' has batch dimension {array.shape[0]}, but the "
                f"batch has {rows} rows"
            )


def _tensor(spec: TensorSpec, array: Array) -> Tensor:
    return Tensor(spec.name, spec.datatype, array.shape, None, array)


def _rows(request: InferenceRequest) -> int:
    """Rows a request adds; not its batch size, which counts a request without rows as one."""
    for tensor in request.inputs.values():
        return tensor.shape[0]
    return request.batch_size


def _gather(batch: Batch, requests: list[InferenceRequest]) -> dict[str, Array]:
    """The inputs of a batch as one array each; the requests have the same ones, with the same dims."""
    first = requests[0].inputs
    arrays: dict[str, Array] = {}
    for name, tensor in first.items():
        if len(requests) == 1:
            array = tensor.numpy()
            if not array.flags.aligned:
                # Where the request's memory begins depends on its message; kernels count on alignment.
                array = array.copy()
                batch.bytes_copied += array.nbytes
        elif tensor.datatype in ELEMENT_SIZES and tensor.datatype in NUMPY_DTYPES:
            # Joining the bytes is one copy like `np.concatenate`, without an array for each request.
            data = b"".join([request.inputs[name].data for request in requests])
            rows = sum([request.inputs[name].shape[0] for request in requests])
            array = np.frombuffer(data, NUMPY_DTYPES[tensor.datatype]).reshape(rows, *tensor.shape[1:])
            batch.bytes_copied += len(data)
        else:
            array = np.concatenate([request.inputs[name].numpy() for request in requests])
            batch.bytes_copied += array.nbytes
        arrays[name] = array
    return arrays
