"""Finds client memory (shared-memory regions) that a model can write its outputs to directly.

Used by: `arrays`.
"""

from __future__ import annotations

from math import prod
from typing import Protocol, runtime_checkable

import numpy as np

from conch.core.request import InferenceRequest
from conch.core.spec import ModelSpec
from conch.core.tensor import ELEMENT_SIZES, NUMPY_DTYPES, POSITIONS, Array

_ALIGNMENT = 64  # as frameworks align their own memory
_LEAST_BYTES = 64 * 1024
"""Smallest total output, in bytes, for which avoiding the copy pays off."""


@runtime_checkable
class WritesInPlace(Protocol):
    """An array function that can write its outputs to given memory."""

    def run_into(self, inputs: dict[str, Array], outputs: dict[str, Array]) -> None:
        """Runs the model once.

        Args:
            inputs: As for a call.
            outputs: An array to fill for each requested output, of its shape.
        """


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
        """Where all outputs of a batch's only request are to be written; None unless all of them can be."""
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
