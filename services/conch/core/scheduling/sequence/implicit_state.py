"""Implicit state: tensors kept for a sequence from one request to the next."""

from __future__ import annotations

from math import prod

from conch.core.errors import ConchError, InternalError
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.scheduling.sequence.table import LiveSequence
from conch.core.spec import ModelSpec, StateSpec
from conch.core.tensor import ELEMENT_SIZES, Tensor
from conch.core.validation import shape_text

_EMPTY_STRING = 4
"""Bytes of an empty BYTES element: its length, which is zero."""


class SequenceStates:
    """The states of one model version.

    Attributes:
        initial: Initial states, by input.
    """

    def __init__(self, spec: ModelSpec) -> None:
        states = spec.sequence.states if spec.sequence is not None else ()
        batches = spec.max_batch_size > 0
        self._model = spec.name
        self._batch_dims = (1,) if batches else ()
        self._by_output = {state.output_name: state for state in states}
        self._visible = frozenset(tensor.name for tensor in spec.outputs)
        self.initial = {state.input_name: self._initial(state) for state in states}

    def collect(self, request: InferenceRequest, response: InferenceResponse) -> None:
        """Moves the states in a response to its sequence; outputs visible to clients stay as well.

        An error leaves the states unchanged. So does a state that does not fit the config, which becomes the
        response's error.
        """
        if response.error is not None:
            return
        sequence = request.sequence
        requested = request.requested
        outputs: list[Tensor] = []
        updates: dict[str, Tensor] = {}
        try:
            for tensor in response.outputs:
                state = self._by_output.get(tensor.name)
                if state is None:
                    outputs.append(tensor)
                    continue
                self._check(state, tensor)
                updates[state.input_name] = tensor.detached(state.input_name)
                if tensor.name in self._visible and (requested is None or tensor.name in requested):
                    outputs.append(tensor)
        except ConchError as error:
            response.error = error
            response.outputs = []
            return
        response.outputs = outputs
        # Warm-up requests and fillers have no sequence.
        if isinstance(sequence, LiveSequence):
            sequence.states.update(updates)

    def _check(self, state: StateSpec, tensor: Tensor) -> None:
        expected = (*self._batch_dims, *state.dims)
        fits = len(tensor.shape) == len(expected) and all(
            want in (-1, got) for want, got in zip(expected, tensor.shape, strict=True)
        )
        if not fits or tensor.datatype != state.datatype:
            raise InternalError(
                f"state '{tensor.name}' of model '{self._model}' is {tensor.datatype} with shape "
                f"{shape_text(tensor.shape)}, but the model configuration specifies {state.datatype} with "
                f"shape {shape_text(expected)}"
            )

    def _initial(self, state: StateSpec) -> Tensor:
        shape = (*self._batch_dims, *state.initial_dims)
        data = state.initial_data
        if data is None:
            data = bytes(prod(shape) * ELEMENT_SIZES.get(state.datatype, _EMPTY_STRING))
        return Tensor(state.input_name, state.datatype, shape, data)
