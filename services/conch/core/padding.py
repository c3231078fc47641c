"""Parses the model parameter ``CONCH_PADDING``, which pads inputs to buckets.

The parameter is JSON::

    {"inputs": {"tokens": {"axis": 0, "to": [16, 32, 64], "value": 0, "mask": "attention_mask"}},
     "outputs": {"logits": {"axis": 0, "like": "tokens"}},
     "max_batch_elements": 8192}

An input or output with more than one padded axis has a list of such objects. This module checks only the
form; the control plane checks the rules against the model's tensors.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from conch.core.errors import InvalidArgumentError

PARAMETER = "CONCH_PADDING"
"""Name of the model parameter."""

POWERS_OF_TWO = 0
"""The `step` of buckets that double."""


@dataclass(frozen=True, slots=True)
class MadeInput:
    """An input that the server computes from the unpadded lengths.

    Attributes:
        name: Input name.
        datatype: Protocol name of the element type.
        column: For lengths: True for shape ``[batch, 1]``, False for ``[batch]``.
    """

    name: str
    datatype: str = "INT64"
    column: bool = False


@dataclass(frozen=True, slots=True)
class PaddedInput:
    """A padded axis of an input.

    Attributes:
        name: Input name.
        axis: Axis, without the batch dimension.
        buckets: Allowed lengths, ascending; empty if `step` gives them.
        step: Allowed lengths are its multiples, or powers of two.
        value: Padding value.
        lengths: Input that receives the unpadded lengths, or None.
        mask: Input that is 1 for original values and 0 for padding, or None.
    """

    name: str
    axis: int
    buckets: tuple[int, ...] = ()
    step: int = POWERS_OF_TWO
    value: bool | int | float | str = 0
    lengths: MadeInput | None = None
    mask: MadeInput | None = None

    def padded(self, length: int) -> int | None:
        """The padded length; None if `length` exceeds all buckets."""
        if self.buckets:
            return next((bucket for bucket in self.buckets if bucket >= length), None)
        length = max(length, 1)
        if self.step == POWERS_OF_TWO:
            return 1 << (length - 1).bit_length()
        return -(-length // self.step) * self.step


@dataclass(frozen=True, slots=True)
class PaddedOutput:
    """An axis of an output that is cut to the request's unpadded length.

    Attributes:
        name: Output name.
        axis: Axis, without the batch dimension.
        source: Padded input with that length.
        source_axis: Axis of that input; None if only one is padded.
    """

    name: str
    axis: int
    source: str
    source_axis: int | None = None


@dataclass(frozen=True, slots=True)
class Padding:
    """Padding rules of a model.

    Attributes:
        inputs: Padded axes of inputs.
        outputs: Axes of outputs that are cut.
        max_batch_elements: Most elements of a padded input in a batch, with padding; 0 for no limit. A
            larger request runs alone.
    """

    inputs: tuple[PaddedInput, ...]
    outputs: tuple[PaddedOutput, ...] = ()
    max_batch_elements: int = 0

    @property
    def made(self) -> tuple[MadeInput, ...]:
        """Inputs that the server computes."""
        return tuple(made for rule in self.inputs for made in (rule.lengths, rule.mask) if made is not None)


def parse_padding(text: str) -> Padding:
    """Parses the parameter.

    Raises:
        InvalidArgumentError: The form is wrong; the text names the field and what it expects.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"not JSON: {error}") from error
    whole = _Object(data, "", ("inputs", "outputs", "max_batch_elements"))
    inputs = tuple(
        _input(rule, name, path) for name, rule, path in _rules(whole.need("inputs", "an object"), "inputs")
    )
    outputs = tuple(_output(rule, name, path) for name, rule, path in _rules(whole.get("outputs"), "outputs"))
    if not inputs:
        _refuse("inputs", "name at least one input")
    return Padding(inputs, outputs, whole.count("max_batch_elements", 0, 0))


def made_inputs(parameters: Mapping[str, str]) -> frozenset[str]:
    """Names of the inputs that padding computes; empty if the parameter is invalid."""
    try:
        return frozenset(made.name for made in parse_padding(parameters.get(PARAMETER, "")).made)
    except InvalidArgumentError:
        return frozenset()  # the control plane reports it when it loads the model


