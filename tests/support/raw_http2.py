"""HTTP/2 as no client library would speak it: frames by hand, to attack a gRPC port with."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress
from select import select

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RESET, SETTINGS, PING, GO_AWAY, CONTINUATION = 0, 1, 3, 4, 6, 7, 9
END_STREAM, END_HEADERS, ACK = 1, 4, 1


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def _number(value: int, bits: int, first: int) -> bytes:
    most = (1 << bits) - 1
    if value < most:
        return bytes([first | value])
    value -= most
    parts = bytearray([first | most])
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def literal(name: str, value: str, *, index: bool = False) -> bytes:
    """A header in full; put into the connection's table if it is to be named by its index later."""
    return b"".join(
        (
            bytes([0x40 if index else 0]),
            *(_number(len(one), 7, 0) + one for one in (name.encode(), value.encode())),
        )
    )


def indexed(index: int) -> bytes:
    """A header of the table, the newest of the connection's own being number 62."""
    return _number(index, 7, 0x80)


def call_headers(path: str, authority: str = "conch") -> bytes:
    """The headers of a gRPC call."""
    return b"".join(
        literal(name, value)
        for name, value in (
            (":method", "POST"),
            (":scheme", "http"),
            (":path", path),
            (":authority", authority),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
        )
    )


class RawConnection:
    """A connection to a gRPC port.

    Args:
        address: Host and port.
    """

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=5)
        self.socket.sendall(PREFACE + frame(SETTINGS, 0, 0))

    def send(self, data: bytes) -> bool:
        """Sends frames; False if the server has closed the connection."""
        with suppress(OSError):
            self.socket.sendall(data)
            return True
        return False

    def received(self) -> bytes:
        """What has come in and was not read, without waiting."""
        parts = []
        with suppress(OSError):
            while select([self.socket], [], [], 0)[0] and (part := self.socket.recv(1 << 20)):
                parts.append(part)
        return b"".join(parts)

    def settings(self) -> dict[int, int]:
        """The server's settings, by their numbers; waits for them.

        Raises:
            OSError: There are none: the server has closed the connection.
        """
        received = b""
        while True:
            while len(received) < 9 or len(received) < 9 + int.from_bytes(received[:3], "big"):
                part = self.socket.recv(4096)
                if not part:
                    raise ConnectionError("the server has closed the connection")
                received += part
            size, kind, flags = int.from_bytes(received[:3], "big"), received[3], received[4]
            payload, received = received[9 : 9 + size], received[9 + size :]
            if kind == SETTINGS and not flags & ACK:
                return dict(struct.iter_unpack(">HI", payload))

    def close(self) -> None:
        """Closes the connection."""
        self.socket.close()
