"""Sizes that Parquet and Arrow bodies unpack to, read from them before anything is allocated. Pure.

A few kilobytes can unpack to terabytes: a compressed page, a value that a dictionary repeats, a view of one
text for each row. The sizes of a file's own metadata may be wrong, so those are read that the libraries
allocate by: headers of Parquet pages (Thrift's compact protocol) and, in messages of Arrow (Flatbuffers),
the length before each compressed buffer.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

_MOST_FOOTER_BYTES = 2 << 20
_MOST_STEPS = 1 << 22
"""Bytes of a file's footer and page headers that are read one by one, in all: some two seconds."""
_PARQUET_MAGIC = b"PAR1"
_DEEPEST = 16
_MOST_FIELDS = 1 << 10
_PREFIX_ENCODING = 7
"""DELTA_BYTE_ARRAY, whose values share beginnings, so that their length is no part of a page's."""
_RECORD_BATCH, _DICTIONARY_BATCH = 3, 2
ARROW_MAGIC = b"ARROW1"
"""Begins and ends a file of Arrow."""
_BLOCK = "<qi4xq"
"""Place of a message in an Arrow file, bytes of its metadata, and bytes of its body."""
_I16, _I32, _I64, _BINARY, _LIST, _STRUCT = 4, 5, 6, 8, 9, 12
"""Types of Thrift."""
_BITS = {_I16: 16, _I32: 32, _I64: 64}

Struct = dict[tuple[int, int], Any]


class PackedError(ValueError):
    """A body contradicts its format, or uses a part of it that has no bound; the text says which."""


# Parquet


@dataclass(frozen=True, slots=True)
class Chunk:
    """A column of a row group in a Parquet file.

    Attributes:
        place: Number of the column in its row group, by which pyarrow finds it: its own name may be another.
        values: Number of its values.
        start: Place of its first page.
        end: Place behind its last page.
    """

    place: int
    values: int
    start: int
    end: int


def parquet_chunks(body: memoryview) -> tuple[list[Chunk], bytes]:
    """The columns of all row groups and the name of the writer, read from the footer.

    pyarrow's own accessors are not safe: an exception in one ends the process.

    Raises:
        PackedError: The footer is none, or is too long.
    """
    (length,) = struct.unpack("<I", body[-8:-4]) if len(body) >= 12 else (0,)
    if not length or bytes(body[-4:]) != _PARQUET_MAGIC or length + 12 > len(body):
        raise PackedError("it has no footer")
    if length > _MOST_FOOTER_BYTES:
        raise PackedError(f"its footer has {length} bytes, at most {_MOST_FOOTER_BYTES} are read")
    footer = _Thrift(body[:-8], len(body) - 8 - length).read_struct(0)
    try:
        groups = footer.get((4, _LIST), ())
        if not any(group[3, _I64] for group in groups):
            groups = ()  # of a file without rows no page is read, wherever it lies
        chunks = [
            _chunk(place, column[3, _STRUCT], len(body))
            for group in groups
            for place, column in enumerate(group.get((1, _LIST), ()))
        ]
        return chunks, bytes(footer.get((6, _BINARY), b""))
    except (KeyError, TypeError, AttributeError):
        raise PackedError("its footer contradicts itself") from None


def _chunk(place: int, metadata: Struct, most: int) -> Chunk:
    start, dictionary = metadata[9, _I64], metadata.get((11, _I64), 0)
    if dictionary:
        start = min(start, dictionary)
    end, values = start + metadata[7, _I64], metadata[5, _I64]
    if not 0 < start <= end <= most or values < 0:
        raise PackedError("a column lies outside the file")
    return Chunk(place, values, start, end)


class ParquetPages:
    """Reads the headers of pages, of all columns of a file at most so many as `_MOST_STEPS` allows.

    Columns may lie in the same place, so that the file's length is no bound.
    """

    def __init__(self, body: memoryview) -> None:
        self._body = body
        self._steps = _MOST_STEPS

    def unpacked_bytes(self, start: int, end: int) -> int:
        """Unpacked bytes of the pages between two places. Raises PackedError: they are no pages."""
        total = 0
        while start < end:
            thrift = _Thrift(self._body[:end], start, self._steps)
            header = thrift.read_struct(0)
            start, self._steps = thrift.at, thrift.steps
            unpacked, packed = header.get((2, _I32), -1), header.get((3, _I32), -1)
            if min(unpacked, packed) < 0:
                raise PackedError("a page has no size")
            for data, encoding in ((5, 2), (8, 4)):  # data pages of version 1 and 2
                if header.get((data, _STRUCT), {}).get((encoding, _I32)) == _PREFIX_ENCODING:
                    raise PackedError("encoding DELTA_BYTE_ARRAY is not read: write it with another one")
            total += unpacked
            start += packed
        return total


