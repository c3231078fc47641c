"""Runs an engine for one instance: a stream, a context per profile, pinned staging, client memory in place.

Owns: the stream, the contexts, device and pinned buffers, graphs. Copies run on the stream beside the
computation, and one synchronisation ends a run. Threads: one at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from math import prod
from typing import Any, NamedTuple

from conch.backends.device_arrays import ALIGNMENT, Places, overlap
from conch.backends.signature import scalar_dims
from conch.core.device import DeviceMemory, DeviceTensor
from conch.core.engine_text import engine_text
from conch.core.errors import ConchError, InternalError, ResourceExhaustedError, UnsupportedError
from conch.core.execution.placement import Placement
from conch.core.spec import ModelSpec
from conch.core.tensor import ELEMENT_SIZES, POSITIONS, Array
from conch_engines.tensorrt.cuda_graphs import CapturedGraph, GraphCapture, find_graph
from conch_engines.tensorrt.engine_description import EngineDescription, EngineTensor
from conch_engines.tensorrt.gpu_buffers import DeviceBuffer, Gpu, Staging
from conch_engines.tensorrt.optimization_profiles import Dims, choose
from conch_engines.tensorrt.plan_runtime import PlanRuntime
from conch_engines.tensorrt.profile_context import BatchShape, ProfileContext
from conch_engines.tensorrt.tensorrt_settings import TensorRTSettings, instance_profiles

_MOST_ROUTES = 1024

Value = Array | DeviceTensor


class SharedEngine(NamedTuple):
    """An engine on a device, which all instances there share."""

    trt: Any
    runtime: PlanRuntime
    engine: Any
    description: EngineDescription
    gpu: Gpu


class _Route(NamedTuple):
    """Execution of batches of one shape: the context, and the graph if one was captured."""

    context: ProfileContext
    graph: CapturedGraph | None


class _Produced(NamedTuple):
    """Address and dims of an output; `placed` if it lies in memory for the response."""

    pointer: int
    dims: Dims
    placed: DeviceTensor | None = None


class _Tensor:
    """One input or output of the engine, as batches have it."""

    def __init__(self, spec: ModelSpec, tensor: EngineTensor, gpu: Gpu) -> None:
        by_name = {each.name: each for each in (*spec.model_inputs, *spec.model_outputs)}
        found = by_name.get(tensor.name)
        self.key = tensor.key
        self.name = tensor.name
        self.datatype = tensor.datatype
        self.element_size = ELEMENT_SIZES[tensor.datatype]
        self.is_shape = tensor.is_shape
        self.on_host = tensor.on_host
        self.gets_batch_size = tensor.gets_batch_size(spec.max_batch_size > 0)
        self.scalar = () if found is None else scalar_dims(spec, found, tensor.dims)
        self.buffer = DeviceBuffer(gpu)
        self.staging = Staging(gpu)


class TensorRTFunction:
    """A `DeviceFunction` and an `ArrayFunction` of one engine."""

    def __init__(
        self, shared: SharedEngine, spec: ModelSpec, settings: TensorRTSettings, placement: Placement
    ) -> None:
        self.device_id = placement.device_id
        self._name = placement.name
        self._shared = shared
        self._gpu = gpu = shared.gpu
        self._batches = spec.max_batch_size > 0
        engine = shared.description
        self._inputs = [_Tensor(spec, tensor, gpu) for tensor in engine.inputs]
        self._outputs = [_Tensor(spec, tensor, gpu) for tensor in engine.outputs]
        self._has_shapes = any(tensor.is_shape for tensor in engine.inputs)
        self._routes: dict[BatchShape, _Route] = {}
        self._graphs: dict[int, list[CapturedGraph]] = {}
        indices = instance_profiles(placement, len(engine.profiles))
        self._profiles = [engine.profiles[index] for index in indices]
        with gpu.current():
            self._stream = gpu.stream(settings.high_priority)
            strategy = getattr(shared.trt.ExecutionContextAllocationStrategy, settings.strategy)
            self._contexts = {
                index: self._context(shared.engine.create_execution_context(strategy), index)
                for index in indices
            }
            if settings.graphs:
                self._capture(spec, settings)

    def _context(self, context: Any, profile: int) -> ProfileContext:
        shared = self._shared
        if context is None:
            raise InternalError(
                f"unable to create TensorRT context for {self._name}: {shared.runtime.last_errors()}"
            )
        return ProfileContext(
            shared.trt,
            shared.runtime,
            context,
            shared.description,
            profile,
            shared.gpu,
            self._stream,
            self._name,
        )

    def _capture(self, spec: ModelSpec, settings: TensorRTSettings) -> None:
        """Captures the graphs that the config asks for."""
        tensors = (*self._inputs, *self._outputs)
        ragged = any(tensor.ragged for tensor in spec.inputs) or spec.batch_inputs
        if ragged or any(each.is_shape or each.on_host for each in tensors):
            raise UnsupportedError(
                f"unable to load model '{spec.name}', CUDA graphs are not supported with shape tensors, "
                f"ragged inputs and batch_input: remove optimization.cuda.graphs"
            )
        shared = self._shared
        engine, strategies = shared.engine, shared.trt.ExecutionContextAllocationStrategy
        nbytes = engine.device_memory_size_v2
        activations = shared.gpu.memory(nbytes)

        def new_context(profile: int) -> ProfileContext:
            context = engine.create_execution_context(strategies.USER_MANAGED)
            if context is not None:
                context.set_device_memory(activations.ptr, nbytes)
            return self._context(context, profile)

        capture = GraphCapture(
            shared.description,
            shared.gpu,
            self._stream,
            {each.key: each.buffer for each in self._inputs},
            {each.key: each.buffer for each in self._outputs},
            self._name,
        )
        for profile in self._profiles:
            self._graphs[profile.index] = capture.capture(settings.graphs, profile, new_context)
        self._activations = activations

    def __call__(self, inputs: dict[str, Array], outputs: tuple[str, ...]) -> Mapping[str, Array]:
        """Runs the engine once with inputs and outputs in host memory."""
        results = self.on_device(inputs, outputs, {})
        return {name: value for name, value in results.items() if not isinstance(value, DeviceTensor)}

    def on_device(
        self, inputs: Mapping[str, Value], outputs: tuple[str, ...], places: Places
    ) -> Mapping[str, Value]:
        """Runs the engine once on its stream."""
        with self._gpu.current():
            try:
                return self._run(inputs, outputs, places)
            except BaseException as error:  # of TensorRT or cupy
                with suppress(Exception):  # of cupy; what was started still uses its memory
                    self._stream.synchronize()
                if isinstance(error, ConchError) or not isinstance(error, Exception):
                    raise
                if isinstance(error, MemoryError):
                    raise ResourceExhaustedError(f"{self._name}: {engine_text(error)}") from error
                raise InternalError(f"TensorRT failed for {self._name}: {engine_text(error)}") from error

    def _run(
        self, inputs: Mapping[str, Value], outputs: tuple[str, ...], places: Places
    ) -> Mapping[str, Value]:
        values = [self._value(tensor, inputs) for tensor in self._inputs]
        shape = self._shape(values)
        route = self._routes.get(shape) or self._route(shape)
        if route.graph is not None:
            produced = self._launch(route.graph, values)
        else:
            produced = self._enqueue(route.context, shape, values, places)
        results = self._results(produced, outputs, places)
        self._stream.synchronize()
        self._add_late(route.context, results, outputs, places)
        return results

    def _value(self, tensor: _Tensor, inputs: Mapping[str, Value]) -> Value:
        value = inputs[tensor.name]
        if tensor.scalar:
            return value.renamed(value.name, ()) if isinstance(value, DeviceTensor) else value.reshape(())
        return value

    def _shape(self, values: list[Value]) -> BatchShape:
        if not self._has_shapes:
            return BatchShape(tuple([value.shape for value in values]))
        pairs = list(zip(self._inputs, values, strict=True))
        rows = next((value.shape[0] for each, value in pairs if not each.is_shape), 1) if self._batches else 0
        dims, contents = [], []
        for tensor, value in pairs:
            if not tensor.is_shape:
                dims.append(value.shape)
                continue
            array = value.numpy() if isinstance(value, DeviceTensor) else value
            content = tuple(array.reshape(-1).tolist())
            content = (rows, *content) if tensor.gets_batch_size else content
            dims.append((len(content),) if tensor.gets_batch_size else value.shape)
            contents.append(content)
        return BatchShape(tuple(dims), tuple(contents))

    def _route(self, shape: BatchShape) -> _Route:
        """Chooses profile and graph for a shape, and remembers them."""
        shapes = {each.key: dims for each, dims in zip(self._inputs, shape.dims, strict=True)}
        keys = [each.key for each in self._inputs if each.is_shape]
        profile = choose(self._profiles, shapes, dict(zip(keys, shape.values, strict=True)), self._name)
        graph = find_graph(self._graphs.get(profile.index, ()), shape.dims, self._batches)
        route = _Route(self._contexts[profile.index], graph)
        if len(self._routes) >= _MOST_ROUTES:
            self._routes.clear()
        self._routes[shape] = route
        return route

    def _launch(self, graph: CapturedGraph, values: list[Value]) -> dict[str, _Produced]:
        """Runs a graph: inputs are copied to its buffers, and of its outputs only the batch's rows count."""
        stream = self._stream
        for tensor, value in zip(self._inputs, values, strict=True):
            pointer = graph.pointers[tensor.key]
            if isinstance(value, DeviceTensor):
                stream.on_device(pointer, value.memory.pointer, value.nbytes)
            else:
                stream.to_device(pointer, tensor.staging, value)
        stream.launch(graph.graph)
        produced = {}
        for tensor in self._outputs:
            dims = graph.output_dims[tensor.key]
            if self._batches:
                dims = (values[0].shape[0], *dims[1:])
            produced[tensor.name] = _Produced(graph.pointers[tensor.key], dims)
        return produced

    def _enqueue(
        self, context: ProfileContext, shape: BatchShape, values: list[Value], places: Places
    ) -> dict[str, _Produced]:
        """Copies inputs to the device where they are not there, and starts the engine."""
        context.set_shape(shape)
        stream = self._stream
        taken: list[DeviceMemory] = []
        for tensor, value in zip(self._inputs, values, strict=True):
            if isinstance(value, DeviceTensor):
                if not tensor.on_host:
                    context.bind(tensor.key, value.memory.pointer or tensor.buffer.at_least(1))
                    taken.append(value.memory)
            elif not tensor.on_host:
                pointer = tensor.buffer.at_least(value.nbytes)
                stream.to_device(pointer, tensor.staging, value)
                context.bind(tensor.key, pointer)
        produced = {}
        for tensor in self._outputs:
            if tensor.key in context.allocators or tensor.on_host:
                continue
            made = self._target(tensor, context.output_dims[tensor.key], places.get(tensor.name), taken)
            context.bind(tensor.key, made.pointer)
            produced[tensor.name] = made
        context.enqueue()
        return produced

    def _target(
        self, tensor: _Tensor, dims: Dims, places: tuple[DeviceMemory, ...] | None, taken: list[DeviceMemory]
    ) -> _Produced:
        """Memory into which the engine writes an output: the client's if it fits, else a buffer."""
        nbytes = prod(dims) * tensor.element_size
        if places:
            place = places[0]
            in_place = (
                len(places) == 1
                and 0 < nbytes <= place.nbytes
                and not place.pointer % ALIGNMENT
                and tensor.datatype not in POSITIONS  # the engine may read back what it wrote
                and not any(overlap(place.part(0, nbytes), other) for other in taken)
            )
            if in_place:
                memory = place.part(0, nbytes)
            else:
                owned = self._gpu.memory(nbytes)
                memory = place.view_owned_by(owned.ptr, nbytes, owned)
            taken.append(memory)
            return _Produced(memory.pointer, dims, DeviceTensor(tensor.name, tensor.datatype, dims, memory))
        return _Produced(tensor.buffer.at_least(nbytes), dims)

    def _results(
        self, produced: Mapping[str, _Produced], outputs: tuple[str, ...], places: Places
    ) -> dict[str, Value]:
        """The wanted outputs, those for the host on their way there."""
        results: dict[str, Value] = {}
        for tensor in self._outputs:
            made = produced.get(tensor.name)
            if made is None or tensor.name not in outputs:
                continue
            if made.placed is not None:
                results[tensor.name] = made.placed
            else:
                results[tensor.name] = self._delivered(tensor, made, places.get(tensor.name))
        return results

    def _delivered(self, tensor: _Tensor, made: _Produced, places: tuple[DeviceMemory, ...] | None) -> Value:
        """A copy of an output that lies in a buffer: on the device for `places`, else in host memory."""
        if places:
            nbytes = prod(made.dims) * tensor.element_size
            if len(places) == 1 and nbytes <= places[0].nbytes:
                memory = places[0].part(0, nbytes)
            else:
                owned = self._gpu.memory(nbytes)
                memory = places[0].view_owned_by(owned.ptr, nbytes, owned)
            self._stream.on_device(memory.pointer, made.pointer, nbytes)
            return DeviceTensor(tensor.name, tensor.datatype, made.dims, memory)
        return self._stream.to_host(made.pointer, tensor.datatype, made.dims)

    def _add_late(
        self, context: ProfileContext, results: dict[str, Value], outputs: tuple[str, ...], places: Places
    ) -> None:
        """Adds outputs known only after the run: shape tensors, and those whose shape depends on data."""
        if len(results) == len(outputs):
            return
        late = [each for each in self._outputs if each.name in outputs and each.name not in results]
        copies = False
        for tensor in late:
            if tensor.key not in context.allocators:
                array = context.host_output(tensor.key)
                results[tensor.name] = array[1:] if tensor.gets_batch_size else array
                continue
            allocator = context.allocators[tensor.key]
            if allocator.error is not None:
                error, allocator.error = allocator.error, None
                raise error
            made = _Produced(allocator.buffer.at_least(1), allocator.dims)
            results[tensor.name] = self._delivered(tensor, made, places.get(tensor.name))
            copies = True
        if copies:
            self._stream.synchronize()

    def close(self) -> None:
        """Frees graphs, contexts and memory, with the device current."""
        with self._gpu.current():
            self._routes.clear()
            self._graphs.clear()
            self._contexts.clear()
            self._inputs.clear()
            self._outputs.clear()
            self._activations = None
