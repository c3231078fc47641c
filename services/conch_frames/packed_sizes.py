"""Sizes that Parquet and Arrow bodies unpack to, read from them before anything is allocated. Pure.

A few kilobytes can unpack to terabytes: a compressed page, a value that a dictionary repeats, a view of one
text for each row. The sizes of a file's own metadata may be wrong, so those are read that the libraries
allocate by: headers of Parquet pages (Thrift's compact protocol) and, in messages of Arrow (Flatbuffers),
the length before each compressed buffer.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Any

_MOST_PAGES = 1 << 16
_DEEPEST = 8
_MOST_FIELDS = 1 << 10
_PREFIX_ENCODING = 7
"""DELTA_BYTE_ARRAY, whose values share beginnings, so that their length is no part of a page's."""
_RECORD_BATCH, _DICTIONARY_BATCH = 3, 2


class PackedError(ValueError):
    """A body contradicts its format, or uses a part of it that has no bound; the text says which."""


# Parquet


def parquet_page_bytes(body: memoryview, start: int, end: int) -> int:
    """Unpacked bytes of the pages between two places. Raises PackedError: they are no pages."""
    total = pages = 0
    while start < end:
        pages += 1
        if pages > _MOST_PAGES:
            raise PackedError(f"a column has more than {_MOST_PAGES} pages")
        header, start = _Thrift(body[:end], start).read_struct(0)
        unpacked, packed = header.get(2), header.get(3)
        if not isinstance(unpacked, int) or not isinstance(packed, int) or min(unpacked, packed) < 0:
            raise PackedError("a page has no size")
        for kind, encoding in ((5, 2), (8, 4)):  # data pages of version 1 and 2
            if isinstance(header.get(kind), dict) and header[kind].get(encoding) == _PREFIX_ENCODING:
                raise PackedError("encoding DELTA_BYTE_ARRAY is not read: write it with another one")
        total += unpacked
        start += packed
    return total


class _Thrift:
    """Reads a struct of Thrift's compact protocol; of lists and texts only their ends."""

    def __init__(self, data: memoryview, at: int) -> None:
        self._data = data
        self._at = at

    def read_struct(self, depth: int) -> tuple[dict[int, Any], int]:
        if depth > _DEEPEST:
            raise PackedError("a page header is nested too deep")
        fields: dict[int, Any] = {}
        number = 0
        while (head := self._byte()) != 0:
            delta, kind = head >> 4, head & 15
            number = number + delta if delta else self._zigzag()
            if len(fields) >= _MOST_FIELDS:
                raise PackedError("a page header has too many fields")
            fields[number] = self._value(kind, depth)
        return fields, self._at

    def _value(self, kind: int, depth: int) -> Any:
        match kind:
            case 1 | 2:
                return kind == 1
            case 3:
                return self._byte()
            case 4 | 5 | 6:
                return self._zigzag()
            case 7:
                return self._skip(8)
            case 8:
                return self._skip(self._varint())
            case 12:
                return self.read_struct(depth + 1)[0]
        raise PackedError(f"a page header has a field of type {kind}")

    def _byte(self) -> int:
        if self._at >= len(self._data):
            raise PackedError("a page header is cut off")
        self._at += 1
        return self._data[self._at - 1]

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7
            if shift > 63:
                raise PackedError("a page header has a number that is too long")

    def _zigzag(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)

    def _skip(self, count: int) -> None:
        self._at += count


# Arrow


def arrow_message_bytes(metadata: bytes, body: memoryview) -> int:
    """Unpacked bytes of a message with its body. Raises PackedError: it contradicts itself."""
    try:
        return sum(_buffer_sizes(metadata, body))
    except (struct.error, IndexError):
        raise PackedError("a message contradicts itself") from None


def _buffer_sizes(metadata: bytes, body: memoryview) -> Iterator[int]:
    message = _Flat.root(metadata)
    kind = message.scalar(1, "<B")
    header = message.table(2)
    if kind == _DICTIONARY_BATCH:
        header = header and header.table(1)
    elif kind != _RECORD_BATCH:
        return
    if header is None:
        raise PackedError("a message has no header")
    compressed = header.table(3) is not None
    for offset, length in header.structs(2, "<qq"):
        if not 0 <= offset <= offset + length <= len(body):
            raise PackedError("a buffer lies outside its message")
        size = length
        if compressed and length:
            (size,) = struct.unpack_from("<q", body, offset)
            size = length if size == -1 else size  # -1: it is not compressed
        if size < 0:
            raise PackedError("a buffer has a negative length")
        yield size


class _Flat:
    """A table of Flatbuffers, read by the numbers of its fields."""

    def __init__(self, data: bytes, at: int) -> None:
        if not 0 <= at < len(data):
            raise PackedError("a message contradicts itself")
        self._data = data
        self._at = at
        self._fields = at - struct.unpack_from("<i", data, at)[0]
        if self._fields < 0:
            raise PackedError("a message contradicts itself")
        (self._size,) = struct.unpack_from("<H", data, self._fields)

    @classmethod
    def root(cls, data: bytes) -> _Flat:
        return cls(data, struct.unpack_from("<I", data)[0])

    def _place(self, number: int) -> int:
        """Place of a field; 0 if the table does not have it."""
        entry = 4 + 2 * number
        if entry + 2 > self._size:
            return 0
        (offset,) = struct.unpack_from("<H", self._data, self._fields + entry)
        return self._at + offset if offset else 0

    def scalar(self, number: int, form: str) -> int:
        place = self._place(number)
        return int(struct.unpack_from(form, self._data, place)[0]) if place else 0

    def table(self, number: int) -> _Flat | None:
        place = self._place(number)
        return _Flat(self._data, place + struct.unpack_from("<I", self._data, place)[0]) if place else None

    def structs(self, number: int, form: str) -> Iterable[tuple[int, ...]]:
        place = self._place(number)
        if not place:
            return ()
        start = place + struct.unpack_from("<I", self._data, place)[0]
        (count,) = struct.unpack_from("<I", self._data, start)
        end = start + 4 + count * struct.calcsize(form)
        if end > len(self._data):
            raise PackedError("a message contradicts itself")
        return struct.iter_unpack(form, self._data[start + 4 : end])
