"""Config names of element types and the protocol's names for them."""

from __future__ import annotations

from conch.protocol.model_config_pb2 import DataType

WIRE_NAMES: dict[int, str] = {
    number: "BYTES" if name == "TYPE_STRING" else name.removeprefix("TYPE_")
    for name, number in DataType.items()
    if name != "TYPE_INVALID"
}
"""Protocol name of each element type, such as ``FP32``; what is not in it is no element type."""
