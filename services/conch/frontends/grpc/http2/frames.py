"""Frames of RFC 9113: types, flags, error codes, settings, and how frames are packed."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from enum import IntEnum

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD_BYTES = 9

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS = range(5)
PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(5, 10)

# ACK and END_STREAM share a bit.
ACK = END_STREAM = 0x1
END_HEADERS = 0x4
PADDED = 0x8
PRIORITY_FLAG = 0x20

MOST_WINDOW = 2**31 - 1
MOST_STREAM_ID = 2**31 - 1
DEFAULT_WINDOW = 65_535
LEAST_FRAME_SIZE = 2**14
MOST_FRAME_SIZE = 2**24 - 1


class ErrorCode(IntEnum):
    """Error codes (section 7)."""

    NO_ERROR = 0x0
    PROTOCOL_ERROR = 0x1
    INTERNAL_ERROR = 0x2
    FLOW_CONTROL_ERROR = 0x3
    SETTINGS_TIMEOUT = 0x4
    STREAM_CLOSED = 0x5
    FRAME_SIZE_ERROR = 0x6
    REFUSED_STREAM = 0x7
    CANCEL = 0x8
    COMPRESSION_ERROR = 0x9
    CONNECT_ERROR = 0xA
    ENHANCE_YOUR_CALM = 0xB
    INADEQUATE_SECURITY = 0xC
    HTTP_1_1_REQUIRED = 0xD


class Setting(IntEnum):
    """Identifiers of settings (section 6.5.2)."""

    HEADER_TABLE_SIZE = 0x1
    ENABLE_PUSH = 0x2
    MAX_CONCURRENT_STREAMS = 0x3
    INITIAL_WINDOW_SIZE = 0x4
    MAX_FRAME_SIZE = 0x5
    MAX_HEADER_LIST_SIZE = 0x6


# Length and type share the first word: length << 8 | type.
_HEAD = struct.Struct(">IBI")
pack_head = _HEAD.pack
unpack_head = _HEAD.unpack_from
unpack_word = struct.Struct(">I").unpack_from
unpack_setting = struct.Struct(">HI").unpack_from
_pack_setting = struct.Struct(">HI").pack
_pack_word_frame = struct.Struct(">IBII").pack
_pack_goaway = struct.Struct(">IBIII").pack


def pack_frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """A whole frame."""
    return pack_head(len(payload) << 8 | kind, flags, stream_id) + payload


def pack_reset(stream_id: int, code: int) -> bytes:
    """An RST_STREAM frame."""
    return _pack_word_frame(4 << 8 | RST_STREAM, 0, stream_id, code)


def pack_window_update(stream_id: int, increment: int) -> bytes:
    """A WINDOW_UPDATE frame."""
    return _pack_word_frame(4 << 8 | WINDOW_UPDATE, 0, stream_id, increment)


def pack_settings(values: Iterable[tuple[int, int]]) -> bytes:
    """A SETTINGS frame."""
    return pack_frame(SETTINGS, 0, 0, b"".join(_pack_setting(*one) for one in values))


def pack_goaway(last_stream_id: int, code: int, text: bytes) -> bytes:
    """A GOAWAY frame."""
    return _pack_goaway(8 + len(text) << 8 | GOAWAY, 0, 0, last_stream_id, code) + text


SETTINGS_ACK = pack_frame(SETTINGS, ACK, 0)
