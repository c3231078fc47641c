"""TensorRT and cupy for machines without a GPU: engines compute on host memory, by address.

A stream runs nothing until it is synchronised, so what is read or reused too early shows. Memory counts as
device memory only while its device is current.
"""

from __future__ import annotations

import ctypes
import enum
import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = dict[str, NDArray[Any]]

VERSION = (11, 4, 0, 106)
FUNCTIONS: dict[str, Callable[[Arrays], Arrays]] = {
    "sum_diff": lambda x: {"SUM": x["A"] + x["B"], "DIFF": x["A"] - x["B"]},
    "copy": lambda x: {"y": x["x"]},
    "double": lambda x: {"y": 2 * x["x"]},
    "nonzero": lambda x: {"y": x["x"][x["x"] != 0]},
    # Rows of zeros of the given width, and the shape itself.
    "zeros": lambda x: {
        "y": np.zeros(tuple(x["shape"]), np.float32) + x["x"][:, :1],
        "shape_out": x["shape"] + np.array([0, 100], np.int32),
    },
}
DTYPES: Mapping[str, Any] = {
    "FLOAT": np.float32,
    "HALF": np.float16,
    "BF16": np.uint16,
    "INT32": np.int32,
    "INT64": np.int64,
    "BOOL": np.bool_,
}


def plan(
    tensors: Sequence[Mapping[str, Any]],
    function: str,
    profiles: Sequence[Mapping[str, Any]] | None = None,
    version: Sequence[int] = VERSION,
) -> bytes:
    """A plan file of the stand-in: a header as TensorRT's, then JSON.

    Args:
        tensors: Keys ``name`` and ``dims``; where they differ from the usual, ``output``, ``dtype``,
            ``shape``, ``format`` and ``data_dependent``.
        function: A name of `FUNCTIONS`.
        profiles: Per profile, least, optimum and most dims by input; of a shape tensor its values.
        version: The version that built it.
    """
    described = {"tensors": list(tensors), "function": function, "profiles": list(profiles or [{}])}
    return b"ftrt" + bytes(20) + bytes(version) + json.dumps(described).encode()


def array_at(address: int, dtype: Any, dims: Sequence[int]) -> NDArray[Any]:
    """Memory as an array."""
    nbytes = int(np.prod(dims, dtype=np.int64)) * np.dtype(dtype).itemsize
    memory = (ctypes.c_char * nbytes).from_address(address)
    return np.frombuffer(memory, dtype).reshape(tuple(dims))


class Memory:
    """Device memory of the stand-in."""

    def __init__(self, cuda: FakeCupy, nbytes: int) -> None:
        self._array = np.full(nbytes + 512, 0xAB, np.uint8)
        address = self._array.__array_interface__["data"][0]
        self.ptr = address + -address % 512
        cuda.live += 1
        weakref.finalize(self, cuda.freed)


class Pinned(bytearray):
    """Pinned memory; `ptr` is its address."""

    @property
    def ptr(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self))


class Stream:
    """Runs what was enqueued when it is synchronised."""

    def __init__(self, cuda: FakeCupy, **options: Any) -> None:
        assert options.pop("non_blocking")
        self.options = options
        self.work: list[Callable[[], object]] = []
        self.captured: list[Callable[[], object]] | None = None
        self.ptr = 1000 + len(cuda.streams)
        cuda.streams[self.ptr] = self
        self.cuda = cuda

    def add(self, step: Callable[[], object]) -> None:
        (self.work if self.captured is None else self.captured).append(step)

    def synchronize(self) -> None:
        assert self.captured is None, "a stream can't be synchronised while it captures"
        work, self.work = self.work, []
        self.cuda.synchronised += 1
        for step in work:
            step()

    def begin_capture(self) -> None:
        self.captured = []

    def end_capture(self) -> Any:
        steps, self.captured = self.captured, None
        assert steps is not None

        def launch(stream: Stream) -> None:
            self.cuda.launched += 1
            for step in steps:
                stream.add(step)

        return SimpleNamespace(launch=launch)


