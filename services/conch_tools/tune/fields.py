"""The fields of a model's config that can be searched."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

from conch.core.padding import PARAMETER as PADDING
from conch.protocol.model_config_pb2 import ModelConfig

NO_SIZES = "none"
_POWERS, _MULTIPLE = "pow2", "multiple_of/"
_MOST_INSTANCES = 8
_MOST_BATCH_POWER = 7


class Field(ABC):
    """A field of the config.

    Attributes:
        name: Name of the field for ``--search``.
        reason: Reason for which another value may serve better, for the diff.
        searched: True if it is searched without being named.
        form: The form of its values, for an error.
    """

    name: ClassVar[str]
    reason: ClassVar[str]
    searched: ClassVar[bool] = True
    form: ClassVar[str] = "a number"

    @abstractmethod
    def values(self, config: ModelConfig, rows: int, cores: int) -> tuple[Any, ...]:
        """Values to search, in order: a step goes to the next one. Empty if the model has no such field.

        Args:
            config: Today's config, completed by the server.
            rows: Rows of a request; no batch may be smaller.
            cores: Cores of the machine.
        """

    @abstractmethod
    def today(self, config: ModelConfig) -> Any:
        """The value that a config has."""

    @abstractmethod
    def apply(self, config: ModelConfig, value: Any) -> None:
        """Sets the value."""

    def parse(self, text: str) -> Any:
        """A value that the user gives. Raises ValueError."""
        if not text.isdecimal():
            raise ValueError(text)
        return int(text)

    def effective(self, value: Any, others: Mapping[str, Any]) -> Any:
        """The value with the same effect that stands for all those with it, beside other fields' values."""
        return value


class _Instances(Field):
    name = "instances"
    reason = "batches run at the same time"

    def values(self, config: ModelConfig, rows: int, cores: int) -> tuple[Any, ...]:
        if config.HasField("ensemble_scheduling") or len(config.instance_group) > 1:
            return ()
        return tuple(each for each in (1, 2, 3, 4, 6, 8) if each <= min(2 * cores, _MOST_INSTANCES))

    def today(self, config: ModelConfig) -> Any:
        return config.instance_group[0].count if config.instance_group else 1

    def apply(self, config: ModelConfig, value: Any) -> None:
        if not config.instance_group:
            config.instance_group.add()
        config.instance_group[0].count = value


class _Batch(Field):
    name = "batch"
    reason = "rows of a batch; larger requests are refused; 0: no batcher"

    def values(self, config: ModelConfig, rows: int, cores: int) -> tuple[Any, ...]:
        if not _batches(config):
            return ()
        sizes = (1 << power for power in range(1, _MOST_BATCH_POWER + 1))
        most = config.max_batch_size
        return (0, *(size for size in sizes if rows <= size < most), most)

    def today(self, config: ModelConfig) -> Any:
        return config.max_batch_size if config.HasField("dynamic_batching") else 0

    def apply(self, config: ModelConfig, value: Any) -> None:
        if not value:
            config.ClearField("dynamic_batching")
            return
        config.max_batch_size = value
        config.dynamic_batching.SetInParent()
        kept = [size for size in config.dynamic_batching.preferred_batch_size if size <= value]
        config.dynamic_batching.preferred_batch_size[:] = kept
        for sample in config.model_warmup:
            sample.batch_size = min(sample.batch_size, value)


class _Delay(Field):
    name = "delay_us"
    reason = "how long the batcher waits for more rows"

    def values(self, config: ModelConfig, rows: int, cores: int) -> tuple[Any, ...]:
        return (0, 100, 500, 1000, 5000) if _batches(config) else ()

    def today(self, config: ModelConfig) -> Any:
        return config.dynamic_batching.max_queue_delay_microseconds

    def apply(self, config: ModelConfig, value: Any) -> None:
        config.dynamic_batching.max_queue_delay_microseconds = value

    def effective(self, value: Any, others: Mapping[str, Any]) -> Any:
        return value if others["batch"] else 0


class _Preferred(Field):
    name = "preferred"
    reason = "sizes at which the batcher does not wait for more rows"
    searched = False
    form = "none, or sizes as 4/8"

    def values(self, config: ModelConfig, rows: int, cores: int) -> tuple[Any, ...]:
        if not _batches(config):
            return ()
        sizes = (1 << power for power in range(1, _MOST_BATCH_POWER + 1))
        return (NO_SIZES, *(str(size) for size in sizes if rows <= size < config.max_batch_size))

    def today(self, config: ModelConfig) -> Any:
        return _sizes_text(config.dynamic_batching.preferred_batch_size)

    def apply(self, config: ModelConfig, value: Any) -> None:
        most = config.max_batch_size or math.inf  # 0: the server completes it
        config.dynamic_batching.preferred_batch_size[:] = [size for size in _sizes(value) if size <= most]

    def parse(self, text: str) -> Any:
        if text != NO_SIZES and not all(size.isdecimal() and int(size) for size in text.split("/")):
            raise ValueError(text)
        return _sizes_text(_sizes(text))

    def effective(self, value: Any, others: Mapping[str, Any]) -> Any:
        kept = [size for size in _sizes(value) if size <= others["batch"]]
        # The largest batch alone is what the batcher prefers without a list.
        return NO_SIZES if kept == [others["batch"]] else _sizes_text(kept)


