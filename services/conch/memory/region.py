"""Base classes of shared-memory regions, and the rules for object names and parts of regions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Protocol

from conch.core.device import DeviceMemory
from conch.core.errors import InvalidArgumentError
from conch.core.tensor import Tensor

_LONGEST_NAME = 255
_MOST_BYTES = 2**64 - 1

_RESERVED = (
    "triton_python_backend_shm_region_",
    "conch_",
    "sem.",  # named semaphores: a write to one can hang a process
    "nccl-",  # shared between the processes of a machine by GPU libraries
    "cuda.shm.",
)
"""Prefixes of object names that belong to servers or their libraries."""


class Region(ABC):
    """Memory that a client has registered under a name.

    Attributes:
        kind: ``system`` or ``cuda``.
        users: Number of requests that use it; counted by `Regions`.
        retired: True once unregistered; it is closed after its last user.
    """

    kind: ClassVar[str]

    def __init__(self, name: str, byte_size: int) -> None:
        self.name = name
        self.byte_size = byte_size
        self.users = 0
        self.retired = False

    @abstractmethod
    def check(self) -> None:
        """Raises InvalidArgumentError if the registered memory is no longer there."""

    @abstractmethod
    def tensor(self, offset: int, byte_size: int, name: str, datatype: str, shape: tuple[int, ...]) -> Tensor:
        """A part as a read-only tensor; the part must lie inside."""

    @abstractmethod
    def write(self, offset: int, byte_size: int, tensor: Tensor) -> None:
        """Writes a tensor that fits into a part; does nothing if the tensor is already there."""

    def buffer(self, offset: int, byte_size: int) -> memoryview | None:
        """A writable view of a part; None if only `write` can write."""
        return None

    def device(self, offset: int, byte_size: int) -> DeviceMemory | None:
        """A part in device memory; None for regions in host memory."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Releases the memory; the region has no users left."""


class CudaRegion(Region):
    """A region on a GPU."""

    kind = "cuda"

    def __init__(self, name: str, device_id: int, byte_size: int) -> None:
        super().__init__(name, byte_size)
        self.device_id = device_id


class CudaOpener(Protocol):
    """Opens GPU memory of other processes."""

    def __call__(self, name: str, raw_handle: bytes, device_id: int, byte_size: int) -> CudaRegion:
        """Opens a region by the 64 bytes of a `cudaIpcMemHandle_t`.

        Raises:
            ConchError: The region can't be opened.
        """


def object_name(region: str, key: str) -> str:
    """The object name of a key, which may start with slashes, as `shm_open` reads it.

    Raises:
        InvalidArgumentError: Clients may not use this name; the error shows `region`.
    """
    name = key.lstrip("/")
    if not name or name in (".", "..") or "/" in name or "\0" in name or _length(name) > _LONGEST_NAME:
        raise InvalidArgumentError(
            f"cannot register shared memory region '{region}' - invalid shm key '{key}'"
        )
    for prefix in _RESERVED:
        if name.startswith(prefix):
            raise InvalidArgumentError(
                f"cannot register shared memory region '{region}' with key '{key}' as the key contains the "
                f"reserved prefix '{prefix}'"
            )
    return name


def _length(name: str) -> int:
    try:
        return len(name.encode())
    except UnicodeEncodeError:
        return _LONGEST_NAME + 1


def check_part(region: str, region_size: int, offset: int, byte_size: int) -> None:
    """Checks that a part lies in a region of `region_size` bytes.

    Raises:
        InvalidArgumentError: The part does not lie inside, or is empty; texts are Triton's.
    """
    if not 0 <= offset < region_size:
        raise InvalidArgumentError(f"Invalid offset for shared memory region: '{region}'")
    unsigned = byte_size if byte_size >= 0 else byte_size + _MOST_BYTES + 1  # as Triton reads a gRPC int64
    if unsigned > _MOST_BYTES - offset:
        raise InvalidArgumentError(
            f"Integer overflow detected: byte_size ({unsigned}) + offset ({offset}) exceeds maximum value "
            f"({_MOST_BYTES}) for region '{region}'"
        )
    if not 0 < byte_size <= region_size - offset:
        raise InvalidArgumentError(f"Invalid offset + byte size for shared memory region: '{region}'")
