"""Outputs of a model as JSON for the page that tries requests: values, or a summary of large tensors.

Runs on the thread that has the response, so it stops at so many elements.
"""

from __future__ import annotations

import base64
from typing import Any, Final

import numpy as np

from conch.core.request import InferenceResponse
from conch.core.tensor import Array, Tensor, decode_bytes, float_array

MOST_ELEMENTS: Final = 200_000
_MOST_TEXT_BYTES: Final = 1 << 20


def response_object(response: InferenceResponse) -> dict[str, Any]:
    """One response: its outputs and parameters, or its error."""
    if response.error is not None:
        return {"error": response.error.message, "code": response.error.code}
    return {
        "outputs": [_output(tensor) for tensor in response.outputs],
        "parameters": {key: value for key, value in (response.parameters or {}).items()},
    }


def _output(tensor: Tensor) -> dict[str, Any]:
    found: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
    tensor.fetch()
    if tensor.datatype == "BYTES":
        return found | _texts(decode_bytes(tensor.data))
    array = float_array(tensor.data, tensor.shape) if tensor.datatype == "BF16" else tensor.numpy()
    flat = array.reshape(-1)
    if flat.size > MOST_ELEMENTS:
        return found | {"data": None, "summary": _summary(flat)}
    return found | {"data": _numbers(flat)}


def _numbers(flat: Array) -> list[Any]:
    if flat.dtype.kind == "f":
        finite = np.isfinite(flat)
        # JSON has no words for these.
        return [
            value if known else str(value)
            for value, known in zip(flat.tolist(), finite.tolist(), strict=True)
        ]
    if flat.dtype.itemsize == 8 and flat.dtype.kind in "iu":
        return [value if abs(value) < 2**53 else str(value) for value in flat.tolist()]  # of JavaScript
    values: list[Any] = flat.tolist()
    return values


def _texts(elements: Array) -> dict[str, Any]:
    """Elements as text where they are, and else as base64."""
    data: list[Any] = []
    left = _MOST_TEXT_BYTES
    for element in elements[:MOST_ELEMENTS]:
        left -= len(element)
        if left < 0:
            break
        try:
            data.append(element.decode())
        except UnicodeDecodeError:
            data.append({"base64": base64.b64encode(element).decode()})
    return {"data": data, "left_out": len(elements) - len(data)}


def _summary(flat: Array) -> dict[str, Any]:
    if flat.dtype.kind == "b":
        return {"true": int(flat.sum()), "elements": int(flat.size)}
    values = flat.astype(np.float64)
    return {
        "elements": int(flat.size),
        "least": float(np.nanmin(values)),
        "mean": float(np.nanmean(values)),
        "most": float(np.nanmax(values)),
        "first": _numbers(flat[:100]),
    }
