"""An HTTP proxy in front of one server, which can misbehave in the ways that networks and stores do."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Fault(Enum):
    HANG = auto()
    """It never comes."""
    BUSY = auto()
    """503 in its place."""
    TRUNCATE = auto()
    """Half of it, and the header says that this is all."""
    DROP = auto()
    """Half of it, and then the connection ends."""
    CORRUPT = auto()
    """Its first byte is another one."""


@dataclass(frozen=True)
class Seen:
    """A request that came by."""

    method: str
    path: str
    range: str


Choose = Callable[[Seen], Fault | None]


@dataclass
class FaultyProxy:
    """The proxy.

    Attributes:
        port: Port on which it listens.
        seen: The requests so far.
        choose: Says which fault a request gets.
    """

    port: int = 0
    seen: list[Seen] = field(default_factory=list)
    choose: Choose = lambda seen: None
    released: threading.Event = field(default_factory=threading.Event)

    def fail(self, fault: Fault, times: int = -1, path: str = "", method: str = "") -> None:
        """Has the next requests, all if negative, with something in their path get a fault."""
        left = [times]

        def choose(seen: Seen) -> Fault | None:
            if path not in seen.path or method not in seen.method or left[0] == 0:
                return None
            left[0] -= 1
            return fault

        self.choose = choose

    def heal(self) -> None:
        """No more faults; what hangs is dropped."""
        self.choose = lambda seen: None
        self.released.set()
        self.released = threading.Event()

    def count(self, path: str = "", method: str = "") -> int:
        """Number of requests with something in their path."""
        return sum(path in seen.path and method in seen.method for seen in self.seen)


@contextmanager
def faulty_proxy(upstream: int) -> Iterator[FaultyProxy]:
    """A proxy in front of a port of this machine."""
    proxy = FaultyProxy()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *arguments: object) -> None:
            pass

        def _serve(self) -> None:
            wanted = self.headers.get("Range") or self.headers.get("x-ms-range") or ""
            seen = Seen(self.command, self.path, wanted)
            proxy.seen.append(seen)
            fault = proxy.choose(seen)
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if fault is Fault.HANG:
                proxy.released.wait()
                self.close_connection = True
                return
            if fault is Fault.BUSY:
                self.send_response(503)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            link = http.client.HTTPConnection("127.0.0.1", upstream)
            try:
                link.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                for name, value in self.headers.items():
                    link.putheader(name, value)
                link.endheaders(body)
                answer = link.getresponse()
                content = answer.read()
            finally:
                link.close()
            size = len(content)
            if fault is Fault.TRUNCATE:
                content = content[: size // 2]
                size = len(content)
            elif fault is Fault.DROP:
                content = content[: size // 2]
            elif fault is Fault.CORRUPT:
                content = bytes([content[0] ^ 255]) + content[1:]
            self.send_response_only(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                    self.send_header(name, value)
            stated = answer.getheader("Content-Length") if self.command == "HEAD" else str(size)
            self.send_header("Content-Length", stated or "0")
            self.end_headers()
            self.wfile.write(content)
            self.close_connection = self.close_connection or fault is Fault.DROP

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _serve

        def handle(self) -> None:
            with suppress(OSError):  # the client has gone
                super().handle()

    class Server(ThreadingHTTPServer):
        daemon_threads = False  # so that closing waits for them

        def handle_error(self, request: object, client_address: object) -> None:
            pass

    server = Server(("127.0.0.1", 0), Handler)
    proxy.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield proxy
    finally:
        proxy.heal()
        server.shutdown()
        thread.join()
        server.server_close()
