"""An HTTP/1.1 client that sends ready bodies: one request at a time on a connection, no threads."""

from __future__ import annotations

import ssl

from conch_tools.connection import Endpoint
from conch_tools.perf.load.calls import Call, Ended

LOST = "connection lost"
MALFORMED = "malformed response"
_READ_BYTES = 1 << 18
_CONNECT_S = 10.0
_MOST_HEAD = 1 << 16


class Http1Client:
    """One connection.

    Args:
        endpoint: The server.
        path: Path of the request.
        ended: Hears of the ends.

    Attributes:
        in_flight: Calls without an end: none or one.
        lost: Whether the connection is of no use any more.
    """

    def __init__(self, endpoint: Endpoint, path: str, ended: Ended) -> None:
        self._socket = endpoint.connect(_CONNECT_S)
        self._socket.setblocking(False)
        self._ended = ended
        lines = [f"POST {path} HTTP/1.1", f"host: {endpoint.authority}", "accept: */*"]
        lines += [f"{name}: {value}" for name, value in endpoint.headers.items()]
        start = "\r\n".join(lines).encode()
        self._json_head = b"%b\r\ncontent-type: application/json" % start
        self._binary_head = (
            b"%b\r\ncontent-type: application/octet-stream\r\ninference-header-content-length: " % start
        )
        self._call: Call | None = None
        self._unsent = memoryview(b"")
        self._received = b""
        self._left = -1  # bytes of the body to come; -1 before the head, -2 while chunks come
        self._closes = False
        self._error = ""
        self.in_flight = 0
        self.lost = False

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self._socket.fileno()

    @property
    def can_send(self) -> bool:
        """Whether a call may be sent now."""
        return not self.lost and self._call is None

    @property
    def wants_write(self) -> bool:
        """Whether the socket took less than there is to send."""
        return bool(self._unsent)

    def send(self, call: Call, now_ns: int) -> None:
        """Queues a call; `flush` sends it."""
        call.sent_ns = now_ns
        self.in_flight = 1
        self._call = call
        self._left = -1
        request = call.request
        head = b"%b%d" % (self._binary_head, request.head_bytes) if request.head_bytes else self._json_head
        self._unsent = memoryview(
            b"%b\r\ncontent-length: %d\r\n\r\n%b" % (head, len(request.body), request.body)
        )

    def flush(self, now_ns: int) -> None:
        """Sends what is queued, as far as the socket takes it."""
        try:
            while self._unsent:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            return
        except OSError:
            self.fail(LOST, now_ns)

    def read(self, now_ns: int) -> None:
        """Reads what has come."""
        while not self.lost:
            try:
                data = self._socket.recv(_READ_BYTES)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return
            except OSError:
                data = b""
            if not data:
                self.fail(LOST, now_ns)
                return
            self._take(data, now_ns)
            if len(data) < _READ_BYTES and not isinstance(self._socket, ssl.SSLSocket):
                return

    def fail(self, error: str, now_ns: int) -> None:
        """Ends the call with an error; the connection is of no use any more."""
        self.lost = True
        self._end(error, now_ns)

    def close(self) -> None:
        """Closes the socket."""
        self.lost = True
        self._socket.close()

    def _take(self, data: bytes, now_ns: int) -> None:
        if self._left == -1:
            data = self._received + data
            end = data.find(b"\r\n\r\n")
            if end < 0:
                self._received = data
                if len(data) > _MOST_HEAD:
                    self.fail(MALFORMED, now_ns)
                return
            self._received = b""
            if not self._read_head(data[:end]):
                self.fail(MALFORMED, now_ns)
                return
            data = data[end + 4 :]
        if self._left == -2:
            self._received += data
            if not self._received.endswith(b"0\r\n\r\n"):
                return
            self._received = b""
        else:
            self._left -= len(data)
            if self._left > 0:
                return
            if self._left < 0:
                self.fail(MALFORMED, now_ns)
                return
        call = self._call
        if call is not None and not self._error:
            call.responses, call.last_ns = 1, now_ns
        self.lost = self._closes
        self._end(self._error, now_ns)

    def _read_head(self, head: bytes) -> bool:
        lines = head.split(b"\r\n")
        words = lines[0].split(b" ", 2)
        if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
            return False
        self._error = "" if words[1] == b"200" else f"HTTP {words[1].decode()}"
        self._left, self._closes = 0, words[0] == b"HTTP/1.0"
        for line in lines[1:]:
            name, _, value = line.partition(b":")
            name, value = name.lower(), value.strip()
            if name == b"content-length":
                if not value.isdigit():
                    return False
                self._left = int(value)
            elif name == b"transfer-encoding" and value.lower() == b"chunked":
                self._left = -2
            elif name == b"connection" and value.lower() == b"close":
                self._closes = True
        return True

    def _end(self, error: str, now_ns: int) -> None:
        call, self._call = self._call, None
        self.in_flight = 0
        if call is not None:
            self._ended.call_ended(call, error, now_ns)
