"""HTTP as bytes: what no well-behaved client would send, and what comes back."""

from __future__ import annotations

import json
import socket
import socketserver
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from tests.support.servers import WAIT_S

_READ = 1 << 16


@dataclass(frozen=True)
class Response:
    """One response.

    Attributes:
        status: Its status.
        headers: Names in lower case.
        body: Its body, without chunks.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)


class RawHttp:
    """A connection.

    Args:
        address: The server's HOST:PORT.
        receive_buffer: The kernel's buffer for what has come, in bytes; None for its default.
    """

    def __init__(self, address: str, receive_buffer: int | None = None) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.socket()
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(WAIT_S)
        self.socket.connect((host, int(port)))
        self._unread = b""

    def send(self, data: bytes) -> None:
        """Sends bytes as they are."""
        self.socket.sendall(data)

    def send_while_taken(self, data: bytes) -> bool:
        """Sends bytes, unless the server has hung up; whether they were sent."""
        try:
            self.socket.sendall(data)
        except ConnectionError:
            return False
        return True

    def half_close(self) -> None:
        """Says that nothing more will be sent."""
        self.socket.shutdown(socket.SHUT_WR)

    def response(self) -> Response | None:
        """The next response; None if the server hangs up first."""
        head = self._until(b"\r\n\r\n")
        if head is None:
            return None
        line, *lines = head.decode("latin-1").split("\r\n")
        version, status = line.split(" ")[:2]
        assert version in {"HTTP/1.1", "HTTP/1.0"}, line
        pairs = (each.partition(":") for each in lines if each)
        headers = {name.lower(): value.strip() for name, _, value in pairs}
        if int(status) == 100:
            return Response(100, headers, b"")
        if headers.get("transfer-encoding") == "chunked":
            return Response(int(status), headers, self._chunks())
        if "content-length" in headers:
            return Response(int(status), headers, self._exactly(int(headers["content-length"])))
        return Response(int(status), headers, self.rest())

    def responses(self) -> Iterator[Response]:
        """All responses until the server hangs up."""
        while (response := self.response()) is not None:
            yield response

    def rest(self) -> bytes:
        """Everything until the server hangs up."""
        while self._read():
            pass
        unread, self._unread = self._unread, b""
        return unread

    def close(self) -> None:
        """Hangs up."""
        self.socket.close()

    def _read(self) -> bool:
        data = b""
        # One that refuses what it has not read yet resets the connection.
        with suppress(ConnectionError):
            data = self.socket.recv(_READ)
        self._unread += data
        return bool(data)

    def _until(self, end: bytes) -> bytes | None:
        while end not in self._unread:
            if not self._read():
                return None
        found, self._unread = self._unread.split(end, 1)
        return found

    def _exactly(self, size: int) -> bytes:
        while len(self._unread) < size:
            assert self._read(), f"the server hung up {size - len(self._unread)} bytes too early"
        found, self._unread = self._unread[:size], self._unread[size:]
        return found

    def _chunks(self) -> bytes:
        whole = b""
        while True:
            line = self._until(b"\r\n")
            assert line is not None, "the server hung up within its chunks"
            chunk = self._exactly(int(line, 16))
            assert self._exactly(2) == b"\r\n"
            if not chunk:
                return whole
            whole += chunk


@contextmanager
def raw_http(address: str, receive_buffer: int | None = None) -> Iterator[RawHttp]:
    """A connection, closed after the block."""
    with closing(RawHttp(address, receive_buffer)) as connection:
        yield connection


def head(method: str, path: str, *lines: str) -> bytes:
    """A request's line and headers."""
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: conch", *lines, "", ""]).encode("latin-1")


def request(method: str, path: str, body: bytes = b"", *lines: str) -> bytes:
    """A whole request."""
    return head(method, path, f"Content-Length: {len(body)}", *lines) + body


def infer_body(model_input: str, datatype: str, values: list[Any], **more: Any) -> bytes:
    """A body with one tensor of one row, as JSON."""
    tensor = {"name": model_input, "datatype": datatype, "shape": [1, len(values)], "data": values}
    return json.dumps({"inputs": [tensor], **more}).encode()


@contextmanager
def dripping(beginning: bytes) -> Iterator[str]:
    """HOST:PORT of a server that answers each request with this, and then a byte now and then for ever."""
    ended = threading.Event()

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with suppress(OSError):  # the client has gone
                self.request.sendall(beginning)
                while not ended.wait(0.05):
                    self.request.sendall(b"x")

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = False  # closing waits for them

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            ended.set()
            server.shutdown()
            thread.join()


DRIPS = {"head": b"HTTP/1.1 200 OK\r\nX: ", "body": b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n"}
"""Beginnings of responses that do not end."""
