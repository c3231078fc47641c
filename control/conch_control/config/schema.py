"""Facts about the config schema: element types, field paths, values at paths."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from conch.protocol.model_config_pb2 import DataType
from conch_control.config.problems import entry_path

WIRE_NAMES: dict[int, str] = {
    number: "BYTES" if name == "TYPE_STRING" else name.removeprefix("TYPE_")
    for name, number in DataType.items()
    if name != "TYPE_INVALID"
}
"""Protocol name of each element type, such as ``FP32``, by enum number."""


_STEP = re.compile(r'\.?(?P<name>\w+)|\[(?P<index>\d+)\]|\[(?P<key>"(?:[^"\\]|\\.)*")\]')


def is_map(field: FieldDescriptor) -> bool:
    """True for a map field."""
    message = field.message_type
    return message is not None and bool(message.GetOptions().map_entry)


def part_of_entry(field: FieldDescriptor, name: str) -> FieldDescriptor:
    """The field ``key`` or ``value`` of a map's entries."""
    message = field.message_type
    assert message is not None, "only for maps"
    return message.fields_by_name[name]


def value_at(config: Message, path: str) -> Any:
    """The value at a path; None if unset.

    Paths look like ``input[1].dims[0]`` or ``parameters["KEY"].string_value``.
    """
    value: Any = config
    for step in _STEP.finditer(path):
        try:
            if step["name"] is not None:
                value = _field(value, step["name"])
            elif step["key"] is not None:
                value = value.get(json.loads(step["key"]))
            else:
                index = int(step["index"])
                value = value.get(index) if hasattr(value, "keys") else value[index]
        except (AttributeError, IndexError, KeyError, ValueError, TypeError):
            return None
        if value is None:
            return None
    return value


def _field(message: Any, name: str) -> Any:
    field = message.DESCRIPTOR.fields_by_name[name]
    if field.is_repeated:
        return getattr(message, name) or None
    if field.has_presence:
        return getattr(message, name) if message.HasField(name) else None
    value = getattr(message, name)
    return None if value == field.default_value else value


Leaf = tuple[str, FieldDescriptor, Any]
"""Path, field and value of a set field."""


def leaves(config: Message, path: str = "") -> Iterator[Leaf]:
    """All set values of a config in schema order.

    A repeated field of plain values counts as one value; so does an empty message.
    """
    for field in _in_order(config):
        value = getattr(config, field.name)
        place = f"{path}.{field.name}" if path else field.name
        if is_map(field):
            for key in sorted(value):
                if part_of_entry(field, "value").message_type is None:
                    yield entry_path(place, key), field, value[key]
                else:
                    yield from _inside(entry_path(place, key), field, value[key])
        elif field.message_type is None:
            yield place, field, list(value) if field.is_repeated else value
        elif field.is_repeated:
            for number, element in enumerate(value):
                yield from _inside(f"{place}[{number}]", field, element)
        else:
            yield from _inside(place, field, value)


def _inside(path: str, field: FieldDescriptor, message: Message) -> Iterator[Leaf]:
    empty = True
    for leaf in leaves(message, path):
        empty = False
        yield leaf
    if empty:
        yield path, field, message


def _in_order(config: Message) -> list[FieldDescriptor]:
    return sorted((field for field, _ in config.ListFields()), key=lambda field: field.index)
