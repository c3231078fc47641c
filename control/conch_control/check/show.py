"""Prints an effective config in the text format, with the origin of each value beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from google.protobuf import text_encoding
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from conch_control.config.fieldpaths import is_map, part_of_entry
from conch_control.config.origins import CONFIG_FILE
from conch_control.config.problems import entry_path

_WIDEST = 60

_Line = tuple[str, str | None]
"""What is printed, and the path of its value if it has one."""


def show_config(
    config: Message, origins: Mapping[str, str], place: Callable[[str], tuple[int, int]] | None = None
) -> str:
    """A config in the text format.

    Args:
        config: The config.
        origins: Where its values come from, by path.
        place: Tells line and column of a value in the config file, if there is one.
    """
    lines = list(_fields(config, "", ""))
    width = min(max((len(text) for text, path in lines if path is not None), default=0), _WIDEST)
    shown = []
    for text, path in lines:
        origin = "" if path is None else origins.get(path, "")
        if path is not None and origin == CONFIG_FILE and place is not None:
            line, column = place(path)
            origin = f"{origin}:{line}:{column}"
        shown.append(f"{text:<{width}}  # {origin}" if origin else text)
    return "\n".join(shown)


def _fields(config: Message, path: str, indent: str) -> Iterator[_Line]:
    fields = sorted((field for field, _ in config.ListFields()), key=lambda field: field.index)
    for field in fields:
        value = getattr(config, field.name)
        place = f"{path}.{field.name}" if path else field.name
        if is_map(field):
            for key in sorted(value):
                yield from _entry(field, key, value[key], entry_path(place, key), indent)
        elif field.message_type is None:
            yield f"{indent}{field.name}: {_values(field, value)}", place
        elif field.is_repeated:
            for number, element in enumerate(value):
                yield from _message(field.name, element, f"{place}[{number}]", indent)
        else:
            yield from _message(field.name, value, place, indent)


def _message(name: str, message: Message, path: str, indent: str) -> Iterator[_Line]:
    inside = list(_fields(message, path, f"{indent}  "))
    if not inside:
        yield f"{indent}{name} {{}}", path
        return
    yield f"{indent}{name} {{", None
    yield from inside
    yield f"{indent}}}", None


def _entry(field: FieldDescriptor, key: Any, value: Any, path: str, indent: str) -> Iterator[_Line]:
    inner = f"{indent}  "
    yield f"{indent}{field.name} {{", None
    yield f"{inner}key: {_scalar(part_of_entry(field, 'key'), key)}", None
    part = part_of_entry(field, "value")
    if part.message_type is None:
        yield f"{inner}value: {_scalar(part, value)}", path
    else:
        yield from _message("value", value, path, inner)
    yield f"{indent}}}", None


def _values(field: FieldDescriptor, value: Any) -> str:
    if not field.is_repeated:
        return _scalar(field, value)
    return f"[{', '.join(_scalar(field, element) for element in value)}]"


def _scalar(field: FieldDescriptor, value: Any) -> str:
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return str(value) if known is None else known.name
    if isinstance(value, str):
        text: Any = value  # the stubs take bytes only
        return f'"{text_encoding.CEscape(text, as_utf8=True)}"'
    if isinstance(value, bytes):
        return f'"{text_encoding.CEscape(value, as_utf8=False)}"'
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)
