"""Encodes responses as cache entries; decoded ones share the memory of the entry.

``CNR1``, the length of the head as a 32-bit number, the head (JSON: the outputs without their data, the
parameters), and the data of each output in wire form, each at a multiple of 16 bytes from the start.
"""

from __future__ import annotations

import json
import struct
from math import prod
from typing import Any

from conch.core.request import InferenceResponse
from conch.core.tensor import ELEMENT_SIZES, Buffer, Tensor

_MAGIC = b"CNR1"
_PREFIX = struct.Struct("<4sI")
_ALIGNMENT = 16  # so that numpy's views of the data are aligned for every datatype
_PADDING = tuple(bytes(count) for count in range(_ALIGNMENT))
_to_text = json.JSONEncoder(separators=(",", ":")).encode
_PARAMETERS = frozenset((bool, int, float, str))


class EntryError(ValueError):
    """Invalid bytes of an entry, or a response that can't be encoded."""


def encode_entry(response: InferenceResponse) -> bytes:
    """Encodes a response without an error; copies its outputs once.

    Raises:
        EntryError: A response parameter has an unsupported type.
    """
    parameters = dict(response.parameters or ())
    if any(type(value) not in _PARAMETERS for value in parameters.values()):
        raise EntryError("a response parameter is not a bool, int, float or str")
    data = [tensor.data for tensor in response.outputs]
    sizes = [part.nbytes if isinstance(part, memoryview) else len(part) for part in data]
    head = _to_text(
        [
            [
                [tensor.name, tensor.datatype, tensor.shape, size]
                for tensor, size in zip(response.outputs, sizes, strict=True)
            ],
            parameters,
        ]
    ).encode()
    parts: list[Buffer] = [_PREFIX.pack(_MAGIC, len(head)), head]
    end = _PREFIX.size + len(head)
    for part, size in zip(data, sizes, strict=True):
        parts.append(_PADDING[-end % _ALIGNMENT])
        parts.append(part)
        end += -end % _ALIGNMENT + size
    return b"".join(parts)


def decode_entry(entry: Buffer) -> InferenceResponse:
    """Decodes an entry. Raises EntryError: it is invalid: a shared cache may hold anything."""
    view = memoryview(entry)
    try:
        magic, length = _PREFIX.unpack_from(view)
        if magic != _MAGIC:
            raise EntryError("not an entry")
        end = _PREFIX.size + length
        outputs, parameters = json.loads(bytes(view[_PREFIX.size : end]))
        tensors = []
        for name, datatype, shape, size in outputs:
            start = end + -end % _ALIGNMENT
            end = start + size
            tensors.append(_tensor(name, datatype, shape, view[start:end]))
            if tensors[-1].nbytes != size:
                raise EntryError("it ends too soon")
        if end != len(view):
            raise EntryError("it does not end where its data do")
        if not isinstance(parameters, dict):
            raise EntryError("its parameters are none")
    except (struct.error, ValueError, TypeError, RecursionError) as error:
        raise EntryError(f"a cached response can't be read: {error}") from error
    return InferenceResponse(tensors, None, parameters or None)


def _tensor(name: Any, datatype: Any, shape: Any, data: memoryview) -> Tensor:
    dims = tuple(shape)
    if not isinstance(name, str) or any(type(dim) is not int or dim < 0 for dim in dims):
        raise EntryError("an output has no name or shape")
    element = ELEMENT_SIZES.get(datatype)
    if (element is None and datatype != "BYTES") or (element and prod(dims) * element != data.nbytes):
        raise EntryError(f"output '{name}' does not hold what its shape says")
    return Tensor(name, datatype, dims, data)
