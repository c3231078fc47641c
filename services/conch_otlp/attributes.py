"""Attributes of spans, metrics, logs and the server, as messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue

_MOST_TEXT = 1024


def attributes_of(pairs: Mapping[str, str | int | float | Sequence[str]]) -> list[KeyValue]:
    """Attributes by their names."""
    return [attribute(short(name), value) for name, value in pairs.items()]


def short(text: str) -> str:
    """A text within the limit, as UTF-8 can have it."""
    return text[:_MOST_TEXT].encode(errors="backslashreplace").decode()


def attribute(name: str, value: str | int | float | Sequence[str]) -> KeyValue:
    """An attribute of a span or a resource."""
    if not isinstance(value, (str, int, float)):
        texts = [AnyValue(string_value=short(text)) for text in value]
        return KeyValue(key=name, value=AnyValue(array_value=ArrayValue(values=texts)))
    if isinstance(value, float):
        return KeyValue(key=name, value=AnyValue(double_value=value))
    if isinstance(value, bool):
        return KeyValue(key=name, value=AnyValue(bool_value=value))
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return KeyValue(key=name, value=AnyValue(int_value=value))
    return KeyValue(key=name, value=AnyValue(string_value=short(str(value))))
