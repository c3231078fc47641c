"""Numpy arrays as torch tensors and back, without copies where the memory allows it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from conch.core.engine_text import engine_text
from conch.core.errors import InternalError, InvalidArgumentError
from conch.core.spec import ModelSpec, TensorSpec
from conch.core.tensor import Array

_DTYPE_NAMES = {
    "BOOL": "bool",
    "UINT8": "uint8",
    "UINT16": "uint16",
    "UINT32": "uint32",
    "UINT64": "uint64",
    "INT8": "int8",
    "INT16": "int16",
    "INT32": "int32",
    "INT64": "int64",
    "FP16": "float16",
    "FP32": "float32",
    "FP64": "float64",
    "BF16": "bfloat16",
}


def accept_read_only(torch: Any) -> None:
    """Uses up torch's warning about read-only arrays, which it gives once in a process.

    Arrays of requests are read-only; models that write to their inputs get copies.
    """
    array = np.zeros(1)
    array.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.from_numpy(array)


def torch_dtypes(torch: Any) -> Mapping[str, Any]:
    """The torch dtype of each datatype that torch has."""
    return {datatype: getattr(torch, name) for datatype, name in _DTYPE_NAMES.items()}


def datatypes_of(torch: Any) -> Mapping[Any, str]:
    """The protocol's datatype of each torch dtype that it has."""
    return {getattr(torch, name): datatype for datatype, name in _DTYPE_NAMES.items()}


class TensorConverter:
    """Converts the arrays of one model's inputs and outputs."""

    def __init__(self, torch: Any, spec: ModelSpec) -> None:
        self._torch = torch
        self._dtypes = torch_dtypes(torch)
        self._names = datatypes_of(torch)
        self._batches = spec.max_batch_size > 0
        self._outputs = {tensor.name: tensor for tensor in spec.model_outputs}
        self._expected = {name: self._dtypes.get(tensor.datatype) for name, tensor in self._outputs.items()}
        self._inputs = {tensor.name: tensor.datatype for tensor in spec.model_inputs}

    def tensor(self, name: str, array: Array) -> Any:
        """An input as a tensor that shares the array's memory, or as a list of str."""
        if array.dtype.hasobject:
            return _text(name, array)
        tensor = self._torch.from_numpy(array)
        if self._inputs.get(name) == "BF16":
            return tensor.view(self._torch.bfloat16)
        return tensor

    def array(self, name: str, value: Any) -> Array:
        """An output as an array that shares the tensor's memory."""
        spec = self._outputs[name]
        if isinstance(value, list):
            return _encoded(spec, value)
        self.check(spec, value)
        if spec.datatype == "BF16":
            value = value.contiguous().view(self._torch.uint16)
        try:
            array: Array = value.numpy(force=True)
        except (TypeError, RuntimeError) as error:
            raise InternalError(f"output '{name}' is no dense tensor: {engine_text(error)}") from error
        return array

    def check(self, spec: TensorSpec, value: Any) -> None:
        """Compares an output tensor with the config. Raises InvalidArgumentError: they differ."""
        if value.dtype is not self._expected[spec.name]:
            expected = "TYPE_STRING" if spec.datatype == "BYTES" else f"TYPE_{spec.datatype}"
            found = self._names.get(value.dtype)
            provided = str(value.dtype) if found is None else f"TYPE_{found}"
            raise InvalidArgumentError(
                f"configuration expects datatype {expected} for output '{spec.name}', model provides "
                f"{provided}"
            )
        if not value.dim() and (self._batches or set(spec.backend_dims) != {1}):
            raise InvalidArgumentError(f"output '{spec.name}' is a scalar which is not supported.")


def _text(name: str, array: Array) -> list[str]:
    try:
        return [bytes(element).decode() for element in array.flat]
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(f"input '{name}' has an element that is not UTF-8: {error}") from error


def _encoded(spec: TensorSpec, values: list[Any]) -> Array:
    if spec.datatype != "BYTES" or not all(isinstance(value, str) for value in values):
        kinds = sorted({type(value).__name__ for value in values}) or ["str"]
        expected = "TYPE_STRING" if spec.datatype == "BYTES" else f"TYPE_{spec.datatype}"
        raise InvalidArgumentError(
            f"configuration expects datatype {expected} for output '{spec.name}', model provides a list of "
            f"{', '.join(kinds)}"
        )
    array = np.empty(len(values), dtype=object)
    array[:] = [value.encode() for value in values]
    return array
