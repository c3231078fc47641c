"""Signatures of MLflow models as inputs and outputs of a config. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_COLUMNS = {
    "boolean": "BOOL",
    "integer": "INT32",
    "long": "INT64",
    "float": "FP32",
    "double": "FP64",
    "string": "STRING",
    "binary": "STRING",
    "datetime": "STRING",
}
_TENSORS = {
    "bool": "BOOL",
    "uint8": "UINT8",
    "uint16": "UINT16",
    "uint32": "UINT32",
    "uint64": "UINT64",
    "int8": "INT8",
    "int16": "INT16",
    "int32": "INT32",
    "int64": "INT64",
    "float16": "FP16",
    "float32": "FP32",
    "float64": "FP64",
    "str": "STRING",
    "object": "STRING",
    "bytes": "STRING",
}


class SignatureError(ValueError):
    """A signature has no counterpart in a config; the text is a clause."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """An input or output.

    Attributes:
        name: Empty if the signature has none.
        datatype: As in a config, without ``TYPE_``.
        dims: The whole shape, with the batch.
        kind: MLflow's type of a column; empty for a tensor.
        named: True if the signature has the name.
    """

    name: str
    datatype: str
    dims: tuple[int, ...]
    optional: bool = False
    kind: str = ""
    named: bool = True

    @property
    def column(self) -> bool:
        """True if it is a column of a table."""
        return bool(self.kind)


@dataclass(frozen=True, slots=True)
class Signature:
    """A signature; `params` are inputs of one element, or of a list."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    params: tuple[Tensor, ...] = ()


def parse_signature(data: Any) -> Signature | None:
    """Reads ``signature`` of an MLmodel, if there is one. Raises SignatureError: it has no counterpart."""
    if not isinstance(data, Mapping):
        return None
    return Signature(
        _named(_tensors(data.get("inputs"), "inputs"), "input"),
        _named(_tensors(data.get("outputs"), "outputs"), "output"),
        tuple(_param(each) for each in _entries(data.get("params"), "params")),
    )


def _tensors(text: Any, where: str) -> tuple[Tensor, ...]:
    return tuple(_tensor(each, where) for each in _entries(text, where))


def _tensor(data: Mapping[str, Any], where: str) -> Tensor:
    name = str(data.get("name", ""))
    optional = data.get("required", True) is False or data.get("optional", False) is True
    kind = data.get("type")
    if kind == "tensor":
        spec = data.get("tensor-spec")
        shape = spec.get("shape") if isinstance(spec, Mapping) else None
        dtype = str(spec.get("dtype")) if isinstance(spec, Mapping) else ""
        if dtype not in _TENSORS or not isinstance(shape, list) or not all(isinstance(d, int) for d in shape):
            raise SignatureError(f"{where} have a tensor of type '{dtype}' and shape {shape}")
        return Tensor(name, _TENSORS[dtype], tuple(shape), optional)
    if kind not in _COLUMNS:
        raise SignatureError(f"{where} have a column '{name}' of type '{kind}', which no tensor can have")
    return Tensor(name, _COLUMNS[kind], (-1,), optional, str(kind))


def _param(data: Mapping[str, Any]) -> Tensor:
    kind, name = data.get("type"), str(data.get("name", ""))
    if kind not in _COLUMNS or not name:
        raise SignatureError(f"params have '{name}' of type '{kind}', which no tensor can have")
    return Tensor(name, _COLUMNS[kind], (1,) if data.get("shape") is None else (-1,), True)


def _named(tensors: tuple[Tensor, ...], usual: str) -> tuple[Tensor, ...]:
    """Names for those without one: one is ``input``, several are ``input_0``, ``input_1``."""
    named = tuple(
        Tensor(
            each.name or (usual if len(tensors) == 1 else f"{usual}_{number}"),
            each.datatype,
            each.dims,
            each.optional,
            each.kind,
            bool(each.name),
        )
        for number, each in enumerate(tensors)
    )
    if len({each.name for each in named}) < len(named):
        raise SignatureError(f"{usual}s have a name twice")
    return named


def _entries(text: Any, where: str) -> list[Mapping[str, Any]]:
    if text is None:
        return []
    try:
        found = json.loads(text)
    except (TypeError, ValueError):
        found = None
    if not isinstance(found, list) or not all(isinstance(each, Mapping) for each in found):
        raise SignatureError(f"{where} are no list of tensors or columns")
    return found
