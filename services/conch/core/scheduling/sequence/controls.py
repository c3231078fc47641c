"""Control inputs: a request's sequence id, and its START, READY and END flags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.spec import ControlTensor
from conch.core.tensor import ELEMENT_SIZES, NUMPY_DTYPES, Tensor, encode_bytes

_EMPTY_STRING = 4
"""Bytes of an empty BYTES element: its length, which is zero."""


class Controls:
    """The control inputs of a model, created once and shared by all requests.

    Args:
        controls: The config's controls.
        batches: True if the model has a batch dimension.

    Attributes:
        flags: The START, READY and END inputs, by `start + 2 * end`; never written to.
        absent: All inputs, for a row without a request.
    """

    def __init__(self, controls: Sequence[ControlTensor], batches: bool) -> None:
        self._shape = (1, 1) if batches else (1,)
        self._ids = [control for control in controls if control.kind == "CORRID"]
        marks = [control for control in controls if control.kind != "CORRID"]
        self.flags = [
            self._marks(marks, {"START": start, "READY": True, "END": end})
            for end in (False, True)
            for start in (False, True)
        ]
        self.absent = {**self._marks(marks, {}), **self.identity(0)}

    def identity(self, correlation_id: int | str) -> dict[str, Tensor]:
        """The inputs with a sequence's id, as many of its bits as fit; 0 or empty for none."""
        return {
            control.name: Tensor(
                control.name, control.datatype, self._shape, _id_bytes(correlation_id, control.datatype)
            )
            for control in self._ids
        }

    def _marks(self, controls: Sequence[ControlTensor], flags: Mapping[str, bool]) -> dict[str, Tensor]:
        tensors = {}
        for control in controls:
            value = control.true_value if flags.get(control.kind) else control.false_value
            data = np.array([value], NUMPY_DTYPES[control.datatype]).tobytes()
            tensors[control.name] = Tensor(control.name, control.datatype, self._shape, data)
        return tensors


def _id_bytes(correlation_id: int | str, datatype: str) -> bytes:
    if datatype == "BYTES":
        return encode_bytes([correlation_id or ""])
    assert isinstance(correlation_id, int), "requests with other ids are refused when they are validated"
    size = ELEMENT_SIZES[datatype]
    # Two's complement: the same bytes for a signed datatype and an unsigned one.
    return (correlation_id & ((1 << 8 * size) - 1)).to_bytes(size, "little")


class FillerRequest(InferenceRequest):
    """Fills the row of a batch whose sequence has no ready request; `like` is a request of the batch."""

    filler: ClassVar[bool] = True

    __slots__ = ()

    def __init__(self, like: InferenceRequest, inputs: dict[str, Tensor]) -> None:
        super().__init__(like.model_name, like.model_version, inputs, _discard, like.received_ns)
        self.model = like.model
        self.requested = like.requested
        self.batch_key = like.batch_key
        self.queued_ns = like.queued_ns
        self.state = like.state


def _discard(request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
    """Discards the responses of fillers."""


def empty_inputs(inputs: Mapping[str, Tensor], controls: Controls) -> dict[str, Tensor]:
    """Zeros or empty strings in the shape of the given inputs, with READY unset."""
    empty = {
        name: Tensor(name, tensor.datatype, tensor.shape, bytes(_size(tensor)))
        for name, tensor in inputs.items()
        if name not in controls.absent
    }
    return {**empty, **controls.absent}


def _size(tensor: Tensor) -> int:
    if tensor.datatype != "BYTES":
        return tensor.nbytes
    count = 1
    for dim in tensor.shape:
        count *= dim
    return count * _EMPTY_STRING
