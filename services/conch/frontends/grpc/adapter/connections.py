"""Disconnects clients; finds their connections among the process's descriptors, as the C core hides them."""

from __future__ import annotations

import os
import socket
from contextlib import closing, suppress
from pathlib import Path

_DESCRIPTORS = Path("/proc/self/fd")


def disconnect(peer: str, ports: frozenset[int]) -> bool:
    """Shuts down a client's connection; the C core then drops its calls. Returns whether it was connected.

    Scans all descriptors, so it is for harmful clients only.

    Args:
        peer: The client, as in `Call.client`; clients on Unix sockets have no address and stay connected.
        ports: Ports that the server listens on.
    """
    kind, _, address = peer.partition(":")
    host, _, port = address.rpartition(":")
    if kind not in ("ipv4", "ipv6") or not _DESCRIPTORS.is_dir():
        return False
    wanted = host.strip("[]"), int(port)
    for name in os.listdir(_DESCRIPTORS):
        with suppress(OSError):
            if not os.readlink(_DESCRIPTORS / name).startswith("socket:"):
                continue
            with closing(socket.socket(fileno=os.dup(int(name)))) as connection:
                if connection.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                there = connection.getpeername()
                mapped = there[0].removeprefix("::ffff:")  # of IPv4 on a socket for both
                if (mapped, there[1]) == wanted and connection.getsockname()[1] in ports:
                    connection.shutdown(socket.SHUT_RDWR)
                    return True
    return False
