"""Nearest valid names for the unknown fields and enum values that protobuf's parsers complain about."""

from __future__ import annotations

import difflib
import re

from conch.protocol.model_config_pb2 import ModelConfig

_UNKNOWN_FIELD = re.compile(r'Message type "(?P<type>[\w.]+)" has no field named "(?P<name>\w+)"')
_UNKNOWN_VALUE = re.compile(r'Enum type "(?P<type>[\w.]+)" has no value named (?P<name>\w+)')
_UNKNOWN_JSON_VALUE = re.compile(r"Invalid enum value (?P<name>\w+) for enum type (?P<type>[\w.]+?)\.? at ")


def with_suggestion(message: str) -> str:
    """Adds ``did you mean 'x'?`` to a parser's message about an unknown name, if a known one is near."""
    candidates: list[str] = []
    pool = ModelConfig.DESCRIPTOR.file.pool
    if match := _UNKNOWN_FIELD.search(message):
        candidates = list(pool.FindMessageTypeByName(match["type"]).fields_by_name)
    elif match := _UNKNOWN_VALUE.search(message) or _UNKNOWN_JSON_VALUE.search(message):
        candidates = list(pool.FindEnumTypeByName(match["type"]).values_by_name)
    if match is None:
        return message
    near = difflib.get_close_matches(match["name"], candidates, n=1)
    return f"{message.rstrip('.')}; did you mean '{near[0]}'?" if near else message
