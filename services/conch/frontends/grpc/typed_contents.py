"""Reads the typed contents of an input without an object per element.

Input is what `wire_format.cut_infer_request` cuts out of a long message. Reads numbers with numpy, strings
one by one into the wire form of a tensor.
Threads and locks: any thread but a transport's; yields the GIL.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import numpy as np

from conch.core.errors import InvalidArgumentError
from conch.core.tensor import Array, Buffer, joined
from conch.frontends.grpc.wire_format import MAX_FIELDS, read_fields
from conch.frontends.yield_gil import yield_gil

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_FIELDS: tuple[tuple[str, int, np.dtype[np.generic]], ...] = (
    ("bool_contents", _VARINT, np.dtype(np.bool_)),
    ("int_contents", _VARINT, np.dtype("<i4")),
    ("int64_contents", _VARINT, np.dtype("<i8")),
    ("uint_contents", _VARINT, np.dtype("<u4")),
    ("uint64_contents", _VARINT, np.dtype("<u8")),
    ("fp32_contents", _FIXED32, np.dtype("<f4")),
    ("fp64_contents", _FIXED64, np.dtype("<f8")),
)
"""Numeric fields from field number 1 on: name, wire type if not packed, dtype."""

_STRINGS = "bytes_contents"
_STRINGS_TAG = 8 << 3 | _LENGTH
_PIECE = 64 * 1024
_FIELDS_BETWEEN_YIELDS = 1024
_MAX_VARINT_BYTES = 10
_MALFORMED = "the request message is malformed"
_prefix = struct.Struct("<I").pack


class TypedContents:
    """The elements of one input.

    Args:
        pieces: Serialised InferTensorContents messages, which protobuf would merge into one.
        max_strings: Most strings that are read; the rest is ignored.

    Attributes:
        filled: Names of the fields with elements, in the order of their numbers.

    Raises:
        InvalidArgumentError: The contents are malformed, or have too many fields.
    """

    def __init__(self, pieces: Sequence[memoryview], max_strings: int) -> None:
        # Packed or not, a number has the same bytes.
        self._numbers: list[list[Buffer]] = [[] for _ in _FIELDS]
        self._strings: list[Buffer] = []
        self._read(pieces, max_strings)
        self.filled = [name for (name, *_), data in zip(_FIELDS, self._numbers, strict=True) if data]
        if self._strings:
            self.filled.append(_STRINGS)

    def _read(self, pieces: Sequence[memoryview], max_strings: int) -> None:
        others = strings = 0
        block: list[Buffer] = []
        for piece, (tag, _, content, end) in _fields(pieces):
            if tag == _STRINGS_TAG:
                long = end - content > _PIECE
                block.append(_prefix(end - content))
                if not long:
                    block.append(piece[content:end])
                strings += 1
                if long or not strings % _FIELDS_BETWEEN_YIELDS:
                    self._strings.append(b"".join(block))
                    block.clear()
                    yield_gil()
                if long:
                    self._strings.append(piece[content:end])
                if strings == max_strings:
                    break
                continue
            others += 1
            if not others % _FIELDS_BETWEEN_YIELDS:
                yield_gil()
            if others > MAX_FIELDS:
                raise InvalidArgumentError(
                    f"typed contents of more than {MAX_FIELDS} fields: numbers have to be packed"
                )
            number = tag >> 3
            known = 1 <= number <= len(_FIELDS) and tag & 7 in (_LENGTH, _FIELDS[number - 1][1])
            if known and content < end:
                self._numbers[number - 1].append(piece[content:end])
        if block:
            self._strings.append(b"".join(block))

    def data(self, field: str, dtype: np.dtype[np.generic]) -> Buffer:
        """Returns the elements of the only filled field in the wire form of a tensor.

        Values that do not fit the tensor's `dtype` are truncated, as in Triton.

        Raises:
            InvalidArgumentError: The contents are malformed.
        """
        if field == _STRINGS:
            return joined(self._strings)
        names = [name for name, *_ in _FIELDS]
        index = names.index(field)
        chunks = self._numbers[index]
        data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        _, kind, wide = _FIELDS[index]
        if kind == _VARINT:
            return joined([part.astype(dtype).data.cast("B") for part in _varints(data, wide)])
        if len(data) % wide.itemsize:
            raise InvalidArgumentError(_MALFORMED)
        return data


def _fields(pieces: Sequence[memoryview]) -> Iterator[tuple[memoryview, tuple[int, int, int, int]]]:
    for piece in pieces:
        for field in read_fields(piece, 0, len(piece)):
            yield piece, field


def _varints(data: Buffer, wide: np.dtype[np.generic]) -> Iterator[Array]:
    """Yields the values of consecutive varints, truncated to a field's width, in pieces."""
    octets = np.frombuffer(data, np.uint8)
    position = 0
    while position < octets.size:
        piece = octets[position : position + _PIECE]
        ends = np.flatnonzero(piece < 0x80)
        lengths = np.diff(ends, prepend=-1)
        if not ends.size or lengths.max() > _MAX_VARINT_BYTES:
            raise InvalidArgumentError(_MALFORMED)
        starts = ends - lengths + 1
        values = np.zeros(ends.size, np.uint64)
        for index in range(int(lengths.max())):
            longer = lengths > index
            part = (piece[starts[longer] + index] & 0x7F).astype(np.uint64)
            values[longer] |= part << np.uint64(7 * index)
        yield (values != 0) if wide == np.bool_ else values.astype(wide)
        position += int(ends[-1]) + 1
        yield_gil()
