"""Connections on their way from the core to a front.

What is in the socket of a front that is lost is lost with it. So the core keeps its own descriptor of each
connection until the front has taken it: until it has added one to an eventfd, whose count outlives the front.
The front does so before it reads from the connection. One that it has not counted is as it was when the core
accepted it, and goes to another front.

Threads and locks: each end is used on the loop of its connections.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

_MOST_BYTES = 4096

T = TypeVar("T")


class ConnectionSender(Generic[T]):
    """The core's end: passes connections on, each with facts about it.

    Args:
        sock: The socket.
        taken: The eventfd; the sender closes both.
    """

    def __init__(self, sock: socket.socket, taken: int) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._taken = taken
        self._kept: deque[tuple[socket.socket, T]] = deque()

    def send(self, accepted: socket.socket, packet: bytes, facts: T) -> bool:
        """Sends a connection, and owns it then; False if the front does not take it now."""
        self.release_taken()
        try:
            socket.send_fds(self._socket, [packet], [accepted.fileno()])
        except OSError:
            return False
        self._kept.append((accepted, facts))
        return True

    def release_taken(self) -> None:
        """Closes this end's descriptors of connections that the front has taken."""
        if not self._kept:
            return
        try:
            count = os.eventfd_read(self._taken)
        except BlockingIOError:
            return
        for _ in range(min(count, len(self._kept))):
            self._kept.popleft()[0].close()

    def close(self) -> None:
        """Sends no more."""
        self._socket.close()

    def take_back(self) -> list[tuple[socket.socket, T]]:
        """The connections that the front has not taken, once its process has ended; none the second time."""
        self.release_taken()
        kept, self._kept = self._kept, deque()
        if self._taken >= 0:
            os.close(self._taken)
            self._taken = -1
        return list(kept)


class ConnectionReceiver:
    """The front's end.

    Args:
        sock: The socket.
        taken: The eventfd.

    Attributes:
        ended: True if the core sends no more.
    """

    def __init__(self, sock: socket.socket, taken: int) -> None:
        sock.setblocking(False)  # `recv_fds` ignores flags
        self._socket = sock
        self._taken = taken
        self.ended = False

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self._socket.fileno()

    def receive(self) -> Iterator[tuple[bytes, int | None]]:
        """Takes what has come: packets, with the connection's descriptor or None if none was free."""
        while True:
            try:
                packet, descriptors, _, _ = socket.recv_fds(self._socket, _MOST_BYTES, 1)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if not packet:
                self.ended = True
                return
            os.eventfd_write(self._taken, 1)
            yield packet, descriptors[0] if descriptors else None
