"""Servers of known behaviour, for clients that measure: each request is answered as a function says."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count

DROP = "drop"
"""The connection is closed instead of an answer."""


@dataclass
class KnownPeer:
    """Record of a server of known behaviour.

    Attributes:
        port: Port on which it listens.
        received: Requests that it has read.
    """

    port: int
    received: int = 0


@contextmanager
def http_peer(behaviour: Callable[[int], str], port: int = 0) -> Iterator[KnownPeer]:
    """An HTTP/1.1 server; `behaviour` gets a request's number from 0 and gives a status line, or `DROP`."""
    with socket.create_server(("127.0.0.1", port)) as listener:
        peer = KnownPeer(listener.getsockname()[1])
        numbers = count()
        connections: list[socket.socket] = []
        threads: list[threading.Thread] = []

        def serve(connection: socket.socket) -> None:
            with connection, connection.makefile("rb") as reader, suppress(OSError):
                while True:
                    length, lines = 0, 0
                    while (line := reader.readline()) not in (b"\r\n", b""):
                        lines += 1
                        name, _, value = line.partition(b":")
                        if name.lower() == b"content-length":
                            length = int(value)
                    if not lines:
                        return
                    reader.read(length)
                    number = next(numbers)
                    peer.received = number + 1
                    answer = behaviour(number)
                    if answer == DROP:
                        return
                    connection.sendall(f"HTTP/1.1 {answer}\r\ncontent-length: 2\r\n\r\n{{}}".encode())

        def accept() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    connections.append(connection)
                    thread = threading.Thread(target=serve, args=(connection,))
                    threads.append(thread)
                    thread.start()

        accepting = threading.Thread(target=accept)
        accepting.start()
        try:
            yield peer
        finally:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            accepting.join()
            for connection in connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join()
