"""Regions in system shared memory: mapped `shm_open` objects."""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Callable
from functools import partial

import numpy as np

from conch.core.errors import ConchError, InternalError, InvalidArgumentError
from conch.core.tensor import POSITIONS, Array, Tensor
from conch.memory.region import Region, object_name
from conch.memory.sigbus_guard import FaultGuard, Protected

DIRECTORY = "/dev/shm"
"""Directory of `shm_open` objects in the C libraries of Linux."""

_MOST_COPIED_BYTES = 2**31 - 1  # as much as a message may have
_OPEN = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


class RegionTensor(Tensor):
    """An input in a region, which its client may write to at any time."""

    __slots__ = ()

    shared = True

    def reshaped(self, shape: tuple[int, ...]) -> Tensor:
        """The same elements in another shape of the same size, without a copy."""
        return self.renamed(self.name, shape)

    def renamed(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The same elements under another name and shape of the same size, without a copy."""
        return RegionTensor(name, self.datatype, shape, self.data)


class _Mapping(mmap.mmap):
    """A mapping that calls a function before it is unmapped, with the last view of it.

    The callback of a weak reference would be too late: `mmap` unmaps first, and another mapping may have its
    addresses by then.
    """

    _before_end: Callable[[], None] | None = None

    def before_end(self, work: Callable[[], None]) -> None:
        """Sets the function."""
        self._before_end = work

    def __del__(self) -> None:
        if self._before_end is not None:
            self._before_end()


class SystemRegion(Region):
    """A part of a shared-memory object.

    The mapping lives until the last view that a request has of it is released, even if the region is closed
    before. The descriptor stays open as long, to notice when the object shrinks.

    Args:
        name: Name of the region.
        key: Name of the object as the client gave it.
        offset: Start of the region in the object.
        byte_size: Size of the region.
        guard: Protects the mapping.

    Raises:
        InvalidArgumentError: Clients may not use the key, or the object has no such part.
        InternalError: The object can't be opened; the text and the code are Triton's.
    """

    kind = "system"

    def __init__(self, name: str, key: str, offset: int, byte_size: int, guard: FaultGuard) -> None:
        super().__init__(name, byte_size)
        self.key = key
        self.offset = offset
        before = offset % mmap.ALLOCATIONGRANULARITY
        mapping = _map(name, key, offset - before, offset, byte_size)
        view = memoryview(mapping)
        start = _address(np.frombuffer(view, np.uint8))
        self._protected: Protected = guard.protect(start, before + byte_size)
        mapping.before_end(partial(guard.unprotect, self._protected))
        self._mapping: _Mapping | None = mapping
        self._memory: memoryview | None = view[before : before + byte_size]

    def check(self) -> None:
        """Raises InvalidArgumentError if the object has shrunk since it was registered."""
        assert self._mapping is not None, "a region in use is not closed"
        now = self._mapping.size()
        if now < self.offset + self.byte_size:
            raise InvalidArgumentError(
                f"shared memory region '{self.name}' has shrunk since it was registered: it needs "
                f"{self.offset + self.byte_size} bytes of '{self.key}', which has {now}"
            )
        if self._protected.broken:
            raise InvalidArgumentError(
                f"shared memory region '{self.name}' has lost its memory: '{self.key}' had shrunk, or there "
                f"was no room left for it; unregister the region and register it again"
            )

    def tensor(self, offset: int, byte_size: int, name: str, datatype: str, shape: tuple[int, ...]) -> Tensor:
        """A part as a tensor: a view, or a copy if the bytes must not change any more.

        Strings are counted before they are split; a client that changes their lengths in between would fail
        the whole batch. For numbers that kernels use as positions see `POSITIONS`.
        """
        assert self._memory is not None, "a region in use is not closed"
        copied = datatype == "BYTES" or datatype in POSITIONS
        if copied and byte_size > _MOST_COPIED_BYTES:
            raise InvalidArgumentError(
                f"input '{name}' in shared memory region '{self.name}' has {byte_size} bytes, but of "
                f"datatype {datatype} at most {_MOST_COPIED_BYTES} are taken"
            )
        part = self._memory[offset : offset + byte_size].toreadonly()
        if not copied:
            return RegionTensor(name, datatype, shape, part)
        # An array copies without the interpreter lock.
        return Tensor(name, datatype, shape, np.frombuffer(part, np.uint8).copy().data)

    def write(self, offset: int, byte_size: int, tensor: Tensor) -> None:
        """Writes a tensor into a part: one copy, without the interpreter lock."""
        size = tensor.nbytes
        if not size:
            return
        part = self.buffer(offset, size)
        # The array, not its bytes: an array that is not contiguous would be copied twice.
        source = (
            np.frombuffer(tensor.data, np.uint8) if tensor.has_data or _is_strings(tensor) else tensor.numpy()
        )
        target = np.frombuffer(part, source.dtype).reshape(source.shape)
        if source.flags.c_contiguous and _address(source) == _address(target):
            return
        np.copyto(target, source)

    def buffer(self, offset: int, byte_size: int) -> memoryview:
        """A writable view of a part."""
        assert self._memory is not None, "a region in use is not closed"
        return self._memory[offset : offset + byte_size]

    def close(self) -> None:
        """Releases the mapping; it is unmapped with the last view of it."""
        self._memory = self._mapping = None


def _is_strings(tensor: Tensor) -> bool:
    return tensor.datatype == "BYTES"


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


def _map(region: str, key: str, start: int, offset: int, byte_size: int) -> _Mapping:
    name = object_name(region, key)
    try:
        descriptor = os.open(f"{DIRECTORY}/{name}", _OPEN)
    except OSError:
        raise InternalError(f"Unable to open shared memory region: '{key}'") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise InternalError(f"Unable to open shared memory region: '{key}'")
        if not (0 <= offset <= status.st_size and 0 < byte_size <= status.st_size - offset):
            raise _invalid(region)
        length = byte_size + offset - start
        return _Mapping(descriptor, length, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE, offset=start)
    except (OSError, ValueError, OverflowError):
        raise _invalid(region) from None
    finally:
        os.close(descriptor)  # the mapping has its own


def _invalid(region: str) -> ConchError:
    return InvalidArgumentError(f"failed to register shared memory region '{region}': invalid args")
