"""What the core needs to know of a model version: its tensors, batching and instances, as plain data.

Made by the control plane from Triton's model config; the core never reads that config itself.
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
        reshape: Dimensions as the backend sees them, or None where they are the same.
        optional: Whether a request may leave the input out.
        ragged: Whether requests with different dims of the input may share a batch.
        labels: Labels of a classification output, by index.
    """

    name: str
    datatype: str
    dims: tuple[int, ...]
    reshape: tuple[int, ...] | None = None
    optional: bool = False
    ragged: bool = False
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
        preserve_ordering: Whether responses leave in the order in which their requests came.
    """

    preferred_sizes: tuple[int, ...] = ()
    max_queue_delay_ns: int = 0
    policies: tuple[QueuePolicy, ...] = ()
    default_level: int = 1
    preserve_ordering: bool = False


@dataclass(frozen=True, slots=True)
class ControlTensor:
    """An input by which a model is told where its requests stand in their sequences.

    Attributes:
        name: Input name.
        kind: What it says.
        datatype: Protocol name of its element type.
        false_value: Element for no; of no use for ``CORRID``.
        true_value: Element for yes; of no use for ``CORRID``.
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
        input_name: Input that it is given to the model as.
        output_name: Output that its next value comes from.
        datatype: Protocol name of the element type.
        dims: Dimensions, batch dimension excluded; -1 for a variable one.
        initial_dims: Dimensions of the first value, all of them known.
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
        max_idle_ns: How long a sequence may be without a request, in nanoseconds.
        controls: Control inputs.
        states: Tensors kept between the requests of a sequence.
        max_queue_delay_ns: How long a request may wait for company, in nanoseconds.
        min_slot_utilization: With ``DIRECT``, the share of slots that makes waiting pointless; 0 for any.
        max_candidates: With ``OLDEST``, the sequences that an instance has at a time.
        preferred_sizes: With ``OLDEST``, batch sizes worth waiting for, ascending.
        preserve_ordering: With ``OLDEST``, whether responses leave in the order of their requests.
        iterative: Whether a request is a sequence of its own that the model may run again and again.
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
        model_name: The model's name; its identifier, once that is known, where models have namespaces.
        model_version: Its version; -1 for the newest that is ready.
        input_map: Ensemble tensor by input of the model.
        output_map: Ensemble tensor by output of the model.
    """

    model_name: str
    model_version: int
    input_map: Mapping[str, str]
    output_map: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class EnsembleScheduling:
    """Which models an ensemble consists of, and how tensors go from one to the next.

    Attributes:
        steps: The models.
        max_inflight: Most unfinished requests that the responses of one decoupled step may have; 0 for any.
    """

    steps: tuple[EnsembleStep, ...]
    max_inflight: int = 0


@dataclass(frozen=True, slots=True)
class BatchInput:
    """An input that is made from the requests of a batch.

    Attributes:
        kind: What it holds, a ``Kind`` of Triton's ``BatchInput``.
        names: Inputs of the model that get it.
        datatype: Protocol name of the element type.
        source: Request input that it is made from.
    """

    kind: str
    names: tuple[str, ...]
    datatype: str
    source: str


@dataclass(frozen=True, slots=True)
class BatchOutput:
    """How outputs without a batch dimension are split between the requests of a batch.

    Attributes:
        kind: How, a ``Kind`` of Triton's ``BatchOutput``.
        names: Outputs that are split.
        source: Request input that says how much each request gets.
    """

    kind: str
    names: tuple[str, ...]
    source: str


@dataclass(frozen=True, slots=True)
class Resource:
    """Something an instance needs to run a batch, counted by the rate limiter.

    Attributes:
        name: Name of the resource.
        count: How much of it.
        shared: Whether there is one pool for all devices.
    """

    name: str
    count: int
    shared: bool = False


@dataclass(frozen=True, slots=True)
class InstanceGroup:
    """A number of equal instances of a model.

    Attributes:
        name: Group name; instances are named after it.
        kind: ``CPU``, ``GPU`` or ``MODEL``; ``AUTO`` only before it is resolved.
        count: Instances per device.
        gpus: Device ids of a GPU group.
        passive: Whether its instances are made but never given a batch.
        profiles: Optimisation profiles, for backends that have them.
        resources: What each instance needs to run a batch.
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


def identifier(namespace: str, name: str) -> str:
    """The identifier of a model, as Triton writes it; its name, where it has no namespace."""
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
        cached: Whether responses may come from the response cache.
        cache_ttl_ns: How long they may, in nanoseconds; 0 for as long as the cache says.
        max_queue_size: Most requests that may wait, of all priority levels together; 0 for any number.
        decoupled: Whether a request may have any number of responses.
        parameters: The config's ``parameters``, key to string value.
        config: The whole config as Triton prints it in JSON: snake_case keys, enum names.
        config_message: The whole config as a serialised ``inference.ModelConfig``.
        backend_options: Options of the backend given on the command line.
        namespace: What tells the model from others of its name; empty where names are unique.
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
        """What the model is published as; its name, where it has no namespace."""
        return identifier(self.namespace, self.name)

    def full_dims(self, tensor: TensorSpec) -> tuple[int, ...]:
        """The shape clients see: the dims, with the batch dimension where the model batches."""
        return (-1, *tensor.dims) if self.max_batch_size > 0 else tensor.dims

    @property
    def model_inputs(self) -> tuple[TensorSpec, ...]:
        """All inputs of the backend's model: those of clients, then those that the server gives it."""
        if self.sequence is None:
            return self.inputs
        controls = (TensorSpec(tensor.name, tensor.datatype, (1,)) for tensor in self.sequence.controls)
        states = (TensorSpec(state.input_name, state.datatype, state.dims) for state in self.sequence.states)
        return (*self.inputs, *controls, *states)

    @property
    def model_outputs(self) -> tuple[TensorSpec, ...]:
        """All outputs of the backend's model: those for clients, then those that only the server takes."""
        if self.sequence is None:
            return self.outputs
        shown = {tensor.name for tensor in self.outputs}
        states = (TensorSpec(state.output_name, state.datatype, state.dims) for state in self.sequence.states)
        return (*self.outputs, *(tensor for tensor in states if tensor.name not in shown))
