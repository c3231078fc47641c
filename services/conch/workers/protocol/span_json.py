"""Encodes spans of model code as JSON for the server, and decodes them.

Used by: response_writer, worker_connection.
"""

from __future__ import annotations

from typing import Any

from conch.core.request import SpanRecord
from conch.workers.protocol.wire import WireError

_TEXTS = ("name", "error_type", "error")
_NUMBERS = ("span_id", "parent_id", "start_ns", "end_ns")
_MOST = 2**64


def span_to_json(span: SpanRecord) -> dict[str, Any]:
    """Encodes a span as JSON values."""
    return span._asdict()


def span_from_json(fields: dict[str, Any]) -> SpanRecord:
    """Decodes a span.

    Raises:
        WireError: It is malformed.
    """
    attributes = fields.get("attributes")
    if (
        set(fields) != set(SpanRecord._fields)
        or not all(isinstance(fields[name], str) for name in _TEXTS)
        or not all(isinstance(fields[name], int) and 0 <= fields[name] < _MOST for name in _NUMBERS)
        or not isinstance(attributes, dict)
        or not all(isinstance(value, str | bool | int | float) for value in attributes.values())
    ):
        raise WireError("a span has names, ids, times and attributes")
    return SpanRecord(**fields)
