"""The tensors models see: a thin layer over the core's."""

from __future__ import annotations

import ctypes
from typing import Any, Protocol

import numpy as np

from conch.backends.python.api.argument_checks import text_of
from conch.backends.python.api.pb_errors import TritonModelException
from conch.core import dlpack
from conch.core.device import DeviceTensor
from conch.core.errors import UnsupportedError
from conch.core.tensor import NUMPY_DTYPES, Array, datatype_of, float_array
from conch.core.tensor import Tensor as CoreTensor

_CPU = (dlpack.CPU, 0)
_DEFAULT_STREAM = 1  # which our copies are in order with
_LARGE = 64 * 1024


class Copies(Protocol):
    """Where bytes are counted that had to be copied; a batch is one."""

    bytes_copied: int


class _Uncounted:
    """Where copies are counted that belong to no batch."""

    __slots__ = ("bytes_copied",)

    def __init__(self) -> None:
        self.bytes_copied = 0


class Tensor:
    """A named array of a request or a response.

    An input's array is made when `as_numpy` is first called, as a copy of the request's bytes: models have
    always been able to write to their inputs, and the request's memory may be shared with others. That is
    the one copy of an input's way; an input nobody looks at, or one that is returned as it came, has none.
    """

    __slots__ = ("_batch", "_core", "_floats")

    def __init__(self, name: str, numpy_array: Any) -> None:
        if type(name) is not str:
            name = text_of(name, "the name of a Tensor")
        array = numpy_array if type(numpy_array) is np.ndarray else _made_array(name, numpy_array)
        if not name:
            raise TritonModelException("Tensor name cannot be an empty string.")
        try:
            self._core = CoreTensor(name, datatype_of(array), array.shape, None, array)
        except UnsupportedError as error:
            raise TritonModelException(f"tensor '{name}': {error}") from error
        self._batch: Copies | None = None

    def _kept(self) -> CoreTensor:
        """The core's tensor in memory the model can't write to: a copy, unless it is an input as it came."""
        core = self._core
        return core if self._batch is not None else core.detached(core.name)

    def _lent(self) -> CoreTensor:
        """The core's tensor for a request to another model, which has it as long as that takes."""
        core = self._core
        if core.datatype == "BYTES" and not core.has_data:
            return CoreTensor(core.name, "BYTES", core.shape, core.data)  # its array may hold anything
        return core.detached(core.name) if core.shared and not core.on_device else core

    @classmethod
    def _answered(cls, core: CoreTensor, on_device: bool) -> Tensor:
        """A copy of a tensor that another model has answered, in memory that nobody else has.

        Args:
            core: The tensor.
            on_device: Whether it may stay on its device.
        """
        tensor = cls._of(core)
        if core.writable:
            tensor._batch = _Uncounted()
            return tensor  # nobody else has its memory as it is
        if isinstance(core, DeviceTensor) and core.on_device:
            if on_device and (memory := core.memory.another(core.nbytes)) is not None:
                memory.write([core.memory])
                tensor._core = DeviceTensor(core.name, core.datatype, core.shape, memory)
                return tensor
            core = core.detached(core.name)
        dtype = None if core.datatype == "BYTES" else NUMPY_DTYPES.get(core.datatype)
        data = core.data
        if dtype is None or type(data) is bytes:
            tensor._core = CoreTensor(core.name, core.datatype, core.shape, bytes(data))
            tensor._batch = _Uncounted()  # copied when an array is wanted
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
        """Whether the data is in host memory."""
        return not self._core.on_device

    def as_numpy(self) -> Array:
        """The data as an array that may be written to; the same one every time.

        BF16 comes as a copy in float32, as numpy has no type for it; what is written there changes no tensor.

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
                # In a worker, whose memory the inputs have been copied to.
                own = core.numpy()
                if core.datatype == "BYTES":
                    # What the model writes to the array is in no bytes; those of numbers are the same memory.
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
        floats: Array | None = getattr(self, "_floats", None)  # not set in every tensor, to save the time
        if floats is None:
            floats = self._floats = float_array(core.data, core.shape)
            if batch is not None:
                batch.bytes_copied += floats.nbytes
        return floats

    def to_dlpack(self) -> Any:
        """The data as a DLPack capsule: the memory itself, also on a GPU.

        There an input is the client's own memory, which a model must not write to.

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
        """A tensor over the memory of a DLPack capsule, or of an object that can give one.

        Raises:
            TritonModelException: It is not contiguous, is neither in host memory nor on a CUDA device, or is
                of a type that the protocol does not have.
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
                brain_floats = _brain_floats(name, source)
                if brain_floats is None:
                    raise error
                return Tensor._of(brain_floats)
        except ValueError as error:  # texts of ours, and Triton's
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
    """An array of what is none.

    Raises:
        TypeError: No array of a type that tensors may have can be meant.
    """
    array = np.asarray(value)
    if array.dtype == object and not array.ndim and not isinstance(value, np.ndarray | bytes | str):
        raise TypeError(f"the array of Tensor '{name}' must be a numpy array, not {type(value)}")
    return array


def _array_of(core: CoreTensor, dtype: np.dtype[Any]) -> Array:
    """A copy of a tensor's elements that may be written to."""
    if core.nbytes < _LARGE:
        # A bytearray is a copy and writable; for small tensors it is faster than copying an array.
        return np.ndarray(core.shape, dtype, bytearray(core.data))
    # Copied as bytes: numpy then does it at once and without the interpreter's lock.
    return np.frombuffer(core.data, np.uint8).copy().view(dtype).reshape(core.shape)


def _on_device(name: str, source: Any) -> DeviceTensor:
    """A tensor over the memory of a CUDA device.

    Raises:
        ValueError: It is not contiguous, or of a type that the protocol does not have.
        BufferError: There is no such device here.
    """
    # Nobody else needs the driver, and most servers have none.
    from conch.memory.cuda import cuda_devices
    from conch.memory.cuda_driver import CudaError, CudaUnavailableError

    capsule = source.__dlpack__(stream=_DEFAULT_STREAM)
    found = dlpack.describe(capsule)
    try:
        memory = cuda_devices().memory(found.pointer, found.device[1], found.nbytes, capsule)
    except (CudaError, CudaUnavailableError) as error:
        raise BufferError(str(error)) from error
    return DeviceTensor(name, found.datatype, found.shape, memory)


def _brain_floats(name: str, source: Any) -> CoreTensor | None:
    """A copy of a tensor of BF16, which numpy can't take; None for any other."""
    capsule = source.__dlpack__()
    found = dlpack.describe(capsule)
    if found.datatype != "BF16":
        return None
    return CoreTensor(name, "BF16", found.shape, ctypes.string_at(found.pointer, found.nbytes))


class _Capsule:
    """A bare capsule with the methods that consumers ask for."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **options: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.device_of(self._capsule)
