"""Reads and writes parts of protobuf's wire format, to save copies and message objects.

Source: the encoding chapter of the protobuf documentation. A field is a tag (number << 3 | wire type); with
wire type 2, a length and that many bytes follow. Fields of a message come in any order.
Threads and locks: no state; long scans yield the GIL.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from conch.core.errors import InvalidArgumentError
from conch.core.tensor import Buffer
from conch.frontends.yield_gil import yield_gil

MAX_FIELDS = 64 * 1024
"""Most fields of a request, with those of its inputs but without those of its tensors."""

MAX_HEAD_BYTES = 256 * 1024
"""Most bytes of a request besides tensors; protobuf holds the GIL while it parses them."""

MAX_PLAIN_FIELDS = 2000
"""Most fields of a request that a transport's thread splits."""

_FIELDS_BETWEEN_YIELDS = MAX_PLAIN_FIELDS + 1

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
MODEL_NAME = 0x0A
"""The tag of a request's first field."""
# model_name, model_version, parameters, inputs, outputs
_PLAIN_TAGS = frozenset((MODEL_NAME, 0x12, 0x22, 0x2A, 0x32))
_RAW_INPUT_CONTENTS = 0x3A
_INPUTS = 0x2A
_CONTENTS = 0x2A  # of an input
_NO_CONTENTS = b"\x2a\x00"
_MAX_PLAIN_HEAD_BYTES = 8 * 1024
_MALFORMED = "the request message is malformed"


def varint(value: int) -> bytes:
    """Encodes a number of at least 0 as a varint."""
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def length_header(field: int, length: int) -> bytes:
    """Encodes what precedes `length` bytes in field number `field`."""
    return varint(field << 3 | _LENGTH) + varint(length)


def read_varint(data: Buffer, position: int) -> tuple[int, int]:
    """Returns the number at a position, and the position behind it.

    Raises:
        InvalidArgumentError: There is no complete varint.
    """
    value = shift = 0
    try:
        while True:
            byte = data[position]
            position += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value, position
            shift += 7
            if shift > 63:
                raise InvalidArgumentError(_MALFORMED)
    except IndexError:
        raise InvalidArgumentError(_MALFORMED) from None


