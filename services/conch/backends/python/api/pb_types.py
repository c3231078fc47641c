"""Constants and datatype conversions of `triton_python_backend_utils`, and checks of its arguments.

Arguments are checked at the call, where the model sees the error. As in Triton, texts may be bytes, and
numbers numpy's.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from enum import IntEnum
from operator import index
from typing import Any

import numpy as np

from conch.core.errors import InvalidArgumentError
from conch.core.tensor import NUMPY_DTYPES, Array, Buffer, decode_bytes, encode_bytes

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
TRITONSERVER_REQUEST_RELEASE_ALL = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 2

# In the order of the numbers of model_config.proto, from 1.
_NAMES = (
    "BOOL",
    "UINT8",
    "UINT16",
    "UINT32",
    "UINT64",
    "INT8",
    "INT16",
    "INT32",
    "INT64",
    "FP16",
    "FP32",
    "FP64",
    "BYTES",
)
_NUMPY_TYPES: dict[str, type[Any]] = {name: NUMPY_DTYPES[name].type for name in _NAMES}
_BY_NUMBER = {number: _NUMPY_TYPES[name] for number, name in enumerate(_NAMES, 1)}
_NUMBERS: dict[type[Any], int] = {kind: number for number, kind in _BY_NUMBER.items()}
_NUMBERS[np.bytes_] = len(_NAMES)

TRITON_STRING_TO_NUMPY: dict[str, type[Any]] = {
    "TYPE_STRING" if name == "BYTES" else f"TYPE_{name}": kind for name, kind in _NUMPY_TYPES.items()
}
# Models may compare with `bool` or `np.bool_`; Triton returns `bool`.
TRITON_STRING_TO_NUMPY["TYPE_BOOL"] = bool


class MemoryType(IntEnum):
    """Kinds of memory for the response of another model."""

    TRITONSERVER_MEMORY_GPU = 0
    TRITONSERVER_MEMORY_CPU = 1


TRITONSERVER_MEMORY_GPU = MemoryType.TRITONSERVER_MEMORY_GPU
TRITONSERVER_MEMORY_CPU = MemoryType.TRITONSERVER_MEMORY_CPU


class PreferredMemory:
    """Preferred memory for the response to a BLS request."""

    __slots__ = ("_device_id", "_kind")

    def __init__(self, preferred_memory_type: MemoryType, preferred_device_id: int = 0) -> None:
        self._kind = preferred_memory_type
        self._device_id = preferred_device_id

    def preferred_memory_type(self) -> MemoryType:
        """The kind of memory."""
        return self._kind

    def preferred_device_id(self) -> int:
        """The device number."""
        return self._device_id


def triton_string_to_numpy(triton_type_string: str) -> type[Any]:
    """The numpy type of a datatype in a model config, such as ``TYPE_FP32``."""
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def triton_to_numpy_type(data_type: int) -> type[Any] | None:
    """The numpy type of a datatype number of model_config.proto, or None."""
    return _BY_NUMBER.get(data_type)


def numpy_to_triton_type(data_type: Any) -> int | None:
    """The datatype number in model_config.proto of a numpy type or dtype, or None."""
    try:
        return _NUMBERS.get(np.dtype(data_type).type)
    except TypeError:
        return None


def serialize_byte_tensor(input_tensor: Array) -> bytes | tuple[()] | None:
    """Serializes an array of bytes or str, each element behind its length.

    As in Triton, returns an empty tuple for an empty array of any type, and None for other element types.
    """
    if input_tensor.size == 0:
        return ()
    if input_tensor.dtype.kind not in "OS":
        return None
    return encode_bytes(input_tensor.ravel())


def deserialize_bytes_tensor(encoded_tensor: Buffer) -> Array:
    """Reads the result of `serialize_byte_tensor` to a flat object array of bytes.

    Raises:
        struct.error: It ends inside an element.
    """
    try:
        return decode_bytes(encoded_tensor)
    except InvalidArgumentError as error:
        raise struct.error(error.message) from None  # the exception that Triton raises


def get_input_config_by_name(model_config: dict[str, Any], name: str) -> dict[str, Any] | None:
    """The entry of an input in a model config, or None."""
    return _entry(model_config, "input", name)


def get_output_config_by_name(model_config: dict[str, Any], name: str) -> dict[str, Any] | None:
    """The entry of an output in a model config, or None."""
    return _entry(model_config, "output", name)


def _entry(model_config: dict[str, Any], key: str, name: str) -> dict[str, Any] | None:
    entries: list[dict[str, Any]] = model_config.get(key, [])
    return next((entry for entry in entries if entry["name"] == name), None)


def using_decoupled_model_transaction_policy(model_config: dict[str, Any]) -> bool:
    """True if the config has the decoupled transaction policy."""
    policy = model_config.get("model_transaction_policy", {})
    return bool(policy.get("decoupled", False))


def text_of(value: object, what: str) -> str:
    """The value as text; `what` is its role. Raises TypeError: it is no text."""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise TypeError(f"{what} must be a string, not bytes that are no UTF-8") from None
    raise TypeError(f"{what} must be a string, not {type(value)}")


def texts_of(values: object, what: str) -> list[str]:
    """The values as a list of texts. Raises TypeError: they are none."""
    # `isinstance` is slow for other types.
    if type(values) is not list and (isinstance(values, str | bytes) or not isinstance(values, Iterable)):
        raise TypeError(f"{what} must be a list of strings, not {type(values)}")
    return [value if type(value) is str else text_of(value, f"an element of {what}") for value in values]


def whole_of(value: object, what: str) -> int:
    """The value as an integer. Raises TypeError: it is none."""
    if type(value) is int:
        return value
    try:
        return int(index(value))  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{what} must be a whole number, not {type(value)}") from None


def number_of(value: object, what: str) -> float:
    """The value as a float. Raises TypeError: it is no number."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise TypeError(f"{what} must be a number, not {type(value)}") from None
