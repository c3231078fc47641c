"""Maps scoring requests to a model's inputs, and its outputs to predictions. Pure.

Inputs are found by name. A model with one input that the request does not name gets the whole table or array
as a matrix; so do engines whose input has all columns of the signature.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime
from typing import Any

import numpy as np
import orjson

from conch.core.errors import InternalError, InvalidArgumentError
from conch.core.spec import ModelSpec, TensorSpec
from conch.core.tensor import NUMPY_DTYPES, Tensor
from conch_mlflow.scoring.scoring_body import Scored, Table
from conch_mlflow.signature import Signature
from conch_mlflow.signature import Tensor as Entry

_BINARY = "binary"
_PREDICT = "predict"
_TRUE, _FALSE = ("true", "1"), ("false", "0")


def request_tensors(scored: Scored, spec: ModelSpec, signature: Signature) -> dict[str, Tensor]:
    """The inputs of a request.

    Raises:
        InvalidArgumentError: The request does not fit the model; the text names the input.
    """
    params = {each.name: each for each in signature.params}
    rules = {each.name: each for each in spec.inputs if each.name not in params}
    kinds = {each.name: each for each in signature.inputs}
    by_name = _by_name(scored.data)
    if len(rules) == 1 and (by_name is None or not rules.keys() & by_name.keys()):
        (rule,) = rules.values()
        inputs = {rule.name: _tensor(spec, rule, _matrix(scored.data, by_name, signature, rule))}
    elif by_name is None:
        raise InvalidArgumentError(
            f"model '{spec.name}' has several inputs: name each of {', '.join(map(repr, rules))}"
        )
    else:
        texts = isinstance(scored.data, Table) and scored.data.texts
        inputs = {}
        for name, rule in rules.items():
            if name in by_name:
                values = _converted(by_name[name], kinds.get(name), rule, texts)
                inputs[name] = _tensor(spec, rule, _array(rule, values))
            elif not rule.optional:
                raise InvalidArgumentError(
                    f"the request has no '{name}', an input of model '{spec.name}'; it has "
                    f"{', '.join(map(repr, by_name)) or 'none'}"
                )
    known = {each.name: each for each in spec.inputs}
    for name, value in scored.params.items():
        if name not in params or name not in known:
            raise InvalidArgumentError(f"params: model '{spec.name}' has no param '{name}'; remove it")
        values = value if isinstance(value, list) else [value]
        inputs[name] = _tensor(spec, known[name], _array(known[name], values))
    return inputs


def split_rows(inputs: dict[str, Tensor], most: int) -> list[dict[str, Tensor]]:
    """The inputs of requests of at most so many rows each; 0 for any number."""
    rows = {each.shape[0] if each.shape else 0 for each in inputs.values()}
    if most <= 0 or len(rows) != 1 or max(rows) <= most:
        return [inputs]
    (count,) = rows
    arrays = {name: (tensor.datatype, tensor.numpy()) for name, tensor in inputs.items()}
    return [
        {
            name: Tensor.from_array(name, array[start : start + most], datatype)
            for name, (datatype, array) in arrays.items()
        }
        for start in range(0, count, most)
    ]


def joined_rows(parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The outputs of several requests as those of one. Raises InternalError: their shapes don't fit."""
    try:
        return [
            Tensor.from_array(same[0].name, np.concatenate([each.numpy() for each in same]), same[0].datatype)
            for same in zip(*parts, strict=True)
        ]
    except ValueError as error:
        raise InternalError(f"the outputs of a model's batches can't be joined: {error}") from None


def wanted_outputs(spec: ModelSpec, signature: Signature) -> tuple[str, ...]:
    """The outputs that the predictions consist of: those of the signature, or as many of the model."""
    names = [each.name for each in spec.outputs]
    declared = [each.name for each in signature.outputs]
    if declared and set(declared) <= set(names):
        return tuple(declared)
    if len(declared) <= 1 < len(names):
        return (_PREDICT if _PREDICT in names else names[0],)
    return tuple(names)


def predictions(outputs: Sequence[Tensor], signature: Signature) -> bytes:
    """The body of the response: a list of records for columns, an array, or arrays by name."""
    entries = _entries(outputs, signature)
    listed = {each.name: _listed(each, entries.get(each.name)) for each in outputs}
    found: Any = listed
    if entries and all(each.column and each.named for each in entries.values()):
        columns = [entries[name].name for name in listed]
        rows = zip(*(map(_plain, values) for values in listed.values()), strict=True)
        found = [dict(zip(columns, row, strict=True)) for row in rows]
    elif len(listed) == 1:
        (found,) = listed.values()
    return orjson.dumps({"predictions": found}, option=orjson.OPT_SERIALIZE_NUMPY)


def _entries(outputs: Sequence[Tensor], signature: Signature) -> dict[str, Entry]:
    """The signature's entries for outputs, by the outputs' names, which an engine may have changed."""
    declared = {each.name: each for each in signature.outputs}
    names = [each.name for each in outputs]
    if declared.keys() == set(names):
        return declared
    return dict(zip(names, signature.outputs, strict=True)) if len(names) == len(declared) else {}


def _by_name(data: Any) -> Mapping[str, Any] | None:
    if isinstance(data, Table):
        return data.columns if data.named else None
    return data if isinstance(data, dict) else None


