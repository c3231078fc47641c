"""Shared-memory objects for tests, and parameters of tensors that lie in regions."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tests.support.names import DIRECTORY, new_name
from tests.support.servers import ServerProcess
from tritonclient.grpc import service_pb2


class SharedObject:
    """An object that `shm_open` finds, as a client has it.

    Args:
        byte_size: Its size.
    """

    def __init__(self, byte_size: int) -> None:
        self.key = new_name()
        self.path = DIRECTORY / self.key
        self._descriptor = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        self.resize(byte_size)

    def resize(self, byte_size: int) -> None:
        """Makes it longer or shorter."""
        os.ftruncate(self._descriptor, byte_size)

    def write(self, array: NDArray[Any], offset: int = 0) -> None:
        """Writes an array's bytes."""
        os.pwrite(self._descriptor, array.tobytes(), offset)

    def read(self, count: int, offset: int = 0, dtype: Any = np.float32) -> NDArray[Any]:
        """Reads an array."""
        return np.frombuffer(os.pread(self._descriptor, count * np.dtype(dtype).itemsize, offset), dtype)

    def close(self) -> None:
        """Removes it."""
        os.close(self._descriptor)
        self.path.unlink(missing_ok=True)


@contextmanager
def shared_object(byte_size: int) -> Iterator[SharedObject]:
    """An object for the time of a block."""
    made = SharedObject(byte_size)
    try:
        yield made
    finally:
        made.close()


def in_region(parameters: Any, region: str, byte_size: int, offset: int | None = None) -> None:
    """Gives a tensor of a message the parameters of one that lies in a region."""
    parameters["shared_memory_region"].string_param = region
    parameters["shared_memory_byte_size"].int64_param = byte_size
    if offset is not None:
        parameters["shared_memory_offset"].int64_param = offset


def register_request(name: str, key: str, byte_size: int, offset: int = 0) -> Any:
    """A message that registers a region."""
    return service_pb2.SystemSharedMemoryRegisterRequest(
        name=name, key=key, offset=offset, byte_size=byte_size
    )


def mapped(server: ServerProcess, memory: SharedObject) -> bool:
    """True if the server has an object mapped or open."""
    process = Path(f"/proc/{server.process.pid}")
    if memory.key in (process / "maps").read_text():
        return True
    for link in (process / "fd").iterdir():
        with suppress(FileNotFoundError):  # closed since it was listed
            if memory.key in str(link.readlink()):
                return True
    return False
