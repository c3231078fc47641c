"""From the requests of a batch to one array for each input."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from conch.backends.padding import Padder
from conch.backends.ragged import KINDS
from conch.core.request import InferenceRequest
from conch.core.scheduling.base import Batch
from conch.core.spec import ModelSpec
from conch.core.tensor import ELEMENT_SIZES, NUMPY_DTYPES, Array

Gather = Callable[[Batch, list[InferenceRequest]], dict[str, Array]]


def gather_for(spec: ModelSpec) -> Gather:
    """What makes the arrays of a model's batches."""
    return _Gatherer(spec) if needs_arrays(spec) else gather


def needs_arrays(spec: ModelSpec) -> bool:
    """Whether inputs are changed or made on their way, which is done in host memory."""
    return bool(any(tensor.ragged for tensor in spec.inputs) or spec.batch_inputs or spec.padding)


def gather(batch: Batch, requests: list[InferenceRequest]) -> dict[str, Array]:
    """The inputs of a batch as one array each; the requests have the same ones, with the same dims."""
    arrays: dict[str, Array] = {}
    if len(requests) == 1:
        for name, tensor in requests[0].inputs.items():
            if tensor.on_device:
                batch.bytes_copied += tensor.fetch()
            array = tensor.numpy()
            arrays[name] = array if array.flags.aligned else _aligned(batch, array)
        return arrays
    _fetch(batch, requests)
    for name in requests[0].inputs:
        arrays[name] = join_rows(batch, requests, name)
    return arrays


def _fetch(batch: Batch, requests: list[InferenceRequest]) -> None:
    """Copies what is on a device to host memory."""
    for request in requests:
        for tensor in request.inputs.values():
            if tensor.on_device:
                batch.bytes_copied += tensor.fetch()


class _Gatherer:
    """For models with inputs that are padded or ragged, or made from others."""

    def __init__(self, spec: ModelSpec) -> None:
        self._ragged = frozenset(tensor.name for tensor in spec.inputs if tensor.ragged)
        self._made = tuple(
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
            elif padder is not None and padder.pads(requests, name):
                arrays[name] = array = padder.join(requests, name)
                batch.bytes_copied += array.nbytes
            else:
                arrays[name] = join_rows(batch, requests, name)
        for source, make, dtype, names in self._made:
            made = make([request.inputs[source].shape for request in requests]).astype(dtype)
            arrays.update(dict.fromkeys(names, made))
        if padder is not None:
            arrays.update(padder.made(requests))
        return arrays


def _aligned(batch: Batch, array: Array) -> Array:
    """A copy: where a request's memory begins depends on its message, and kernels count on alignment."""
    batch.bytes_copied += array.nbytes
    return array.copy()


def join_rows(batch: Batch, requests: list[InferenceRequest], name: str) -> Array:
    """One input of requests with the same dims, their rows one after the other."""
    tensor = requests[0].inputs[name]
    if len(requests) == 1:
        array = tensor.numpy()
        return array if array.flags.aligned else _aligned(batch, array)
    if tensor.datatype in ELEMENT_SIZES and tensor.datatype in NUMPY_DTYPES:
        # Joining the bytes is one copy like `np.concatenate`, without an array for each request.
        data = b"".join([request.inputs[name].data for request in requests])
        rows = sum([request.inputs[name].shape[0] for request in requests])
        array = np.frombuffer(data, NUMPY_DTYPES[tensor.datatype]).reshape(rows, *tensor.shape[1:])
        batch.bytes_copied += len(data)
    else:
        array = np.concatenate([request.inputs[name].numpy() for request in requests])
        batch.bytes_copied += array.nbytes
    return array


def _join_flat(batch: Batch, requests: list[InferenceRequest], name: str) -> Array:
    """One input of requests with whatever dims, their elements one after the other."""
    tensor = requests[0].inputs[name]
    if len(requests) == 1:
        return join_rows(batch, requests, name).reshape(-1)
    if tensor.datatype in ELEMENT_SIZES and tensor.datatype in NUMPY_DTYPES:
        data = b"".join([request.inputs[name].data for request in requests])
        batch.bytes_copied += len(data)
        return np.frombuffer(data, NUMPY_DTYPES[tensor.datatype])
    array = np.concatenate([request.inputs[name].numpy().reshape(-1) for request in requests])
    batch.bytes_copied += array.nbytes
    return array
