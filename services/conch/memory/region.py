"""What regions of every kind have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Protocol

from conch.core.tensor import Tensor


class Region(ABC):
    """Memory of a client under a name.

    Attributes:
        kind: ``system`` or ``cuda``.
        name: The client's name for it.
        byte_size: Its size in bytes.
        users: How many requests use it; only `Regions` counts.
        retired: Whether it has been unregistered, and goes with its last user.
    """

    kind: ClassVar[str]

    def __init__(self, name: str, byte_size: int) -> None:
        self.name = name
        self.byte_size = byte_size
        self.users = 0
        self.retired = False

    @abstractmethod
    def check(self) -> None:
        """Checks that the memory is still what was registered.

        Raises:
            InvalidArgumentError: It is not.
        """

    @abstractmethod
    def tensor(self, offset: int, byte_size: int, name: str, datatype: str, shape: tuple[int, ...]) -> Tensor:
        """A part of it, which lies in it, as a tensor that nobody can write to."""

    @abstractmethod
    def write(self, offset: int, byte_size: int, tensor: Tensor) -> None:
        """Writes a tensor, which fits, into a part of it; nothing if that is where the tensor is already."""

    def buffer(self, offset: int, byte_size: int) -> memoryview | None:
        """A part of it for somebody to write to; None where only `write` can."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Gives the memory up: nobody uses it, and nobody will."""


class CudaRegion(Region):
    """A region on a GPU.

    Attributes:
        device_id: The GPU.
    """

    kind = "cuda"

    def __init__(self, name: str, device_id: int, byte_size: int) -> None:
        super().__init__(name, byte_size)
        self.device_id = device_id


class CudaOpener(Protocol):
    """What opens memory of other processes on GPUs."""

    def __call__(self, name: str, raw_handle: bytes, device_id: int, byte_size: int) -> CudaRegion:
        """Opens a region.

        Args:
            name: The client's name for it.
            raw_handle: The 64 bytes of a `cudaIpcMemHandle_t`.
            device_id: The GPU.
            byte_size: How long it is.

        Raises:
            ConchError: It can't be opened.
        """
