"""Responses for people and as JSON."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from conch.core.tensor import Array, Tensor
from conch.observability.tracing.waterfall import printable
from conch_tools.infer.client import InferResponse, array_of

_MOST_VALUES = 24
_MOST_TEXT = 300
_WIDTH = 100
_USUAL = ("triton_final_response",)
_SEQUENCE = ("sequence_id", "sequence_start", "sequence_end")


def as_text(response: InferResponse, classes: int = 0) -> str:
    """The outputs with their datatypes and shapes, long values abbreviated."""
    lines = []
    for tensor in response.outputs:
        head = f"{printable(tensor.name)} {tensor.datatype} {list(tensor.shape)}"
        if classes and tensor.datatype == "BYTES":
            lines += [f"{printable(tensor.name)}, top {classes}", *_classes(tensor)]
            continue
        values = _values(array_of(tensor))
        lines += [f"{head}\n{values}" if "\n" in values else f"{head}: {values}"]
    hidden = _USUAL if response.parameters.get("sequence_id") else (*_USUAL, *_SEQUENCE)
    others = [f"{name}={value}" for name, value in response.parameters.items() if name not in hidden]
    if others:
        lines.append(printable(f"parameters: {', '.join(others)}"))
    return "\n".join(lines)


def _values(array: Array) -> str:
    if array.dtype.kind == "O":
        if array.size == 1:
            return _quoted(array.item())
        return np.array2string(
            array, _WIDTH, threshold=_MOST_VALUES, separator=", ", formatter={"object": _quoted}
        )
    return np.array2string(array, _WIDTH, 6, threshold=_MOST_VALUES, separator=", ")


def _quoted(value: Any) -> str:
    try:
        text = bytes(value).decode()
    except UnicodeDecodeError:
        return f"{len(value)} bytes, {bytes(value[:16]).hex(' ')}{' ...' if len(value) > 16 else ''}"
    cut = text if len(text) <= _MOST_TEXT else text[:_MOST_TEXT]
    more = f"... ({len(text):,} characters)" if len(text) > _MOST_TEXT else ""
    return printable(json.dumps(cut, ensure_ascii=False)) + more


def _classes(tensor: Tensor) -> Iterator[str]:
    """A line for each class: value, index and label."""
    array = tensor.numpy()
    rows = array.reshape(-1, array.shape[-1]) if array.ndim else array.reshape(1, 1)
    for number, row in enumerate(rows):
        if len(rows) > 1:
            yield f"  row {number}"
        for each in row:
            value, _, rest = each.decode(errors="replace").partition(":")
            index, _, label = rest.partition(":")
            yield printable(f"  {value:>12}  {index:>5}  {label}").rstrip()


def as_json(response: InferResponse) -> dict[str, Any]:
    """A response in the form of Triton's JSON over HTTP; values that JSON lacks are texts."""
    found: dict[str, Any] = {"model_name": response.model, "model_version": response.version}
    if response.id:
        found["id"] = response.id
    if response.parameters:
        found["parameters"] = dict(response.parameters)
    found["outputs"] = [
        {
            "name": tensor.name,
            "datatype": tensor.datatype,
            "shape": list(tensor.shape),
            "data": _json_values(array_of(tensor)),
        }
        for tensor in response.outputs
    ]
    return found


def _json_values(array: Array) -> list[Any]:
    values = array.ravel().tolist()
    if array.dtype.kind == "O":
        return [_json_text(value) for value in values]
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        return [value if math.isfinite(value) else _not_finite(value) for value in values]
    return values


def _json_text(value: bytes) -> Any:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"b64": base64.b64encode(value).decode()}


def _not_finite(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


class SaveError(Exception):
    """An output can't be saved."""


def save(response: InferResponse, directory: Path, number: int | None = None) -> Sequence[Path]:
    """Writes each output to ``NAME.npy``, or the outputs of a stream to ``NAME.NUMBER.npy``.

    Raises:
        SaveError: They can't be written.
    """
    written = []
    for tensor in response.outputs:
        suffix = ".npy" if number is None else f".{number}.npy"
        path = directory / f"{tensor.name.replace('/', '_')}{suffix}"
        array = array_of(tensor)
        if array.dtype.kind == "O":
            if any(value.endswith(b"\0") for value in array.ravel()):
                raise SaveError(
                    f"--save: '{tensor.name}' has texts that end in zero bytes, which .npy can't keep"
                )
            array = array.astype(np.bytes_)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            np.save(path, array, allow_pickle=False)
        except OSError as error:
            raise SaveError(f"--save: {path} can't be written: {error.strerror or error}") from None
        written.append(path)
    return written
