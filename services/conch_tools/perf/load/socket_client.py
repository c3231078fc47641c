"""The socket of a client: reads until it has no more, and says when it is lost."""

from __future__ import annotations

import ssl
from abc import ABC, abstractmethod

from conch_tools.connection import Endpoint
from conch_tools.perf.load.calls import Ended

LOST = "connection lost"
WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_READ_BYTES = 1 << 18
_CONNECT_S = 5.0


class SocketClient(ABC):
    """One connection.

    Args:
        endpoint: The server.
        ended: Receives the ends.

    Attributes:
        in_flight: Calls without an end.
        lost: True if the connection is of no use any more.

    Raises:
        OSError: There is no server, or its certificate is wrong.
    """

    def __init__(self, endpoint: Endpoint, ended: Ended) -> None:
        self._ended = ended
        self._explained: set[str] = set()
        self._socket = endpoint.connect(_CONNECT_S)
        self._buffers = isinstance(self._socket, ssl.SSLSocket)  # more than epoll sees
        self.in_flight = 0
        self.lost = False

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self._socket.fileno()

    def read(self, now_ns: int) -> None:
        """Reads what has come."""
        while not self.lost:
            try:
                data = self._socket.recv(_READ_BYTES)
            except WOULD_BLOCK:
                return
            except OSError:
                data = b""
            if not data:
                self.fail(LOST, now_ns)
                return
            self._receive(data, now_ns)
            if len(data) < _READ_BYTES and not self._buffers:
                return

    def close(self) -> None:
        """Closes the socket; calls without an end are forgotten."""
        self.lost = True
        self._socket.close()

    @abstractmethod
    def fail(self, error: str, now_ns: int) -> None:
        """Ends all calls with an error; the connection is of no use any more."""

    @abstractmethod
    def _receive(self, data: bytes, now_ns: int) -> None:
        """Takes what has come."""
