"""Which format a client asks for, by its headers; pure."""

from __future__ import annotations

from conch.observability.metrics.exposition import Format

_OPENMETRICS = "application/openmetrics-text"
_TEXT = ("text/plain", "text/*", "*/*")
_ANY_CODING = "*"


def wanted_format(accept: str, accept_encoding: str) -> Format:
    """The format that a client likes best, of those there are.

    Args:
        accept: The header ``Accept``, possibly empty.
        accept_encoding: The header ``Accept-Encoding``, possibly empty.
    """
    types = _qualities(accept)
    openmetrics = types.get(_OPENMETRICS, 0.0)
    text = next((types[name] for name in _TEXT if name in types), 0.0)
    codings = _qualities(accept_encoding)
    gzip = codings.get("gzip", codings.get(_ANY_CODING, 0.0))
    return Format(openmetrics > 0 and openmetrics >= text, gzip > 0)


def _qualities(header: str) -> dict[str, float]:
    """How much each of the values of a header is liked; the most where one is named several times."""
    found: dict[str, float] = {}
    for item in header.split(","):
        name, *parameters = (part.strip().lower() for part in item.split(";"))
        if name:
            found[name] = max(found.get(name, 0.0), _quality(parameters))
    return found


def _quality(parameters: list[str]) -> float:
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            try:
                return float(value)
            except ValueError:
                return 0.0
    return 1.0
