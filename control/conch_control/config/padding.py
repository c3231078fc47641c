"""Reads the parameter ``CONCH_PADDING`` and checks it against a model's tensors."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

from conch.core.errors import InvalidArgumentError
from conch.core.padding import PARAMETER, PaddedInput, PaddedOutput, Padding, parse_padding
from conch.core.tensor import ELEMENT_SIZES
from conch.protocol.model_config_pb2 import ModelConfig, ModelInput, ModelOutput
from conch_control.config.datatypes import WIRE_NAMES

_LARGEST = 2**64  # of whole numbers, which JSON has of any size
_Kind = TypeVar("_Kind", ModelInput, ModelOutput)


def read_padding(config: ModelConfig) -> Padding | None:
    """The padding of a completed and otherwise checked config; None where there is none.

    Raises:
        InvalidArgumentError: The parameter has another form, or does not fit the model; the text names the
            parameter, the field in it and what to do.
    """
    if PARAMETER not in config.parameters:
        return None
    try:
        padding = parse_padding(config.parameters[PARAMETER].string_value)
        return _checked(padding, config)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(
            f"parameter '{PARAMETER}' of model '{config.name}': {error.message}"
        ) from error


def _checked(padding: Padding, config: ModelConfig) -> Padding:
    if config.max_batch_size == 0:
        raise InvalidArgumentError("padding is for models with max_batch_size > 0")
    if padding.max_batch_elements and not config.HasField("dynamic_batching"):
        raise InvalidArgumentError("max_batch_elements: needs 'dynamic_batching'")
    inputs = {tensor.name: tensor for tensor in config.input}
    outputs = {tensor.name: tensor for tensor in config.output}
    checked = []
    axes: set[tuple[str, int]] = set()
    for rule in padding.inputs:
        field = f"inputs.{rule.name}"
        tensor = _tensor(rule.name, inputs, "input", field)
        if tensor.allow_ragged_batch:
            raise InvalidArgumentError(f"{field}: a ragged input is not padded; drop 'allow_ragged_batch'")
        _check_axis(tensor, rule.axis, field)
        if (rule.name, rule.axis) in axes:
            raise InvalidArgumentError(f"{field}: axis {rule.axis} is given twice")
        axes.add((rule.name, rule.axis))
        checked.append(replace(rule, value=_value(rule, tensor, field)))
    _check_made(padding, config)
    cut: set[tuple[str, int]] = set()
    for out in padding.outputs:
        field = f"outputs.{out.name}"
        _check_axis(_tensor(out.name, outputs, "output", field), out.axis, field)
        if (out.name, out.axis) in cut:
            raise InvalidArgumentError(f"{field}: axis {out.axis} is given twice")
        cut.add((out.name, out.axis))
    sources = tuple(replace(out, source_axis=_source_axis(out, axes)) for out in padding.outputs)
    for out in sources:
        if inputs[out.source].optional:
            raise InvalidArgumentError(
                f"outputs.{out.name}.like: input '{out.source}' must not be optional: its length is needed"
            )
    return Padding(tuple(checked), sources, padding.max_batch_elements)


def _tensor(name: str, known: Mapping[str, _Kind], kind: str, field: str) -> _Kind:
    tensor = known.get(name)
    if tensor is None:
        raise InvalidArgumentError(f"{field}: the model has no {kind} '{name}'{_near(name, known)}")
    return tensor


def _near(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean '{near[0]}'?" if near else ""


def _check_axis(tensor: ModelInput | ModelOutput, axis: int, field: str) -> None:
    dims = list(tensor.dims)
    if tensor.HasField("reshape"):
        raise InvalidArgumentError(f"{field}: a tensor with a reshape can't be padded")
    if axis >= len(dims):
        raise InvalidArgumentError(
            f"{field}.axis: dims {dims} have no axis {axis}; axes are counted from 0, without the batch "
            f"dimension"
        )
    if dims[axis] != -1:
        raise InvalidArgumentError(f"{field}.axis: axis {axis} of dims {dims} must be -1, a variable one")


def _value(rule: PaddedInput, tensor: ModelInput, field: str) -> bool | int | float | str:
    """The value as the tensor's element type has it."""
    datatype = WIRE_NAMES[tensor.data_type]
    value = rule.value
    if datatype == "BF16":
        raise InvalidArgumentError(f"{field}: inputs of TYPE_BF16 can't be padded")
    if datatype == "BYTES":
        if isinstance(value, str) or value == 0:
            return value or ""
    elif isinstance(value, str) or (isinstance(value, int) and abs(value) > _LARGEST):
        pass
    elif datatype.startswith("FP"):
        return float(value)
    elif (isinstance(value, int) or value.is_integer()) and int(value) in _values_of(datatype):
        return bool(value) if datatype == "BOOL" else int(value)
    shown = "STRING" if datatype == "BYTES" else datatype
    raise InvalidArgumentError(f"{field}.value: {value!r} is no value of TYPE_{shown}")


def _values_of(datatype: str) -> range:
    if datatype == "BOOL":
        return range(2)
    bits = 8 * ELEMENT_SIZES[datatype]
    return range(1 << bits) if datatype.startswith("U") else range(-(1 << bits - 1), 1 << bits - 1)


def _check_made(padding: Padding, config: ModelConfig) -> None:
    taken = {tensor.name for tensor in config.input}
    taken.update(name for made in config.batch_input for name in made.target_name)
    for made in padding.made:
        if made.name in taken:
            raise InvalidArgumentError(
                f"'{made.name}' is made by the server, so it can't be another input as well; inputs that the "
                f"server makes are not listed under 'input'"
            )
        taken.add(made.name)


def _source_axis(out: PaddedOutput, axes: set[tuple[str, int]]) -> int:
    field = f"outputs.{out.name}"
    padded = sorted(axis for name, axis in axes if name == out.source)
    if not padded:
        names = sorted({name for name, _ in axes})
        raise InvalidArgumentError(
            f"{field}.like: '{out.source}' is not padded; padded are {', '.join(names)}"
            f"{_near(out.source, names)}"
        )
    if out.source_axis is None:
        if len(padded) > 1:
            raise InvalidArgumentError(
                f"{field}: '{out.source}' is padded along several axes; say which with 'like_axis'"
            )
        return padded[0]
    if out.source_axis not in padded:
        raise InvalidArgumentError(f"{field}.like_axis: '{out.source}' is not padded along {out.source_axis}")
    return out.source_axis
