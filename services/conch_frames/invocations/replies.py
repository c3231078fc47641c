"""Predictions in the format that a caller accepts: JSON, CSV or an Arrow stream. Pure."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Final

import numpy as np
import orjson

from conch.core.errors import InvalidArgumentError, UnsupportedError
from conch.core.tensor import Array, Tensor
from conch_frames.csv_table import csv_text
from conch_frames.interface import FrameInterface, OutputRule
from conch_frames.invocations.request_body import ARROW_TYPE, CSV_TYPE, JSON_TYPE
from conch_frames.output_columns import output_columns

_KNOWN: Final = (JSON_TYPE, CSV_TYPE, ARROW_TYPE)


class AcceptError(UnsupportedError):
    """A caller accepts none of the formats."""

    http_status = 406


def reply_type(accept: str) -> str:
    """The format of a reply by the header ``Accept``: the known one with the highest weight, JSON for any.

    Raises:
        AcceptError: None is accepted.
    """
    weights: dict[str, float] = {}
    for item in accept.lower().split(","):
        name, *parameters = (part.strip() for part in item.split(";"))
        if name:
            weights.setdefault(name, _weight(parameters))
    if not weights:
        return JSON_TYPE
    found = {kind: _accepted(weights, kind) for kind in _KNOWN}
    best = max(_KNOWN, key=lambda kind: found[kind])
    if not found[best]:
        raise AcceptError(f"Accept is '{accept}', and predictions come as {', '.join(_KNOWN)}")
    return best


def import_format(kind: str) -> None:
    """Imports what a format needs. Raises AcceptError: pyarrow is not installed."""
    if kind != ARROW_TYPE:
        return
    try:
        import_module("conch_frames.arrow_tables")
    except ImportError:
        raise AcceptError(
            f"{ARROW_TYPE} needs the Python package pyarrow on the server: `pip install 'conch[frames]'`"
        ) from None


def _accepted(weights: dict[str, float], kind: str) -> float:
    family = kind.partition("/")[0] + "/*"
    return next((weights[each] for each in (kind, family, "*/*") if each in weights), 0.0)


def _weight(parameters: Sequence[str]) -> float:
    for parameter in parameters:
        key, _, value = parameter.partition("=")
        if key.strip() == "q":
            try:
                weight = float(value)
            except ValueError:
                return 0.0
            return weight if 0 <= weight <= 1 else 0.0
    return 1.0


def predictions(outputs: Sequence[Tensor], interface: FrameInterface, kind: str = JSON_TYPE) -> bytes:
    """The body of a reply.

    Args:
        outputs: The outputs that the interface names.
        interface: The model's interface.
        kind: A format that `reply_type` has returned.

    Raises:
        InvalidArgumentError: The format can't have the outputs.
    """
    rules = {rule.output: rule for rule in interface.outputs}
    given = [(rules.get(each.name, OutputRule(each.name, each.name, False, 0)), each) for each in outputs]
    if kind == JSON_TYPE:
        return _json(given)
    columns = output_columns({rule.name: _squeezed(each.numpy(), rule) for rule, each in given})
    if kind == CSV_TYPE:
        binary = {rule.name for rule, _ in given if rule.is_binary}
        return csv_text(
            {name: _plain_texts(name, values, binary) for name, values in columns.items()}
        ).encode()
    from conch_frames.arrow_tables import arrow_stream

    return arrow_stream(columns)


def _json(given: Sequence[tuple[OutputRule, Tensor]]) -> bytes:
    """A list of records if all outputs may be in them, an array if there is one, else arrays by name."""
    listed = {rule.name: _listed(each, rule) for rule, each in given}
    found: Any = listed
    if given and all(rule.in_records for rule, _ in given):
        lengths = {name: len(values) for name, values in listed.items()}
        if len(set(lengths.values())) > 1:
            raise InvalidArgumentError(f"the outputs of the model have different numbers of rows: {lengths}")
        plain = (each.tolist() if isinstance(each, np.ndarray) else each for each in listed.values())
        rows = zip(*plain, strict=True)
        found = [dict(zip(listed, row, strict=True)) for row in rows]
    elif len(listed) == 1:
        (found,) = listed.values()
    return orjson.dumps({"predictions": found}, option=orjson.OPT_SERIALIZE_NUMPY)


def _listed(tensor: Tensor, rule: OutputRule) -> Any:
    """An output as JSON has it. Raises InvalidArgumentError: a text is not UTF-8, or a number is infinite."""
    array = _squeezed(tensor.numpy(), rule)
    if array.dtype.kind == "f" and np.isinf(array).any():
        raise InvalidArgumentError(
            f"output '{rule.name}' has infinity, which JSON has not: accept CSV or Arrow"
        )
    if tensor.datatype != "BYTES":
        return np.ascontiguousarray(array if array.dtype.kind != "f" else array.astype(np.float64))
    try:
        texts = [
            base64.b64encode(each).decode() if rule.is_binary else each.decode() for each in array.reshape(-1)
        ]
    except UnicodeDecodeError:
        raise InvalidArgumentError(
            f"output '{rule.name}' has bytes that are no UTF-8: accept Arrow"
        ) from None
    return np.array(texts, object).reshape(array.shape).tolist()


def _squeezed(array: Array, rule: OutputRule) -> Array:
    if array.ndim == rule.rank + 1 and array.shape[-1] == 1:
        return array[..., 0]
    return array


def _plain_texts(name: str, values: Array, binary: set[str]) -> Array:
    """Texts of a column for CSV. Raises InvalidArgumentError: it has bytes that are no text."""
    if values.dtype.kind != "O":
        return values
    if name in binary:
        encoded = [each.encode() if isinstance(each, str) else each for each in values.tolist()]
        return np.array([base64.b64encode(each).decode() for each in encoded], object)
    if any(isinstance(each, bytes) for each in values.tolist()):
        raise InvalidArgumentError(f"output '{name}' has bytes that are no UTF-8: accept Arrow")
    return values
