"""A server that streams the beginning of a chat's answer, and goes on until its client has gone."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

from tests.support.waiting import PATIENCE_S


class HeldChat:
    """The server.

    Attributes:
        port: Its port.
        gone: True once a client has closed its connection.
        asked: Bodies of the requests.
    """

    def __init__(self) -> None:
        self.port = 0
        self.gone = False
        self.asked: list[dict[str, object]] = []


@contextmanager
def held_chat(pieces: list[str]) -> Iterator[HeldChat]:
    """A server for a block."""
    site = HeldChat()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *arguments: object) -> None:
            pass

        def do_POST(self) -> None:
            site.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            for piece in pieces:
                chunk = {"choices": [{"index": 0, "delta": {"content": piece}}]}
                self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
            self.connection.settimeout(PATIENCE_S)
            site.gone = self.connection.recv(1) == b""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    site.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield site
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
