"""Reads the parameters of requests, inputs and outputs from protobuf messages."""

from __future__ import annotations

from typing import Any

from conch.core.errors import InvalidArgumentError
from conch.core.request import InferenceRequest, Parameter, RegionPart

EMPTY_FINAL = "triton_enable_empty_final_response"

_PROTOCOL_PARAMETERS = {
    "sequence_id": ("correlation_id", ("int64_param", "string_param")),
    "sequence_start": ("sequence_start", ("bool_param",)),
    "sequence_end": ("sequence_end", ("bool_param",)),
    "priority": ("priority", ("int64_param", "uint64_param")),
    "timeout": ("timeout_us", ("int64_param",)),
    EMPTY_FINAL: ("empty_final", ("bool_param",)),
}
_CUSTOM_KINDS = frozenset(("int64_param", "bool_param", "string_param", "double_param"))
SHARED_MEMORY = {
    "shared_memory_region": "string_param",
    "shared_memory_offset": "int64_param",
    "shared_memory_byte_size": "int64_param",
}
"""Parameters of a tensor in a region, with the kinds of their values."""


def read_region(tensor: Any) -> RegionPart | None:
    """Reads the shared-memory parameters of an input or output; returns None without any.

    Raises:
        InvalidArgumentError: A value has the wrong type, or one is missing; texts are Triton's.
    """
    parameters = tensor.parameters
    given = [key for key in SHARED_MEMORY if key in parameters]
    if not given:
        return None
    name = tensor.name
    for key in given:
        kind = parameters[key].WhichOneof("parameter_choice")
        if kind != SHARED_MEMORY[key]:
            raise InvalidArgumentError(
                f"invalid value type for '{key}' parameter for tensor '{name}', expected "
                f"{SHARED_MEMORY[key]}."
            )
    if "shared_memory_region" not in given:
        raise InvalidArgumentError(
            f"'{given[0]}' can not be specified without 'shared_memory_region' parameter for tensor '{name}'"
        )
    if "shared_memory_byte_size" not in given:
        raise InvalidArgumentError(
            f"'shared_memory_byte_size' must be specified along with 'shared_memory_region' parameter for "
            f"tensor '{name}'"
        )
    return RegionPart(
        parameters["shared_memory_region"].string_param,
        parameters["shared_memory_offset"].int64_param if "shared_memory_offset" in given else 0,
        parameters["shared_memory_byte_size"].int64_param,
    )


def read_output_parameters(request: InferenceRequest, output: Any) -> RegionPart | None:
    """Reads the parameters of a requested output; returns its region, if any.

    Raises:
        InvalidArgumentError: A value has the wrong type or contradicts another; texts are Triton's.
    """
    parameters = output.parameters
    if "classification" in parameters:
        value = parameters["classification"]
        if value.WhichOneof("parameter_choice") != "int64_param":
            raise InvalidArgumentError(
                "invalid value type for 'classification' parameter, expected int64_param"
            )
        if value.int64_param <= 0:  # also 0, despite Triton's text
            raise InvalidArgumentError("invalid value for 'classification' parameter, expected >= 0")
        if "shared_memory_region" in parameters:
            raise InvalidArgumentError("output can't set both 'shared_memory_region' and 'classification'")
        if request.classes is None:
            request.classes = {}
        request.classes[output.name] = value.int64_param
    return read_region(output)


def read_parameters(request: InferenceRequest, parameters: Any) -> None:
    """Sets a request's attributes from the protocol's parameters, and copies custom ones.

    Raises:
        InvalidArgumentError: A value has the wrong type, or a key is reserved; texts are Triton's.
    """
    custom: dict[str, Parameter] = {}
    for key, value in parameters.items():
        kind = value.WhichOneof("parameter_choice")
        known = _PROTOCOL_PARAMETERS.get(key)
        if known is not None:
            attribute, kinds = known
            if kind not in kinds:
                raise _wrong_type(key, " or ".join(kinds))
            setattr(request, attribute, getattr(value, kind))
        elif key.startswith("triton_"):
            raise InvalidArgumentError(
                "parameter keys starting with 'triton_' are reserved for Triton usage. Only the following "
                f"keys starting with 'triton_' are allowed: {EMPTY_FINAL}"
            )
        elif kind in _CUSTOM_KINDS:
            custom[key] = getattr(value, kind)
        else:
            raise _wrong_type(key, "int64_param, bool_param, or string_param")
    if request.priority < 0:
        raise InvalidArgumentError("invalid value for 'priority', expected value >= 0.")
    # The protocol carries unsigned numbers in signed fields.
    request.timeout_us %= 2**64
    if isinstance(request.correlation_id, int):
        request.correlation_id %= 2**64
    if custom:
        request.parameters = custom


def _wrong_type(key: str, expected: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"invalid value type for '{key}' parameter, expected {expected}.")
