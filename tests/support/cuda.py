"""CUDA for machines without it: a driver whose devices' memory is files, and clients that allocate it.

The driver is a library of its own, fake_cuda.c, named like the real one. So everything that is ours runs as
it does with a GPU, ctypes included, also in a server process that finds it through ``LD_LIBRARY_PATH``.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from conch.process.gpu_discovery import find_gpus

_SOURCE = Path(__file__).with_name("fake_cuda.c")
_HANDLE = struct.Struct("<4siQi44s")
_numbers = itertools.count()


def build(directory: Path, old: bool = False) -> str:
    """Makes the driver.

    Args:
        directory: Target directory.
        old: True if it is one from before memory pools.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to make a CUDA driver with")
    library = str(directory / "libcuda.so.1")
    options = ["-O1", "-shared", "-fPIC", *(["-DOLD"] if old else [])]
    subprocess.run([compiler, *options, str(_SOURCE), "-o", library, "-lpthread"], check=True)
    return library


class FakeCuda:
    """A driver, and the memory that others have allocated on its devices.

    Args:
        library: The driver.
        directory: Directory of the memory.

    Attributes:
        library: The driver.
        directory: Directory of the memory.
    """

    def __init__(self, library: str, directory: Path) -> None:
        self.library = library
        self.directory = directory

    @property
    def environment(self) -> dict[str, str]:
        """Variables of a process that uses it."""
        paths = [str(Path(self.library).parent), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
        return {"LD_LIBRARY_PATH": ":".join(paths), "FAKE_CUDA_DIR": str(self.directory)}

    def allocate(self, values: NDArray[Any], device: int = 0, pid: int = 0) -> Allocation:
        """Memory of another process on a device, with a copy of an array in it."""
        return Allocation(self.directory, np.ascontiguousarray(values), device, pid)

    @property
    def open_handles(self) -> set[str]:
        """The names of the allocations that are open somewhere."""
        return {path.name.split("-", 2)[2] for path in self.directory.glob("open-*")}

    def opened_by(self, pid: int) -> set[str]:
        """The names of the allocations that a process has open."""
        prefix = f"open-{pid}-"
        return {path.name.removeprefix(prefix) for path in self.directory.glob(f"{prefix}*")}

    @contextmanager
    def failing(self, function: str, code: int) -> Iterator[None]:
        """Has a function of the driver fail."""
        path = self.directory / f"fail-{function}"
        path.write_text(str(code))
        try:
            yield
        finally:
            path.unlink()


class Allocation:
    """Memory that another process has allocated on a device.

    Attributes:
        name: Its name among the open handles.
        handle: Its ``cudaIpcMemHandle_t``.
        array: Its contents, as an array like the one it was made with.
    """

    def __init__(self, directory: Path, values: NDArray[Any], device: int, pid: int) -> None:
        self.name = f"memory{next(_numbers)}"
        path = directory / self.name
        path.write_bytes(values.tobytes())
        self.handle = _HANDLE.pack(b"FAKE", device, values.nbytes, pid, self.name.encode())
        self._mapping = _mapping(path, values.nbytes)
        self.array = np.frombuffer(self._mapping, values.dtype).reshape(values.shape)


def _mapping(path: Path, nbytes: int) -> Any:
    """A file's content, for as long as the process lives; `mmap.mmap` would keep a descriptor too."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    descriptor = os.open(path, os.O_RDWR)
    try:
        address = libc.mmap(
            None,
            ctypes.c_size_t(nbytes),
            mmap.PROT_READ | mmap.PROT_WRITE,
            mmap.MAP_SHARED,
            descriptor,
            ctypes.c_long(0),
        )
    finally:
        os.close(descriptor)
    return (ctypes.c_char * nbytes).from_address(address)


def without_gpu() -> str:
    """Reason for which tests on a real device can't run here; empty if they can."""
    return "" if find_gpus(0.0) else "no CUDA device: no libcuda.so.1, or none that finds one"
