"""Parses ``CONCH_PADDING`` and checks it against a model's tensors."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

from conch.core.errors import InvalidArgumentError
from conch.core.padding import PARAMETER, PaddedInput, PaddedOutput, Padding, parse_padding
from conch.core.tensor import ELEMENT_SIZES
from conch.protocol.model_config_pb2 import ModelConfig, ModelInput, ModelOutput
from conch_control.config.problems import Checked, Problem, entry_path, nearest
from conch_control.config.schema import WIRE_NAMES

_LARGEST = 2**64  # JSON integers have any size
_T = TypeVar("_T")


def checked_padding(config: ModelConfig) -> Checked[Padding | None]:
    """Padding of an otherwise valid config, and its problems; None without padding."""
    if PARAMETER not in config.parameters:
        return None
    path = f"{entry_path('parameters', PARAMETER)}.string_value"
    prefix = f"parameter '{PARAMETER}' of model '{config.name}': "
    try:
        padding = parse_padding(config.parameters[PARAMETER].string_value)
    except InvalidArgumentError as error:
        yield Problem(path, f"{prefix}{error.message}", cause=error.__cause__)
        return None
    checked = _checked(padding, config)
    while True:
        try:
            wrong = next(checked)
        except StopIteration as done:
            result: Padding = done.value
            return result
        yield Problem(path, f"{prefix}{wrong.message}", nearest=wrong.nearest)


@dataclass(frozen=True, slots=True)
class _Wrong:
    """A problem of the parameter's value."""

    message: str
    nearest: str = ""


_Values = Generator[_Wrong, None, _T]


def _checked(padding: Padding, config: ModelConfig) -> _Values[Padding]:
    if config.max_batch_size == 0:
        yield _Wrong("padding is for models with max_batch_size > 0")
    if padding.max_batch_elements and not config.HasField("dynamic_batching"):
        yield _Wrong("max_batch_elements: needs 'dynamic_batching'")
    inputs = {tensor.name: tensor for tensor in config.input}
    outputs = {tensor.name: tensor for tensor in config.output}
    checked = []
    axes: set[tuple[str, int]] = set()
    for rule in padding.inputs:
        field = f"inputs.{rule.name}"
        tensor = inputs.get(rule.name)
        if tensor is None:
            yield _unknown(rule.name, inputs, "input", field)
            continue
        if tensor.allow_ragged_batch:
            yield _Wrong(f"{field}: a ragged input is not padded; drop 'allow_ragged_batch'")
        yield from _axis_problems(tensor, rule.axis, field)
        if (rule.name, rule.axis) in axes:
            yield _Wrong(f"{field}: axis {rule.axis} is given twice")
        axes.add((rule.name, rule.axis))
        value = yield from _value(rule, tensor, field)
        checked.append(replace(rule, value=value))
    yield from _made_problems(padding, config)
    cut: set[tuple[str, int]] = set()
    for out in padding.outputs:
        field = f"outputs.{out.name}"
        shown = outputs.get(out.name)
        if shown is None:
            yield _unknown(out.name, outputs, "output", field)
        else:
            yield from _axis_problems(shown, out.axis, field)
        if (out.name, out.axis) in cut:
            yield _Wrong(f"{field}: axis {out.axis} is given twice")
        cut.add((out.name, out.axis))
    sources = []
    for out in padding.outputs:
        source_axis = yield from _source_axis(out, axes)
        sources.append(replace(out, source_axis=source_axis))
    for out in sources:
        if out.source in inputs and inputs[out.source].optional:
            yield _Wrong(
                f"outputs.{out.name}.like: input '{out.source}' must not be optional: its length is needed"
            )
    return Padding(tuple(checked), tuple(sources), padding.max_batch_elements)


def _unknown(name: str, known: Iterable[str], kind: str, field: str) -> _Wrong:
    near = nearest(name, known)
    return _Wrong(f"{field}: the model has no {kind} '{name}'{_hint(near)}", near)


def _hint(near: str) -> str:
    return f"; did you mean '{near}'?" if near else ""


def _axis_problems(tensor: ModelInput | ModelOutput, axis: int, field: str) -> Iterator[_Wrong]:
    dims = list(tensor.dims)
    if tensor.HasField("reshape"):
        yield _Wrong(f"{field}: a tensor with a reshape can't be padded")
    if axis >= len(dims):
        yield _Wrong(
            f"{field}.axis: dims {dims} have no axis {axis}; axes are counted from 0, without the batch "
            f"dimension"
        )
    elif dims[axis] != -1:
        yield _Wrong(f"{field}.axis: axis {axis} of dims {dims} must be -1, a variable one")


def _value(rule: PaddedInput, tensor: ModelInput, field: str) -> _Values[bool | int | float | str]:
    """The value converted to the tensor's element type."""
    datatype = WIRE_NAMES.get(tensor.data_type)
    value = rule.value
    if datatype is None:
        return value  # no type: reported elsewhere
    if datatype == "BF16":
        yield _Wrong(f"{field}: inputs of TYPE_BF16 can't be padded")
        return value
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
    yield _Wrong(f"{field}.value: {value!r} is no value of TYPE_{shown}")
    return value


def _values_of(datatype: str) -> range:
    if datatype == "BOOL":
        return range(2)
    bits = 8 * ELEMENT_SIZES[datatype]
    return range(1 << bits) if datatype.startswith("U") else range(-(1 << bits - 1), 1 << bits - 1)


def _made_problems(padding: Padding, config: ModelConfig) -> Iterator[_Wrong]:
    taken = {tensor.name for tensor in config.input}
    taken.update(name for made in config.batch_input for name in made.target_name)
    for made in padding.made:
        if made.name in taken:
            yield _Wrong(
                f"'{made.name}' is made by the server, so it can't be another input as well; inputs that the "
                f"server makes are not listed under 'input'"
            )
        taken.add(made.name)


def _source_axis(out: PaddedOutput, axes: set[tuple[str, int]]) -> _Values[int | None]:
    field = f"outputs.{out.name}"
    padded = sorted(axis for name, axis in axes if name == out.source)
    if not padded:
        names = sorted({name for name, _ in axes})
        near = nearest(out.source, names)
        yield _Wrong(
            f"{field}.like: '{out.source}' is not padded; padded are {', '.join(names)}{_hint(near)}", near
        )
        return None
    if out.source_axis is None:
        if len(padded) > 1:
            yield _Wrong(f"{field}: '{out.source}' is padded along several axes; say which with 'like_axis'")
        return padded[0]
    if out.source_axis not in padded:
        yield _Wrong(f"{field}.like_axis: '{out.source}' is not padded along {out.source_axis}")
    return out.source_axis
