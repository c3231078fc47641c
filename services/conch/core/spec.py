"""What the core needs to know of a model version: its tensors, batching and instances, as plain data.

Made by the control plane from Triton's model config; the core never reads that config itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output of a model, batch dimension excluded.

    Attributes:
        name: Tensor name.
        datatype: Protocol name of the element type, such as ``FP32``.
        dims: Dimensions as clients see them; -1 for a variable one.
        reshape: Dimensions as the backend sees them, or None where they are the same.
        optional: Whether a request may leave the input out.
        labels: Labels of a classification output, by index.
    """

    name: str
    datatype: str
    dims: tuple[int, ...]
    reshape: tuple[int, ...] | None = None
    optional: bool = False
    labels: tuple[str, ...] = ()

    @property
    def backend_dims(self) -> tuple[int, ...]:
        """Dimensions as the backend sees them."""
        return self.dims if self.reshape is None else self.reshape


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """What becomes of the requests that wait on one priority level.

    Attributes:
        delays: Whether requests whose timeout has passed wait behind the others, not answered with an error.
        timeout_ns: How long a request may wait, in nanoseconds; 0 for as long as it takes.
        allow_override: Whether a request may shorten that.
        max_size: Most requests that may wait; 0 for any number.
    """

    delays: bool = False
    timeout_ns: int = 0
    allow_override: bool = False
    max_size: int = 0

    def timeout_for(self, requested_us: int) -> int:
        """The timeout, in nanoseconds, of a request that asks for one in microseconds; 0 for none."""
        if self.allow_override and 0 < requested_us * 1000 < self.timeout_ns:
            return requested_us * 1000
        return self.timeout_ns


@dataclass(frozen=True, slots=True)
class DynamicBatching:
    """Settings of the dynamic batcher.

    Attributes:
        preferred_sizes: Batch sizes worth waiting for, ascending.
        max_queue_delay_ns: How long the oldest request may wait for company, in nanoseconds.
        policies: The queue policy of each priority level, highest first; empty for one level without limits.
        default_level: Level of requests without one, counted from 1.
    """

    preferred_sizes: tuple[int, ...] = ()
    max_queue_delay_ns: int = 0
    policies: tuple[QueuePolicy, ...] = ()
    default_level: int = 1


@dataclass(frozen=True, slots=True)
class InstanceGroup:
    """A number of equal instances of a model.

    Attributes:
        name: Group name; instances are named after it.
        kind: ``CPU``, ``GPU`` or ``MODEL``.
        count: Instances per device.
        gpus: Device ids of a GPU group.
    """

    name: str
    kind: str = "CPU"
    count: int = 1
    gpus: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class WarmupInput:
    """An input of the requests of a warm-up sample.

    Attributes:
        name: Input name.
        datatype: Protocol name of the element type.
        dims: Dimensions as clients see them, batch dimension excluded, all of them known.
        source: Where the values come from.
        data: The values in wire form where they come from a file, else empty.
    """

    name: str
    datatype: str
    dims: tuple[int, ...]
    source: Literal["ZERO", "RANDOM", "FILE"] = "ZERO"
    data: bytes = b""


@dataclass(frozen=True, slots=True)
class WarmupSample:
    """Requests that run on every instance before a version takes any others.

    Not part of `ModelSpec`: nobody needs its data once the version is ready.

    Attributes:
        name: Name for messages about it.
        inputs: Inputs of each request.
        batch_size: Requests of one row that run together, at least one.
        count: How often they run, at least once.
    """

    name: str
    inputs: tuple[WarmupInput, ...]
    batch_size: int = 1
    count: int = 1


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One version of one model, ready to be loaded.

    Attributes:
        name: Model name.
        version: Version number.
        platform: Triton's legacy platform name, possibly empty.
        backend: Name of the backend that runs it.
        max_batch_size: Largest batch, 0 for a model without batching.
        inputs: Input tensors.
        outputs: Output tensors.
        directory: The model's directory.
        version_directory: The version's directory.
        model_file: File name inside the version directory.
        instance_groups: Instance groups, at least one.
        batching: Dynamic batching, or None for the default scheduler.
        max_queue_size: Most requests that may wait, of all priority levels together; 0 for any number.
        decoupled: Whether a request may have any number of responses.
        parameters: The config's ``parameters``, key to string value.
        config: The whole config as Triton prints it in JSON: snake_case keys, enum names.
        config_message: The whole config as a serialised ``inference.ModelConfig``.
        backend_options: Options of the backend given on the command line.
    """

    name: str
    version: int
    platform: str
    backend: str
    max_batch_size: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    directory: Path
    version_directory: Path
    model_file: str
    instance_groups: tuple[InstanceGroup, ...]
    batching: DynamicBatching | None = None
    max_queue_size: int = 0
    decoupled: bool = False
    parameters: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, object] = field(default_factory=dict)
    config_message: bytes = b""
    backend_options: Mapping[str, str] = field(default_factory=dict)

    def full_dims(self, tensor: TensorSpec) -> tuple[int, ...]:
        """The shape clients see: the dims, with the batch dimension where the model batches."""
        return (-1, *tensor.dims) if self.max_batch_size > 0 else tensor.dims