class _Padding(Field):
    name = "padding"
    reason = "lengths to which inputs are padded; with fewer, more requests share a batch"
    searched = False
    form = "lengths as 16/64, or pow2, or multiple_of/8"

    def values(self, config: ModelConfig, rows: int, cores: int) -> tuple[Any, ...]:
        found = {_lengths_text(axis["to"]) for axis in _padded_axes(_padding(config))}
        return tuple(found) if len(found) == 1 else ()

    def today(self, config: ModelConfig) -> Any:
        return _lengths_text(next(_padded_axes(_padding(config)))["to"])

    def apply(self, config: ModelConfig, value: Any) -> None:
        padding = _padding(config)
        for axis in _padded_axes(padding):
            axis["to"] = _lengths(value)
        config.parameters[PADDING].string_value = json.dumps(padding)

    def parse(self, text: str) -> Any:
        return _lengths_text(_lengths(text))


class _Placement(Field):
    name = "placement"
    reason = "threads of the server, or processes of their own"
    form = "in_process or worker"
    _PARAMETER = "CONCH_PLACEMENT"
    _VALUES = ("in_process", "worker")

    def values(self, config: ModelConfig, rows: int, cores: int) -> tuple[Any, ...]:
        return self._VALUES if config.backend == "python" else ()

    def today(self, config: ModelConfig) -> Any:
        return _parameter(config, self._PARAMETER) or "worker"

    def apply(self, config: ModelConfig, value: Any) -> None:
        config.parameters[self._PARAMETER].string_value = value

    def parse(self, text: str) -> Any:
        if text not in self._VALUES:
            raise ValueError(text)
        return text


class _OrtNumber(Field):
    """A parameter of ONNX Runtime; 0 is its default, and what a config without it has."""

    parameter: ClassVar[str]

    def today(self, config: ModelConfig) -> Any:
        text = _parameter(config, self.parameter)
        return int(text) if text.isdecimal() else 0

    def apply(self, config: ModelConfig, value: Any) -> None:
        if value or self.parameter in config.parameters:
            config.parameters[self.parameter].string_value = str(value)


class _Threads(_OrtNumber):
    name = "threads"
    reason = "threads of ONNX Runtime in each instance"
    parameter = "intra_op_thread_count"

    def values(self, config: ModelConfig, rows: int, cores: int) -> tuple[Any, ...]:
        if config.backend != "onnxruntime":
            return ()
        return tuple(each for each in (1, 2, 4, 8, 16) if each <= cores)


class _OrtSwitch(_OrtNumber):
    searched = False

    def values(self, config: ModelConfig, rows: int, cores: int) -> tuple[Any, ...]:
        return (0, 1) if config.backend == "onnxruntime" else ()

    def parse(self, text: str) -> Any:
        if text not in ("0", "1"):
            raise ValueError(text)
        return int(text)


class _Spinning(_OrtSwitch):
    name = "spinning"
    reason = "whether idle threads of ONNX Runtime spin, which costs processor time"
    parameter = "session.intra_op.allow_spinning"
    form = "0 or 1"


class _Execution(_OrtSwitch):
    name = "execution"
    reason = "whether ONNX Runtime runs branches of the graph at the same time (1) or in order (0)"
    parameter = "execution_mode"
    form = "0 or 1"


FIELDS: tuple[Field, ...] = (
    _Instances(),
    _Batch(),
    _Delay(),
    _Preferred(),
    _Padding(),
    _Placement(),
    _Threads(),
    _Spinning(),
    _Execution(),
)
"""Fields in the order in which they are applied: the batcher's own follow the one that makes a batcher."""


def _batches(config: ModelConfig) -> bool:
    others = config.HasField("sequence_batching") or config.HasField("ensemble_scheduling")
    return config.max_batch_size > 1 and not others


def _parameter(config: ModelConfig, name: str) -> str:
    return config.parameters[name].string_value if name in config.parameters else ""


def _padding(config: ModelConfig) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_parameter(config, PADDING) or "{}")
    return found


def _padded_axes(padding: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for axes in padding.get("inputs", {}).values():
        yield from axes if isinstance(axes, list) else [axes]


def _lengths(text: str) -> Any:
    """Lengths as the model parameter has them. Raises ValueError."""
    if text == _POWERS:
        return text
    numbers = text.removeprefix(_MULTIPLE)
    if not all(each.isdecimal() and int(each) for each in numbers.split("/")):
        raise ValueError(text)
    if numbers != text:
        return {"multiple_of": int(numbers)}
    return sorted({int(each) for each in numbers.split("/")})


def _lengths_text(lengths: Any) -> str:
    if isinstance(lengths, list):
        return "/".join(map(str, sorted(set(lengths))))
    return lengths if lengths == _POWERS else f"{_MULTIPLE}{lengths['multiple_of']}"


def _sizes(text: str) -> list[int]:
    return [] if text == NO_SIZES else sorted({int(size) for size in text.split("/")})


def _sizes_text(sizes: Iterable[int]) -> str:
    return "/".join(str(size) for size in sorted(set(sizes))) or NO_SIZES
