"""Model configs in Triton's JSON form.

Output: original field names, enum names, default values included, 64-bit numbers as numbers (protobuf
prints strings). Input: enum names in any case, 64-bit values as numbers or strings, no unknown fields.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, cast

from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from conch.core.errors import InvalidArgumentError
from conch.protocol.model_config_pb2 import ModelConfig
from conch_control.config.lenient_json import RepeatedKey, parse_lenient
from conch_control.config.problems import with_suggestion

# The stubs also allow the C runtime's class, which has the same members.
_CONFIG = cast(Descriptor, ModelConfig.DESCRIPTOR)
_INT64_TYPES = (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64)

# Triton converts 64-bit fields by a list of paths without these.
_STILL_STRINGS = frozenset(
    {
        "inference.ModelSequenceBatching.InitialState.dims",
        "inference.ModelOptimizationPolicy.Cuda.GraphSpec.Shape.dim",
        "inference.ModelInstanceGroup.SecondaryDevice.device_id",
    }
)


def to_json(config: ModelConfig) -> dict[str, Any]:
    """A config as a JSON dictionary, members in schema order."""
    printed = json_format.MessageToDict(
        config, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return _in_order(_convert(printed, _CONFIG, _number), _CONFIG)


def from_json(data: Mapping[str, Any]) -> ModelConfig:
    """The config of a JSON dictionary.

    Raises:
        InvalidArgumentError: A member is unknown or has the wrong type.
    """
    try:
        converted = _convert(dict(data), _CONFIG, _upper_enum)
        return json_format.ParseDict(converted, ModelConfig())
    except (json_format.ParseError, ValueError, TypeError, RecursionError) as error:
        raise InvalidArgumentError(with_suggestion(str(error).split("\n", 1)[0])) from error


def parse_override(text: str) -> ModelConfig:
    """Parses the ``config`` parameter of a load request, as leniently as Triton.

    Raises:
        InvalidArgumentError: It is not JSON, or not a config.
    """
    config = ModelConfig()
    config.CopyFrom(_parsed_override(text))
    return config


@lru_cache(maxsize=4)  # a load asks several times: for the ensemble's parts, the versions, the definition
def _parsed_override(text: str) -> ModelConfig:
    try:
        data = parse_lenient(text)
        if not isinstance(data, dict):
            raise InvalidArgumentError("Root element must be a message.")
        return from_json(_regular(data, _CONFIG))
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"Invalid config override: {error.message}") from error
    except ValueError as error:
        raise InvalidArgumentError(f"Invalid config override: {error}") from error


def _regular(data: Mapping[str, Any], message: Descriptor) -> dict[str, Any]:
    """Converts what protobuf's C++ parser accepts to what its Python parser accepts.

    A field may repeat, under either of its names; repeated fields may be single values or nested lists;
    the last value of a singular field wins.
    """
    found: dict[str, Any] = {}
    for name, given in data.items():
        field = message.fields_by_name.get(name) or message.fields_by_camelcase_name.get(name)
        for value in given if isinstance(given, RepeatedKey) else (given,):
            if field is None or value is None:
                found.setdefault(name, value)
            elif _is_map(field):
                found[field.name] = _with_entries(found.get(field.name), value, field)
            elif field.is_repeated:
                elements = [_regular_value(each, field) for each in _flat(value)]
                found[field.name] = [*(found.get(field.name) or ()), *elements]
            elif isinstance(value, list):
                raise InvalidArgumentError(f"{name}: Proto field is not repeating, cannot start list.")
            else:
                before, now = found.get(field.name), _regular_value(value, field)
                merge = isinstance(before, dict) and isinstance(now, dict)
                found[field.name] = before | now if merge else now
    return found


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _with_entries(before: dict[str, Any] | None, given: Any, field: FieldDescriptor) -> Any:
    if field.message_type is None or not isinstance(given, dict):
        return given  # left to the parser to refuse
    values = field.message_type.fields_by_name["value"]
    entries = {
        key: _regular_value(value[-1] if isinstance(value, RepeatedKey) else value, values)
        for key, value in given.items()
    }
    return {**(before or {}), **entries}


def _regular_value(value: Any, field: FieldDescriptor) -> Any:
    if field.message_type is not None and isinstance(value, dict):
        return _regular(value, field.message_type)
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL and isinstance(value, str):
        return {"true": True, "false": False}.get(value.lower(), value)
    return value


def _flat(value: Any) -> Iterator[Any]:
    if not isinstance(value, list):
        yield value
        return
    for element in value:
        yield from _flat(element)


_Leaf = Callable[[FieldDescriptor, Any], Any]


def _number(field: FieldDescriptor, value: Any) -> Any:
    convert = field.cpp_type in _INT64_TYPES and field.full_name not in _STILL_STRINGS
    return int(value) if convert else value


def _upper_enum(field: FieldDescriptor, value: Any) -> Any:
    return value.upper() if field.enum_type is not None and isinstance(value, str) else value


def _convert(data: dict[str, Any], message: Descriptor, leaf: _Leaf) -> dict[str, Any]:
    """Copies a dictionary, applying `leaf` to all non-message values."""
    fields = message.fields_by_name
    return {
        name: _convert_field(value, fields[name], leaf) if name in fields else value
        for name, value in data.items()
    }


def _convert_field(value: Any, field: FieldDescriptor, leaf: _Leaf) -> Any:
    nested = field.message_type
    is_map = nested is not None and nested.GetOptions().map_entry
    if isinstance(value, list) and not is_map:
        return [_convert_field(element, field, leaf) for element in value]
    if nested is None:
        return leaf(field, value)
    if not isinstance(value, dict):
        return value  # left to the parser to refuse
    if is_map:
        values = nested.fields_by_name["value"]
        for key, element in value.items():
            if values.message_type is not None and isinstance(element, str):  # protobuf would name a letter
                members = ", ".join(each.name for each in values.message_type.fields)
                raise InvalidArgumentError(
                    f'{field.name}["{key}"]: expected an object with {members}, not a text'
                )
        return {key: _convert_field(element, values, leaf) for key, element in value.items()}
    return _convert(value, nested, leaf)


def _in_order(data: dict[str, Any], message: Descriptor) -> dict[str, Any]:
    """Sorts members in schema order."""
    return {
        field.name: _in_order_value(data[field.name], field.message_type)
        for field in message.fields
        if field.name in data
    }


def _in_order_value(value: Any, nested: Descriptor | None) -> Any:
    if nested is None or nested.GetOptions().map_entry:
        return value
    if isinstance(value, list):
        return [_in_order(element, nested) for element in value]
    return _in_order(value, nested)
