"""`pb_utils.Tensor`: a thin layer over the core's tensor.

Inputs are copied once, when the model first reads them; outputs are passed without a copy unless the
model could still write to them.
"""

from __future__ import annotations

import ctypes
from typing import Any, Protocol

import numpy as np

from conch.backends.python.api.pb_errors import TritonModelException
from conch.backends.python.api.pb_types import text_of
from conch.core import dlpack
from conch.core.device import DeviceTensor
from conch.core.errors import UnsupportedError
from conch.core.tensor import NUMPY_DTYPES, Array, float_array
from conch.core.tensor import Tensor as CoreTensor

_CPU = (dlpack.CPU, 0)
_DEFAULT_STREAM = 1  # the stream that conch copies on
_LARGE = 64 * 1024


class Copies(Protocol):
    """Counts copied bytes; a batch is one."""

    bytes_copied: int


class _Uncounted:
    """Counts copies that belong to no batch."""

    __slots__ = ("bytes_copied",)

    def __init__(self) -> None:
        self.bytes_copied = 0


class Tensor:
    """A named array of a request or a response.

    An input's array is created by the first `as_numpy`, as a copy of the request's bytes: models may write to
    inputs, and the request's memory may be shared. An input that is not read, or is returned unchanged, is
    not copied.
    """

    __slots__ = ("_batch", "_core", "_floats")

    def __init__(self, name: str, numpy_array: Any) -> None:
        if type(name) is not str:
            name = text_of(name, "the name of a Tensor")
        array = numpy_array if type(numpy_array) is np.ndarray else _made_array(name, numpy_array)
        if not name:
            raise TritonModelException("Tensor name cannot be an empty string.")
        try:
            self._core = CoreTensor.from_array(name, array)
        except UnsupportedError as error:
            raise TritonModelException(f"tensor '{name}': {error}") from error
        self._batch: Copies | None = None

    def _stable(self) -> CoreTensor:
        """The core tensor in memory that the model cannot write to: a copy, unless it is an unread input."""
        core = self._core
        return core if self._batch is not None else core.detached(core.name)

    def _for_request(self) -> CoreTensor:
        """The core tensor for a BLS request, valid until the call completes."""
        core = self._core
        if core.datatype == "BYTES" and not core.has_data:
            return CoreTensor(
                core.name, "BYTES", core.shape, core.data
            )  # its array may hold non-bytes objects
        return core.detached(core.name) if core.shared and not core.on_device else core

    @classmethod
    def _from_response(cls, core: CoreTensor, on_device: bool) -> Tensor:
        """A private copy of a tensor of another model's response, which may stay on its device."""
        tensor = cls._of(core)
        if core.writable:
            tensor._batch = _Uncounted()
            return tensor  # its memory is private already
        if isinstance(core, DeviceTensor) and core.on_device:
            if on_device and (memory := core.memory.new_memory(core.nbytes)) is not None:
                memory.write([core.memory])
                tensor._core = DeviceTensor(core.name, core.datatype, core.shape, memory)
                return tensor
            core = core.detached(core.name)
        dtype = None if core.datatype == "BYTES" else NUMPY_DTYPES.get(core.datatype)
        data = core.data
        if dtype is None or type(data) is bytes:
            tensor._core = CoreTensor(core.name, core.datatype, core.shape, bytes(data))
            tensor._batch = _Uncounted()  # copied by `as_numpy`
        else:
            array = _array_of(core, dtype)
            tensor._core = CoreTensor(core.name, core.datatype, core.shape, None, array)
        return tensor

    def name(self) -> str:
        """The tensor's name."""
        return self._core.name

    def shape(self) -> list[int]:
        """The dimensions, batch dimension included."""
        return list(self._core.shape)

    def triton_dtype(self) -> str:
        """The datatype's name in a model config, such as ``TYPE_FP32``."""
        datatype = self._core.datatype
        return "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}"

    def is_cpu(self) -> bool:
        """True if the data is in host memory."""
        return not self._core.on_device

    def as_numpy(self) -> Array:
        """The data as a writable array; the same one every time.

        BF16 is returned as a float32 copy, also where the tensor was made of an array of ml_dtypes; writes to
        it change no tensor.

        Raises:
            TritonModelException: It is on a GPU.
        """
        core = self._core
        batch = self._batch
        if core.on_device:
            raise TritonModelException("Tensor is stored in GPU and cannot be converted to NumPy.")
        try:
            if core.datatype == "BF16":
                return self._as_floats(core, batch)
            if batch is None:
                return core.numpy()
            if core.writable:
                # In a worker: the inputs are in its own memory.
                own = core.numpy()
                if core.datatype == "BYTES":
                    # Writes to a BYTES array do not reach the bytes; numbers share memory.
                    self._core = CoreTensor(core.name, core.datatype, core.shape, None, own)
                self._batch = None
                return own
            dtype = None if core.datatype == "BYTES" else NUMPY_DTYPES.get(core.datatype)
            array: Array = core.numpy().copy() if dtype is None else _array_of(core, dtype)
            batch.bytes_copied += array.nbytes
            self._core = CoreTensor(core.name, core.datatype, core.shape, None, array)
            self._batch = None
            return array
        except UnsupportedError as error:
            raise TritonModelException(str(error)) from None

    def _as_floats(self, core: CoreTensor, batch: Copies | None) -> Array:
        floats: Array | None = getattr(self, "_floats", None)  # set lazily, to save time
        if floats is None:
            floats = self._floats = float_array(core.data, core.shape)
            if batch is not None:
                batch.bytes_copied += floats.nbytes
        return floats

    def to_dlpack(self) -> Any:
        """The data as a DLPack capsule over the memory itself, also on a GPU.

        On a GPU an input is the client's own memory, which a model must not write to.

        Raises:
            TritonModelException: It is a string tensor.
        """
        return self.__dlpack__()

    def __dlpack__(self, *, stream: Any = None, **options: Any) -> Any:
        core = self._core
        if isinstance(core, DeviceTensor) and core.on_device:
            return core.__dlpack__(stream=stream)
        if core.datatype == "BYTES":
            raise TritonModelException("DLPack does not have support for string tensors.")
        if core.datatype == "BF16":
            data = np.frombuffer(core.data, np.uint8)
            if self._batch is not None:
                data = data.copy()
                self._batch.bytes_copied += data.nbytes
            return dlpack.export(data.ctypes.data, _CPU, "BF16", core.shape, data)
        return self.as_numpy().__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        core = self._core
        return core.__dlpack_device__() if isinstance(core, DeviceTensor) and core.on_device else _CPU

    @staticmethod
    def from_dlpack(name: str, tensor: Any) -> Tensor:
        """Creates a tensor over the memory of a DLPack capsule, or of an object with `__dlpack__`.

        Raises:
            TritonModelException: It is not contiguous, not in host or CUDA memory, or of an unsupported type.
        """
        name = text_of(name, "the name of a Tensor")
        if not name:
            raise TritonModelException("Tensor name cannot be an empty string.")
        source = tensor if hasattr(tensor, "__dlpack__") else _Capsule(tensor)
        try:
            kind, _ = source.__dlpack_device__()
            if kind == dlpack.CUDA:
                return Tensor._of(_on_device(name, source))
            if kind not in (dlpack.CPU, dlpack.CUDA_HOST):
                raise BufferError(
                    f"it is on a device of kind {int(kind)}, which is neither the host nor CUDA"
                )
            try:
                array = np.from_dlpack(source)
            except (BufferError, RuntimeError, TypeError) as error:
                brain_floats = _bfloat16(name, source)
                if brain_floats is None:
                    raise error
                return Tensor._of(brain_floats)
        except ValueError as error:  # conch's and Triton's texts
            raise TritonModelException(str(error)) from error
        except (BufferError, RuntimeError, TypeError) as error:
            raise TritonModelException(f"tensor '{name}' cannot be imported from DLPack: {error}") from error
        if not array.flags.c_contiguous:
            raise TritonModelException(
                "DLPack tensor is not contiguous. Only contiguous DLPack tensors that are stored in C-Order "
                "are supported."
            )
        return Tensor(name, array)

    @classmethod
    def _of(cls, core: CoreTensor) -> Tensor:
        tensor = cls.__new__(cls)
        tensor._core = core
        tensor._batch = None
        return tensor

    def __repr__(self) -> str:
        return f"Tensor({self._core.name!r}, {self.triton_dtype()}, {list(self._core.shape)})"


