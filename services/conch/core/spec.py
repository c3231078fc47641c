"""Model specification: tensors, batching and instances of a version, as plain data.

The control plane makes it from Triton's model config, which the core never reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from conch.core.padding import Padding


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output of a model, batch dimension excluded.

    Attributes:
        name: Tensor name.
        datatype: Protocol name of the element type, such as ``FP32``.
        dims: Dimensions as clients see them; -1 for a variable one.
        reshape: Dimensions as the backend sees them; None if they are the same.
        optional: True if a request may leave the input out.
        ragged: True if requests with different dims of the input may share a batch.
        labels: Labels of a classification output, by index.
        is_shape: True if it is a shape tensor: its values belong to the batch's shape, so it has no batch
            dimension, and requests share a batch only if they have the same values.
    """

    name: str
    datatype: str
    dims: tuple[int, ...]
    reshape: tuple[int, ...] | None = None
    optional: bool = False
    ragged: bool = False
    labels: tuple[str, ...] = ()
    is_shape: bool = False

    @property
    def backend_dims(self) -> tuple[int, ...]:
        """Dimensions as the backend sees them."""
        return self.dims if self.reshape is None else self.reshape


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """Queue policy of one priority level.

    Attributes:
        delays: True if a request whose timeout has passed moves behind the others instead of failing.
        timeout_ns: Longest wait in nanoseconds; 0 for no limit.
        allow_override: True if a request may shorten the timeout.
        max_size: Largest number of waiting requests; 0 for no limit.
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
        max_queue_delay_ns: Longest wait of the oldest request for others, in nanoseconds.
        policies: Queue policies by priority level, highest first; empty for one level without limits.
        default_level: Level of requests without one, counted from 1.
        preserve_ordering: True if responses are sent in the order of their requests.
    """

    preferred_sizes: tuple[int, ...] = ()
    max_queue_delay_ns: int = 0
    policies: tuple[QueuePolicy, ...] = ()
    default_level: int = 1
    preserve_ordering: bool = False


@dataclass(frozen=True, slots=True)
class ControlTensor:
    """A control input, which tells a model the sequence state of its requests.

    Attributes:
        name: Input name.
        datatype: Protocol name of its element type.
        false_value: Element for no; unused for ``CORRID``.
        true_value: Element for yes; unused for ``CORRID``.
    """

    name: str
    kind: Literal["START", "READY", "END", "CORRID"]
    datatype: str
    false_value: float = 0
    true_value: float = 1


@dataclass(frozen=True, slots=True)
class StateSpec:
    """A tensor that the server keeps for each sequence between its requests.

    Attributes:
        input_name: The model's input for it.
        output_name: The model's output with its next value.
        datatype: Protocol name of the element type.
        dims: Dimensions, batch dimension excluded; -1 for a variable one.
        initial_dims: Dimensions of the first value, without -1.
        initial_data: The first value in wire form; None for zeros.
    """

    input_name: str
    output_name: str
    datatype: str
    dims: tuple[int, ...]
    initial_dims: tuple[int, ...]
    initial_data: bytes | None = None


@dataclass(frozen=True, slots=True)
class SequenceBatching:
    """Settings of the sequence batcher.

    Attributes:
        strategy: ``DIRECT`` keeps a sequence in one row of the batches of one instance; ``OLDEST`` batches
            the oldest requests of the sequences that an instance has.
        max_idle_ns: Longest idle time of a sequence, in nanoseconds.
        controls: Control inputs.
        states: Tensors kept between the requests of a sequence.
        max_queue_delay_ns: Longest wait of a request for others, in nanoseconds.
        min_slot_utilization: With ``DIRECT``, the share of filled slots that ends the wait; 0 for any.
        max_candidates: With ``OLDEST``, the number of sequences of an instance at a time.
        preferred_sizes: With ``OLDEST``, batch sizes worth waiting for, ascending.
        preserve_ordering: With ``OLDEST``, whether responses are sent in the order of their requests.
        iterative: True if each request is a sequence, which the model may run repeatedly.
    """

    strategy: Literal["DIRECT", "OLDEST"] = "DIRECT"
    max_idle_ns: int = 1_000_000_000
    controls: tuple[ControlTensor, ...] = ()
    states: tuple[StateSpec, ...] = ()
    max_queue_delay_ns: int = 0
    min_slot_utilization: float = 0.0
    max_candidates: int = 1
    preferred_sizes: tuple[int, ...] = ()
    preserve_ordering: bool = False
    iterative: bool = False


@dataclass(frozen=True, slots=True)
class EnsembleStep:
    """One model of an ensemble.

    Attributes:
        model_name: The model's name, or its identifier once it is resolved in a namespace.
        model_version: Its version; -1 for the default one.
        input_map: Ensemble tensor by input of the model.
        output_map: Ensemble tensor by output of the model.
    """

    model_name: str
    model_version: int
    input_map: Mapping[str, str]
    output_map: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class EnsembleScheduling:
    """The steps of an ensemble.

    Attributes:
        max_inflight: Largest number of unfinished responses of a decoupled step, of all requests; 0: any.
    """

    steps: tuple[EnsembleStep, ...]
    max_inflight: int = 0


@dataclass(frozen=True, slots=True)
class BatchInput:
    """An input that the server computes from the requests of a batch.

    Attributes:
        kind: A ``Kind`` of Triton's ``BatchInput``.
        names: The model's inputs that get it.
        datatype: Protocol name of the element type.
        source: The request input that it is computed from.
    """

    kind: str
    names: tuple[str, ...]
    datatype: str
    source: str