def read_fields(data: Buffer, position: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Yields the tag, the start, the start of the content and the end of each field of a message.

    Raises:
        InvalidArgumentError: The message is not well-formed at its top level.
    """
    while position < end:
        start = position
        tag, content = read_varint(data, position)
        kind = tag & 7
        if kind == _LENGTH:
            length, content = read_varint(data, content)
            position = content + length
        elif kind == _VARINT:
            _, position = read_varint(data, content)
        elif kind == _FIXED64:
            position = content + 8
        elif kind == _FIXED32:
            position = content + 4
        else:
            raise InvalidArgumentError(_MALFORMED)
        if position > end:
            raise InvalidArgumentError(_MALFORMED)
        yield tag, start, content, position


def check_fields(message: Buffer, depth: int) -> None:
    """Checks that a message has no more than `MAX_FIELDS` fields.

    Counts `depth` levels of nested messages: fields with a length above the last level are read as messages;
    malformed ones count as one field.

    Raises:
        InvalidArgumentError: It has more, or is not well-formed at its top level.
    """
    todo = [(0, len(message), depth)]
    count = 0
    while todo:
        position, end, left = todo.pop()
        try:
            for tag, _, content, stop in read_fields(message, position, end):
                count += 1
                if count > MAX_FIELDS:
                    raise _too_many(MAX_FIELDS)
                if not count % _FIELDS_BETWEEN_YIELDS:
                    yield_gil()
                if left > 1 and tag & 7 == _LENGTH:
                    todo.append((content, stop, left - 1))
        except InvalidArgumentError:
            if left == depth or count > MAX_FIELDS:
                raise


class CutRequest(NamedTuple):
    """A ModelInferRequest and the tensors cut out of it.

    Attributes:
        head: The message without tensors; typed contents are empty.
        raw: Views of the raw contents, in order.
        contents: Views of the typed contents of each input, which protobuf would merge.
    """

    head: bytes
    raw: list[Buffer]
    contents: list[list[memoryview]]


def cut_infer_request(
    message: Buffer, max_fields: int = MAX_FIELDS, max_head: int = MAX_HEAD_BYTES
) -> CutRequest:
    """Cuts the tensors out of a ModelInferRequest without copying them.

    Counts fields and bytes on the way, so that the rest, which protobuf parses, is short.

    `max_fields` includes the fields of inputs; `max_head` is in bytes.

    Raises:
        InvalidArgumentError: The message is malformed or exceeds a limit.
    """
    view = memoryview(message)
    head: list[Buffer] = []
    raw: list[Buffer] = []
    contents: list[list[memoryview]] = []
    count = size = 0
    for tag, start, content, end in read_fields(message, 0, len(message)):
        count += 1
        if tag == _RAW_INPUT_CONTENTS:
            raw.append(view[content:end])
        elif tag == _INPUTS:
            pieces: list[memoryview] = []
            rest: list[Buffer] = []
            for inner, inner_start, inner_content, inner_end in read_fields(message, content, end):
                count += 1
                if inner == _CONTENTS:
                    pieces.append(view[inner_content:inner_end])
                else:
                    rest.append(view[inner_start:inner_end])
                    size += inner_end - inner_start
                if count > max_fields or size > max_head:
                    break
                if not count % _FIELDS_BETWEEN_YIELDS:
                    yield_gil()
            if pieces:
                rest.append(_NO_CONTENTS)
            contents.append(pieces)
            head += (length_header(_INPUTS >> 3, sum(map(len, rest))), *rest)
        else:
            head.append(view[start:end])
            size += end - start
        if not count % _FIELDS_BETWEEN_YIELDS:
            yield_gil()
        if count > max_fields:
            raise _too_many(max_fields)
        if size > max_head:
            raise InvalidArgumentError(
                f"names, shapes and parameters take more than {max_head} bytes of the request message; send "
                f"what is large as a tensor"
            )
    return CutRequest(b"".join(head), raw, contents)


def _too_many(max_fields: int) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"the request message has more than {max_fields} fields, such as inputs, parameters and raw contents"
    )


def split_infer_request(message: Buffer) -> tuple[bytes, slice | None, list[slice]] | None:
    """Splits a plain ModelInferRequest without parsing it.

    A client's requests mostly differ only in id and raw contents, and serialisers write fields in the order
    of their numbers, so the rest is the same bytes in all of them.

    Returns:
        The message without id and raw contents, the place of the id's text, if any, and the places of the raw
        contents; None for a message that is not plain: unknown fields, another order, an error, too large.
    """
    end = len(message)
    position = id_start = id_end = 0
    request_id: slice | None = None
    raw_start = end
    raw: list[slice] = []
    last_tag = 0
    try:
        while position < end:
            tag = message[position]
            start = position
            size = message[position + 1]
            position += 2
            if size > 0x7F:
                size, position = read_varint(message, position - 1)
            content = position
            position += size
            if tag == _RAW_INPUT_CONTENTS:
                if not raw:
                    raw_start = start
                elif len(raw) == MAX_PLAIN_FIELDS:
                    return None
                raw.append(slice(content, position))
            elif tag < last_tag:
                return None
            elif tag == 0x1A:  # id
                id_start, id_end = start, position
                request_id = slice(content, position)
                if size > MAX_HEAD_BYTES:
                    return None
            elif tag not in _PLAIN_TAGS or position - id_end + id_start > _MAX_PLAIN_HEAD_BYTES:
                return None
            last_tag = tag
    except (IndexError, InvalidArgumentError):
        return None
    if position != end:
        return None
    return bytes(message[:id_start]) + bytes(message[id_end:raw_start]), request_id, raw
