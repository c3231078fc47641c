"""`ProfileContext`: an execution context with one profile, which sets only what has changed.

Owns: the context, the shapes and addresses that it has, host memory of shape tensors, allocators of outputs
whose shape depends on data. Threads: one at a time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from conch.backends.gather import ARRAY_DTYPES
from conch.core.errors import InternalError, InvalidArgumentError
from conch.core.tensor import Array
from conch_engines.tensorrt.engine_description import EngineDescription
from conch_engines.tensorrt.gpu_buffers import DeviceBuffer, Gpu, Stream
from conch_engines.tensorrt.optimization_profiles import Dims
from conch_engines.tensorrt.plan_runtime import PlanRuntime


class BatchShape(NamedTuple):
    """Dims of all inputs of a batch, and values of its shape tensors, in the engine's order."""

    dims: tuple[Dims, ...]
    values: tuple[Dims, ...] = ()


class ProfileContext:
    """A context of an engine for one profile; make it with its device current."""

    def __init__(
        self,
        trt: Any,
        runtime: PlanRuntime,
        context: Any,
        engine: EngineDescription,
        profile: int,
        gpu: Gpu,
        stream: Stream,
        instance: str,
    ) -> None:
        self._trt = trt
        self._runtime = runtime
        self._context = context
        self._engine = engine
        self._gpu = gpu
        self._stream = stream
        self._instance = instance
        self._shape: BatchShape | None = None
        self._dims: dict[str, Dims] = {}
        self._addresses: dict[str, int] = {}
        self._shape_inputs = [each for each in engine.inputs if each.is_shape]
        self._host: dict[str, Array] = {}
        self.output_dims: dict[str, Dims] = {}
        self.allocators: dict[str, Any] = {}
        if not context.set_optimization_profile_async(profile, stream.handle):
            raise InternalError(
                f"Can not set the specified optimization profile {profile}[{profile}] for {instance}"
                f"{self._errors()}"
            )
        stream.synchronize()

    def set_shape(self, shape: BatchShape) -> None:
        """Sets dims of inputs and values of shape tensors, and finds the dims of outputs."""
        if shape == self._shape:
            return
        self._runtime.forget_errors()
        self._shape = None
        for tensor, dims in zip(self._engine.inputs, shape.dims, strict=True):
            if self._dims.get(tensor.key) != dims:
                if not self._context.set_input_shape(tensor.key, dims):
                    raise InvalidArgumentError(
                        f"request specifies invalid shape for input '{tensor.name}' for {self._instance}"
                        f"{self._errors()}"
                    )
                self._dims[tensor.key] = dims
        for tensor, values in zip(self._shape_inputs, shape.values, strict=True):
            array = np.array(values, ARRAY_DTYPES[tensor.datatype])
            # Kept for as long as the context has its address.
            self._host[tensor.key] = array
            self.bind(tensor.key, array.__array_interface__["data"][0])
        missing = self._context.infer_shapes()
        if missing:
            raise InternalError(f"failed to specify the inputs {', '.join(missing)} of {self._instance}")
        for tensor in self._engine.outputs:
            found = tuple(self._context.get_tensor_shape(tensor.key))
            self.output_dims[tensor.key] = found
            if min(found, default=0) < 0 and tensor.key not in self.allocators:
                allocator = self.allocators[tensor.key] = output_allocator(self._trt, self._gpu)
                self._context.set_output_allocator(tensor.key, allocator)
            elif tensor.on_host and tensor.key not in self.allocators:
                array = self._host[tensor.key] = np.empty(found, ARRAY_DTYPES[tensor.datatype])
                self.bind(tensor.key, array.__array_interface__["data"][0])
        self._shape = shape

    def host_output(self, key: str) -> Array:
        """A copy of an output that the engine writes in host memory."""
        return self._host[key].copy()

    def bind(self, key: str, address: int) -> None:
        """Sets the address of a tensor."""
        if self._addresses.get(key) != address:
            if not self._context.set_tensor_address(key, address):
                raise InternalError(
                    f"failed to set the address of '{key}' for {self._instance}{self._errors()}"
                )
            self._addresses[key] = address

    def enqueue(self) -> None:
        """Starts the engine on the stream."""
        if not self._context.execute_async_v3(self._stream.handle):
            raise InternalError(f"unable to enqueue for inference {self._instance}{self._errors()}")

    def _errors(self) -> str:
        errors = self._runtime.last_errors()
        return f": {errors}" if errors else ""


def output_allocator(trt: Any, gpu: Gpu) -> Any:
    """An `IOutputAllocator` with the memory and the dims of the output's last run.

    The class is made here, as its base is there only with TensorRT.
    """

    class OutputAllocator(trt.IOutputAllocator):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IOutputAllocator.__init__(self)
            self.buffer = DeviceBuffer(gpu)
            self.dims: Dims = ()
            self.error: Exception | None = None

        def reallocate_output(self, name: str, memory: int, size: int, alignment: int) -> int:
            """The address of so many bytes; 0 if there are none."""
            try:
                return self.buffer.at_least(size)
            except Exception as error:  # must not pass through TensorRT
                self.error = error
                return 0

        def reallocate_output_async(
            self, name: str, memory: int, size: int, alignment: int, stream: int
        ) -> int:
            """As `reallocate_output`: memory of cupy is ready at once."""
            return self.reallocate_output(name, memory, size, alignment)

        def notify_shape(self, name: str, dims: Any) -> None:
            """Keeps the dims."""
            self.dims = tuple(dims)

    return OutputAllocator()
