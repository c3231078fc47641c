"""Tensors in the memory of a device, as far as the core has to know of them: where they are.

What opens, copies and frees such memory is behind `DeviceMemory`; the one there is for CUDA is in
`conch.memory.cuda`. A `DeviceTensor` is a `Tensor`: whoever asks it for bytes or an array gets a copy in host
memory, made once; whoever can use the memory where it is asks `on_device` first.
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
    """A piece of a device's memory; it is there at least as long as this object.

    Every copy has happened when its method returns, and what the device was to do with the memory before in
    the order of its default stream has happened before it.

    Attributes:
        pointer: Its address.
        device_id: Number of the device.
        nbytes: Its size.
    """

    __slots__ = ()

    pointer: int
    device_id: int
    nbytes: int

    @abstractmethod
    def part(self, offset: int, nbytes: int) -> DeviceMemory:
        """A piece of it, which must lie inside."""

    @abstractmethod
    def read(self) -> memoryview:
        """A copy in host memory.

        Raises:
            ConchError: The device failed.
        """

    @abstractmethod
    def write(self, parts: Iterable[Buffer | DeviceMemory]) -> None:
        """Copies what comes from the host or a device into it, one after the other from its beginning.

        Raises:
            ConchError: The device failed.
        """

    @abstractmethod
    def owned(self, pointer: int, nbytes: int, owner: object) -> DeviceMemory:
        """Memory on the same device that somebody else has.

        Args:
            pointer: Its address.
            nbytes: Its size.
            owner: What has to be kept as long as it is used.
        """

    @abstractmethod
    def another(self, nbytes: int) -> DeviceMemory | None:
        """New memory on the same device; None where it can't give and take memory without stopping others.

        Raises:
            ConchError: The device failed, or has too little.
        """


class DeviceTensor(Tensor):
    """A tensor in the memory of a device, never one of BYTES.

    Attributes:
        memory: Where it is.
    """

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
        """Copies it to host memory unless that has been done; returns how many bytes that took."""
        return 0 if self._data is not None else memoryview(self.data).nbytes

    def numpy(self) -> Array:
        """A copy in host memory as an array of its shape, which can't be written to."""
        self.fetch()
        return super().numpy()

    @property
    def dtype(self) -> np.dtype[Any] | None:
        """The numpy dtype of its elements; None for BF16."""
        return NUMPY_DTYPES.get(self.datatype)

    def __getitem__(self, rows: slice) -> DeviceTensor:
        """Some of its rows, which must be there, without a copy."""
        start, end = rows.start, rows.stop
        size = prod(self.shape[1:]) * ELEMENT_SIZES[self.datatype]
        memory = self.memory.part(start * size, (end - start) * size)
        return DeviceTensor(self.name, self.datatype, (end - start, *self.shape[1:]), memory)

    def reshaped(self, shape: tuple[int, ...]) -> DeviceTensor:
        """The same elements under another shape of the same size, without a copy."""
        return self.renamed(self.name, shape)

    def renamed(self, name: str, shape: tuple[int, ...]) -> DeviceTensor:
        """The same elements under another name and another shape of the same size, without a copy."""
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
        """The memory as numba, cupy and others take it; its contents are ready on every stream."""
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
            stream: Where the consumer will use it. Nothing is to be done for that: clients have written their
                memory before they name it, and every copy of ours is over when it returns.
            options: Whatever newer versions of the protocol ask for, all of which may be left alone.
        """
        memory = self.memory
        return dlpack.export(memory.pointer, self.__dlpack_device__(), self.datatype, self.shape, memory)

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CUDA, self.memory.device_id


class FetchedTensor(DeviceTensor):
    """A tensor on a device, for somebody who only wants to know of host memory; copied when it is looked at.

    Args:
        tensor: The tensor.
        batch: The batch it runs in, which counts the copy.
    """

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
    """What counts copies."""

    bytes_copied: int


def concatenated(name: str, tensors: list[Tensor], device_id: int) -> DeviceTensor | None:
    """The rows of several tensors of one datatype one after the other, in memory of a device.

    Args:
        name: Name of the result.
        tensors: The tensors, wherever they are; at least one must be on that device.
        device_id: Number of the device.

    Returns:
        The rows; None where the device can't give memory for it without stopping others.
    """
    near = next(t for t in tensors if isinstance(t, DeviceTensor) and t.memory.device_id == device_id)
    memory = near.memory.another(sum(tensor.nbytes for tensor in tensors))
    if memory is None:
        return None
    memory.write(tensor.memory if isinstance(tensor, DeviceTensor) else tensor.data for tensor in tensors)
    if len(tensors) == 1:
        return DeviceTensor(name, near.datatype, near.shape, memory)
    rows = sum(tensor.shape[0] for tensor in tensors)
    return DeviceTensor(name, near.datatype, (rows, *near.shape[1:]), memory)