def _made_array(name: str, value: Any) -> Array:
    """Converts a value to an array.

    Raises:
        TypeError: It has no type that tensors may have.
    """
    array = np.asarray(value)
    if array.dtype == object and not array.ndim and not isinstance(value, np.ndarray | bytes | str):
        raise TypeError(f"the array of Tensor '{name}' must be a numpy array, not {type(value)}")
    return array


def _array_of(core: CoreTensor, dtype: np.dtype[Any]) -> Array:
    """A writable copy of a tensor's elements."""
    if core.nbytes < _LARGE:
        # For small tensors a bytearray is a faster writable copy than an array.
        return np.ndarray(core.shape, dtype, bytearray(core.data))
    # As bytes numpy copies in one step without the GIL.
    return np.frombuffer(core.data, np.uint8).copy().view(dtype).reshape(core.shape)


def _on_device(name: str, source: Any) -> DeviceTensor:
    """A tensor over CUDA memory.

    Raises:
        ValueError: It is not contiguous, or of an unsupported type.
        BufferError: There is no such device.
    """
    # Imported late: most servers have no driver.
    from conch.memory.cuda import cuda_devices
    from conch.memory.cuda_driver import CudaError, CudaUnavailableError

    capsule = source.__dlpack__(stream=_DEFAULT_STREAM)
    found = dlpack.describe(capsule)
    try:
        memory = cuda_devices().memory(found.pointer, found.device[1], found.nbytes, capsule)
    except (CudaError, CudaUnavailableError) as error:
        raise BufferError(str(error)) from error
    return DeviceTensor(name, found.datatype, found.shape, memory)


def _bfloat16(name: str, source: Any) -> CoreTensor | None:
    """A copy of a BF16 tensor, which numpy cannot import; None for other types."""
    capsule = source.__dlpack__()
    found = dlpack.describe(capsule)
    if found.datatype != "BF16":
        return None
    return CoreTensor(name, "BF16", found.shape, ctypes.string_at(found.pointer, found.nbytes))


class _Capsule:
    """Gives a bare capsule the DLPack methods."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **options: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.device_of(self._capsule)
