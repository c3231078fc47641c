"""Gives tensors the shapes backends and clients expect, and responses the outputs that were asked for."""

from __future__ import annotations

from conch.core.classification import classify
from conch.core.errors import ConchError, InternalError
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.spec import ModelSpec
from conch.core.validation import reshaped_shape


class Shaper:
    """Between the shapes clients see and those a backend sees, for one model version.

    Attributes:
        reshapes_inputs: Whether `shape_inputs` has anything to do.
        reshapes_outputs: Whether `shape_response` has anything to do for a request that wants all outputs.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._skip = 1 if spec.max_batch_size > 0 else 0
        self._inputs = {
            tensor.name: (tensor.dims, tensor.reshape) for tensor in spec.inputs if tensor.reshape is not None
        }
        self._outputs = {
            tensor.name: (tensor.reshape, tensor.dims)
            for tensor in spec.outputs
            if tensor.reshape is not None
        }
        self._specs = {tensor.name: tensor for tensor in spec.outputs}
        self.reshapes_inputs = bool(self._inputs)
        self.reshapes_outputs = bool(self._outputs)

    def shape_inputs(self, request: InferenceRequest) -> None:
        """Gives a request's inputs the shapes the backend sees."""
        inputs = request.inputs
        for name, (source, target) in self._inputs.items():
            tensor = inputs.get(name)
            if tensor is not None:
                inputs[name] = tensor.reshaped(reshaped_shape(tensor.shape, target, source, self._skip))

    def restore_inputs(self, request: InferenceRequest) -> None:
        """Undoes `shape_inputs`, for a request that runs again."""
        inputs = request.inputs
        for name, (source, target) in self._inputs.items():
            tensor = inputs.get(name)
            if tensor is not None:
                inputs[name] = tensor.reshaped(reshaped_shape(tensor.shape, source, target, self._skip))

    def shape_response(self, request: InferenceRequest, response: InferenceResponse) -> None:
        """Drops outputs nobody asked for, gives the others the shapes clients see, and classifies.

        An output that does not have the shape its reshape starts from becomes the response's error, and so
        does one that can't be classified.
        """
        outputs = response.outputs
        if request.requested is not None:
            requested = request.requested
            outputs = [tensor for tensor in outputs if tensor.name in requested]
        if self._outputs:
            for index, tensor in enumerate(outputs):
                reshape = self._outputs.get(tensor.name)
                if reshape is None:
                    continue
                source, target = reshape
                if len(tensor.shape) != len(source) + self._skip:
                    response.error = InternalError(
                        f"unexpected shape for output '{tensor.name}' of model '{self._spec.name}': expected "
                        f"the dims {list(source)} of its reshape, got {list(tensor.shape)}"
                    )
                    return
                outputs[index] = tensor.reshaped(reshaped_shape(tensor.shape, target, source, self._skip))
        if request.classes is not None:
            classes = request.classes
            try:
                outputs = [
                    classify(tensor, classes[tensor.name], self._specs.get(tensor.name), self._skip > 0)
                    if tensor.name in classes
                    else tensor
                    for tensor in outputs
                ]
            except ConchError as error:
                response.error = error
                outputs = []
        response.outputs = outputs
