"""The few pieces of protobuf's wire format that save a copy or a message object.

Source: the encoding chapter of the protobuf documentation. A field is a tag (number << 3 | wire type), for
wire type 2 followed by a length and that many bytes. Fields of a message may come in any order.
"""

from __future__ import annotations

from conch.core.errors import InvalidArgumentError
from conch.core.tensor import Buffer

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
MODEL_NAME = 0x0A
"""The tag of a request's first field."""
# model_name, model_version, parameters, inputs, outputs
_PLAIN_TAGS = frozenset((MODEL_NAME, 0x12, 0x22, 0x2A, 0x32))
_MALFORMED = "the request message is malformed"


def varint(value: int) -> bytes:
    """A number of at least 0 as a varint."""
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def length_header(field: int, length: int) -> bytes:
    """What precedes `length` bytes in field number `field`."""
    return varint(field << 3 | _LENGTH) + varint(length)


def read_varint(data: bytes, position: int) -> tuple[int, int]:
    """The number at a position, and the position behind it.

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


def split_repeated_bytes(message: bytes, field: int) -> tuple[bytes, list[Buffer]]:
    """Takes the contents of a repeated bytes field out of a message without copying them.

    Args:
        message: A serialised message.
        field: Number of a repeated bytes field at its top level.

    Returns:
        The message without that field (copied), and views of the field's contents in their order.

    Raises:
        InvalidArgumentError: The message is not well-formed at its top level.
    """
    wanted = field << 3 | _LENGTH
    end = len(message)
    view = memoryview(message)
    rest: list[Buffer] = []
    contents: list[Buffer] = []
    position = 0
    while position < end:
        start = position
        tag, position = read_varint(message, position)
        kind = tag & 7
        if kind == _LENGTH:
            length, position = read_varint(message, position)
            content = position
            position += length
            if position > end:
                raise InvalidArgumentError(_MALFORMED)
            if tag == wanted:
                contents.append(view[content:position])
                continue
        elif kind == _VARINT:
            _, position = read_varint(message, position)
        elif kind == _FIXED64:
            position += 8
        elif kind == _FIXED32:
            position += 4
        else:
            raise InvalidArgumentError(_MALFORMED)
        if position > end:
            raise InvalidArgumentError(_MALFORMED)
        rest.append(view[start:position])
    return b"".join(rest), contents


def split_infer_request(message: bytes) -> tuple[bytes, slice | None, list[slice]] | None:
    """Takes a plain ModelInferRequest apart without parsing it.

    Requests of one client mostly differ in their id and their raw contents only, and serialisers write
    fields in the order of their numbers; so what is left without those two stands for all such requests.

    Args:
        message: A serialised ModelInferRequest.

    Returns:
        The message without id and raw contents, where the text of its id is, if it has one, and where each
        of the raw contents is; None where the message has unknown fields, another order of fields or an
        error in it, and has to be parsed.
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
            if tag == 0x3A:  # raw_input_contents
                if not raw:
                    raw_start = start
                raw.append(slice(content, position))
            elif tag < last_tag:
                return None
            elif tag == 0x1A:  # id
                id_start, id_end = start, position
                request_id = slice(content, position)
            elif tag not in _PLAIN_TAGS:
                return None
            last_tag = tag
    except (IndexError, InvalidArgumentError):
        return None
    if position != end:
        return None
    return message[:id_start] + message[id_end:raw_start], request_id, raw
