"""Listening sockets; connections are accepted on the loop's thread."""

from __future__ import annotations

import errno
import logging
import os
import socket
import stat
from collections.abc import Callable
from contextlib import suppress

from conch.core.clock import Clock, monotonic_ns
from conch.ipc.loop import IoLoop

log = logging.getLogger(__name__)

_BACKLOG = 2048
_TURN_NS = 2_000_000
_ACCEPT_AGAIN_NS = 100_000_000


class Listener:
    """A listening socket.

    Args:
        bound: The socket, which `close` closes.
        take: Takes each connection, which does not block, with its client's address; may raise OSError: the
            client disconnected.
        name: Name of the port in the log.
        clock: Monotonic time in nanoseconds.
    """

    def __init__(
        self,
        bound: socket.socket,
        take: Callable[[socket.socket, object], None],
        name: str,
        clock: Clock = monotonic_ns,
    ) -> None:
        self._bound = bound
        self._take = take
        self._clock = clock
        self._loop: IoLoop | None = None  # while it accepts
        self._closed = False
        address = bound.getsockname()
        self._path = address if isinstance(address, str) else ""
        self._inode = os.stat(address).st_ino if self._path else 0
        self._name = name
        self._exhausted = False  # the last connection could not be accepted

    def listen(self, loop: IoLoop) -> None:
        """Starts to accept, or goes on."""
        if self._closed:
            return
        try:
            loop.register(self._bound.fileno(), self)
        except OSError:  # memory is exhausted
            self._listen_later(loop)
        else:
            self._loop = loop

    def _listen_later(self, loop: IoLoop) -> None:
        loop.call_at(self._clock() + _ACCEPT_AGAIN_NS, lambda: self.listen(loop))

    def on_ready(self, events: int) -> None:
        """Accepts some of the connections that wait: where all places are taken, each may cost a search."""
        end_ns = self._clock() + _TURN_NS
        while self._clock() < end_ns:
            try:
                accepted, address = self._bound.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError as error:  # descriptors or memory are exhausted
                if not self._exhausted:
                    log.warning("%s can't accept connections: %s", self._name, error.strerror)
                self._exhausted = True
                loop, self._loop = self._loop, None
                assert loop is not None, "events come while it accepts"
                loop.unregister(self._bound.fileno())
                self._listen_later(loop)
                return
            self._exhausted = False
            accepted.setblocking(False)
            with suppress(OSError):
                self._take(accepted, address)

    def close(self) -> None:
        """Stops listening; removes the file of a Unix socket."""
        if self._closed:
            return
        self._closed = True
        if self._loop is not None:
            self._loop.unregister(self._bound.fileno())
        self._bound.close()
        with suppress(OSError):
            if self._path and os.stat(self._path).st_ino == self._inode:  # else it is a successor's
                os.unlink(self._path)


def tcp_sockets(host: str, port: int, reuse_port: bool) -> list[socket.socket]:
    """Listens on the addresses of a host: all that this machine has, with one port; ``::`` has IPv4 too.

    Raises:
        OSError: It is not known, it has no address of this machine, or the port is in use on one of them.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    bound: list[socket.socket] = []
    number = port
    failure: OSError | None = None
    for family, _, _, _, target in dict.fromkeys(found):
        try:
            bound.append(_tcp_socket(family, (target[0], number, *target[2:]), reuse_port, host == "::"))
        except OSError as error:
            failure = error
            if port and error.errno == errno.EADDRINUSE:
                while bound:
                    bound.pop().close()
                break
        else:
            number = bound[0].getsockname()[1]
    if not bound:
        assert failure is not None, "a host has an address"
        raise failure
    return bound


def _tcp_socket(family: int, target: tuple[object, ...], reuse_port: bool, both: bool) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not both)
        return _listening(bound, target)
    except BaseException:
        bound.close()
        raise


def _listening(bound: socket.socket, address: str | tuple[object, ...]) -> socket.socket:
    bound.bind(address)
    bound.listen(_BACKLOG)
    bound.setblocking(False)
    return bound


def unix_socket(path: str) -> socket.socket:
    """Listens on a path; takes the place of a socket of a server that ended."""
    with suppress(OSError):
        if stat.S_ISSOCK(os.stat(path).st_mode):
            os.unlink(path)  # of a server that ended; a running one loses its clients, as with gRPC
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        return _listening(bound, path)
    except BaseException:
        bound.close()
        raise
