"""`Endpoint`, which a port of a server listens on, and the texts of its addresses."""

from __future__ import annotations

from dataclasses import dataclass

_ANYWHERE = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]", "::": "[::1]"}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A port or Unix socket that a server listens on.

    Attributes:
        service: Name in the table of ports: ``gRPC``, ``HTTP``, ``Metrics``, ``Control``, or an add-on's own,
            such as ``Console``.
        url: Address for clients on this machine.
        address: Address it listens on.
        security: Its protection, such as ``TLS``.
        port: The port in use; without meaning for a Unix socket.
    """

    service: str
    url: str
    address: str
    security: str
    port: int = 0


def local_address(address: str, port: int) -> str:
    """Host and port for clients on this machine, such as ``127.0.0.1:8001``."""
    host = _ANYWHERE.get(address, address)
    return f"{f'[{host}]' if ':' in host and not host.startswith('[') else host}:{port}"


def listening(target: str, port: int) -> str:
    """An address with the port in use, also if any free port was requested."""
    return f"{target.rpartition(':')[0]}:{port}"


def security(tls: object | None) -> str:
    """The protection of a port without tokens."""
    return "plain text" if tls is None else "TLS"
