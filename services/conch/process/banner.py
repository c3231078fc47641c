"""Texts of a started server: tables of its models and endpoints. Used by `conch.server` and the commands."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from conch.core.model_control import IndexEntry

_REASON_WIDTH = 60
_ANYWHERE = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]", "::": "[::1]"}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A port or Unix socket that a server listens on.

    Attributes:
        service: ``gRPC``, ``HTTP``, ``Metrics`` or ``Control``.
        url: Address for clients on this machine.
        address: Address it listens on.
        security: Its protection, such as ``TLS``.
    """

    service: str
    url: str
    address: str
    security: str


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with a border, as wide as its contents; cells may have several lines."""
    split = [[cell.splitlines() or [""] for cell in row] for row in (header, *rows)]
    widths = [max(len(line) for row in split for line in row[column]) for column in range(len(header))]
    border = "+" + "+".join("-" * (width + 2) for width in widths) + "+"
    lines = [border]
    for number, row in enumerate(split):
        for level in range(max(map(len, row))):
            cells = (cell[level] if level < len(cell) else "" for cell in row)
            lines.append(
                "|" + "|".join(f" {cell:<{width}} " for cell, width in zip(cells, widths, strict=True)) + "|"
            )
        if number == 0:
            lines.append(border)
    return "\n".join([*lines, border])


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


def models_table(models: Iterable[IndexEntry]) -> str:
    """The versions of all models, with the reasons of unavailable ones."""
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