class FakeCupy:
    """Stands in for the modules `cupy` and `cupy.cuda`, with devices 0 and 1."""

    def __init__(self) -> None:
        self.cuda = self
        self.runtime = self
        self.current: list[int] = []
        self.streams: dict[int, Stream] = {}
        self.live = self.synchronised = self.launched = self.copied = 0

    def freed(self) -> None:
        self.live -= 1

    def Device(self, number: int) -> FakeDevice:
        if number > 1:
            raise RuntimeError("cudaErrorInvalidDevice: invalid device ordinal")
        return FakeDevice(self, number)

    def Stream(self, **options: Any) -> Stream:
        assert self.current
        return Stream(self, **options)

    def alloc(self, nbytes: int) -> Memory:
        assert self.current
        return Memory(self, nbytes)

    def alloc_pinned_memory(self, nbytes: int) -> Pinned:
        return Pinned(nbytes)

    def memcpyAsync(self, target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
        assert self.current
        assert kind in (1, 2, 3)
        self.copied += kind != 3
        self.streams[stream].add(partial(ctypes.memmove, target, source, nbytes))

    def memsetAsync(self, target: int, value: int, nbytes: int, stream: int) -> None:
        self.streams[stream].add(partial(ctypes.memset, target, value, nbytes))

    def get_default_memory_pool(self) -> Any:
        return SimpleNamespace(free_all_blocks=lambda: None)

    get_default_pinned_memory_pool = get_default_memory_pool


class FakeDevice:
    """One of the devices, as a context."""

    compute_capability = "90"

    def __init__(self, cuda: FakeCupy, number: int) -> None:
        self._cuda = cuda
        self._number = number

    def __enter__(self) -> FakeDevice:
        self._cuda.current.append(self._number)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._cuda.current.pop()


class _Names(enum.Enum):
    INPUT, OUTPUT, HOST, DEVICE, STATIC, ON_PROFILE_CHANGE, USER_MANAGED = range(7)


class ILogger:
    """The base of loggers."""


class IOutputAllocator:
    """The base of allocators."""


class FakeTensorRT:
    """Stands in for the module `tensorrt`."""

    __version__ = ".".join(map(str, VERSION))
    TensorIOMode = TensorLocation = ExecutionContextAllocationStrategy = _Names
    ILogger = ILogger
    IOutputAllocator = IOutputAllocator

    def __init__(self, cuda: FakeCupy) -> None:
        self.cuda = cuda
        self.engines = 0
        self.contexts: list[IExecutionContext] = []

    def Runtime(self, logger: Any) -> Runtime:
        return Runtime(self, logger)


class Runtime:
    """Makes engines of plans of its version."""

    def __init__(self, trt: FakeTensorRT, logger: Any) -> None:
        self._trt = trt
        self._logger = logger
        self.engine_host_code_allowed = False

    def deserialize_cuda_engine(self, content: bytes) -> ICudaEngine | None:
        assert self._trt.cuda.current, "TensorRT crashes without a device"
        if tuple(content[24:28]) != VERSION:
            error = SimpleNamespace(name="ERROR")
            self._logger.log(error, "Error Code 1: Serialization (Version tag does not match)")
            return None
        self._trt.engines += 1
        return ICudaEngine(self._trt, json.loads(content[28:]))


class ICudaEngine:
    """An engine of the stand-in; names and signatures are those of TensorRT 11."""

    device_memory_size_v2 = 64

    def __init__(self, trt: FakeTensorRT, described: dict[str, Any]) -> None:
        self._trt = trt
        self.tensors = {each["name"]: each for each in described["tensors"]}
        self._profiles = described["profiles"]
        self.function = FUNCTIONS[described["function"]]
        self.num_io_tensors = len(self.tensors)
        self.num_optimization_profiles = len(self._profiles)

    def get_tensor_name(self, index: int) -> str:
        return str(list(self.tensors)[index])

    def get_tensor_mode(self, name: str) -> _Names:
        return _Names.OUTPUT if self.tensors[name].get("output") else _Names.INPUT

    def get_tensor_dtype(self, name: str) -> Any:
        return SimpleNamespace(name=self.tensors[name].get("dtype", "FLOAT"))

    def get_tensor_shape(self, name: str) -> list[int]:
        return list(self.tensors[name]["dims"])

    def get_tensor_format_desc(self, name: str) -> str:
        return str(self.tensors[name].get("format", "Row major linear FP32 format"))

    def get_tensor_vectorized_dim(self, name: str) -> int:
        return 1 if "vectorized" in self.get_tensor_format_desc(name) else -1

    def get_tensor_location(self, name: str) -> _Names:
        return _Names.HOST if self.tensors[name].get("shape") else _Names.DEVICE

    def is_shape_inference_io(self, name: str) -> bool:
        return bool(self.tensors[name].get("shape"))

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[list[int]]:
        dims = self.get_tensor_shape(name)
        if self.tensors[name].get("shape"):
            return [dims] * 3
        return list(self._profiles[profile_index].get(name, [dims] * 3))

    def get_tensor_profile_values(self, profile_index: int, name: str) -> list[list[int]]:
        assert self.tensors[name].get("shape")
        return list(self._profiles[profile_index].get(name, []))

    def create_execution_context(self, strategy: _Names) -> IExecutionContext:
        context = IExecutionContext(self._trt, self, strategy)
        self._trt.contexts.append(context)
        return context


class IExecutionContext:
    """A context of the stand-in; counts what is set."""

    def __init__(self, trt: FakeTensorRT, engine: ICudaEngine, strategy: _Names) -> None:
        self._trt = trt
        self._engine = engine
        self.strategy = strategy
        self.profile = -1
        self.has_memory = strategy is not _Names.USER_MANAGED
        self._dims: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._allocators: dict[str, Any] = {}
        self.set_shapes = self.set_addresses = self.runs = 0
        self.fails = False

    def set_device_memory(self, memory: int, size: int) -> None:
        self.has_memory = memory % 256 == 0 and size >= self._engine.device_memory_size_v2

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        self.profile = profile_index
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.set_shapes += 1
        self._dims[name] = shape
        return True

    def set_tensor_address(self, name: str, memory: int) -> bool:
        assert memory
        self.set_addresses += 1
        self._addresses[name] = memory
        return True

    def set_output_allocator(self, name: str, output_allocator: Any) -> bool:
        self._allocators[name] = output_allocator
        return True

    def _inputs(self, read: bool) -> Arrays:
        """Inputs; without reading only shape tensors have their values."""
        arrays: Arrays = {}
        for name, tensor in self._engine.tensors.items():
            if not tensor.get("output"):
                dtype = DTYPES[tensor.get("dtype", "FLOAT")]
                dims = self._dims[name]
                if read or tensor.get("shape"):
                    arrays[name] = array_at(self._addresses[name], dtype, dims).copy()
                else:
                    arrays[name] = np.zeros(dims, dtype)
        return arrays

    def infer_shapes(self) -> list[str]:
        missing = [n for n, t in self._engine.tensors.items() if not t.get("output") and n not in self._dims]
        return missing

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        if name in self._dims:
            return self._dims[name]
        if self._engine.tensors[name].get("data_dependent"):
            return (-1,)
        return tuple(self._engine.function(self._inputs(False))[name].shape)

    def execute_async_v3(self, stream_handle: int) -> bool:
        if self.fails:
            return False
        assert self.has_memory
        assert self._trt.cuda.current
        self.runs += 1
        # What is set later does not count.
        frozen = IExecutionContext(self._trt, self._engine, self.strategy)
        frozen._dims, frozen._addresses = dict(self._dims), dict(self._addresses)
        frozen._allocators = dict(self._allocators)
        self._trt.cuda.streams[stream_handle].add(lambda: frozen._compute(stream_handle))
        return True

    def _compute(self, stream: int) -> None:
        for name, value in self._engine.function(self._inputs(True)).items():
            address = self._addresses.get(name)
            allocator = self._allocators.get(name)
            if allocator is not None:
                address = allocator.reallocate_output_async(name, 0, value.nbytes, 256, stream)
                allocator.notify_shape(name, list(value.shape))
            assert address
            array_at(address, value.dtype, value.shape)[...] = value


STAND_INS = {"Runtime": Runtime, "ICudaEngine": ICudaEngine, "IExecutionContext": IExecutionContext}
"""Classes of the stand-in whose public methods must exist in the real ones."""
