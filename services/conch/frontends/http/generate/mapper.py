"""From the members of a generate request to tensors and parameters; a pure function.

What has the name of an input becomes that input, everything else a parameter, also among the members of the
member `parameters`. The texts are Triton's, and most of those about types come with status 500.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from math import prod
from typing import Any

import numpy as np

from conch.core.errors import ConchError, InternalError, InvalidArgumentError
from conch.core.request import Parameter
from conch.core.spec import ModelSpec, TensorSpec
from conch.core.tensor import ELEMENT_SIZES, NUMPY_DTYPES, Array, Tensor, encode_bytes
from conch.frontends.http.bodies import text, too_deep
from conch.frontends.http.generate.document import Pairs

_NESTED = "parameters"
_MOST_NESTING = 100
_WRONG_SHAPE = "Unable to parse 'data': Shape does not match true shape of 'data' field"


@dataclass(slots=True)
class Mapped:
    """What a request says.

    Attributes:
        id: Its id, or empty; it is among the parameters too.
        inputs: Tensors by name, in the order of the document.
        parameters: Everything else.
    """

    id: str = ""
    inputs: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Parameter] = field(default_factory=dict)


def map_request(document: Pairs, spec: ModelSpec, most_bytes: int) -> Mapped:
    """What a request says to a model.

    Args:
        document: The members of its body.
        spec: The model.
        most_bytes: The most bytes that all tensors together may have.

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
    """Members by name; of several the first, also where each of them is due."""
    return dict(reversed(document))


class _Mapper:
    def __init__(self, inputs: Mapping[str, TensorSpec], spec: ModelSpec, most_bytes: int) -> None:
        self.mapped = Mapped()
        self._inputs = inputs
        self._spec = spec
        self._most_bytes = most_bytes
        self._bytes = 0

    def nested(self, value: Any) -> None:
        """Maps the members of the member that holds more of them."""
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
            prefix = f"[request id: {self.mapped.id or '<id_unknown>'}] "
            raise InvalidArgumentError(f"{prefix}input '{key}' already exists in request")
        values, count = _elements(value)
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
        # Before there is any tensor: it may be several times as large as its text.
        self._count(key, sum(map(_string_size, values)) if rule.datatype == "BYTES" else 0)
        self._count(key, count * ELEMENT_SIZES.get(rule.datatype, 0))
        self.mapped.inputs[key] = make_tensor(rule, shape, values)

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
        return float(value)  # as the fast parser has it
    if isinstance(value, bool | int | float | str):
        return value
    raise InvalidArgumentError(
        f"parameter '{key}' has invalid type. It should be either 'int', 'bool', or 'string'."
    )


def _string_size(value: Any) -> int:
    """The size of an element in wire form; at least that of a character is a byte."""
    return 4 + len(value) if isinstance(value, str) else 0


def _elements(value: Any) -> tuple[list[Any], int]:
    """All elements of a value, arrays in it taken apart, and how many there are by the outermost array."""
    if not isinstance(value, list) or isinstance(value, Pairs):
        return [value], 1
    count = len(value)
    levels = 1
    while any(type(each) is list for each in value):
        levels += 1
        if levels >= _MOST_NESTING:
            raise too_deep()
        value = list(chain.from_iterable(each if type(each) is list else (each,) for each in value))
    return value, count


def shape_for(count: int, dims: Iterable[int]) -> tuple[int, ...] | None:
    """The shape that so many elements have under a model's dims; None where there is none.

    The innermost variable dimension takes what the fixed ones leave, the others are 1.
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


def make_tensor(rule: TensorSpec, shape: tuple[int, ...], values: list[Any]) -> Tensor:
    """A tensor of elements as JSON has them.

    Raises:
        InternalError: There are too many or too few of them, or one has the wrong type.
    """
    count = prod(shape)
    if len(values) < count:
        raise InternalError("Failed to parse 'data' field: shape does not match true shape")
    if rule.datatype == "BYTES":
        if not all(isinstance(value, str) for value in values):
            raise InternalError(
                "Unable to parse JSON bytes array: attempt to access JSON non-string as string"
            )
        if len(values) > count:
            raise InternalError(_WRONG_SHAPE)
        return Tensor(rule.name, "BYTES", shape, encode_bytes(values))
    array = _array(rule.datatype, values)
    if len(values) > count:
        raise InternalError(_WRONG_SHAPE)
    return Tensor.from_array(rule.name, array.reshape(shape), rule.datatype)


_KINDS: dict[str, tuple[frozenset[type], type, str]] = {
    "b": (frozenset({bool}), np.bool_, "non-boolean as boolean"),
    "i": (frozenset({int}), np.int64, "non-signed-integer as signed-integer"),
    "u": (frozenset({int}), np.uint64, "non-unsigned-integer as unsigned-integer"),
    "f": (frozenset({int, float}), np.float64, "non-number as double"),
}
"""By kind of a numpy dtype: the types that JSON may have for it, the widest dtype, and what is wrong else."""


def _array(datatype: str, values: list[Any]) -> Array:
    """Numbers as JSON has them, cut to the width of the datatype as Triton cuts them."""
    dtype = NUMPY_DTYPES[datatype]
    types, widest, wrong = _KINDS[dtype.kind]
    failure = InternalError(f"Unable to parse 'data': attempt to access JSON {wrong}")
    if not types.issuperset(map(type, values)) or (dtype.kind == "u" and min(values, default=0) < 0):
        raise failure
    try:
        array: Array = np.array(values, widest)
    except OverflowError:
        raise failure from None
    with np.errstate(over="ignore"):
        return array.astype(dtype)
