"""The limit of a call's metadata, which gRPC's C core checks only for clients that acknowledge its settings.

HTTP/2's compression of headers lets a few bytes stand for much metadata: a client that goes beyond the limit
is disconnected, or it could occupy the server with one small call after the other. No state.
"""

from __future__ import annotations

import os
import socket
from contextlib import closing, suppress
from pathlib import Path

from conch.frontends.grpc.rpc_calls import Metadata

_ENTRY_BYTES = 32  # of each entry, as HTTP/2 counts
# Without references to the connection's table, entries are as long as what was sent.
_FEW_ENTRIES = 16
_DESCRIPTORS = Path("/proc/self/fd")


def exceeds(metadata: Metadata, most_bytes: int) -> bool:
    """True if metadata has more bytes, as HTTP/2 counts them, than a limit."""
    if len(metadata) <= _FEW_ENTRIES:
        return False
    return sum(len(key) + len(value) + _ENTRY_BYTES for key, value in metadata) > most_bytes


def disconnect(client: str, port: int) -> bool:
    """Shuts down a client's connection to a port; returns whether it was connected.

    grpcio hides its connections, so all descriptors of the process are scanned. Clients on Unix sockets have
    no address and stay connected.
    """
    kind, _, address = client.partition(":")
    host, _, client_port = address.rpartition(":")
    if kind not in ("ipv4", "ipv6") or not _DESCRIPTORS.is_dir():
        return False
    for name in os.listdir(_DESCRIPTORS):
        with suppress(OSError):
            if not os.readlink(_DESCRIPTORS / name).startswith("socket:"):
                continue
            with closing(socket.socket(fileno=os.dup(int(name)))) as connection:
                if connection.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                there = connection.getpeername()
                mapped = there[0].removeprefix("::ffff:")  # of IPv4 on a socket for both
                if (mapped, there[1]) == (host.strip("[]"), int(client_port)) and (
                    connection.getsockname()[1] == port
                ):
                    connection.shutdown(socket.SHUT_RDWR)
                    return True
    return False
