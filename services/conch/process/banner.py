"""Announcement of a server's start: models and endpoints, as tables for people or as lines of a log."""

from __future__ import annotations

import logging
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from conch.core.model_control import NOT_RESIDENT, IndexEntry
from conch.process.endpoint import Endpoint

_REASON_WIDTH = 60


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


@dataclass(frozen=True, slots=True)
class Announcement:
    """A text that is logged whatever levels the log leaves out.

    Attributes:
        text: The text for people, with tables.
        lines: The same as messages, each with its level and fields for a log in JSON.
    """

    text: str
    lines: Sequence[tuple[int, str, Mapping[str, str]]]


def failure_announcement(models: Sequence[IndexEntry], *causes: str) -> Announcement:
    """The versions of all models at a start that failed, then a line for each cause."""
    return Announcement(
        "\n".join((*([_models_table(models)] if models else []), *causes)),
        [
            *_model_lines(models, failed=logging.ERROR),
            *((logging.ERROR, cause.lstrip(), {}) for cause in causes),
        ],
    )


def _model_lines(
    models: Iterable[IndexEntry], failed: int = logging.INFO
) -> list[tuple[int, str, Mapping[str, str]]]:
    return [
        (
            failed if each.state == "UNAVAILABLE" and each.reason != NOT_RESIDENT else logging.INFO,
            _model_message(each),
            _fields(each),
        )
        for each in models
    ]


def _model_message(entry: IndexEntry) -> str:
    version = f" version {entry.version}" if entry.version else ""
    reason = f": {entry.reason}" if entry.reason else ""
    return f"model '{entry.name}'{version} is {entry.state or 'not loaded'}{reason}"


def _fields(entry: IndexEntry) -> dict[str, str]:
    fields = {
        "model": entry.name,
        "version": entry.version,
        "state": entry.state,
        "reason": entry.reason,
    }
    return {name: value for name, value in fields.items() if value}


def _models_table(models: Iterable[IndexEntry]) -> str:
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


def start_announcement(
    models: Sequence[IndexEntry], endpoints: Sequence[Endpoint], exposure: str
) -> Announcement:
    """The models and the endpoints of a server that has started, and what is open to which clients.

    Models that are not in memory are only counted: there may be thousands.
    """
    shown = [each for each in models if each.reason != NOT_RESIDENT]
    left = len(models) - len(shown)
    notes = [f"{left:,} models are loaded for their first request"] if left else []
    rows = [[each.service, each.url, each.address, each.security] for each in endpoints]
    lines = [(logging.INFO, _endpoint_message(each), _endpoint_fields(each)) for each in endpoints]
    ports = table(["Service", "URL", "Listens on", "Security"], rows)
    return Announcement(
        "\n".join((_models_table(shown), *notes, exposure, ports)),
        [
            *_model_lines(shown),
            *((logging.INFO, note, {}) for note in notes),
            *lines,
            (logging.INFO, exposure, {}),
        ],
    )


def _endpoint_message(endpoint: Endpoint) -> str:
    return f"{endpoint.service} is at {endpoint.url}, listens on {endpoint.address}, {endpoint.security}"


def _endpoint_fields(endpoint: Endpoint) -> dict[str, str]:
    return {name: getattr(endpoint, name) for name in ("service", "url", "address", "security")}
