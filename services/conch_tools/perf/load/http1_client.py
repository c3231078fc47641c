"""An HTTP/1.1 client that sends ready bodies: one request at a time on a connection, no threads."""

from __future__ import annotations

import json

from conch_tools.connection import Endpoint
from conch_tools.perf.load.calls import Call, Ended
from conch_tools.perf.load.socket_client import LOST, WOULD_BLOCK, SocketClient
from conch_tools.perf.load.validation import http_difference

MALFORMED = "malformed response"
_MOST_HEAD = 1 << 16


class Http1Client(SocketClient):
    """One connection.

    Args:
        endpoint: The server.
        path: Path of the request.
        ended: Hears of the ends.
        validates: Whether requests have expected outputs.

    Raises:
        OSError: There is no server, or its certificate is wrong.
    """

    def __init__(self, endpoint: Endpoint, path: str, ended: Ended, validates: bool = False) -> None:
        super().__init__(endpoint, ended)
        self._socket.setblocking(False)
        lines = [f"POST {path} HTTP/1.1", f"host: {endpoint.authority}", "accept: */*"]
        lines += [f"{name}: {value}" for name, value in endpoint.headers.items()]
        lines += ["content-type: application/octet-stream", "inference-header-content-length: "]
        self._head = "\r\n".join(lines).encode()
        self._call: Call | None = None
        self._unsent = memoryview(b"")
        self._received = b""
        self._left = -1  # bytes of the body to come; -1 before the head, -2 while chunks come
        self._validates = validates
        self._body = b""  # kept to validate it
        self._outputs_at = 0
        self._closes = False
        self._error = ""

    @property
    def full_at(self) -> int:
        """0: HTTP/1.1 has no streams."""
        return 0

    def takes(self, slot: int) -> bool:
        """Whether a call of a slot may be sent now."""
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
        head = b"%b%d\r\ncontent-length: %d\r\n\r\n" % (self._head, request.head_bytes, len(request.body))
        self._unsent = memoryview(head + request.body)

    def flush(self, now_ns: int) -> None:
        """Sends what is queued, as far as the socket takes it."""
        try:
            while self._unsent:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except WOULD_BLOCK:
            return
        except OSError:
            self.fail(LOST, now_ns)

    def fail(self, error: str, now_ns: int) -> None:
        """Ends the call with an error; the connection is of no use any more."""
        self.lost = True
        self._end(error, now_ns)

    def _receive(self, data: bytes, now_ns: int) -> None:
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
        if self._validates:
            self._body += data
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
        if self._validates:
            self._validate(call)
        if self._error:
            self._explain(data)
        elif call is not None:
            call.responses, call.last_ns = 1, now_ns
        self.lost = self._closes
        self._end(self._error, now_ns)

    def _validate(self, call: Call | None) -> None:
        body, self._body = self._body, b""
        if self._error or call is None or call.request.expected is None:
            return
        try:
            self._error = http_difference(call.request.expected, body, self._outputs_at)
        except (ValueError, KeyError, TypeError):
            self._error = MALFORMED

    def _explain(self, body: bytes) -> None:
        if self._error in self._explained:
            return
        self._explained.add(self._error)
        try:
            self._ended.explained(self._error, str(json.loads(body)["error"]))
        except (ValueError, KeyError, TypeError):  # not of Triton's form, or in pieces
            return

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
            elif name == b"inference-header-content-length" and value.isdigit():
                self._outputs_at = int(value)
            elif name == b"connection" and value.lower() == b"close":
                self._closes = True
        return True

    def _end(self, error: str, now_ns: int) -> None:
        call, self._call = self._call, None
        self.in_flight = 0
        if call is not None:
            self._ended.call_ended(call, error, now_ns)
