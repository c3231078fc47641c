"""Gathers a batch: one array per input from the requests' tensors.

Rows are concatenated; inputs may be padded to a common length (`Padder`) or ragged (flattened and
concatenated), and the server adds batch inputs (`KINDS`) that describe the shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod

import numpy as np

from conch.core.padding import PaddedInput, Padding
from conch.core.request import InferenceRequest
from conch.core.scheduling.scheduler import Batch
from conch.core.spec import ModelSpec
from conch.core.tensor import ELEMENT_SIZES, NUMPY_DTYPES, Array, Tensor

Shapes = Sequence[tuple[int, ...]]
"""Shapes of one tensor in the requests of a batch, batch dimension first."""

ARRAY_DTYPES = {**NUMPY_DTYPES, "BF16": np.dtype("<u2")}
"""The dtype of an array function's arrays by datatype; BF16, which numpy lacks, as the elements' bits."""

Gather = Callable[[Batch, list[InferenceRequest]], dict[str, Array]]


def gather_for(spec: ModelSpec) -> Gather:
    """The gather function for a model."""
    return _Gatherer(spec) if needs_host_arrays(spec) else gather


def needs_host_arrays(spec: ModelSpec) -> bool:
    """True if inputs are padded, ragged, derived or shape tensors, which happens in host memory."""
    special = any(tensor.ragged or tensor.is_shape for tensor in spec.inputs)
    return bool(special or spec.batch_inputs or spec.padding)


def gather(batch: Batch, requests: list[InferenceRequest]) -> dict[str, Array]:
    """One array per input; the requests have the same inputs with the same dims."""
    arrays: dict[str, Array] = {}
    if len(requests) == 1:
        for name, tensor in requests[0].inputs.items():
            if tensor.on_device:
                batch.bytes_copied += tensor.fetch()
            array = array_of(tensor)
            arrays[name] = array if array.flags.aligned else _aligned(batch, array)
        return arrays
    _fetch(batch, requests)
    for name in requests[0].inputs:
        arrays[name] = join_rows(batch, requests, name)
    return arrays


def array_of(tensor: Tensor) -> Array:
    """A tensor in host memory as an array of `ARRAY_DTYPES`."""
    if tensor.datatype == "BF16":
        return np.frombuffer(tensor.data, ARRAY_DTYPES["BF16"]).reshape(tensor.shape)
    return tensor.numpy()


def _fetch(batch: Batch, requests: list[InferenceRequest]) -> None:
    """Copies device tensors to host memory."""
    for request in requests:
        for tensor in request.inputs.values():
            if tensor.on_device:
                batch.bytes_copied += tensor.fetch()


class _Gatherer:
    """Gathers for models with padded, ragged or derived inputs, or shape tensors."""

    def __init__(self, spec: ModelSpec) -> None:
        self._ragged = frozenset(tensor.name for tensor in spec.inputs if tensor.ragged)
        self._shapes = frozenset(tensor.name for tensor in spec.inputs if tensor.is_shape)
        self._batch_inputs = tuple(
            (made.source, KINDS[made.kind], NUMPY_DTYPES[made.datatype], made.names)
            for made in spec.batch_inputs
        )
        self._padder = None if spec.padding is None else Padder(spec.padding)

    def __call__(self, batch: Batch, requests: list[InferenceRequest]) -> dict[str, Array]:
        padder = self._padder
        arrays: dict[str, Array] = {}
        _fetch(batch, requests)
        for name in requests[0].inputs:
            if name in self._ragged:
                arrays[name] = _join_flat(batch, requests, name)
            elif name in self._shapes:  # the same in all requests
                arrays[name] = join_rows(batch, requests[:1], name)
            elif padder is not None and padder.pads(requests, name):
                arrays[name] = array = padder.join(requests, name)
                batch.bytes_copied += array.nbytes
            else:
                arrays[name] = join_rows(batch, requests, name)
        for source, make, dtype, names in self._batch_inputs:
            made = make([request.inputs[source].shape for request in requests]).astype(dtype)
            arrays.update(dict.fromkeys(names, made))
        if padder is not None:
            arrays.update(padder.made(requests))
        return arrays


def _aligned(batch: Batch, array: Array) -> Array:
    """A copy: request memory may start anywhere in a message, but kernels rely on alignment."""
    batch.bytes_copied += array.nbytes
    return array.copy()


def join_rows(batch: Batch, requests: list[InferenceRequest], name: str) -> Array:
    """Concatenates the rows of one input; the requests have the same dims."""
    tensor = requests[0].inputs[name]
    if len(requests) == 1:
        array = array_of(tensor)
        return array if array.flags.aligned else _aligned(batch, array)
    if tensor.datatype in ELEMENT_SIZES:
        # One copy as with `np.concatenate`, but without an array per request.
        data = b"".join([request.inputs[name].data for request in requests])
        rows = sum([request.inputs[name].shape[0] for request in requests])
        array = np.frombuffer(data, ARRAY_DTYPES[tensor.datatype]).reshape(rows, *tensor.shape[1:])
        batch.bytes_copied += len(data)
    else:
        array = np.concatenate([request.inputs[name].numpy() for request in requests])
        batch.bytes_copied += array.nbytes
    return array


def _join_flat(batch: Batch, requests: list[InferenceRequest], name: str) -> Array:
    """Concatenates the elements of one ragged input."""
    tensor = requests[0].inputs[name]
    if len(requests) == 1:
        return join_rows(batch, requests, name).reshape(-1)
    if tensor.datatype in ELEMENT_SIZES:
        data = b"".join([request.inputs[name].data for request in requests])
        batch.bytes_copied += len(data)
        return np.frombuffer(data, ARRAY_DTYPES[tensor.datatype])
    array = np.concatenate([request.inputs[name].numpy().reshape(-1) for request in requests])
    batch.bytes_copied += array.nbytes
    return array


class Padder:
    """Pads the inputs of one model and makes the inputs that carry the real lengths."""

    def __init__(self, padding: Padding) -> None:
        self._rules: dict[str, tuple[PaddedInput, ...]] = {}
        for rule in padding.inputs:
            self._rules[rule.name] = (*self._rules.get(rule.name, ()), rule)
        self._generated = tuple(rule for rule in padding.inputs if rule.lengths or rule.mask)

    def pads(self, requests: Sequence[InferenceRequest], name: str) -> bool:
        """True if the input is padded and any request is shorter than its bucket."""
        rules = self._rules.get(name)
        return rules is not None and any(
            rule.padded(length := request.inputs[name].shape[rule.axis + 1]) != length
            for request in requests
            for rule in rules
        )

    def join(self, requests: Sequence[InferenceRequest], name: str) -> Array:
        """The padded rows of all requests in one array; each row is copied once."""
        tensors = [request.inputs[name] for request in requests]
        first = tensors[0]
        dtype = ARRAY_DTYPES[first.datatype]
        dims = list(first.shape[1:])
        rules = self._rules[name]
        for rule in rules:
            dims[rule.axis] = _padded(rule, dims[rule.axis])
        shape = (sum([tensor.shape[0] for tensor in tensors]), *dims)
        value = rules[0].value
        if dtype.hasobject:
            array: Array = np.full(shape, str(value).encode(), dtype)
        elif value:
            array = np.full(shape, value, dtype)
        else:
            array = np.zeros(shape, dtype)  # fresh memory is zeroed lazily
        start = 0
        for tensor in tensors:
            rows, *lengths = tensor.shape
            array[(slice(start, start + rows), *map(slice, lengths))] = array_of(tensor)
            start += rows
        return array

    def made(self, requests: Sequence[InferenceRequest]) -> dict[str, Array]:
        """Length and mask inputs; none for a padded input that was left out."""
        arrays: dict[str, Array] = {}
        for rule in self._generated:
            if rule.name not in requests[0].inputs:
                continue
            shapes = [request.inputs[rule.name].shape for request in requests]
            lengths = np.repeat([shape[rule.axis + 1] for shape in shapes], [shape[0] for shape in shapes])
            if rule.lengths is not None:
                column = lengths.astype(NUMPY_DTYPES[rule.lengths.datatype])
                arrays[rule.lengths.name] = column.reshape(-1, 1) if rule.lengths.column else column
            if rule.mask is not None:
                positions = np.arange(_padded(rule, shapes[0][rule.axis + 1]))
                mask = positions < lengths.reshape(-1, 1)
                arrays[rule.mask.name] = mask.astype(NUMPY_DTYPES[rule.mask.datatype])
        return arrays


def _padded(rule: PaddedInput, length: int) -> int:
    padded = rule.padded(length)
    assert padded is not None, "requests are refused that are longer than the largest bucket"
    return padded


def _counts(shapes: Shapes) -> Array:
    return np.array([prod(shape) for shape in shapes], np.int64)


def _accumulated(shapes: Shapes) -> Array:
    return np.cumsum(_counts(shapes))


def _accumulated_with_zero(shapes: Shapes) -> Array:
    return np.concatenate(([0], _accumulated(shapes)))


def _largest_as_shape(shapes: Shapes) -> Array:
    # Only the shape carries information.
    return np.zeros(max(prod(shape) for shape in shapes), np.int64)


def _item_shapes(shapes: Shapes) -> Array:
    rows = [shape[1:] for shape in shapes for _ in range(shape[0])]
    return np.array(rows, np.int64).reshape(len(rows), len(shapes[0]) - 1)


def _item_shapes_flat(shapes: Shapes) -> Array:
    return _item_shapes(shapes).reshape(-1)


KINDS: Mapping[str, Callable[[Shapes], Array]] = {
    "BATCH_ELEMENT_COUNT": _counts,
    "BATCH_ACCUMULATED_ELEMENT_COUNT": _accumulated,
    "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO": _accumulated_with_zero,
    "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE": _largest_as_shape,
    "BATCH_ITEM_SHAPE": _item_shapes,
    "BATCH_ITEM_SHAPE_FLATTEN": _item_shapes_flat,
}
"""Content of a batch input of each kind, from the shapes of its source input in the requests."""
