"""Scatters a function's output arrays: one response per request of the batch.

Owns: per model, the datatype and dims of the last valid output, so that equal ones skip the check.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np

from conch.backends.gather import ARRAY_DTYPES, Shapes
from conch.core.device import DeviceTensor
from conch.core.errors import InternalError
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.spec import ModelSpec, TensorSpec
from conch.core.tensor import Array, Tensor, datatype_of
from conch.core.validation import shape_text

Value = Array | DeviceTensor
"""An output of a function."""


def scatter_for(spec: ModelSpec) -> Scatterer:
    """The scatterer for a model."""
    if any(tensor.is_shape for tensor in (*spec.inputs, *spec.outputs)):
        return _ShapeTensorScatterer(spec)
    return _InputShapeScatterer(spec) if spec.batch_outputs else Scatterer(spec)


def rows_of(request: InferenceRequest) -> int:
    """Rows of a request; unlike its batch size, 0 for a request with empty inputs."""
    for tensor in request.inputs.values():
        return tensor.shape[0]
    return request.batch_size


class Scatterer:
    """Checks outputs against the config and gives each request its rows."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._batches = spec.max_batch_size > 0
        self._outputs = {tensor.name: tensor for tensor in spec.model_outputs}
        states = () if spec.sequence is None else spec.sequence.states
        self._states = frozenset(state.output_name for state in states)
        # Most outputs repeat the datatype and dims of the last valid one.
        self._last_valid: dict[str, tuple[np.dtype[Any] | None, tuple[int, ...]]] = {}

    def split(
        self, requests: list[InferenceRequest], wanted: tuple[str, ...], results: Mapping[str, Value]
    ) -> list[InferenceResponse]:
        """The responses in the order of the requests; `wanted` are the outputs that any of them asks for."""
        rows = [self._rows(request) for request in requests] if self._batches else None
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

    _rows = staticmethod(rows_of)  # overridden where not every input has rows; not a method, which is a call

    def _checked(self, name: str, results: Mapping[str, Value], rows: int | None) -> tuple[TensorSpec, Value]:
        """One output with its spec, checked."""
        spec = self._outputs[name]
        array = self._found(name, results)
        shape = array.shape
        if not shape and rows is None and set(spec.backend_dims) == {1}:
            # Dims of a config can't be empty: those of 1 stand for a scalar.
            shape = spec.backend_dims
            array = (
                array.renamed(name, shape) if isinstance(array, DeviceTensor) else np.reshape(array, shape)
            )
        tail = shape if rows is None else shape[1:]
        if (array.dtype, tail) == self._last_valid.get(name) and (rows is None or shape[0] == rows):
            return spec, array
        self._check(spec, array, rows)
        self._last_valid[name] = (array.dtype, tail)
        return spec, array

    def _found(self, name: str, results: Mapping[str, Value]) -> Value:
        array = results.get(name)
        if array is None:
            raise InternalError(f"model '{self._spec.name}' did not return output '{name}'")
        return array

    def _check(self, spec: TensorSpec, array: Value, rows: int | None) -> None:
        name = spec.name
        self._check_datatype(spec, array)
        dims = spec.backend_dims
        shape = array.shape if rows is None else array.shape[1:]
        fits = shape == dims or (
            len(shape) == len(dims) and all(want in (-1, got) for want, got in zip(dims, shape, strict=True))
        )
        if not fits or (rows is not None and not array.shape):
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

    def _check_datatype(self, spec: TensorSpec, array: Value) -> None:
        if not isinstance(array, DeviceTensor) and array.dtype == ARRAY_DTYPES[spec.datatype]:
            return
        datatype = array.datatype if isinstance(array, DeviceTensor) else datatype_of(array)
        if datatype != spec.datatype:
            raise InternalError(
                f"output '{spec.name}' of model '{self._spec.name}' has datatype {datatype}, but "
                f"the model configuration specifies {spec.datatype}"
            )


class _PartsScatterer(Scatterer):
    """For models with outputs of which a request gets a part that is not rows; subclasses know the parts."""

    def __init__(self, spec: ModelSpec, names: Iterable[str]) -> None:
        super().__init__(spec)
        self._special = frozenset(names)
        self._places = {tensor.name: place for place, tensor in enumerate(spec.model_outputs)}

    def split(
        self, requests: list[InferenceRequest], wanted: tuple[str, ...], results: Mapping[str, Value]
    ) -> list[InferenceResponse]:
        special = self._special
        responses = super().split(requests, tuple(n for n in wanted if n not in special), results)
        for name in wanted:
            if name in special:
                spec = self._outputs[name]
                parts = self._parts(spec, self._found(name, results), requests)
                for request, response, part in zip(requests, responses, parts, strict=True):
                    if request.requested is None or name in request.requested:
                        response.outputs.append(_tensor(spec, part))
        for response in responses:
            response.outputs.sort(key=lambda tensor: self._places[tensor.name])
        return responses

    @abstractmethod
    def _parts(self, spec: TensorSpec, array: Value, requests: list[InferenceRequest]) -> Sequence[Value]:
        """The checked part of each request."""


class _InputShapeScatterer(_PartsScatterer):
    """For models with `batch_output`: each request's part has the shape of one of its inputs."""

    def __init__(self, spec: ModelSpec) -> None:
        self._sources = {name: split.source for split in spec.batch_outputs for name in split.names}
        super().__init__(spec, self._sources)

    def _parts(self, spec: TensorSpec, array: Value, requests: list[InferenceRequest]) -> Sequence[Value]:
        self._check_datatype(spec, array)
        if isinstance(array, DeviceTensor):
            array = array.numpy()
        source = self._sources[spec.name]
        try:
            return split_flat(array, [request.inputs[source].shape for request in requests])
        except ValueError as error:
            raise InternalError(
                f"output '{spec.name}' of model '{self._spec.name}' can't be split by the shapes of input "
                f"'{source}': {error}"
            ) from error


class _ShapeTensorScatterer(_PartsScatterer):
    """For models with shape tensors, which have no batch dimension: each request gets a whole output."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec, [tensor.name for tensor in (*spec.inputs, *spec.outputs) if tensor.is_shape])

    def _parts(self, spec: TensorSpec, array: Value, requests: list[InferenceRequest]) -> Sequence[Value]:
        self._check(spec, array, None)
        return [array] * len(requests)

    def _rows(self, request: InferenceRequest) -> int:
        batched = (each.shape[0] for name, each in request.inputs.items() if name not in self._special)
        return next(batched, request.batch_size)


def _tensor(spec: TensorSpec, array: Value) -> Tensor:
    if isinstance(array, DeviceTensor):
        return array.renamed(spec.name, array.shape)
    return Tensor.from_array(spec.name, array, spec.datatype)


def split_flat(array: Array, shapes: Shapes) -> list[Array]:
    """Splits a flat array into consecutive views of the given shapes."""
    flat = array.reshape(-1)
    ends = list(accumulate(prod(shape) for shape in shapes))
    if flat.size != ends[-1]:
        raise ValueError(f"{flat.size} elements for shapes of {ends[-1]} elements")
    starts = [0, *ends[:-1]]
    return [flat[start:end].reshape(shape) for start, end, shape in zip(starts, ends, shapes, strict=True)]
