"""Encodes responses as the flat JSON of the generate extension. Used by: `generate_route`."""

from __future__ import annotations

import json
from typing import Any, Final

import numpy as np
import orjson

from conch.core.errors import InvalidArgumentError
from conch.core.request import InferenceResponse, Parameter
from conch.core.response_errors import wrong_parameter
from conch.core.tensor import Tensor, decode_bytes

_PIECE: Final = 16 * 1024


def answer_object(model_name: str, model_version: str, request_id: str, response: InferenceResponse) -> bytes:
    """Encodes a response as a JSON object with sorted members.

    Raises:
        InvalidArgumentError: It holds what JSON has no form for.
    """
    members = {"model_name": orjson.dumps(model_name), "model_version": orjson.dumps(model_version)}
    if request_id:
        members["id"] = orjson.dumps(request_id)
    for key, value in (response.parameters or {}).items():
        members[key] = _parameter(model_name, key, value)
    for tensor in response.outputs:
        members[tensor.name] = _tensor(tensor)
    # Triton sorts by bytes.
    ordered = sorted(members.items(), key=lambda item: item[0].encode())
    return b"{" + b",".join(orjson.dumps(key) + b":" + value for key, value in ordered) + b"}"


def _parameter(model: str, key: str, value: Parameter) -> bytes:
    if isinstance(value, float):
        return _dumps(value, bool(np.isfinite(value)))
    if not isinstance(value, bool | int | str) or not _is_64_bits(value):
        raise wrong_parameter(model, key, value)
    return _dumps(value)


def _is_64_bits(value: int | str) -> bool:
    return isinstance(value, str) or -(2**63) <= value < 2**64


def _tensor(tensor: Tensor) -> bytes:
    """Encodes the elements as a flat array; a single element as a scalar."""
    if tensor.datatype in ("FP16", "BF16"):
        raise InvalidArgumentError(
            f"sending {tensor.datatype} data via JSON is not supported. Please use the binary data format "
            f"for output {tensor.name}"
        )
    if tensor.datatype == "BYTES":
        strings = [element.decode(errors="surrogateescape") for element in decode_bytes(tensor.data)]
        return _dumps(strings[0] if len(strings) == 1 else strings)
    array = tensor.numpy().ravel()
    finite = True
    if array.dtype.kind == "f":
        finite = bool(np.isfinite(array).all())
        array = array.astype(np.float64)  # or numbers would be rounded to the digits that FP32 needs
    if array.size == 1:
        return _dumps(array[0].item(), finite)
    # In pieces: while one is written no other thread can run.
    pieces = (array[start : start + _PIECE].tolist() for start in range(0, array.size, _PIECE))
    return b"[" + b",".join(_dumps(piece, finite)[1:-1] for piece in pieces) + b"]"


def _dumps(value: Any, finite: bool = True) -> bytes:
    """JSON, with NaN and Infinity where they are, and bytes that are no UTF-8 passed on as they are."""
    if finite:
        try:
            return orjson.dumps(value)
        except TypeError:
            pass
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="surrogateescape")
