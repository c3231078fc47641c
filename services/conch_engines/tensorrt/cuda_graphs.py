"""CUDA graphs of an instance: captured at load, chosen by the shape of a batch.

A graph keeps the state of the context that it was captured from, so each has a context of its own; these
share one block of device memory for activations, as an instance runs one batch at a time.

Owns: the graphs, their contexts and that block. Threads: one at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from conch.core.tensor import ELEMENT_SIZES
from conch_engines.tensorrt.engine_description import EngineDescription
from conch_engines.tensorrt.gpu_buffers import DeviceBuffer, Gpu, Stream
from conch_engines.tensorrt.optimization_profiles import Dims, OptimizationProfile
from conch_engines.tensorrt.profile_context import BatchShape, ProfileContext
from conch_engines.tensorrt.tensorrt_settings import GraphSpec

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """A graph that computes one shape of batch.

    Attributes:
        dims: Dims of the inputs, in the engine's order.
        least_rows: Smallest batch that it may run.
        graph: cupy's object.
        pointers: Address by tensor.
        output_dims: Dims by output.
        kept: Object that must live as long as the graph.
    """

    dims: tuple[Dims, ...]
    least_rows: int
    graph: Any
    pointers: Mapping[str, int]
    output_dims: Mapping[str, Dims]
    kept: object = None

    def fits(self, dims: Sequence[Dims], batches: bool) -> bool:
        """True if the graph can run inputs of these dims; with `batches`, also those of fewer rows."""
        if not batches:
            return self.dims == tuple(dims)
        rows = dims[0][0]
        return self.least_rows <= rows <= self.dims[0][0] and all(
            own[1:] == given[1:] for own, given in zip(self.dims, dims, strict=True)
        )


def find_graph(graphs: Sequence[CapturedGraph], dims: Sequence[Dims], batches: bool) -> CapturedGraph | None:
    """The smallest graph that can run a batch; one of its very size comes first, as it is the smallest."""
    fitting = [graph for graph in graphs if graph.fits(dims, batches)]
    return min(fitting, key=lambda graph: graph.dims[0][:1], default=None)


class GraphCapture:
    """Captures graphs of an instance; use it with the device current."""

    def __init__(
        self,
        engine: EngineDescription,
        gpu: Gpu,
        stream: Stream,
        inputs: Mapping[str, DeviceBuffer],
        outputs: Mapping[str, DeviceBuffer],
        instance: str,
    ) -> None:
        self._engine = engine
        self._gpu = gpu
        self._stream = stream
        self._inputs = inputs
        self._outputs = outputs
        self._instance = instance

    def capture(
        self,
        specs: Sequence[GraphSpec],
        profile: OptimizationProfile,
        new_context: Callable[[int], ProfileContext],
    ) -> list[CapturedGraph]:
        """The graphs of a profile; those that it or TensorRT does not allow are left out, and logged."""
        captured = []
        # The largest first, so that the buffers that all share do not grow.
        for spec in sorted(specs, key=lambda spec: -spec.batch_size):
            dims = tuple(self._dims(spec, each.key, each.name, profile) for each in self._engine.inputs)
            shapes = {each.key: one for each, one in zip(self._engine.inputs, dims, strict=True)}
            name, problem = profile.problem(shapes, {})
            if not problem:
                try:
                    captured.append(self._captured(spec, dims, new_context(profile.index)))
                except Exception as error:  # of TensorRT or cupy; the model runs without the graph
                    problem = str(error)
            else:
                problem = f"input '{name}': {problem}"
            if problem:
                log.warning(
                    "%s: no CUDA graph for batch size %d with profile %d: %s",
                    self._instance,
                    spec.batch_size,
                    profile.index,
                    problem,
                )
        if captured:
            log.info(
                "%s: %d CUDA graphs captured with profile %d", self._instance, len(captured), profile.index
            )
        return captured

    def _dims(self, spec: GraphSpec, key: str, name: str, profile: OptimizationProfile) -> Dims:
        optimum = profile.shapes[key].optimum
        given = spec.dims.get(name)
        if not spec.batch_size:
            return optimum if given is None else given
        return (spec.batch_size, *(optimum[1:] if given is None else given))

    def _captured(self, spec: GraphSpec, dims: tuple[Dims, ...], context: ProfileContext) -> CapturedGraph:
        stream, engine = self._stream, self._engine
        context.set_shape(BatchShape(dims))
        if context.allocators:
            raise ValueError("it has outputs whose shape depends on data")
        all_dims = {each.key: one for each, one in zip(engine.inputs, dims, strict=True)}
        all_dims.update(context.output_dims)
        tensors = (*engine.inputs, *engine.outputs)
        sizes = {each.key: prod(all_dims[each.key]) * ELEMENT_SIZES[each.datatype] for each in tensors}
        buffers = {**self._inputs, **self._outputs}
        for each in tensors:
            if not each.on_host:
                context.bind(each.key, buffers[each.key].at_least(sizes[each.key]))
        for each in engine.inputs:
            stream.zero(buffers[each.key].pointer, sizes[each.key])
        context.enqueue()  # TensorRT finishes what a change of shapes has left to do, which can't be captured
        stream.synchronize()
        stream.begin_capture()
        try:
            context.enqueue()
        finally:
            graph = stream.end_capture()
        return CapturedGraph(
            dims,
            spec.least_batch_size,
            graph,
            {key: buffer.pointer for key, buffer in buffers.items()},
            dict(context.output_dims),
            (context, [buffer.memory for buffer in buffers.values()]),
        )
