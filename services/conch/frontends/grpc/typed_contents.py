"""The typed contents of an input, read without an object per element.

Reads what `conch.frontends.grpc.wire.cut_infer_request` has cut out of a long message: numbers with numpy,
strings one by one into their wire form. Runs on any thread but a polling one, and gives way to others.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import numpy as np

from conch.core.errors import InvalidArgumentError
from conch.core.tensor import Array, Buffer, joined
from conch.frontends.grpc.wire import MOST_FIELDS, read_fields
from conch.frontends.http.turns import give_way

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
"""The fields of numbers from field number 1 on: name, wire type where they are not packed, and width."""

_STRINGS = "bytes_contents"
_STRINGS_TAG = 8 << 3 | _LENGTH
_PIECE = 64 * 1024
_FIELDS_BETWEEN_BREAKS = 1024
_LONGEST_VARINT = 10
_MALFORMED = "the request message is malformed"
_prefix = struct.Struct("<I").pack


class TypedContents:
    """The elements of one input.

    Args:
        pieces: What an InferTensorContents message was sent as; protobuf merges several into one.
        most_strings: How many strings are read at most; what comes behind them is not looked at.

    Attributes:
        filled: Names of the fields that have elements, in the order of their numbers.

    Raises:
        InvalidArgumentError: The contents are malformed, or have too many fields.
    """

    def __init__(self, pieces: Sequence[memoryview], most_strings: int) -> None:
        # A number that is not packed has the same bytes as one that is.
        self._numbers: list[list[Buffer]] = [[] for _ in _FIELDS]
        self._strings: list[Buffer] = []
        self._read(pieces, most_strings)
        self.filled = [name for (name, *_), data in zip(_FIELDS, self._numbers, strict=True) if data]
        if self._strings:
            self.filled.append(_STRINGS)

    def _read(self, pieces: Sequence[memoryview], most_strings: int) -> None:
        others = strings = 0
        block: list[Buffer] = []
        for piece, (tag, _, content, end) in _fields(pieces):
            if tag == _STRINGS_TAG:
                long = end - content > _PIECE
                block.append(_prefix(end - content))
                if not long:
                    block.append(piece[content:end])
                strings += 1
                if long or not strings % _FIELDS_BETWEEN_BREAKS:
                    self._strings.append(b"".join(block))
                    block.clear()
                    give_way()
                if long:
                    self._strings.append(piece[content:end])
                if strings == most_strings:
                    break
                continue
            others += 1
            if not others % _FIELDS_BETWEEN_BREAKS:
                give_way()
            if others > MOST_FIELDS:
                raise InvalidArgumentError(
                    f"typed contents of more than {MOST_FIELDS} fields: numbers have to be packed"
                )
            number = tag >> 3
            known = 1 <= number <= len(_FIELDS) and tag & 7 in (_LENGTH, _FIELDS[number - 1][1])
            if known and content < end:
                self._numbers[number - 1].append(piece[content:end])
        if block:
            self._strings.append(b"".join(block))

    def data(self, field: str, dtype: np.dtype[np.generic]) -> Buffer:
        """The elements of the one field that is filled, in the wire form of a tensor.

        Args:
            field: Its name.
            dtype: Of the tensor: values that do not fit it are cut, as Triton does.

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
    """The values of varints one after the other, cut to a field's width, some at a time."""
    octets = np.frombuffer(data, np.uint8)
    position = 0
    while position < octets.size:
        piece = octets[position : position + _PIECE]
        ends = np.flatnonzero(piece < 0x80)
        lengths = np.diff(ends, prepend=-1)
        if not ends.size or lengths.max() > _LONGEST_VARINT:
            raise InvalidArgumentError(_MALFORMED)
        starts = ends - lengths + 1
        values = np.zeros(ends.size, np.uint64)
        for index in range(int(lengths.max())):
            longer = lengths > index
            part = (piece[starts[longer] + index] & 0x7F).astype(np.uint64)
            values[longer] |= part << np.uint64(7 * index)
        yield (values != 0) if wide == np.bool_ else values.astype(wide)
        position += int(ends[-1]) + 1
        give_way()
