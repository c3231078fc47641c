"""Computes batch keys: requests with equal keys may share a batch.

Requests must have the same inputs, with equal shapes except for the batch dimension. Padded inputs compare by
their padded shape; ragged inputs by no shape; shape tensors by their values, too.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

from conch.core.errors import InvalidArgumentError
from conch.core.padding import PaddedInput, Padding
from conch.core.request import InferenceRequest
from conch.core.spec import ModelSpec

BatchKey = Callable[[InferenceRequest], object]
"""Computes the key of a validated request."""


def batch_key_for(spec: ModelSpec) -> BatchKey | None:
    """The function for a model's keys; None if all valid requests may share a batch."""
    key = _shape_key_for(spec)
    names = tuple(tensor.name for tensor in spec.inputs if tensor.is_shape)
    if not names:
        return key
    return lambda request: (
        None if key is None else key(request),
        tuple(bytes(request.inputs[name].data) for name in names if name in request.inputs),
    )


def _shape_key_for(spec: ModelSpec) -> BatchKey | None:
    """The function for keys of the inputs' shapes."""
    skip = 1 if spec.max_batch_size > 0 else 0
    if spec.padding is not None:
        return _PaddedShapes(spec, spec.padding)
    ragged = frozenset(tensor.name for tensor in spec.inputs if tensor.ragged)
    if ragged:
        if not any(tensor.optional or (-1 in tensor.dims and not tensor.ragged) for tensor in spec.inputs):
            return None
        return lambda request: tuple(
            sorted(
                (name, () if name in ragged else tensor.shape[skip:])
                for name, tensor in request.inputs.items()
            )
        )
    if any(tensor.optional or -1 in tensor.dims for tensor in spec.inputs):
        return lambda request: tuple(sorted((name, t.shape[skip:]) for name, t in request.inputs.items()))
    return None


class PaddedKey(NamedTuple):
    """A batch key with a limit on elements.

    Attributes:
        shapes: Shapes of the inputs.
        most_rows: Most rows in a batch; at least 1.
    """

    shapes: Any
    most_rows: int


class _PaddedShapes:
    """Computes keys from padded shapes."""

    def __init__(self, spec: ModelSpec, padding: Padding) -> None:
        self._name = spec.name
        self._ragged = frozenset(tensor.name for tensor in spec.inputs if tensor.ragged)
        self._budget = padding.max_batch_elements
        self._rules: dict[str, list[PaddedInput]] = {}
        for rule in padding.inputs:
            self._rules.setdefault(rule.name, []).append(rule)

    def __call__(self, request: InferenceRequest) -> object:
        shapes = {
            name: () if name in self._ragged else self._padded(request, name, tensor.shape[1:])
            for name, tensor in request.inputs.items()
        }
        key = tuple(sorted(shapes.items()))
        if not self._budget:
            return key
        row = max((prod(shape) for name, shape in shapes.items() if name in self._rules), default=0)
        return PaddedKey(key, max(self._budget // max(row, 1), 1))

    def _padded(self, request: InferenceRequest, name: str, dims: tuple[int, ...]) -> tuple[int, ...]:
        rules = self._rules.get(name)
        if rules is None:
            return dims
        padded = list(dims)
        for rule in rules:
            length = rule.padded(dims[rule.axis])
            if length is None:
                raise InvalidArgumentError(
                    f"{request.log_prefix}input '{name}' for model '{self._name}' is too long: its dimension "
                    f"{rule.axis + 1} is {dims[rule.axis]}, the longest the model is padded to is "
                    f"{rule.buckets[-1]}"
                )
            padded[rule.axis] = length
        return tuple(padded)
