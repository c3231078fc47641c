"""Inputs and outputs of an infer request: arrays to OpenVINO's tensors and back.

Small inputs are copied to a tensor that the request keeps; large ones are used where they are. Outputs are
copied, as the next run overwrites the request's memory, or written to memory of the client.
Used by: `infer_function`, `openvino_backend`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from conch.backends.gather import ARRAY_DTYPES
from conch.core.tensor import Array

SMALL_BYTES = 16 * 1024
"""Largest input, in bytes, that is copied: to make a tensor around its memory takes longer."""


class InputTensor:
    """One input of an infer request.

    Args:
        ov: The `openvino` package.
        request: The infer request.
        index: The input's index.
        datatype: Its datatype.
        scalar: The config's dims, all of them 1, where the model has a scalar; else empty.
    """

    __slots__ = (
        "_array",
        "_index",
        "_is_text",
        "_kept",
        "_lent",
        "_make",
        "_request",
        "_scalar",
        "_shape",
        "_type",
    )

    def __init__(self, ov: Any, request: Any, index: int, datatype: str, scalar: tuple[int, ...]) -> None:
        self._make = ov.Tensor
        self._request = request
        self._index = index
        self._kept = request.get_input_tensor(index)
        self._type = self._kept.get_element_type()
        self._scalar = scalar
        self._is_text = datatype == "BYTES"
        self._lent: Any = None  # keeps the array alive, which the request does not
        self._shape: tuple[int, ...] | None = None
        self._array: Array = np.empty(0, ARRAY_DTYPES[datatype])

    def set(self, array: Array) -> bool:
        """Sets the value; True if the array itself is used, until `let_go`."""
        if self._scalar:
            array = array.reshape(())
        if self._is_text:
            # Of arrays OpenVINO takes fixed-length strings only.
            tensor = self._make([bytes(element) for element in array.flat] or [b""])
            tensor.set_shape(array.shape)
            self._request.set_input_tensor(self._index, tensor)
        elif array.nbytes > SMALL_BYTES:
            # Unlike others, this constructor accepts read-only memory.
            tensor = self._make(np.ascontiguousarray(array), array.shape, self._type)
            self._request.set_input_tensor(self._index, tensor)
            self._shape, self._lent = None, tensor
            return True
        else:
            if array.shape != self._shape:
                self._keep(array.shape)
            self._array[...] = array
        return False

    def let_go(self) -> None:
        """Drops the array of the last run."""
        self._request.set_input_tensor(self._index, self._kept)
        self._lent = None

    def _keep(self, shape: tuple[int, ...]) -> None:
        """Makes the request's own tensor for a shape."""
        self._kept = self._make(self._type, shape)
        self._request.set_input_tensor(self._index, self._kept)
        self._array = self._kept.data.view(self._array.dtype)  # BF16, which numpy lacks, comes as FP16
        self._shape = shape


class OutputTensor:
    """One output of an infer request; see `InputTensor`.

    Attributes:
        is_text: Whether its elements are strings.
    """

    __slots__ = ("_dtype", "_index", "_kept", "_make", "_place", "_request", "_scalar", "_type", "is_text")

    def __init__(self, ov: Any, request: Any, index: int, datatype: str, scalar: tuple[int, ...]) -> None:
        self._make = ov.Tensor
        self._request = request
        self._index = index
        self._kept = request.get_output_tensor(index)
        self._type = self._kept.get_element_type()
        self._dtype = ARRAY_DTYPES[datatype]
        self._scalar = scalar
        self._place: Array | None = None
        self.is_text = datatype == "BYTES"

    def write_to(self, place: Array) -> None:
        """Has the next run write to an array, until `let_go`."""
        shape = () if self._scalar else place.shape
        self._request.set_output_tensor(self._index, self._make(place, shape, self._type))
        self._place = place  # keeps it alive, which the request does not

    def read(self, values: list[Array] | None) -> Array:
        """The value as an array of its own, or the place where it was written.

        Args:
            values: All outputs of the model in its memory; None to ask the request.
        """
        if self.is_text:
            elements: Array = self._request.get_output_tensor(self._index).bytes_data.astype(object)
            return elements
        index = self._index
        array = self._request.get_output_tensor(index).data if values is None else values[index]
        place = self._place
        if place is not None and (self._scalar or array.shape == place.shape):
            return place
        array = array.copy()
        if array.dtype != self._dtype:
            array = array.view(self._dtype)
        return array.reshape(self._scalar) if self._scalar else array

    def let_go(self) -> None:
        """Drops the place of the last run."""
        self._place = None
        self._request.set_output_tensor(self._index, self._kept)
