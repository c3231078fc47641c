"""Reshapes tensors between clients and backends, and selects and classifies outputs."""

from __future__ import annotations

from math import prod

import numpy as np

from conch.core.errors import ConchError, InternalError, InvalidArgumentError
from conch.core.padding import PaddedOutput
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.spec import ModelSpec, TensorSpec
from conch.core.tensor import Array, Tensor
from conch.core.validation import reshaped_shape


class Shaper:
    """Converts shapes of clients to those of the backend and back, for one model version.

    Attributes:
        reshapes_inputs: True if `shape_inputs` has anything to do.
        reshapes_outputs: True if `shape_response` has anything to do for a request that wants all outputs.
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
        self._cuts: dict[str, list[PaddedOutput]] = {}
        for cut in spec.padding.outputs if spec.padding is not None else ():
            self._cuts.setdefault(cut.name, []).append(cut)
        self.reshapes_outputs = bool(self._outputs or self._cuts)

    def shape_inputs(self, request: InferenceRequest) -> None:
        """Reshapes inputs for the backend."""
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
        """Drops outputs that are not requested, gives the others the shapes clients see, and classifies.

        Outputs of a model with padded inputs are cut back to the request's own lengths. An output that does
        not have the shape its reshape or its cut starts from becomes the response's error, and so does one
        that can't be classified.
        """
        outputs = response.outputs
        if request.requested is not None:
            requested = request.requested
            outputs = [tensor for tensor in outputs if tensor.name in requested]
        if self._cuts:
            try:
                outputs = [self._cut(request, tensor) for tensor in outputs]
            except ConchError as error:
                response.error = error
                return
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

    def _cut(self, request: InferenceRequest, tensor: Tensor) -> Tensor:
        """Cuts the part of an output that belongs to the padding of its inputs."""
        cuts = self._cuts.get(tensor.name)
        if cuts is None:
            return tensor
        ends: list[int | None] = [None] * len(tensor.shape)
        for cut in cuts:
            axis = cut.axis + 1
            length = request.inputs[cut.source].shape[(cut.source_axis or 0) + 1]
            if axis >= len(ends) or tensor.shape[axis] < length:
                raise InternalError(
                    f"unexpected shape for output '{tensor.name}' of model '{self._spec.name}': expected at "
                    f"least {length} in dimension {axis}, as in input '{cut.source}', got "
                    f"{list(tensor.shape)}"
                )
            ends[axis] = length
        array = tensor.numpy()[tuple(slice(end) for end in ends)]
        return Tensor(tensor.name, tensor.datatype, array.shape, None, array)


_MOST_ELEMENTS = 1_000_000


def classify(tensor: Tensor, count: int, spec: TensorSpec | None, batches: bool) -> Tensor:
    """Formats the highest values of each row of an output.

    Args:
        tensor: A numeric output; all dimensions after the batch form a row.
        count: Most classes per row.
        spec: The output's config, which has the labels.
        batches: True if the first dimension is the batch.

    Returns:
        A BYTES tensor of shape [batch, k], or [k] for a model without batching. Floating-point
        values have six decimals; among equal values, the lower index comes first.

    Raises:
        InvalidArgumentError: The datatype is unsupported, or the tensor is too large.
    """
    if tensor.datatype in ("BYTES", "BOOL", "FP16", "BF16"):
        raise InvalidArgumentError(
            f"class result not available for output due to unsupported type '{tensor.datatype}'"
        )
    array = tensor.numpy()
    if array.size > _MOST_ELEMENTS:
        raise InvalidArgumentError("classification output tensor too large")
    # numpy can't infer -1 for a batch without rows.
    rows = array.reshape(array.shape[0], prod(array.shape[1:])) if batches else array.reshape(1, -1)
    k = min(count, rows.shape[1])
    labels = spec.labels if spec is not None else ()
    classes = np.empty((rows.shape[0], k), dtype=object)
    for index, row in enumerate(rows):
        classes[index] = _top(row, k, labels)
    return Tensor.from_array(tensor.name, classes if batches else classes[0], "BYTES")


def _top(row: Array, k: int, labels: tuple[str, ...]) -> list[bytes]:
    # The reversed stable sort keeps the lower index first among equal values.
    order = np.argsort(row[::-1], kind="stable")[::-1][:k]
    floating = row.dtype.kind == "f"
    texts: list[bytes] = []
    for place in order:
        index = len(row) - 1 - int(place)
        value = f"{float(row[index]):.6f}" if floating else str(int(row[index]))
        label = f":{labels[index]}" if index < len(labels) and labels[index] else ""
        texts.append(f"{value}:{index}{label}".encode())
    return texts
