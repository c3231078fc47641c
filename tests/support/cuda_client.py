"""A client's memory on a GPU, allocated through the CUDA driver: no package is needed for that."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

_Address = ctypes.c_uint64


class CudaClient:
    """Allocates memory on GPUs for other processes to open; used on one thread.

    Args:
        library: The driver's shared library.
    """

    def __init__(self, library: str) -> None:
        self._library = ctypes.CDLL(library)
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._call("cuInit", ctypes.c_uint(0))
        count = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        self.gpus = count.value
        for device in range(count.value):
            with self.on(device):
                pass  # a context opens descriptors that the driver keeps: now, not during a test

    def _call(self, name: str, *arguments: Any) -> None:
        result = getattr(self._library, name)(*arguments)
        assert not result, f"{name}: CUDA error {result}"

    @contextmanager
    def on(self, device: int) -> Iterator[Any]:
        """Calls of the driver on a device."""
        if device not in self._contexts:
            number, context = ctypes.c_int(), ctypes.c_void_p()
            self._call("cuDeviceGet", ctypes.byref(number), device)
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
            self._contexts[device] = context
        self._call("cuCtxPushCurrent_v2", self._contexts[device])
        try:
            yield self._call
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    @contextmanager
    def allocated(self, values: NDArray[Any], device: int = 0) -> Iterator[DeviceArray]:
        """Memory with a copy of an array in it."""
        pointer = _Address()
        with self.on(device) as call:
            call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(values.nbytes))
        try:
            made = DeviceArray(self, pointer, values, device)
            made.write(values)
            yield made
        finally:
            with self.on(device) as call:
                call("cuMemFree_v2", pointer)


class DeviceArray:
    """An array in memory of a GPU.

    Attributes:
        device: The GPU.
        handle: The ``cudaIpcMemHandle_t`` of its memory.
        nbytes: Its size.
    """

    def __init__(self, client: CudaClient, pointer: _Address, like: NDArray[Any], device: int) -> None:
        self._client = client
        self._pointer = pointer
        self._like = like
        self.device = device
        self.nbytes = like.nbytes
        handle = (ctypes.c_char * 64)()
        with client.on(device) as call:
            call("cuIpcGetMemHandle", handle, pointer)
        self.handle = bytes(handle)

    def write(self, values: NDArray[Any]) -> None:
        """Copies an array to it."""
        self._copy(self._pointer, _Address(values.ctypes.data))

    def read(self) -> NDArray[Any]:
        """A copy of what is in it."""
        values = np.empty_like(self._like)
        self._copy(_Address(values.ctypes.data), self._pointer)
        return values

    def _copy(self, target: _Address, source: _Address) -> None:
        stream = ctypes.c_void_p()
        with self._client.on(self.device) as call:
            call("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(0))
            call("cuMemcpyAsync", target, source, ctypes.c_size_t(self.nbytes), stream)
            call("cuStreamSynchronize", stream)
            call("cuStreamDestroy_v2", stream)
