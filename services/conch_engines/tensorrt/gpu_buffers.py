"""Memory, streams and graphs of one GPU, by cupy.

Owns: per instance a stream, buffers on the device and pinned buffers, which grow and are used again. Threads:
one at a time per object.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from conch.backends.gather import ARRAY_DTYPES
from conch.core.tensor import Array
from conch_engines.tensorrt.optimization_profiles import Dims

_TO_DEVICE, _TO_HOST, _ON_DEVICE = 1, 2, 3  # cudaMemcpyKind
_HIGHEST_PRIORITY = -5  # CUDA clamps it to what the device has


class Gpu:
    """One GPU as cupy has it."""

    def __init__(self, cupy: Any, number: int) -> None:
        self._cuda = cupy.cuda
        self._cupy = cupy
        self.number = number

    def current(self) -> Any:
        """A context in which the device is the calling thread's."""
        return self._cuda.Device(self.number)

    @property
    def compute_capability(self) -> str:
        """The compute capability, as ``9.0``; raises an error of cupy without the device."""
        digits = str(self._cuda.Device(self.number).compute_capability)
        return f"{digits[:-1]}.{digits[-1]}"

    def memory(self, nbytes: int) -> Any:
        """New device memory with ``ptr``; the object owns it."""
        return self._cuda.alloc(max(nbytes, 1))

    def stream(self, high_priority: bool) -> Stream:
        """A new stream."""
        options = {"priority": _HIGHEST_PRIORITY} if high_priority else {}
        return Stream(self._cuda, self._cuda.Stream(non_blocking=True, **options))

    def free_unused(self) -> None:
        """Gives memory that cupy keeps for later back to the device."""
        self._cupy.get_default_memory_pool().free_all_blocks()
        self._cupy.get_default_pinned_memory_pool().free_all_blocks()


class Stream:
    """A CUDA stream, its copies, and pinned host memory for them."""

    def __init__(self, cuda: Any, stream: Any) -> None:
        self._cuda = cuda
        self._copy = cuda.runtime.memcpyAsync
        self._stream = stream
        self.handle = stream.ptr

    def synchronize(self) -> None:
        """Waits until all of the stream is done."""
        self._stream.synchronize()

    def to_device(self, target: int, staged: Staging, array: Array) -> None:
        """Copies an array by way of pinned memory, which must not be in use."""
        nbytes = array.nbytes
        if nbytes:
            self._copy(target, staged.put(array), nbytes, _TO_DEVICE, self.handle)

    def on_device(self, target: int, source: int, nbytes: int) -> None:
        """Copies from device to device."""
        if nbytes:
            self._copy(target, source, nbytes, _ON_DEVICE, self.handle)

    def to_host(self, source: int, datatype: str, shape: Dims) -> Array:
        """A copy in pinned memory of its own, which is complete once the stream has been synchronised."""
        dtype = ARRAY_DTYPES[datatype]
        count = prod(shape)
        if not count:
            return np.empty(shape, dtype)
        nbytes = count * dtype.itemsize
        memory = self._cuda.alloc_pinned_memory(nbytes)
        self._copy(memory.ptr, source, nbytes, _TO_HOST, self.handle)
        # The array keeps the memory until the response is sent.
        return np.frombuffer(memory, dtype, count).reshape(shape)

    def zero(self, target: int, nbytes: int) -> None:
        """Fills device memory with zeros."""
        self._cuda.runtime.memsetAsync(target, 0, nbytes, self.handle)

    def begin_capture(self) -> None:
        """Records what is enqueued from now on instead of running it."""
        self._stream.begin_capture()

    def end_capture(self) -> Any:
        """Ends recording; returns a graph."""
        return self._stream.end_capture()

    def launch(self, graph: Any) -> None:
        """Runs a graph."""
        graph.launch(self._stream)


class DeviceBuffer:
    """Device memory of an instance that grows when needed."""

    __slots__ = ("_gpu", "memory", "nbytes", "pointer")

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self.nbytes = 0
        self.pointer = 0
        self.memory: Any = None

    def at_least(self, nbytes: int) -> int:
        """The address of so many bytes; earlier content is lost where it grows."""
        if nbytes > self.nbytes or not self.pointer:
            self.memory = self._gpu.memory(nbytes)
            self.nbytes = nbytes
            self.pointer = self.memory.ptr
        return self.pointer


class Staging:
    """Pinned host memory of one input, from which the device copies without waiting."""

    __slots__ = ("_bytes", "_cuda", "_memory")

    def __init__(self, gpu: Gpu) -> None:
        self._cuda = gpu._cuda
        self._memory: Any = None
        self._bytes = np.empty(0, np.uint8)

    def put(self, array: Array) -> int:
        """Copies an array there; returns the address."""
        nbytes = array.nbytes
        if nbytes > len(self._bytes):
            self._memory = self._cuda.alloc_pinned_memory(nbytes)
            self._bytes = np.frombuffer(self._memory, np.uint8, nbytes)
        self._bytes[:nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        address: int = self._memory.ptr
        return address
