"""`TimedResponse`: an HTTP response that has to come within its socket's timeout as a whole.

The timeout of a socket holds for each read: a peer that sends a byte now and then would never be too late.
"""

from __future__ import annotations

import socket
from http.client import HTTPResponse
from io import BufferedReader, RawIOBase
from time import monotonic
from typing import Any


class TimedResponse(HTTPResponse):
    """A response; its time begins when the request has been sent.

    Args:
        sock: The connection, with a timeout.
        more: As for `HTTPResponse`.
    """

    def __init__(self, sock: socket.socket, *more: Any, **named: Any) -> None:
        super().__init__(sock, *more, **named)
        self.fp: BufferedReader = BufferedReader(_TimedReader(self.fp.detach(), sock))


class _TimedReader(RawIOBase):
    """Reads from a socket until its timeout has passed once."""

    def __init__(self, raw: RawIOBase, sock: socket.socket) -> None:
        timeout_s = sock.gettimeout()
        assert timeout_s is not None, "the connection has a timeout"
        self._raw = raw
        self._sock = sock
        self._deadline_s = monotonic() + timeout_s

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left_s = self._deadline_s - monotonic()
        if left_s <= 0:
            raise TimeoutError("the response takes too long")
        self._sock.settimeout(left_s)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()