def _matrix(data: Any, by_name: Mapping[str, Any] | None, signature: Signature, rule: TensorSpec) -> Any:
    """Array for a model's only input, whose name the request does not have."""
    if not isinstance(data, Table) and by_name is None:
        return _array(rule, data)
    columns = data.columns if isinstance(data, Table) else data
    names = [each.name for each in signature.inputs if each.column and each.named]
    if by_name is not None and names:
        missing = [name for name in names if name not in by_name]
        if missing:
            raise InvalidArgumentError(f"the request has no column {', '.join(map(repr, missing))}")
        columns = {name: by_name[name] for name in names}
    texts = isinstance(data, Table) and data.texts
    kinds = {each.name: each for each in signature.inputs}
    arrays = [
        _array(rule, _converted(values, kinds.get(name), rule, texts), name)
        for name, values in columns.items()
    ]
    if not arrays:
        raise InvalidArgumentError("the request has no columns")
    if len({array.shape[:1] for array in arrays}) > 1:
        raise InvalidArgumentError("the columns of the request have different lengths")
    return np.stack(arrays, axis=1)


def _tensor(spec: ModelSpec, rule: TensorSpec, array: Any) -> Tensor:
    """An array as an input, with a dim of 1 behind where the model has one more."""
    if array.ndim + 1 == len(spec.full_dims(rule)):
        array = array[..., np.newaxis]
    return Tensor(rule.name, rule.datatype, array.shape, None, np.ascontiguousarray(array))


def _array(rule: TensorSpec, values: Any, name: str = "") -> Any:
    """An array of an input's datatype. Raises InvalidArgumentError: the values don't fit it."""
    name = name or rule.name
    if rule.datatype == "BYTES":
        return _text_array(values, name)
    dtype = NUMPY_DTYPES.get(rule.datatype)
    if dtype is None:
        raise InvalidArgumentError(f"'{name}' is {rule.datatype}, which this route can't send")
    try:
        given = np.asarray(values)
        if given.dtype.kind == "O" and dtype.kind == "f":
            given = np.array(values, np.float64)  # None is NaN
    except (TypeError, ValueError, OverflowError):
        raise InvalidArgumentError(f"'{name}' is no regular array of numbers") from None
    expected = {"f": "fiu", "i": "fiu", "u": "fiu", "b": "b"}[dtype.kind]
    if given.size and given.dtype.kind not in expected:
        raise InvalidArgumentError(f"'{name}' must have {_described(rule)}, not {_first(given)!r}")
    with np.errstate(invalid="ignore", over="ignore"):
        array = given.astype(dtype)
    lost = np.isinf(array) & np.isfinite(given) if dtype.kind == "f" else array != given
    if lost.any():
        raise InvalidArgumentError(f"'{name}' must have {_described(rule)}, without loss")
    return array


def _text_array(values: Any, name: str) -> Any:
    array = np.array(values, object)
    flat = array.reshape(-1)
    for at, each in enumerate(flat):
        if isinstance(each, str):
            flat[at] = each.encode()
        elif isinstance(each, datetime | date):
            flat[at] = each.isoformat().encode()
        elif each is None:
            place = [int(index) for index in np.unravel_index(at, array.shape)]
            raise InvalidArgumentError(
                f"'{name}' has a null at {place}, and a text can't be missing: send another one, such as ''"
            )
        elif not isinstance(each, bytes):
            raise InvalidArgumentError(f"'{name}' must have texts, not {each!r}")
    return flat.reshape(array.shape)


def _described(rule: TensorSpec) -> str:
    return {"BOOL": "true or false"}.get(rule.datatype, f"numbers of type {rule.datatype}")


def _first(array: Any) -> Any:
    """A value of the wrong type."""
    values = array.reshape(-1).tolist()
    wrong = (each for each in values if isinstance(each, bool) or not isinstance(each, int | float))
    return next(wrong, values[0])


def _converted(values: Any, entry: Entry | None, rule: TensorSpec, texts: bool) -> Any:
    """Values of a column as the model's types: parsed if all are texts, decoded if they are binary."""
    if entry is not None and entry.kind == _BINARY and isinstance(values, list):
        return [_decoded(each, rule.name) if isinstance(each, str) else each for each in values]
    if not texts or rule.datatype == "BYTES":
        return values
    parse: Callable[[str], Any] = {"F": _real, "B": _truth}.get(rule.datatype[0], int)
    try:
        return [parse(each) for each in values]
    except ValueError as error:
        raise InvalidArgumentError(f"a column must have {_described(rule)}: {error}") from None


def _real(text: str) -> float | None:
    return float(text) if text else None


def _truth(text: str) -> bool:
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise ValueError(f"'{text}' is neither true nor false")


def _decoded(text: str, name: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        raise InvalidArgumentError(f"'{name}' is binary, which must be in base64") from None


def _listed(tensor: Tensor, entry: Entry | None) -> Any:
    """An output as JSON has it, in the rank of the signature."""
    array = tensor.numpy()
    if entry is not None and array.ndim == len(entry.dims) + 1 and array.shape[-1] == 1:
        array = array[..., 0]
    if tensor.datatype != "BYTES":
        return np.ascontiguousarray(array if array.dtype.kind != "f" else array.astype(np.float64))
    binary = entry is not None and entry.kind == _BINARY
    texts = [
        base64.b64encode(each).decode() if binary else each.decode(errors="replace")
        for each in array.reshape(-1)
    ]
    return np.array(texts, object).reshape(array.shape).tolist()


def _plain(value: Any) -> Any:
    """A value of a record."""
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value
