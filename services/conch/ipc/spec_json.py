"""Encodes what workers load as JSON, and decodes it: model specs, placements, libraries.

The annotations of the dataclasses drive it: a new field needs no change here.
"""

from __future__ import annotations

import base64
import types
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from conch.core.execution.placement import Placement
from conch.core.spec import ModelSpec
from conch.ipc.channel import WireError

_Record = TypeVar("_Record")


@dataclass(frozen=True, slots=True)
class Library:
    """A backend that is compiled for Triton.

    Attributes:
        backend: The backend's name.
        file: The library.
        options: Facts of the server, and the options of ``--backend-config``.
        host: The library of conch-native, which provides Triton's functions.
        policies: Settings of host policies, by name.
    """

    backend: str
    file: Path
    options: Mapping[str, str]
    host: Path
    policies: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


def spec_to_json(spec: ModelSpec) -> dict[str, Any]:
    """Encodes a spec as JSON values."""
    return _pack_record(spec)


def spec_from_json(value: object) -> ModelSpec:
    """Decodes a spec.

    Raises:
        WireError: It is malformed.
    """
    return _read(ModelSpec, value)


def placement_to_json(placement: Placement) -> dict[str, Any]:
    """Encodes a placement as JSON values."""
    return _pack_record(placement)


def placement_from_json(value: object) -> Placement:
    """Decodes a placement.

    Raises:
        WireError: It is malformed.
    """
    return _read(Placement, value)


def library_to_json(library: Library) -> dict[str, Any]:
    """Encodes a library as JSON values."""
    return _pack_record(library)


def library_from_json(value: object) -> Library | None:
    """Decodes a library, or its absence.

    Raises:
        WireError: It is malformed.
    """
    return None if value is None else _read(Library, value)


def record_to_json(record: object) -> dict[str, Any]:
    """Encodes any dataclass as JSON values."""
    return _pack_record(record)


def record_from_json(kind: type[_Record], value: object) -> _Record:
    """Decodes a dataclass.

    Raises:
        WireError: It is malformed.
    """
    return _read(kind, value)


def _pack_record(record: Any) -> dict[str, Any]:
    return {field.name: _pack(getattr(record, field.name)) for field in fields(record)}


def _pack(value: Any) -> Any:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _pack(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_pack(item) for item in value]
    if is_dataclass(value):
        return _pack_record(value)
    return value


def _read(kind: type[_Record], value: object) -> _Record:
    try:
        record: _Record = _unpack(kind, value)
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise WireError(f"a {kind.__name__} can't be read: {error}") from error
    return record


@cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    return get_type_hints(kind)


def _unpack(hint: Any, value: Any) -> Any:
    if hint is Any or hint is object:
        return value
    if is_dataclass(hint):
        assert isinstance(hint, type)
        hints = _hints(hint)
        return hint(**{name: _unpack(hints[name], item) for name, item in value.items()})
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _unpack_union(arguments, value)
    if origin is Literal:
        if value not in arguments:
            raise ValueError(f"{value!r} is none of {arguments}")
        return value
    if origin is tuple:
        return tuple(_unpack(arguments[0], item) for item in _checked(list, value))
    if origin is not None:  # a mapping from text
        return {key: _unpack(arguments[1], item) for key, item in _checked(dict, value).items()}
    if hint is bytes:
        return base64.b64decode(_checked(str, value), validate=True)
    if hint is Path:
        return Path(_checked(str, value))
    # JSON keeps bool and number apart, Python int and float: `initial` keeps its type.
    return _checked(int | float if hint is float else hint, value)


def _unpack_union(arguments: tuple[Any, ...], value: Any) -> Any:
    if value is None and type(None) in arguments:
        return None
    rest = [argument for argument in arguments if argument is not type(None)]
    if len(rest) == 1:
        return _unpack(rest[0], value)
    if type(value) not in rest:
        raise ValueError(f"{value!r} is none of {rest}")
    return value


def _checked(kind: Any, value: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} is not what belongs there")
    return value
