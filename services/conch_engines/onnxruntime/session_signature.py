"""Reads an ONNX model's inputs and outputs from a session. Used by: `onnxruntime`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from conch.backends.signature import ModelTensor, Signature

_DATATYPES = {
    "tensor(bool)": "BOOL",
    "tensor(uint8)": "UINT8",
    "tensor(uint16)": "UINT16",
    "tensor(uint32)": "UINT32",
    "tensor(uint64)": "UINT64",
    "tensor(int8)": "INT8",
    "tensor(int16)": "INT16",
    "tensor(int32)": "INT32",
    "tensor(int64)": "INT64",
    "tensor(float16)": "FP16",
    "tensor(float)": "FP32",
    "tensor(double)": "FP64",
    "tensor(string)": "BYTES",
}

DATATYPES = frozenset(_DATATYPES.values())
"""Datatypes that the backend serves."""

_FIXES = {
    True: "; export the model with a Cast of it, for example to FP32",
    False: "; export the model without it (scikit-learn's ZipMap: options={'zipmap': False})",
}
"""Advice for unsupported element types, and for values that are not tensors."""


def signature_of(session: Any, model: str) -> Signature:
    """The signature of a session of the named model."""
    return Signature(
        _tensors(session.get_inputs(), model),
        _tensors(session.get_outputs(), model),
        _tensors(session.get_overridable_initializers(), model),
    )


def _tensors(arguments: Iterable[Any], model: str) -> tuple[ModelTensor, ...]:
    tensors = []
    for argument in arguments:
        datatype = _DATATYPES.get(argument.type, "")
        dims = tuple(dim if isinstance(dim, int) and dim >= 0 else -1 for dim in argument.shape or ())
        problem = "" if datatype else _problem(argument.type, argument.name, model)
        tensors.append(ModelTensor(argument.name, datatype, dims, problem))
    return tuple(tensors)


def _problem(onnx_type: str, name: str, model: str) -> str:
    what = (
        "BF16 tensors are not supported by the onnxruntime backend"
        if onnx_type == "tensor(bfloat16)"
        else "expected a tensor of a type the protocol has"
    )
    fix = _FIXES[onnx_type.partition("(")[0] == "tensor"]
    return f"unsupported ONNX type '{onnx_type}' for I/O '{name}' of model '{model}': {what}{fix}"