@dataclass(frozen=True, slots=True)
class BatchOutput:
    """Outputs without a batch dimension, which the server splits between the requests of a batch.

    Attributes:
        kind: A ``Kind`` of Triton's ``BatchOutput``.
        names: The outputs.
        source: The request input that determines the share of each request.
    """

    kind: str
    names: tuple[str, ...]
    source: str


@dataclass(frozen=True, slots=True)
class Resource:
    """A resource that an instance needs to run a batch, counted by the rate limiter.

    Attributes:
        shared: True if all devices share one pool.
    """

    name: str
    count: int
    shared: bool = False


@dataclass(frozen=True, slots=True)
class InstanceGroup:
    """A group of equal instances of a model.

    Attributes:
        name: Group name; instances are named after it.
        kind: ``CPU``, ``GPU`` or ``MODEL``; ``AUTO`` only before it is resolved.
        count: Instances per device.
        gpus: Device ids of a GPU group.
        passive: True if its instances never get a batch.
        profiles: Optimisation profiles, for backends that have them.
        resources: Resources that each instance needs to run a batch.
        priority: Weight for the rate limiter: an instance of 2 runs half as often as one of 1.
    """

    name: str
    kind: str = "CPU"
    count: int = 1
    gpus: tuple[int, ...] = ()
    passive: bool = False
    profiles: tuple[str, ...] = ()
    resources: tuple[Resource, ...] = ()
    priority: int = 1


@dataclass(frozen=True, slots=True)
class WarmupInput:
    """An input of the requests of a warm-up sample.

    Attributes:
        name: Input name.
        datatype: Protocol name of the element type.
        dims: Dimensions as clients see them, batch dimension excluded, without -1.
        data: Values in wire form if `source` is ``FILE``, else empty.
    """

    name: str
    datatype: str
    dims: tuple[int, ...]
    source: Literal["ZERO", "RANDOM", "FILE"] = "ZERO"
    data: bytes = b""


@dataclass(frozen=True, slots=True)
class WarmupSample:
    """A warm-up sample, which runs on every instance before the version is ready.

    Not part of `ModelSpec`, so that its data is freed once the version is ready.

    Attributes:
        name: Name for messages.
        inputs: Inputs of each request.
        batch_size: Number of one-row requests in the batch, at least one.
        count: Number of runs, at least one.
        optional: True if a failure is only logged.
    """

    name: str
    inputs: tuple[WarmupInput, ...]
    batch_size: int = 1
    count: int = 1
    optional: bool = False


def identifier(namespace: str, name: str) -> str:
    """The identifier of a model as Triton writes it; its name if it has no namespace."""
    return f"{namespace}::{name}" if namespace else name


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
        batching: Dynamic batching, or None.
        sequence: Sequence batching, or None; with neither, nor an ensemble, requests run one by one.
        ensemble: The steps of an ensemble, which has no instances; or None.
        batch_inputs: Inputs made from the requests of a batch.
        batch_outputs: Outputs split by more than the batch dimension.
        padding: Inputs of variable dims that are padded to a few lengths, or None.
        cached: True if the response cache is used.
        cache_ttl_ns: Lifetime of cached responses in nanoseconds; 0 for the cache's default.
        max_queue_size: Largest number of waiting requests of all priority levels; 0 for no limit.
        decoupled: True if a request may have any number of responses.
        parameters: The config's ``parameters``, key to string value.
        config: The whole config as Triton prints it in JSON: snake_case keys, enum names.
        config_message: The whole config as a serialised ``inference.ModelConfig``.
        backend_options: Options of the backend given on the command line.
        namespace: The model's namespace; empty if names are unique.
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
    sequence: SequenceBatching | None = None
    ensemble: EnsembleScheduling | None = None
    batch_inputs: tuple[BatchInput, ...] = ()
    batch_outputs: tuple[BatchOutput, ...] = ()
    padding: Padding | None = None
    cached: bool = False
    cache_ttl_ns: int = 0
    max_queue_size: int = 0
    decoupled: bool = False
    parameters: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, object] = field(default_factory=dict)
    config_message: bytes = b""
    backend_options: Mapping[str, str] = field(default_factory=dict)
    namespace: str = ""

    @property
    def identifier(self) -> str:
        """The identifier under which the model is published; its name if it has no namespace."""
        return identifier(self.namespace, self.name)

    def full_dims(self, tensor: TensorSpec) -> tuple[int, ...]:
        """The shape that clients see: the dims, after the batch dimension if the model batches."""
        return (-1, *tensor.dims) if self.max_batch_size > 0 and not tensor.is_shape else tensor.dims

    @property
    def model_inputs(self) -> tuple[TensorSpec, ...]:
        """All inputs of the backend's model: those of clients, then controls and states."""
        if self.sequence is None:
            return self.inputs
        controls = (TensorSpec(tensor.name, tensor.datatype, (1,)) for tensor in self.sequence.controls)
        states = (TensorSpec(state.input_name, state.datatype, state.dims) for state in self.sequence.states)
        return (*self.inputs, *controls, *states)

    @property
    def model_outputs(self) -> tuple[TensorSpec, ...]:
        """All outputs of the backend's model: those for clients, then states."""
        if self.sequence is None:
            return self.outputs
        shown = {tensor.name for tensor in self.outputs}
        states = (TensorSpec(state.output_name, state.datatype, state.dims) for state in self.sequence.states)
        return (*self.outputs, *(tensor for tensor in states if tensor.name not in shown))
