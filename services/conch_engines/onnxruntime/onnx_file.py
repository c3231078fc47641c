"""Reads from an ONNX file what ONNX Runtime does not tell: tensors with any number of dims.

ONNX Runtime gives them the shape of a scalar. In the file, the type of a scalar has an empty shape, and that
of a tensor of any rank has none. The reader skips all else by its length, so weights are not read.
"""

from __future__ import annotations

from collections.abc import Iterator

_GRAPH = 7  # of ModelProto
_INPUT, _OUTPUT = 11, 12  # of GraphProto
_NAME, _TYPE = 1, 2  # of ValueInfoProto
_TENSOR = 1  # of TypeProto
_SHAPE = 2  # of TypeProto.Tensor
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5  # wire types


def tensors_of_any_rank(content: bytes) -> frozenset[str]:
    """Names of a model's inputs and outputs whose number of dims its file leaves open."""
    if content[4:8] == b"ORTM":  # ONNX Runtime's own format, with all shapes
        return frozenset()
    found = set()
    for key, start, end in _fields(content, 0, len(content)):
        values = _fields(content, start, end) if key == _GRAPH else ()
        for kind, *value in values:
            if kind in (_INPUT, _OUTPUT):
                parts = {part: place for part, *place in _fields(content, *value)}
                types = {part: place for part, *place in _fields(content, *parts.get(_TYPE, (0, 0)))}
                shapes = {part for part, *_ in _fields(content, *types.get(_TENSOR, (0, 0)))}
                if _TENSOR in types and _SHAPE not in shapes:
                    name = content[slice(*parts.get(_NAME, (0, 0)))]
                    found.add(name.decode(errors="replace"))
    return frozenset(found)


def _fields(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Number, start and end of each field with a length; ONNX Runtime has read the file, so it is sound."""
    while at < end:
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == _LENGTH:
            size, at = _varint(data, at)
            yield tag >> 3, at, at + size
            at += size
        elif kind == _VARINT:
            _, at = _varint(data, at)
        elif kind in (_FIXED64, _FIXED32):
            at += 8 if kind == _FIXED64 else 4
        else:
            return


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while (byte := data[at]) >= 0x80:
        value |= (byte & 0x7F) << shift
        shift += 7
        at += 1
    return value | byte << shift, at + 1
