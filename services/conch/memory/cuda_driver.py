"""ctypes bindings of the CUDA driver functions that shared memory needs.

The driver library is on every machine with a usable GPU, so nothing has to be installed and no CUDA version
chosen, unlike with cupy or cuda-python. Addresses are valid for everything that uses the primary context of a
device, as torch, cupy and ONNX Runtime do. Calls release the interpreter lock.
"""

from __future__ import annotations

import ctypes
from typing import Any

LIBRARY = "libcuda.so.1"
HANDLE_BYTES = 64
"""Size of a ``cudaIpcMemHandle_t``, which is the driver's ``CUipcMemHandle``."""


class CudaUnavailableError(Exception):
    """There is no working driver, or no GPU."""


class CudaError(Exception):
    """A driver call failed; the text is the driver's."""


class IpcHandle(ctypes.Structure):
    """The handle of an allocation of another process; passed by value."""

    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


_Int = ctypes.c_int
_Size = ctypes.c_size_t
_Pointer = ctypes.c_uint64  # CUdeviceptr
_Opaque = ctypes.c_void_p  # CUcontext, CUstream
_Unsigned = ctypes.c_uint
_Out = ctypes.c_void_p

_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "cuInit": (_Unsigned,),
    "cuGetErrorString": (_Int, _Out),
    "cuDeviceGetCount": (_Out,),
    "cuDeviceGet": (_Out, _Int),
    "cuDeviceGetAttribute": (_Out, _Int, _Int),
    "cuDeviceGetUuid": (_Out, _Int),
    "cuDevicePrimaryCtxRetain": (_Out, _Int),
    "cuCtxPushCurrent_v2": (_Opaque,),
    "cuCtxPopCurrent_v2": (_Out,),
    "cuStreamCreate": (_Out, _Unsigned),
    "cuStreamSynchronize": (_Opaque,),
    "cuIpcOpenMemHandle_v2": (_Out, IpcHandle, _Unsigned),
    "cuIpcCloseMemHandle": (_Pointer,),
    "cuIpcGetMemHandle": (_Out, _Pointer),
    "cuMemGetAddressRange_v2": (_Out, _Out, _Pointer),
    "cuPointerGetAttribute": (_Out, _Int, _Pointer),
    "cuMemcpyAsync": (_Pointer, _Pointer, _Size, _Opaque),
}
_POOLS: dict[str, tuple[Any, ...]] = {
    "cuMemAllocAsync": (_Out, _Size, _Opaque),
    "cuMemFreeAsync": (_Pointer, _Opaque),
}


class Driver:
    """A working driver with at least one GPU.

    Attributes:
        gpus: Number of GPUs, which are numbered from 0.
        has_pools: True if the driver has memory pools (since CUDA 11.2).

    Raises:
        CudaUnavailableError: There is no such driver.
    """

    def __init__(self, library: str = LIBRARY) -> None:
        try:
            loaded = ctypes.CDLL(library)
            self._functions = {name: _function(loaded, name, types) for name, types in _FUNCTIONS.items()}
        except (OSError, AttributeError) as error:
            raise CudaUnavailableError(f"the CUDA driver can't be used: {error}") from error
        try:
            self._functions |= {name: _function(loaded, name, types) for name, types in _POOLS.items()}
            self.has_pools = True
        except AttributeError:
            self.has_pools = False
        count = _Int()
        try:
            self.call("cuInit", 0)
            self.call("cuDeviceGetCount", ctypes.byref(count))
        except CudaError as error:
            raise CudaUnavailableError(f"the CUDA driver does not work: {error}") from error
        self.gpus = count.value
        if not self.gpus:
            raise CudaUnavailableError("the CUDA driver has no GPU")

    def call(self, name: str, *arguments: Any) -> None:
        """Calls a driver function. Raises CudaError: the call failed."""
        result = self._functions[name](*arguments)
        if result:
            raise CudaError(self._text(result))

    def _text(self, result: int) -> str:
        text = ctypes.c_char_p()
        if self._functions["cuGetErrorString"](result, ctypes.byref(text)) or not text.value:
            return f"CUDA error {result}"
        return text.value.decode(errors="replace")


def _function(library: ctypes.CDLL, name: str, types: tuple[Any, ...]) -> Any:
    function = getattr(library, name)
    function.argtypes = types
    function.restype = _Int
    return function
