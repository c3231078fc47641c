"""Random model configs, and their texts in random layouts."""

from __future__ import annotations

import json
from typing import Any, cast

from google.protobuf import text_encoding
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

from conch.protocol.model_config_pb2 import ModelConfig

_NAMES = st.sampled_from(["X", "Y", "m", "a b", 'q"}#{', "é\n", "[0]", "a.b", "\\", ""])
_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    """Any config that its schema allows; hardly one that can be loaded."""
    config = ModelConfig()
    _fill(draw, config, 6)
    return config


def _fill(draw: st.DrawFn, message: Message, most: int) -> None:
    fields: list[FieldDescriptor] = list(cast(Descriptor, message.DESCRIPTOR).fields)
    if not fields:
        return
    for field in draw(st.lists(st.sampled_from(fields), max_size=min(most, len(fields)), unique=True)):
        value = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            key_field = field.message_type.fields_by_name["key"]
            value_field = field.message_type.fields_by_name["value"]
            for key in draw(st.lists(_scalars(key_field), max_size=2, unique=True)):
                if value_field.message_type is None:
                    value[key] = draw(_scalars(value_field))
                else:
                    value[key].SetInParent()
                    _fill(draw, value[key], 3)
        elif field.is_repeated:
            for _ in range(draw(st.integers(0, 3))):
                if field.message_type is None:
                    value.append(draw(_scalars(field)))
                else:
                    _fill(draw, value.add(), 3)
        elif field.message_type is not None:
            value.SetInParent()
            _fill(draw, value, 3)
        else:
            setattr(message, field.name, draw(_scalars(field)))


def _scalars(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.enum_type is not None:
        return st.sampled_from(list(field.enum_type.values_by_number))
    if field.cpp_type in _INTEGERS:
        low, high = _INTEGERS[field.cpp_type]
        return st.integers(max(low, -3), 5) | st.integers(low, high)
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return st.booleans()
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return _NAMES.map(str.encode) if field.type == FieldDescriptor.TYPE_BYTES else _NAMES
    return st.sampled_from([0.0, 1.0, 0.5, -2.0])


class Layout:
    """Writes a config in a random layout, and notes where it puts each value.

    Attributes:
        text: The config.
        places: Offset of each value, by path; also of lists, by their first value or bracket.
    """

    def __init__(self, draw: st.DrawFn, config: Message) -> None:
        self._draw = draw
        self.text = ""
        self.places: dict[str, int] = {}
        self._fields(config, "")
        self._space()

    def _add(self, text: str) -> None:
        self.text += text

    def _space(self, needed: bool = False) -> None:
        spaces = [" ", "\n", "\t ", " # a comment: { [ \" '\n", "\r\n", " #}\n"]
        self._add(self._draw(st.sampled_from(spaces if needed else ["", *spaces])))

    def _fields(self, message: Message, path: str) -> None:
        for field, value in message.ListFields():
            place = f"{path}.{field.name}" if path else field.name
            if field.message_type is not None and field.message_type.GetOptions().map_entry:
                for key in value:
                    self._entry(field, key, value[key], place)
            elif field.is_repeated:
                self._repeated(field, list(value), place)
            else:
                self._name(field.name, field.message_type is not None)
                self._value(field, value, place)
                self._separator()

    def _separator(self) -> None:
        self._add(self._draw(st.sampled_from([" ", "\n", " , ", ";", ",\n# ]\n"])))

    def _name(self, name: str, message: bool) -> None:
        self._space()
        self._add(name)
        self._space()
        if not message or self._draw(st.booleans()):
            self._add(":")
            self._space()

    def _repeated(self, field: FieldDescriptor, values: list[Any], place: str) -> None:
        number = 0
        while number < len(values):
            self._name(field.name, field.message_type is not None)
            if not self._draw(st.booleans()):
                self.places.setdefault(place, len(self.text))
                self._value(field, values[number], f"{place}[{number}]")
                number += 1
                self._separator()
                continue
            self.places.setdefault(place, len(self.text))
            self._add("[")
            count = self._draw(st.integers(1, len(values) - number))
            for index in range(number, number + count):
                self._space()
                if index > number:
                    self._add(",")
                    self._space()
                self._value(field, values[index], f"{place}[{index}]")
            number += count
            self._space()
            self._add("]")
            self._separator()

    def _entry(self, field: FieldDescriptor, key: Any, value: Any, place: str) -> None:
        parts = field.message_type.fields_by_name if field.message_type is not None else {}
        path = f"{place}[{json.dumps(key, ensure_ascii=False)}]"
        self._name(field.name, True)
        self.places.setdefault(place, len(self.text))
        self._add("{")
        self._name("key", False)
        self._value(parts["key"], key, f"{path}.key")
        self._separator()
        self._name("value", parts["value"].message_type is not None)
        self._value(parts["value"], value, path)
        self._space()
        self._add("}")
        self._separator()

    def _value(self, field: FieldDescriptor, value: Any, path: str) -> None:
        self.places[path] = len(self.text)
        if field.message_type is None:
            self._add(self._literal(field, value))
            return
        opening, closing = self._draw(st.sampled_from([("{", "}"), ("<", ">")]))
        self._add(opening)
        self._fields(value, path)
        self._space()
        self._add(closing)

    def _literal(self, field: FieldDescriptor, value: Any) -> str:
        if field.enum_type is not None:
            return str(field.enum_type.values_by_number[value].name)
        if isinstance(value, str | bytes):
            data = value.encode() if isinstance(value, str) else value
            quote = self._draw(st.sampled_from("\"'"))
            half = self._draw(st.integers(0, len(data)))
            parts = [data] if half in (0, len(data)) or not data.isascii() else [data[:half], data[half:]]
            return " ".join(f"{quote}{text_encoding.CEscape(part, as_utf8=False)}{quote}" for part in parts)
        return str(value).lower() if isinstance(value, bool) else str(value)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[ModelConfig, Layout]:
    """A config and a text of it."""
    config = draw(configs())
    return config, Layout(draw, config)
