"""Pads the inputs of requests to the length they share, and makes the inputs that tell the real lengths."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from conch.core.padding import PaddedInput, Padding
from conch.core.request import InferenceRequest
from conch.core.tensor import NUMPY_DTYPES, Array


class Padder:
    """Pads for one model.

    Args:
        padding: What is padded.
    """

    def __init__(self, padding: Padding) -> None:
        self._rules: dict[str, tuple[PaddedInput, ...]] = {}
        for rule in padding.inputs:
            self._rules[rule.name] = (*self._rules.get(rule.name, ()), rule)
        self._making = tuple(rule for rule in padding.inputs if rule.lengths or rule.mask)

    def pads(self, requests: Sequence[InferenceRequest], name: str) -> bool:
        """Whether an input is one that is padded and any of the requests is too short as it is."""
        rules = self._rules.get(name)
        return rules is not None and any(
            rule.padded(length := request.inputs[name].shape[rule.axis + 1]) != length
            for request in requests
            for rule in rules
        )

    def join(self, requests: Sequence[InferenceRequest], name: str) -> Array:
        """The rows of all requests of a batch, padded: one array, into which each row is copied once."""
        tensors = [request.inputs[name] for request in requests]
        first = tensors[0]
        dtype = NUMPY_DTYPES[first.datatype]
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
            array = np.zeros(shape, dtype)  # memory fresh from the system need not be written to
        start = 0
        for tensor in tensors:
            rows, *lengths = tensor.shape
            array[(slice(start, start + rows), *map(slice, lengths))] = tensor.numpy()
            start += rows
        return array

    def made(self, requests: Sequence[InferenceRequest]) -> dict[str, Array]:
        """The inputs made from the real lengths; not those of a padded input that was left out."""
        arrays: dict[str, Array] = {}
        for rule in self._making:
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