class _Thrift:
    """Reads structs of Thrift's compact protocol as dicts by number and type of their fields.

    A field of another type than a reader expects is none for it, as in Thrift's own code. That code cuts
    numbers to the bits of their type, so that field 65538 is field 2: numbers with more are refused.

    Attributes:
        at: Place of the next byte.
        steps: Bytes that may still be read one by one.
    """

    def __init__(self, data: memoryview, at: int, steps: int = _MOST_STEPS) -> None:
        self._data = data
        self.at = at
        self.steps = steps

    def read_struct(self, depth: int) -> Struct:
        fields: Struct = {}
        number = 0
        while (head := self._byte()) != 0:
            delta, kind = head >> 4, head & 15
            number = number + delta if delta else self._zigzag(_I16)
            if len(fields) >= _MOST_FIELDS:
                raise PackedError("a struct has too many fields")
            if (number, kind) in fields:
                raise PackedError("a struct has a field twice")
            fields[number, kind] = self._value(kind, depth)
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        if depth > _DEEPEST:
            raise PackedError("a struct is nested too deep")
        match kind:
            case 1 | 2:
                return kind == 1
            case 3:
                return self._byte()
            case 4 | 5 | 6:
                return self._zigzag(kind)
            case 7:
                return self._take(8)
            case 8:
                return self._take(self._varint())
            case 9 | 10:
                head = self._byte()
                size = self._varint() if head >> 4 == 15 else head >> 4
                if size > len(self._data) - self.at:
                    raise PackedError("a list is longer than the file")
                # An element is a byte at least, also a bool.
                return [self._value(head & 15 if head & 15 > 2 else 3, depth + 1) for _ in range(size)]
            case 12:
                return self.read_struct(depth + 1)
        raise PackedError(f"a struct has a field of type {kind}")

    def _byte(self) -> int:
        if self.at >= len(self._data):
            raise PackedError("a struct is cut off")
        if not self.steps:
            raise PackedError("its footer and the headers of its pages are too long")
        self.steps -= 1
        self.at += 1
        return self._data[self.at - 1]

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7
            if shift > 63:
                raise PackedError("a struct has a number that is too long")

    def _zigzag(self, kind: int) -> int:
        value = self._varint()
        if value >> _BITS[kind]:
            raise PackedError("a struct has a number that is too long")
        return (value >> 1) ^ -(value & 1)

    def _take(self, count: int) -> memoryview:
        if count > len(self._data) - self.at:
            raise PackedError("a struct is cut off")
        self.at += count
        return self._data[self.at - count : self.at]


# Arrow


def arrow_file_messages(body: memoryview) -> Iterator[tuple[bytes, memoryview]]:
    """Metadata of the messages in an Arrow file, each with the file from the message's body on.

    By the footer, as pyarrow reads it: polars writes no stream into the file.

    Raises:
        PackedError: The footer is none.
    """
    trailer = len(ARROW_MAGIC) + 4
    (length,) = struct.unpack("<i", body[-trailer:][:4]) if len(body) > 2 * trailer else (0,)
    if bytes(body[-len(ARROW_MAGIC) :]) != ARROW_MAGIC or not 0 < length < len(body) - trailer:
        raise PackedError("the file has no footer")
    try:
        footer = _Flat.root(bytes(body[-trailer - length : -trailer]))
        for kind in (2, 3):  # dictionaries, record batches
            for start, size, _ in footer.structs(kind, _BLOCK):
                if not 0 < start <= start + size <= len(body):
                    raise PackedError("a message lies outside the file")
                prefix = 8 if body[start : start + 4] == b"\xff" * 4 else 4
                yield bytes(body[start + prefix : start + size]), body[start + size :]
    except (struct.error, IndexError):
        raise PackedError("the footer contradicts itself") from None


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
