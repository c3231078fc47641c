"""Reads the signatures of a SavedModel without TensorFlow.

`saved_model.pb` is a ``SavedModel`` message; the fields needed of it are declared here, with the numbers of
TensorFlow's ``saved_model.proto``, ``meta_graph.proto`` and ``tensor_shape.proto``.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from conch.backends.signature import ModelTensor, Signature
from conch.core.errors import InvalidArgumentError, UnavailableError

_FIELD = descriptor_pb2.FieldDescriptorProto
_PACKAGE = "conch.saved_model"
# Message: field: (number, type, repeated). A type with a capital letter is a message.
_MESSAGES: dict[str, dict[str, tuple[int, str, bool]]] = {
    "SavedModel": {"meta_graphs": (2, "MetaGraph", True)},
    "MetaGraph": {"info": (1, "Info", False), "signatures": (5, "SignatureEntry", True)},
    "Info": {"tags": (4, "string", True)},
    "SignatureEntry": {"key": (1, "string", False), "value": (2, "SignatureDef", False)},
    "SignatureDef": {"inputs": (1, "TensorEntry", True), "outputs": (2, "TensorEntry", True)},
    "TensorEntry": {"key": (1, "string", False), "value": (2, "TensorInfo", False)},
    "TensorInfo": {
        "name": (1, "string", False),
        "dtype": (2, "int32", False),
        "shape": (3, "Shape", False),
    },
    "Shape": {"dims": (2, "Dim", True), "unknown_rank": (3, "bool", False)},
    "Dim": {"size": (1, "int64", False)},
}
_TYPES = {
    "string": _FIELD.TYPE_STRING,
    "int32": _FIELD.TYPE_INT32,
    "int64": _FIELD.TYPE_INT64,
    "bool": _FIELD.TYPE_BOOL,
}
_DATATYPES = {
    1: "FP32",
    2: "FP64",
    3: "INT32",
    4: "UINT8",
    5: "INT16",
    6: "INT8",
    7: "BYTES",
    9: "INT64",
    10: "BOOL",
    14: "BF16",
    17: "UINT16",
    19: "FP16",
    22: "UINT32",
    23: "UINT64",
}
"""TensorFlow's ``DataType`` numbers."""

DATATYPES = frozenset(_DATATYPES.values())
"""Datatypes that TensorFlow has."""


def read_signature(directory: Path, model: str, tag: str, name: str) -> Signature:
    """One signature of a SavedModel."""
    path = directory / "saved_model.pb"
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UnavailableError(f"unable to find '{path}' for model '{model}'") from error
    saved = _message("SavedModel")()
    try:
        saved.ParseFromString(content)
    except DecodeError as error:
        raise InvalidArgumentError(f"'{path}' of model '{model}' is no SavedModel: {error}") from error
    graphs = [graph for graph in saved.meta_graphs if tag in graph.info.tags]
    if not graphs:
        tags = sorted({each for graph in saved.meta_graphs for each in graph.info.tags})
        raise InvalidArgumentError(
            f"'{path}' of model '{model}' has no graph with the tag '{tag}'; it has: "
            f"{', '.join(tags) or 'none'}. Parameter 'TF_GRAPH_TAG' chooses one"
        )
    signatures = {entry.key: entry.value for entry in graphs[0].signatures}
    if name not in signatures:
        named = sorted(key for key in signatures if not key.startswith("__"))
        raise InvalidArgumentError(
            f"'{path}' of model '{model}' has no signature '{name}'; it has: {', '.join(named) or 'none'}. "
            f"Parameter 'TF_SIGNATURE_DEF' chooses one"
        )
    chosen = signatures[name]
    return Signature(_tensors(chosen.inputs, model), _tensors(chosen.outputs, model))


def _tensors(entries: Any, model: str) -> tuple[ModelTensor, ...]:
    """Tensors of a map, whose order in the file is arbitrary, by name."""
    ordered = sorted(entries, key=lambda entry: str(entry.key))
    return tuple(_tensor(entry.key, entry.value, model) for entry in ordered)


def _tensor(name: str, info: Any, model: str) -> ModelTensor:
    datatype = _DATATYPES.get(info.dtype, "")
    if not datatype:
        return ModelTensor(name, "", (), f"TensorFlow type {info.dtype} of tensor '{name}' has no datatype")
    if info.shape.unknown_rank or not info.HasField("shape"):
        problem = (
            f"Unable to autofill for '{model}': the rank of model tensor '{name}' is 0 and dimensions are "
            f"not defined"
        )
        return ModelTensor(name, datatype, None, problem)
    return ModelTensor(name, datatype, tuple(max(dim.size, -1) for dim in info.shape.dims))


@cache
def _message(name: str) -> Any:
    """The class of a message of `_MESSAGES`; in a pool of its own."""
    file = descriptor_pb2.FileDescriptorProto(name="conch/saved_model.proto", package=_PACKAGE)
    file.syntax = "proto2"
    for message, fields in _MESSAGES.items():
        made = file.message_type.add(name=message)
        for field, (number, kind, repeated) in fields.items():
            label = _FIELD.LABEL_REPEATED if repeated else _FIELD.LABEL_OPTIONAL
            added = made.field.add(name=field, number=number, label=label)
            if kind in _TYPES:
                added.type = _TYPES[kind]
            else:
                added.type, added.type_name = _FIELD.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
