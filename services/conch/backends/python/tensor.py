"""The tensors models see: a thin layer over the core's."""

from __future__ import annotations

from typing import Any

import numpy as np

from conch.backends.python.errors import TritonModelException
from conch.core.errors import UnsupportedError
from conch.core.scheduler.base import Batch
from conch.core.tensor import NUMPY_DTYPES, Array, datatype_of
from conch.core.tensor import Tensor as CoreTensor

_CPU = (1, 0)
_LARGE = 64 * 1024


class Tensor:
    """A named array of a request or a response.

    An input's array is made when `as_numpy` is first called, as a copy of the request's bytes: models have
    always been able to write to their inputs, and the request's memory may be shared with others. That is
    the one copy of an input's way; an input nobody looks at, or one that is returned as it came, has none.
    """

    __slots__ = ("_batch", "_core")

    def __init__(self, name: str, numpy_array: Any) -> None:
        if not name:
            raise TritonModelException("Tensor name cannot be an empty string.")
        array = numpy_array if type(numpy_array) is np.ndarray else np.asarray(numpy_array)
        try:
            self._core = CoreTensor(name, datatype_of(array), array.shape, None, array)
        except UnsupportedError as error:
            raise TritonModelException(f"tensor '{name}': {error}") from error
        self._batch: Batch | None = None

    @classmethod
    def _received(cls, core: CoreTensor, batch: Batch) -> Tensor:
        """Wraps an input; its copy, if there is one, is counted in the batch."""
        tensor = cls.__new__(cls)
        tensor._core = core
        tensor._batch = batch
        return tensor

    def _kept(self) -> CoreTensor:
        """The core's tensor in memory the model can't write to: a copy, unless it is an input as it came."""
        core = self._core
        return core if self._batch is not None else core.detached(core.name)

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
        """Whether the data is in host memory; it always is."""
        return True

    def as_numpy(self) -> Array:
        """The data as an array that may be written to; the same one every time."""
        core = self._core
        batch = self._batch
        if batch is None:
            return core.numpy()
        dtype = None if core.datatype == "BYTES" else NUMPY_DTYPES.get(core.datatype)
        if dtype is None:
            array: Array = core.numpy().copy()
        elif core.nbytes < _LARGE:
            # A bytearray is a copy and writable; for small tensors it is faster than copying an array.
            array = np.ndarray(core.shape, dtype, bytearray(core.data))
        else:
            # Copied as bytes: numpy then does it at once and without the interpreter's lock.
            array = np.frombuffer(core.data, np.uint8).copy().view(dtype).reshape(core.shape)
        batch.bytes_copied += array.nbytes
        self._core = CoreTensor(core.name, core.datatype, core.shape, None, array)
        self._batch = None
        return array

    def to_dlpack(self) -> Any:
        """The data as a DLPack capsule.

        Raises:
            TritonModelException: It is a string tensor.
        """
        return self.__dlpack__()

    def __dlpack__(self, *, stream: Any = None, **options: Any) -> Any:
        if self._core.datatype == "BYTES":
            raise TritonModelException("DLPack does not have support for string tensors.")
        return self.as_numpy().__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CPU

    @staticmethod
    def from_dlpack(name: str, tensor: Any) -> Tensor:
        """A tensor over the memory of a DLPack capsule, or of an object that can give one.

        Raises:
            TritonModelException: It is not contiguous, not in host memory, or of a type numpy does not have.
        """
        source = tensor if hasattr(tensor, "__dlpack__") else _Capsule(tensor)
        device = tuple(source.__dlpack_device__())
        if device[0] != _CPU[0]:
            raise TritonModelException(
                "Tensor is stored in GPU and cannot be converted to NumPy. GPU tensors are not supported yet"
            )
        try:
            array = np.from_dlpack(source)
        except (BufferError, RuntimeError, TypeError) as error:
            raise TritonModelException(
                f"tensor '{name}' cannot be imported from DLPack: {error}; types numpy does not have, such "
                f"as BF16, are not supported yet"
            ) from error
        if not array.flags.c_contiguous:
            raise TritonModelException(
                "DLPack tensor is not contiguous. Only contiguous DLPack tensors that are stored in C-Order "
                "are supported."
            )
        return Tensor(name, array)

    def __repr__(self) -> str:
        return f"Tensor({self._core.name!r}, {self.triton_dtype()}, {list(self._core.shape)})"


class _Capsule:
    """A bare capsule with the methods numpy asks for."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **options: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CPU
