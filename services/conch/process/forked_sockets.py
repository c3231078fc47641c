"""Closes a server's sockets in processes that its models fork.

Owns the addresses that the servers of this process listen on. A fork has descriptors of all sockets: without
this it would keep the ports, and clients' connections, after the server has ended. Sockets of gRPC's C core
are found by their addresses too. `exec` closes all of them anyway.
"""

from __future__ import annotations

import os
import socket
import stat
import weakref

_INTERNET = (socket.AF_INET, socket.AF_INET6)


class ListeningAddresses:
    """The ports and Unix socket paths that one server listens on."""

    def __init__(self) -> None:
        self.addresses: set[int | str] = set()
        _known.add(self)

    def add(self, target: str, port: int) -> None:
        """Adds a `GrpcOptions.target`, with the port in use unless it is a Unix socket."""
        self.addresses.add(target.removeprefix("unix:") if target.startswith("unix:") else port)

    def clear(self) -> None:
        """Removes all addresses, once the server has closed them."""
        self.addresses.clear()


_known: weakref.WeakSet[ListeningAddresses] = weakref.WeakSet()


def _close_in_child() -> None:
    addresses: set[int | str] = set()
    for each in list(_known):
        addresses |= each.addresses
    if not addresses:
        return
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for name in os.listdir("/proc/self/fd"):
        if _local_address(int(name)) in addresses:
            # Python objects still hold the number and may close it, so it must not become another file's.
            os.dup2(null, int(name), inheritable=False)
    os.close(null)


def _local_address(descriptor: int) -> int | str | None:
    """The port or path that a descriptor's socket is bound to; None for other descriptors."""
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return None
        sock = socket.socket(fileno=descriptor)
    except OSError:
        return None  # the descriptor of the directory listing
    try:
        name = sock.getsockname()
    except OSError:
        return None
    finally:
        sock.detach()
    if sock.family in _INTERNET:
        port: int = name[1]
        return port
    return name if isinstance(name, str) and name else None


os.register_at_fork(after_in_child=_close_in_child)
