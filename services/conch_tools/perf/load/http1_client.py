"""An HTTP/1.1 client that sends ready bodies: one request at a time on a connection, no threads.

Server-sent events are responses of their own, except ``[DONE]`` and OpenAI's events without any text, such as
the first one of a chat, which has the role.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from time import monotonic_ns

from conch_tools.connection import Endpoint
from conch_tools.perf.load.calls import Ended, LoadCall
from conch_tools.perf.load.socket_client import LOST, WOULD_BLOCK, SocketClient
from conch_tools.perf.load.validation import http_difference
from conch_tools.perf.measure.records import KeptResponse

MALFORMED = "malformed response"
ERROR_EVENT = "error event"
_TEXTS = ("content", "text", "reasoning_content", "reasoning", "refusal", "tool_calls")
_MOST_HEAD = 1 << 16


class Http1Client(SocketClient):
    """One connection.

    Args:
        endpoint: The server.
        path: Path of the request.
        ended: Receives the ends.
        validates: True if requests have expected outputs.

    Raises:
        OSError: There is no server, or its certificate is wrong.
    """

    def __init__(self, endpoint: Endpoint, path: str, ended: Ended, validates: bool = False) -> None:
        super().__init__(endpoint, ended)
        self._socket.setblocking(False)
        lines = [f"POST {path} HTTP/1.1", f"host: {endpoint.authority}", "accept: */*"]
        lines += [f"{name}: {value}" for name, value in endpoint.headers.items()]
        start = "\r\n".join(lines).encode()
        self._json_head = b"%b\r\ncontent-type: application/json" % start
        self._binary_head = (
            b"%b\r\ncontent-type: application/octet-stream\r\ninference-header-content-length: " % start
        )
        self._call: LoadCall | None = None
        self._unsent = memoryview(b"")
        self._received = b""
        self._left = -1  # bytes of the body to come; -1 before the head, -2 while chunks come
        self._chunks = _Chunks()
        self._events = False
        self._validates = validates
        self._body: list[bytes] = []  # of an error, of a response that is kept, or the begin of an event
        self._head_bytes = 0
        self._closes = False
        self._error = ""

    @property
    def full_at(self) -> int:
        """0: HTTP/1.1 has no streams."""
        return 0

    def takes(self, slot: int) -> bool:
        """True if a call of a slot may be sent now."""
        return not self.lost and self._call is None

    @property
    def wants_write(self) -> bool:
        """True if the socket took only a part of the output."""
        return bool(self._unsent)

    def send(self, call: LoadCall, now_ns: int) -> None:
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
        if self._left == -2:
            try:
                data = self._chunks.take(data)
            except ValueError:
                self.fail(MALFORMED, now_ns)
                return
            ended = self._chunks.ended
        elif len(data) > self._left:
            self.fail(MALFORMED, now_ns)
            return
        else:
            self._left -= len(data)
            ended = not self._left
        if self._events:
            self._take_events(data, now_ns)
        elif self._error or self._validates or (self._call is not None and self._call.kept is not None):
            self._body.append(data)
        if ended:
            self._finish(now_ns)

    def _take_events(self, data: bytes, now_ns: int) -> None:
        text = b"".join((*self._body, data)).replace(b"\r\n", b"\n")
        *events, rest = text.split(b"\n\n")
        self._body = [rest]
        call = self._call
        assert call is not None, "a body without a request is malformed"
        for event in events:
            content = _event_data(event)
            if content.startswith(b'{"error"'):
                self._error = self._error or ERROR_EVENT
                self._explain(content)
            elif content and content != b"[DONE]" and not _is_mark(content):
                if call.kept is not None:
                    call.kept.append(KeptResponse(monotonic_ns(), event))
                self._ended.responded(call, now_ns)
                call.last_ns = now_ns
                call.responses += 1

    def _finish(self, now_ns: int) -> None:
        """Ends the call with its response."""
        call, body = self._call, b"".join(self._body)
        if self._error:
            self._explain(body)
        elif call is not None and not self._events:
            if call.request.expected is not None:
                self._validate(call.request.expected, body)
            call.responses, call.last_ns = 1, now_ns
            if call.kept is not None:
                call.kept.append(KeptResponse(now_ns, body, self._head_bytes))
        self.lost = self._closes
        self._end(self._error, now_ns)

    def _validate(self, expected: Mapping[str, bytes], body: bytes) -> None:
        try:
            self._error = http_difference(expected, body, self._head_bytes)
        except (ValueError, KeyError, TypeError):
            self._error = MALFORMED

    def _explain(self, body: bytes) -> None:
        if self._error in self._explained:
            return
        self._explained.add(self._error)
        try:
            self._ended.explained(self._error, str(json.loads(body)["error"]))
        except (ValueError, KeyError, TypeError):  # not of Triton's form
            return

    def _read_head(self, head: bytes) -> bool:
        lines = head.split(b"\r\n")
        words = lines[0].split(b" ", 2)
        if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
            return False
        self._error = "" if words[1] == b"200" else f"HTTP {words[1].decode()}"
        self._left, self._closes = 0, words[0] == b"HTTP/1.0"
        self._events, self._body, self._head_bytes = False, [], 0
        for line in lines[1:]:
            name, _, value = line.partition(b":")
            name, value = name.lower(), value.strip()
            if name == b"content-length":
                if not value.isdigit():
                    return False
                self._left = int(value)
            elif name == b"transfer-encoding" and value.lower() == b"chunked":
                self._left, self._chunks = -2, _Chunks()
            elif name == b"content-type" and value.startswith(b"text/event-stream"):
                self._events = True
            elif name == b"inference-header-content-length" and value.isdigit():
                self._head_bytes = int(value)
            elif name == b"connection" and value.lower() == b"close":
                self._closes = True
        return True

    def _end(self, error: str, now_ns: int) -> None:
        call, self._call = self._call, None
        self.in_flight = 0
        if call is not None:
            self._ended.call_ended(call, error, now_ns)


class _Chunks:
    """Decodes a chunked body.

    Attributes:
        ended: True if its last chunk has come.
    """

    def __init__(self) -> None:
        self._rest = b""
        self.ended = False

    def take(self, data: bytes) -> bytes:
        """The contents of the chunks that are whole now.

        Raises:
            ValueError: The body is malformed.
        """
        rest = self._rest + data
        at = 0
        found = []
        while not self.ended:
            line_end = rest.find(b"\r\n", at)
            if line_end < 0:
                break
            size = int(rest[at:line_end].partition(b";")[0], 16)
            if size < 0:
                raise ValueError("a chunk with a negative size")
            if not size:
                self.ended = rest.find(b"\r\n\r\n", line_end) >= 0
                break
            begin = line_end + 2
            if len(rest) < begin + size + 2:
                break
            found.append(rest[begin : begin + size])
            at = begin + size + 2
        self._rest = rest[at:]
        return b"".join(found)


def _is_mark(content: bytes) -> bool:
    """True for an event of OpenAI's routes without text, such as a role or a reason to finish."""
    if b'"choices"' not in content:
        return False
    try:
        choices = json.loads(content)["choices"]
        parts = [choice.get("delta", choice) for choice in choices]
        return not any(part.get(name) for part in parts for name in _TEXTS)
    except (ValueError, LookupError, TypeError, AttributeError):
        return False  # of another kind


def _event_data(event: bytes) -> bytes:
    """The data of a server-sent event; empty for a comment."""
    lines = (line for line in event.split(b"\n") if line.startswith(b"data:"))
    return b"\n".join(line[5:].strip() for line in lines)
