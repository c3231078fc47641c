"""Maps the members of a generate request to tensors and parameters; a pure function.

A member with the name of an input becomes that input, any other a parameter; so do the members of
`parameters`. Error texts are Triton's; most type errors have status 500.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from conch.core.errors import ConchError, InternalError, InvalidArgumentError
from conch.core.request import Parameter, id_prefix
from conch.core.spec import ModelSpec, TensorSpec
from conch.core.tensor import ELEMENT_SIZES, Buffer, Tensor
from conch.frontends.http.infer.json_elements import json_tensor
from conch.frontends.http.jsontext.json_loader import load
from conch.frontends.http.jsontext.json_scanner import Pairs
from conch.frontends.http.jsontext.json_values import BulkArray, text


def parse_document(body: Buffer, quick: bool = False) -> Pairs:
    """Returns the members of a body; long arrays may be `BulkArray`.

    Raises:
        InternalError: It is not a JSON object.
        InvalidArgumentError: It is nested too deep, or has too many members.
        SlowTextError: Parsing would take long, with `quick`.
    """
    value = load(body, pairs=True, quick=quick)
    if not isinstance(value, Pairs):
        raise InternalError("attempt to get members for non-object")
    return value


_NESTED = "parameters"

Elements = list[Any] | BulkArray
"""A parsed JSON array."""


@dataclass(slots=True)
class Mapped:
    """A mapped request.

    Attributes:
        id: Its id, or empty; also among the parameters.
        inputs: Tensors by name, in document order.
        parameters: All other members.
    """

    id: str = ""
    inputs: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Parameter] = field(default_factory=dict)


def map_request(document: Pairs, spec: ModelSpec, most_bytes: int) -> Mapped:
    """Maps the members of a body for a model, with at most `most_bytes` of tensors.

    Raises:
        ConchError: A member can't be mapped.
    """
    mapper = _Mapper({tensor.name: tensor for tensor in spec.inputs}, spec, most_bytes)
    first = _first(document)
    if "id" in first:
        try:
            mapper.mapped.id = text(first["id"])
        except InternalError as error:
            raise InternalError(f"Unable to parse 'id': {error.message}") from None
    for key, _ in document:
        if key == _NESTED:
            mapper.nested(first[key])
        else:
            mapper.member(key, first[key])
    return mapper.mapped


def _first(document: Pairs) -> dict[str, Any]:
    """Members by name; the first of several with one name counts."""
    return dict(reversed(document.members))


class _Mapper:
    def __init__(self, inputs: Mapping[str, TensorSpec], spec: ModelSpec, most_bytes: int) -> None:
        self.mapped = Mapped()
        self._inputs = inputs
        self._spec = spec
        self._most_bytes = most_bytes
        self._bytes = 0

    def nested(self, value: Any) -> None:
        """Maps the members of `parameters`."""
        if _NESTED in self._inputs:
            raise InvalidArgumentError(
                f"Keyword '{_NESTED}' for nested schema also given as input tensor name"
            )
        if not isinstance(value, Pairs):
            raise InternalError(
                f"Expected JSON object for keyword: '{_NESTED}': attempt to access JSON non-object as object"
            )
        first = _first(value)
        for key, _ in value:
            try:
                self.member(key, first[key])
            except ConchError as error:
                raise type(error)(f"Converting keyword: '{_NESTED}': {error.message}") from None

    def member(self, key: str, value: Any) -> None:
        """Maps one member."""
        rule = self._inputs.get(key)
        if rule is None:
            self.mapped.parameters.setdefault(key, _parameter(key, value))
            return
        if key in self.mapped.inputs:
            raise InvalidArgumentError(f"{id_prefix(self.mapped.id)}input '{key}' already exists in request")
        given: Elements = value if isinstance(value, list | BulkArray) else [value]
        count = len(given)
        shape = shape_for(count, self._spec.full_dims(rule))
        if shape is None:
            raise InvalidArgumentError(
                f"The schema can not convert input '{key}' to tensor with proper shape"
            )
        if rule.datatype in ("FP16", "BF16"):
            raise InvalidArgumentError(
                f"receiving {rule.datatype} data via JSON is not supported. Please use the binary data "
                f"format for input {key}"
            )
        # Before the tensor is made: it may be several times as large as its text.
        self._count(key, _string_bytes(given) if rule.datatype == "BYTES" else 0)
        self._count(key, count * ELEMENT_SIZES.get(rule.datatype, 0))
        self.mapped.inputs[key] = json_tensor(key, rule.datatype, shape, given)

    def _count(self, key: str, size: int) -> None:
        self._bytes += size
        if self._bytes > self._most_bytes:
            raise InvalidArgumentError(
                f"request size of {self._bytes} bytes with input '{key}' of size {size} bytes exceeds the "
                f"maximum allowed input size of {self._most_bytes}. Use --http-max-input-size to increase "
                "the limit."
            )


def _parameter(key: str, value: Any) -> Parameter:
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return float(value)  # as the fast parser does
    if isinstance(value, str):
        return text(value)
    if isinstance(value, bool | int | float):
        return value
    raise InvalidArgumentError(
        f"parameter '{key}' has invalid type. It should be either 'int', 'bool', or 'string'."
    )


def _string_bytes(given: Elements) -> int:
    """Smallest size of strings in wire form; other elements do not count."""
    pieces = given.pieces if isinstance(given, BulkArray) else [given]
    return sum(
        4 + len(each)
        for piece in pieces
        if isinstance(piece, list)
        for each in piece
        if isinstance(each, str)
    )


def shape_for(count: int, dims: Iterable[int]) -> tuple[int, ...] | None:
    """Returns the shape of `count` elements under a model's dims, or None.

    The innermost variable dimension takes all elements that the fixed ones leave; other variable ones are 1.
    """
    dims = tuple(dims)
    rest, over = divmod(count, prod(dim for dim in dims if dim >= 0))
    if over or (rest != 1 and -1 not in dims):
        return None
    shape: list[int] = []
    for dim in reversed(dims):
        if dim >= 0:
            shape.append(dim)
        else:
            shape.append(rest)
            rest = 1
    return tuple(reversed(shape))
