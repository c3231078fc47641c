"""Redis servers for tests: fakeredis behind a real socket, and one that never answers."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import redis
from tests.support.servers import eventually
from tests.support.waiting import PATIENCE_S

_SERVER = """
import sys
from fakeredis import TcpFakeServer

server = TcpFakeServer(("127.0.0.1", int(sys.argv[1])))
open(sys.argv[2], "w").write(str(server.server_address[1]))
server.serve_forever()
"""


class RedisServer:
    """A Redis that can be taken away and brought back, without what it held.

    It runs in a process of its own: it keeps a thread for every connection, and can be killed.

    Attributes:
        port: Its port, always the same one.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Starts it, and returns when it answers."""
        report = self._directory / "port"
        report.unlink(missing_ok=True)
        command = [sys.executable, "-c", _SERVER, str(self.port), str(report)]
        with (self._directory / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.port = int(eventually(lambda: report.exists() and report.read_text(), "Redis listens"))

    def stop(self) -> None:
        """Kills it: connections are reset, new ones refused."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    @contextmanager
    def client(self) -> Iterator[Any]:
        """A client to look at what it holds."""
        with closing(redis.Redis("127.0.0.1", self.port)) as client:
            yield client

    def settings(self, **more: str) -> dict[str, str]:
        """Settings for a cache in it, which waits for as long as it takes unless `more` says otherwise."""
        patience = str(round(1000 * PATIENCE_S))
        patient = {"connect_timeout": patience, "socket_timeout": patience}
        return {"host": "127.0.0.1", "port": str(self.port), **patient, **more}


@contextmanager
def redis_server() -> Iterator[RedisServer]:
    """A Redis for one block."""
    with tempfile.TemporaryDirectory(prefix="conch-redis-") as directory:
        server = RedisServer(Path(directory))
        try:
            yield server
        finally:
            server.stop()


@contextmanager
def silent_server(port: int = 0, taken: list[socket.socket] | None = None) -> Iterator[int]:
    """The port of a server that takes connections, into a list if one is given, and never says anything."""
    with closing(socket.create_server(("127.0.0.1", port))) as listener:
        taken = [] if taken is None else taken
        stopping = threading.Event()

        def accept() -> None:
            while not stopping.is_set():
                connection, _ = listener.accept()
                taken.append(connection)

        thread = threading.Thread(target=accept)
        thread.start()
        port = int(listener.getsockname()[1])
        try:
            yield port
        finally:
            stopping.set()
            socket.create_connection(("127.0.0.1", port)).close()
            thread.join()
            for connection in taken:
                connection.close()


@contextmanager
def scripted_server(reply: bytes) -> Iterator[int]:
    """The port of a server that answers anything with the same bytes."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        stopping = threading.Event()
        taken: list[socket.socket] = []

        def serve() -> None:
            while not stopping.is_set():
                connection, _ = listener.accept()
                taken.append(connection)
                try:
                    while not stopping.is_set() and connection.recv(65536):
                        connection.sendall(reply)
                except OSError:
                    continue

        thread = threading.Thread(target=serve)
        thread.start()
        port: int = listener.getsockname()[1]
        try:
            yield port
        finally:
            stopping.set()
            for connection in taken:
                with suppress(OSError):  # the client may have gone
                    connection.shutdown(socket.SHUT_RDWR)
            socket.create_connection(("127.0.0.1", port)).close()
            thread.join()
            for connection in taken:
                connection.close()