class _Object:
    """A JSON object with its path and its allowed keys."""

    def __init__(self, data: Any, path: str, keys: Iterable[str]) -> None:
        self.path = path
        if not isinstance(data, dict):
            _refuse(path, f"must be an object, got {_shown(data)}")
        self._data: dict[str, Any] = data
        known = tuple(keys)
        for key in data:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"did you mean '{near[0]}'?" if near else f"known are {', '.join(known)}"
                _refuse(path, f"unknown key '{key}'; {hint}")

    def path_of(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def get(self, key: str, default: Any = None) -> Any:
        return self._data.get(key, default)

    def need(self, key: str, what: str) -> Any:
        if key not in self._data:
            _refuse(self.path_of(key), f"is missing; give {what}")
        return self._data[key]

    def name(self, key: str) -> str:
        value = self.need(key, "a tensor's name")
        if not isinstance(value, str) or not value:
            _refuse(self.path_of(key), f"must be a tensor's name, got {_shown(value)}")
        return value

    def count(self, key: str, least: int, default: int | None = None) -> int:
        value = self.need(key, "a whole number") if default is None else self.get(key, default)
        return _whole_number(value, least, self.path_of(key))


def _rules(data: Any, path: str) -> Iterable[tuple[str, Any, str]]:
    """Yields tensor name, rule and path for each axis."""
    if data is None:
        return
    if not isinstance(data, dict):
        _refuse(path, f"must be an object with tensor names as keys, got {_shown(data)}")
    for name, rules in data.items():
        if isinstance(rules, list):
            for number, rule in enumerate(rules):
                yield name, rule, f"{path}.{name}[{number}]"
        else:
            yield name, rules, f"{path}.{name}"


def _input(data: Any, name: str, path: str) -> PaddedInput:
    rule = _Object(data, path, ("axis", "to", "value", "lengths", "mask"))
    buckets, step = _buckets(rule.need("to", _TO), rule.path_of("to"))
    value = rule.get("value", 0)
    if not isinstance(value, bool | int | float | str):
        _refuse(rule.path_of("value"), f"must be a number, a boolean or a string, got {_shown(value)}")
    lengths = _made(rule.get("lengths"), rule.path_of("lengths"), ("name", "data_type", "dims"))
    mask = _made(rule.get("mask"), rule.path_of("mask"), ("name", "data_type"))
    return PaddedInput(name, rule.count("axis", 0), buckets, step, value, lengths, mask)


_TO = "a list of lengths, \"pow2\" or {\"multiple_of\": n}"  # fmt: skip


def _buckets(data: Any, path: str) -> tuple[tuple[int, ...], int]:
    if data == "pow2":
        return (), POWERS_OF_TWO
    if isinstance(data, dict):
        return (), _Object(data, path, ("multiple_of",)).count("multiple_of", 1)
    if not isinstance(data, list) or not data:
        _refuse(path, f"must be {_TO}, got {_shown(data)}")
    return tuple(sorted({_whole_number(each, 1, path) for each in data})), POWERS_OF_TWO


def _made(data: Any, path: str, keys: tuple[str, ...]) -> MadeInput | None:
    if data is None:
        return None
    made = _Object({"name": data} if isinstance(data, str) else data, path, keys)
    datatype = made.get("data_type", "TYPE_INT64")
    if datatype not in ("TYPE_INT32", "TYPE_INT64"):
        _refuse(made.path_of("data_type"), f"must be TYPE_INT32 or TYPE_INT64, got {_shown(datatype)}")
    dims = made.get("dims", [])
    if dims not in ([], [1]):
        _refuse(made.path_of("dims"), f"must be [] or [1], got {_shown(dims)}")
    return MadeInput(made.name("name"), datatype.removeprefix("TYPE_"), dims == [1])


def _output(data: Any, name: str, path: str) -> PaddedOutput:
    rule = _Object(data, path, ("axis", "like", "like_axis"))
    source_axis = None if rule.get("like_axis") is None else rule.count("like_axis", 0)
    return PaddedOutput(name, rule.count("axis", 0), rule.name("like"), source_axis)


def _whole_number(value: Any, least: int, path: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 1 << 40:
        _refuse(path, f"must be a whole number >= {least}, got {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _refuse(path: str, problem: str) -> NoReturn:
    raise InvalidArgumentError(f"{path}: {problem}" if path else problem)
