"""Tensors in device memory.

`DeviceMemory` is the interface to a device; `conch.memory.cuda` implements it for CUDA. A `DeviceTensor` is a
`Tensor` whose bytes or array are a copy in host memory, made once. Code that can use device memory checks
`on_device` first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from math import prod
from typing import Any, ClassVar, Protocol

import numpy as np

from conch.core import dlpack
from conch.core.errors import InvalidArgumentError
from conch.core.tensor import ELEMENT_SIZES, NUMPY_DTYPES, Array, Buffer, Tensor


class DeviceMemory(ABC):
    """A range of device memory, which lives at least as long as this object.

    Copies are complete on return and happen after all earlier work of the default stream.
    """

    __slots__ = ()

    pointer: int
    device_id: int
    nbytes: int

    @abstractmethod
    def part(self, offset: int, nbytes: int) -> DeviceMemory:
        """A part, which must lie inside."""

    @abstractmethod
    def read(self) -> memoryview:
        """A copy in host memory. Raises ConchError: the device failed."""

    @abstractmethod
    def write(self, parts: Iterable[Buffer | DeviceMemory]) -> None:
        """Copies host or device memory into it, back to back from the start.

        Raises:
            ConchError: The device failed.
        """

    @abstractmethod
    def view_owned_by(self, pointer: int, nbytes: int, owner: object) -> DeviceMemory:
        """Memory on the same device that `owner` keeps alive."""

    @abstractmethod
    def new_memory(self, nbytes: int) -> DeviceMemory | None:
        """New memory on the same device; None if allocation would stall the device.

        Raises:
            ConchError: The device failed, or has too little.
        """


class DeviceTensor(Tensor):
    """A tensor in device memory; never of BYTES."""

    on_device: ClassVar[bool] = True
    shared: ClassVar[bool] = True  # most are in regions of clients

    __slots__ = ("memory",)

    def __init__(
        self,
        name: str,
        datatype: str,
        shape: tuple[int, ...],
        memory: DeviceMemory,
        data: Buffer | None = None,
    ) -> None:
        super().__init__(name, datatype, shape, data)
        self.memory = memory

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.memory.nbytes

    @property
    def data(self) -> Buffer:
        """A copy in host memory, made when first asked for."""
        data = self._data
        if data is None:
            data = self._data = self.memory.read().toreadonly() if self.memory.nbytes else b""
        return data

    def fetch(self) -> int:
        """Copies it to host memory, once; returns the bytes copied now."""
        return 0 if self._data is not None else memoryview(self.data).nbytes

    def numpy(self) -> Array:
        """A read-only copy in host memory as an array."""
        self.fetch()
        return super().numpy()

    @property
    def dtype(self) -> np.dtype[Any] | None:
        """The numpy dtype of its elements; None for BF16."""
        return NUMPY_DTYPES.get(self.datatype)

    def __getitem__(self, rows: slice) -> DeviceTensor:
        """A range of its rows, without a copy."""
        start, end = rows.start, rows.stop
        size = prod(self.shape[1:]) * ELEMENT_SIZES[self.datatype]
        memory = self.memory.part(start * size, (end - start) * size)
        return DeviceTensor(self.name, self.datatype, (end - start, *self.shape[1:]), memory)

    def reshaped(self, shape: tuple[int, ...]) -> DeviceTensor:
        """The same elements in another shape of the same size, without a copy."""
        return self.renamed(self.name, shape)

    def renamed(self, name: str, shape: tuple[int, ...]) -> DeviceTensor:
        """The same elements under another name and shape of the same size, without a copy."""
        if prod(shape) != prod(self.shape):
            raise InvalidArgumentError(
                f"tensor '{self.name}' of shape {list(self.shape)} can't have shape {list(shape)}"
            )
        return DeviceTensor(name, self.datatype, shape, self.memory, self._data)

    def detached(self, name: str) -> Tensor:
        """The same elements under another name, in host memory."""
        return Tensor(name, self.datatype, self.shape, bytes(self.data))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The CUDA array interface; the contents are ready on every stream."""
        dtype = self.dtype
        if dtype is None:
            raise AttributeError(f"{self.datatype} has no type string; use DLPack")
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": dtype.str,
            "data": (self.memory.pointer, False),
            "strides": None,
            "stream": None,
        }

    def __dlpack__(self, *, stream: Any = None, **options: Any) -> Any:
        """A DLPack capsule of the memory itself.

        Args:
            stream: The consumer's stream. Ignored: clients write before they send the request, and copies of
                the server are complete on return.
            options: Options of newer protocol versions. Ignored.
        """
        memory = self.memory
        return dlpack.export(memory.pointer, self.__dlpack_device__(), self.datatype, self.shape, memory)

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CUDA, self.memory.device_id


class FetchedTensor(DeviceTensor):
    """A device tensor for consumers of host memory: copied on first access, which its batch counts."""

    on_device: ClassVar[bool] = False

    __slots__ = ("_batch",)

    def __init__(self, tensor: DeviceTensor, batch: Counting) -> None:
        super().__init__(tensor.name, tensor.datatype, tensor.shape, tensor.memory, tensor._data)
        self._batch = batch

    @property
    def data(self) -> Buffer:
        """A copy in host memory, made when first asked for."""
        if self._data is None:
            self._batch.bytes_copied += self.memory.nbytes
        return super().data


class Counting(Protocol):
    """Counts copied bytes."""

    bytes_copied: int


def concatenated(name: str, tensors: list[Tensor], device_id: int) -> DeviceTensor | None:
    """Concatenates the rows of tensors in device memory; None if an allocation would stall the device.

    At least one of the tensors must be on the device.
    """
    near = next(t for t in tensors if isinstance(t, DeviceTensor) and t.memory.device_id == device_id)
    memory = near.memory.new_memory(sum(tensor.nbytes for tensor in tensors))
    if memory is None:
        return None
    memory.write(tensor.memory if isinstance(tensor, DeviceTensor) else tensor.data for tensor in tensors)
    if len(tensors) == 1:
        return DeviceTensor(name, near.datatype, near.shape, memory)
    rows = sum(tensor.shape[0] for tensor in tensors)
    return DeviceTensor(name, near.datatype, (rows, *near.shape[1:]), memory)
