"""What a server says of itself once it serves: its models, and where clients find it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from conch.core.server_core import IndexEntry
from conch.tables import table

_REASON_WIDTH = 60
_ANYWHERE = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]", "::": "[::1]"}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A port, or a Unix socket, that a server listens on.

    Attributes:
        service: What is served there: ``gRPC``, ``HTTP``, ``Metrics`` or ``Control``.
        url: What clients on this machine use to reach it.
        address: What it listens on.
        security: How it is protected.
    """

    service: str
    url: str
    address: str
    security: str


def local_address(address: str, port: int) -> str:
    """Host and port for clients on this machine, such as ``127.0.0.1:8001``."""
    host = _ANYWHERE.get(address, address)
    return f"{f'[{host}]' if ':' in host and not host.startswith('[') else host}:{port}"


def models_table(models: Iterable[IndexEntry]) -> str:
    """The versions of all models, with the reasons of those that do not serve."""
    rows = [
        [
            entry.name,
            entry.version or "-",
            entry.state or "not loaded",
            textwrap.fill(entry.reason, _REASON_WIDTH),
        ]
        for entry in models
    ]
    return table(["Model", "Version", "Status", "Reason"], rows)


def banner(models: Iterable[IndexEntry], endpoints: Sequence[Endpoint], notes: Sequence[str] = ()) -> str:
    """The models, a line for each note, and the endpoints."""
    rows = [[each.service, each.url, each.address, each.security] for each in endpoints]
    return "\n".join(
        (models_table(models), *notes, table(["Service", "URL", "Listens on", "Security"], rows))
    )
