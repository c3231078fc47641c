"""Describes a bound function (`conch.Tensor`, `conch.ModelConfig`) and makes its model config."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
from google.protobuf import text_format

from conch.core.errors import InvalidArgumentError, UnsupportedError
from conch.core.tensor import datatype_of
from conch.protocol.model_config_pb2 import DataType, ModelQueuePolicy
from conch.protocol.model_config_pb2 import ModelConfig as ConfigMessage

BACKEND = "bound"
"""Name of the backend of bound functions."""

TimeoutAction = Literal["REJECT", "DELAY"]

_MOST_RANK = 32


@dataclass(frozen=True, slots=True)
class Tensor:
    """An input or output of a function.

    Attributes:
        name: Its name; by default ``INPUT_1``, ``INPUT_2`` ... or ``OUTPUT_1`` ...
        dtype: Element type, also `ml_dtypes.bfloat16`; `bytes`, `str` and `object` mean strings, which are
            passed as `bytes`.
        shape: Dims without the batch dimension; -1 for a variable one.
        optional: True if requests may leave the input out.
    """

    name: str | None = None
    dtype: npt.DTypeLike = np.float32
    shape: Sequence[int] = (-1,)
    optional: bool = False

    @property
    def datatype(self) -> str:
        """The protocol's datatype name.

        Raises:
            InvalidArgumentError: The dtype has none.
        """
        try:
            dtype = np.dtype(self.dtype)
        except TypeError:
            raise self._wrong(f"dtype {self.dtype!r} is none of numpy's") from None
        try:
            return datatype_of(np.empty(0, dtype.newbyteorder("=")))
        except UnsupportedError:
            raise self._wrong(f"dtype {dtype} has no datatype in the protocol") from None

    def check(self) -> None:
        """Validates the tensor.

        Raises:
            InvalidArgumentError: It is invalid; the text says why.
        """
        dims: Any = self.shape
        if isinstance(dims, str) or not isinstance(dims, Sequence):
            raise self._wrong(f"shape {dims!r} must be a sequence of dims, such as (-1, 3)")
        if not dims:
            raise self._wrong("shape () must have a dim; (1,) is that of a single value")
        if len(dims) > _MOST_RANK:
            raise self._wrong(f"shape has {len(dims)} dims, and there can be {_MOST_RANK}")
        for dim in dims:
            if not isinstance(dim, int | np.integer) or isinstance(dim, bool) or (dim < 1 and dim != -1):
                raise self._wrong(f"shape {tuple(dims)!r} may have positive dims and -1, not {dim!r}")
        _ = self.datatype

    def _wrong(self, problem: str) -> InvalidArgumentError:
        return InvalidArgumentError(f"tensor {'' if self.name is None else repr(self.name) + ' '}{problem}")


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """Queue policy of waiting requests.

    Attributes:
        timeout_action: Action for a request that waits too long.
        default_timeout_microseconds: The queue timeout; 0 for none.
        allow_timeout_override: True if a request may set its own timeout.
        max_queue_size: Maximum number of waiting requests; 0 for no limit.
    """

    timeout_action: TimeoutAction = "REJECT"
    default_timeout_microseconds: int = 0
    allow_timeout_override: bool = False
    max_queue_size: int = 0

    def fill(self, message: ModelQueuePolicy) -> None:
        """Writes the policy to a config."""
        if self.timeout_action not in get_args(TimeoutAction):
            raise InvalidArgumentError(
                f"timeout_action: must be one of {', '.join(get_args(TimeoutAction))}, not "
                f"{self.timeout_action!r}"
            )
        message.timeout_action = (
            ModelQueuePolicy.REJECT if self.timeout_action == "REJECT" else ModelQueuePolicy.DELAY
        )
        message.default_timeout_microseconds = self.default_timeout_microseconds
        message.allow_timeout_override = self.allow_timeout_override
        message.max_queue_size = self.max_queue_size


@dataclass(frozen=True, slots=True)
class DynamicBatcher:
    """Settings of dynamic batching; see docs/batching.md.

    Attributes:
        max_queue_delay_microseconds: Longest wait for a fuller batch.
        preferred_batch_size: Batch sizes worth waiting for.
        preserve_ordering: True if responses are sent in the order of the requests.
        priority_levels: Number of priority levels; 0 for none.
        default_priority_level: Level of requests without one.
        default_queue_policy: Policy of waiting requests.
        priority_queue_policy: Policies of single levels.
    """

    max_queue_delay_microseconds: int = 0
    preferred_batch_size: Sequence[int] = ()
    preserve_ordering: bool = False
    priority_levels: int = 0
    default_priority_level: int = 0
    default_queue_policy: QueuePolicy | None = None
    priority_queue_policy: Mapping[int, QueuePolicy] = field(default_factory=dict)

    def fill(self, config: ConfigMessage) -> None:
        """Writes the settings to a config."""
        message = config.dynamic_batching
        message.SetInParent()
        message.max_queue_delay_microseconds = self.max_queue_delay_microseconds
        message.preferred_batch_size.extend(self.preferred_batch_size)
        message.preserve_ordering = self.preserve_ordering
        message.priority_levels = self.priority_levels
        message.default_priority_level = self.default_priority_level
        if self.default_queue_policy is not None:
            self.default_queue_policy.fill(message.default_queue_policy)
        for level, policy in self.priority_queue_policy.items():
            policy.fill(message.priority_queue_policy[level])


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Model configuration of a function.

    Attributes:
        batching: True if inputs and outputs have a leading batch dimension.
        max_batch_size: Maximum rows per call of the function.
        batcher: Dynamic batching; None to call the function once per request.
        decoupled: True if the function yields any number of responses per request.
        response_cache: True if the server's response cache may answer.
        parameters: Model parameters.
        text: More of the config, in config.pbtxt syntax.
    """

    batching: bool = True
    max_batch_size: int = 4
    batcher: DynamicBatcher | None = field(default_factory=DynamicBatcher)
    decoupled: bool = False
    response_cache: bool = False
    parameters: Mapping[str, str] = field(default_factory=dict)
    text: str = ""

    def message(
        self, name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], instances: int, version: int
    ) -> ConfigMessage:
        """Makes the config of a model.

        Args:
            name: Its name.
            inputs: The function's inputs.
            outputs: The function's outputs.
            instances: Number of functions.
            version: The model's version.

        Raises:
            InvalidArgumentError: A value is invalid; the text names it.
        """
        if self.batching and self.max_batch_size < 1:
            raise InvalidArgumentError(
                f"max_batch_size: must be at least 1, not {self.max_batch_size}; for functions without a "
                f"batch dimension say batching=False"
            )
        config = ConfigMessage(name=name, backend=BACKEND)
        config.max_batch_size = self.max_batch_size if self.batching else 0
        # Protobuf rejects numbers out of range.
        try:
            if self.batching and self.batcher is not None:
                self.batcher.fill(config)
            for key, value in self.parameters.items():
                config.parameters[key].string_value = value
        except (TypeError, ValueError) as error:
            raise InvalidArgumentError(f"config of model '{name}': {error}") from None
        for tensor in _named(inputs, "INPUT"):
            config.input.add(
                name=tensor.name,
                data_type=_data_type(tensor),
                dims=map(int, tensor.shape),
                optional=tensor.optional,
            )
        for tensor in _named(outputs, "OUTPUT"):
            if tensor.optional:
                raise InvalidArgumentError(f"output '{tensor.name}' can't be optional: only inputs can")
            config.output.add(name=tensor.name, data_type=_data_type(tensor), dims=map(int, tensor.shape))
        config.instance_group.add(kind="KIND_CPU", count=instances)
        config.version_policy.specific.versions.append(version)
        if self.decoupled:
            config.model_transaction_policy.decoupled = True
        if self.response_cache:
            config.response_cache.enable = True
        if self.text:
            self._merge(config)
        return config

    def _merge(self, config: ConfigMessage) -> None:
        # The text may override what is set, such as the kind of batching.
        more = ConfigMessage()
        try:
            text_format.Parse(self.text, more)
        except text_format.ParseError as error:
            raise InvalidArgumentError(f"text of the config of model '{config.name}': {error}") from None
        for name in ("name", "backend", "platform", "input", "output", "instance_group", "max_batch_size"):
            if any(descriptor.name == name for descriptor, _ in more.ListFields()):
                raise InvalidArgumentError(
                    f"text of the config of model '{config.name}': '{name}' follows from what was bound"
                )
        if more.WhichOneof("scheduling_choice") is not None:
            config.ClearField("dynamic_batching")
        config.MergeFrom(more)


def _named(tensors: Iterable[Tensor], prefix: str) -> list[Tensor]:
    """Tensors with names, validated."""
    named: list[Tensor] = []
    for number, tensor in enumerate(tensors, 1):
        if not isinstance(tensor, Tensor):
            raise InvalidArgumentError(
                f"{prefix.lower()}s: must be a list of conch.Tensor, not of {type(tensor).__name__}"
            )
        name = f"{prefix}_{number}" if tensor.name is None else tensor.name
        named.append(Tensor(name, tensor.dtype, tensor.shape, tensor.optional))
        named[-1].check()
    names: list[Any] = [tensor.name for tensor in named]
    for name in names:
        if not name or not isinstance(name, str):
            raise InvalidArgumentError(f"{prefix.lower()}s: {name!r} can't be the name of a tensor")
        if names.count(name) > 1:
            raise InvalidArgumentError(f"{prefix.lower()}s: there are two named '{name}'")
    if not named:
        raise InvalidArgumentError(f"{prefix.lower()}s: there must be at least one")
    return named


def _data_type(tensor: Tensor) -> Any:
    datatype = tensor.datatype
    return DataType.Value("TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}")
