"""Nearest valid names for the unknown fields and enum values that protobuf's parsers complain about."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from conch.protocol.model_config_pb2 import ModelConfig

_UNKNOWN_FIELD = re.compile(r'Message type "(?P<type>[\w.]+)" has no field named "(?P<name>\w+)"')
_UNKNOWN_VALUE = re.compile(r'Enum type "(?P<type>[\w.]+)" has no value named (?P<name>\w+)')
_UNKNOWN_JSON_VALUE = re.compile(r"Invalid enum value (?P<name>\w+) for enum type (?P<type>[\w.]+?)\.? at ")


def nearest(name: str, names: Iterable[str]) -> str:
    """The name that is closest to one, or nothing if none is close."""
    return next(iter(difflib.get_close_matches(name, list(names), n=1)), "")


def unknown_name(message: str) -> tuple[str, str] | None:
    """The unknown name that a parser's message is about and the known one nearest to it, if any.

    None for messages about something else.
    """
    pool = ModelConfig.DESCRIPTOR.file.pool
    if match := _UNKNOWN_FIELD.search(message):
        known = list(pool.FindMessageTypeByName(match["type"]).fields_by_name)
    elif match := _UNKNOWN_VALUE.search(message) or _UNKNOWN_JSON_VALUE.search(message):
        known = list(pool.FindEnumTypeByName(match["type"]).values_by_name)
    else:
        return None
    return match["name"], nearest(match["name"], known)


def with_suggestion(message: str) -> str:
    """Adds ``did you mean 'x'?`` to a parser's message about an unknown name, if a known one is near."""
    _, near = unknown_name(message) or ("", "")
    return f"{message.rstrip('.')}; did you mean '{near}'?" if near else message
