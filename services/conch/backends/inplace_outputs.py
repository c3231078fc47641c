"""Outputs that a model writes directly to where its client wants them."""

from __future__ import annotations

from math import prod
from typing import Protocol, runtime_checkable

import numpy as np

from conch.core.request import InferenceRequest
from conch.core.spec import ModelSpec
from conch.core.tensor import ELEMENT_SIZES, NUMPY_DTYPES, POSITIONS, Array

_ALIGNMENT = 64  # as models' own memory has it
_LEAST_BYTES = 64 * 1024
"""From here on not copying is worth what it takes to tell a model where to write."""


@runtime_checkable
class WritesInPlace(Protocol):
    """An array function that can write its outputs to memory that it is given."""

    def run_into(self, inputs: dict[str, Array], outputs: dict[str, Array]) -> None:
        """Runs the model once.

        Args:
            inputs: As for a call.
            outputs: An array for each output that is wanted, of its shape, to be filled.
        """


class InPlaceOutputs:
    """Finds the memory for the outputs of a model that can write in place.

    Args:
        spec: The model version.
        function: The model.

    Attributes:
        function: The same.
    """

    def __init__(self, spec: ModelSpec, function: WritesInPlace) -> None:
        self.function = function
        self._batches = spec.max_batch_size > 0
        # What is cut, split or kept for a sequence is not what goes to the client.
        plain = not (spec.batch_outputs or spec.padding or spec.sequence)
        self._outputs = {
            tensor.name: (tensor.backend_dims, tensor.datatype)
            for tensor in spec.model_outputs
            if plain
            and min(tensor.backend_dims, default=0) >= 0
            and tensor.datatype in ELEMENT_SIZES
            and tensor.datatype in NUMPY_DTYPES
            and tensor.datatype not in POSITIONS  # a model may read what it has written
        }

    def places(
        self, request: InferenceRequest, wanted: tuple[str, ...], inputs: dict[str, Array]
    ) -> dict[str, Array] | None:
        """Where all outputs of a request are to be written; None if not all of them can be.

        Args:
            request: The one request of a batch, with uses of shared memory.
            wanted: The outputs that it wants.
            inputs: What the model is given.
        """
        uses = request.region_bindings
        # Whoever else looks at the response on its way, such as a cache, must not see memory of the client.
        if uses is None or request.responder is not uses:
            return None
        first = next(iter(request.inputs.values()), None)
        if self._batches and first is None:
            return None  # all inputs are optional: nothing says how many rows there are
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
            buffer = uses.buffer(name, size)
            if buffer is None or not size:
                return None
            place = np.frombuffer(buffer, NUMPY_DTYPES[datatype]).reshape(shape)
            if place.__array_interface__["data"][0] % _ALIGNMENT:
                return None
            # A model may read its inputs after it has begun to write.
            others = (*inputs.values(), *places.values())
            if any(np.may_share_memory(place, other) for other in others):
                return None
            places[name] = place
            total += size
        return places if total >= _LEAST_BYTES else None
