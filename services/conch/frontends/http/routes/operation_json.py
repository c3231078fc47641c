"""Converts JSON bodies to the plain requests of operations, and their plain results to JSON."""

from __future__ import annotations

import binascii
from collections.abc import Mapping, Sequence
from typing import Any

from conch.core.errors import InternalError, InvalidArgumentError, UnavailableError, UnsupportedError
from conch.core.model_control import IndexEntry, LoadParameter
from conch.core.version_text import parse_version
from conch.frontends.http.json_body import member, members
from conch.frontends.http.jsontext.json_values import (
    BulkArray,
    boolean,
    elements,
    text,
    unsigned,
)
from conch.frontends.http.jsontext.json_values import member as required_member
from conch.observability.logging.log_settings import FORMATS, Setting

_HANDLE_BYTES = 64
_SWITCHES = ("log_info", "log_warning", "log_error")
_TRACE_NUMBERS = ("trace_rate", "trace_count", "log_frequency")


def entry_object(entry: IndexEntry) -> dict[str, Any]:
    """Converts a line of the index, without empty fields."""
    fields = {
        "version": entry.version,
        "state": entry.state,
        "reason": entry.reason,
        "labels": list(entry.labels),
    }
    found: dict[str, Any] = {"name": entry.name} | {key: value for key, value in fields.items() if value}
    return found if entry.traffic is None else found | {"traffic": entry.traffic}


def label_version(body: Any) -> int:
    """Reads the version that a label is to name, a number or its text.

    Raises:
        InvalidArgumentError: There is none, or it is no version.
    """
    version = member(body, "version")
    if type(version) is int:
        version = str(version)
    if not isinstance(version, str) or not version:
        raise InvalidArgumentError('a label needs a body with the version that it names: {"version": 8}')
    return parse_version(version)


def rollout_start(body: Any) -> tuple[dict[str, Any], bool]:
    """Reads a declaration as in rollout.toml, and whether to start also with a candidate that is held out.

    Raises:
        InvalidArgumentError: ``again`` is no boolean.
    """
    if body is None:
        return {}, False
    if not isinstance(body, dict):
        raise InvalidArgumentError('a rollout is an object: {"rollout": {"candidate": 8}}')
    declaration = dict(body)
    again = declaration.pop("again", False)
    if not isinstance(again, bool):
        raise InvalidArgumentError("again: must be true or false")
    return declaration, again


def rollout_weight(body: Any) -> float | None:
    """Reads the weight of a rollout's candidate in percent; None without one.

    Raises:
        InvalidArgumentError: It is no number.
    """
    weight = member(body, "weight")
    if weight is None:
        return None
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise InvalidArgumentError("weight: must be a percentage, a number from 0 to 100")
    return float(weight)


def trace_object(settings: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Converts trace settings; levels are a list, and so is what was given several times."""
    return {
        name: list(values) if name == "trace_level" or len(values) > 1 else "".join(values)
        for name, values in settings.items()
    }


def ready_only(body: Any) -> bool:
    """Reads whether an index lists only ready models.

    Raises:
        InvalidArgumentError: The member is no boolean; the text is Triton's.
    """
    wanted = body.get("ready", False) if isinstance(body, dict) else False
    if not isinstance(wanted, bool):
        raise InvalidArgumentError("Invalid value for 'ready': expected a boolean")
    return wanted


def load_parameters(body: Any) -> dict[str, LoadParameter]:
    """Reads the parameters of a load; decodes files.

    Raises:
        InternalError: One is unknown, or no string; the texts are Triton's.
        InvalidArgumentError: A file is not in base64.
    """
    if not isinstance(body, dict) or "parameters" not in body:
        return {}
    parameters: dict[str, LoadParameter] = {}
    for key, value in members(body["parameters"]).items():
        given = text(value)
        if key == "config":
            parameters[key] = given
        elif key.startswith("file:"):
            parameters[key] = _decoded_file(key, given)
        else:
            raise InternalError("unexpected error on creating Triton parameter")
    return parameters


def _decoded_file(key: str, encoded: str) -> bytes:
    try:
        return binascii.a2b_base64("".join(encoded.split()), strict_mode=True)
    except ValueError as error:  # binascii.Error is one
        raise InvalidArgumentError(f"load parameter '{key}' must be in base64: {error}") from None


def unload_dependents(body: Any) -> bool:
    """Reads whether an unload takes the models along that only this one needs."""
    parameters = member(body, "parameters")
    dependents = member({} if parameters is None else members(parameters), "unload_dependents")
    return dependents is not None and boolean(dependents)


def _registration_field(body: Any, name: str) -> Any:
    if not isinstance(body, dict) or name not in body:
        raise InvalidArgumentError(f"Shared memory register request has no '{name}' field")
    return body[name]


def system_registration(body: Any) -> tuple[str, int, int]:
    """Reads key, offset and size of a system region.

    Raises:
        ConchError: One is missing, or of the wrong type; the texts are Triton's.
    """
    key = text(_registration_field(body, "key"))
    offset = member(body, "offset")
    return key, 0 if offset is None else unsigned(offset), unsigned(_registration_field(body, "byte_size"))


def cuda_registration(body: Any) -> tuple[bytes, int, int]:
    """Reads handle, device and size of a CUDA region.

    Raises:
        ConchError: One is missing, or of the wrong type; the texts are Triton's.
    """
    encoded = text(required_member(_registration_field(body, "raw_handle"), "b64"))
    byte_size = unsigned(required_member(body, "byte_size"))
    device = unsigned(required_member(body, "device_id"))
    try:
        handle = binascii.a2b_base64("".join(encoded.split()), strict_mode=True)
    except ValueError:
        handle = b""
    if len(handle) != _HANDLE_BYTES:
        raise InvalidArgumentError("'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t")
    return handle, device, byte_size


def _changes(body: Any) -> dict[str, Any]:
    """Returns the members of a body; none without a body."""
    return {} if body is None or isinstance(body, list | BulkArray) else members(body)


def log_changes(body: Any) -> dict[str, Setting]:
    """Reads new values of log settings; ignores null and unknown names.

    Raises:
        ConchError: A value has the wrong type, or can't be set; the texts are Triton's.
    """
    given = {name: value for name, value in _changes(body).items() if value is not None}
    changes: dict[str, Setting] = {}
    if "log_file" in given:
        raise UnsupportedError("log file location can not be updated through network protocol")
    for name in _SWITCHES:
        if name in given:
            changes[name] = boolean(given[name])
    if "log_verbose_level" in given:
        changes["log_verbose_level"] = unsigned(given["log_verbose_level"])
    if "log_format" in given:
        form = text(given["log_format"])
        if form not in FORMATS:
            raise UnavailableError(f"invalid argument for --log_format, got: {form}")
        changes["log_format"] = form
    return changes


def trace_changes(body: Any) -> dict[str, Sequence[str]]:
    """Reads new values of trace settings; null is an empty value.

    Raises:
        InternalError: A value has the wrong type.
    """
    given = _changes(body)
    changes: dict[str, Sequence[str]] = {}
    if "trace_file" in given:
        changes["trace_file"] = ()
    if "trace_level" in given:
        levels = given["trace_level"]
        changes["trace_level"] = () if levels is None else [text(level) for level in elements(levels)]
    for name in _TRACE_NUMBERS:
        if name in given:
            changes[name] = () if given[name] is None else (text(given[name]),)
    return changes
