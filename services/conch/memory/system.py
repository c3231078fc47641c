"""Regions in system shared memory: objects that `shm_open` finds, mapped."""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Callable

import numpy as np

from conch.core.errors import ConchError, InternalError, InvalidArgumentError
from conch.core.tensor import POSITIONS, Array, Tensor
from conch.memory.faults import FaultGuard, Protected
from conch.memory.keys import object_name
from conch.memory.region import Region

DIRECTORY = "/dev/shm"
"""Where Linux's C libraries have the objects of `shm_open`."""

_MOST_COPIED_BYTES = 2**31 - 1  # as much as a message may have
_OPEN = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


class RegionTensor(Tensor):
    """An input in a region: whoever has the region may write to it at any time."""

    __slots__ = ()

    shared = True

    def reshaped(self, shape: tuple[int, ...]) -> Tensor:
        """The same elements under another shape of the same size, without a copy."""
        return self.renamed(self.name, shape)

    def renamed(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The same elements under another name and another shape of the same size, without a copy."""
        return RegionTensor(name, self.datatype, shape, self.data)


class _Mapping(mmap.mmap):
    """A mapping that says when it goes: when nobody has a view of it any more."""

    on_gone: Callable[[], None] | None = None

    def __del__(self) -> None:
        if self.on_gone is not None:
            self.on_gone()


class SystemRegion(Region):
    """A part of a shared-memory object.

    Requests have views of the mapping, so it stays until the last of them is gone, whatever becomes of the
    region. The object's descriptor stays open as long, to see whether it shrinks.

    Args:
        name: The client's name for it.
        key: The object's name as the client gave it.
        offset: Where in the object it begins.
        byte_size: How long it is.
        guard: Watches over the memory.

    Attributes:
        key: As above.
        offset: As above.

    Raises:
        InvalidArgumentError: The key is not one for clients, or the object has no such part.
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
        protected = self._protected
        mapping.on_gone = lambda: guard.unprotect(protected)
        self._mapping: _Mapping | None = mapping
        self._memory: memoryview | None = view[before : before + byte_size]

    def check(self) -> None:
        """Checks that the object has not shrunk since it was registered."""
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
        """A part of it as a tensor: a view, but a copy where nobody may change the bytes any more.

        Strings are counted before they are taken apart, and a client that changes their lengths in between
        would fail the batch, and the requests of others in it. For numbers that kernels take for positions
        see `POSITIONS`.
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
        # Through an array: that copies without the interpreter's lock.
        return Tensor(name, datatype, shape, np.frombuffer(part, np.uint8).copy().data)

    def write(self, offset: int, byte_size: int, tensor: Tensor) -> None:
        """Writes a tensor into a part of it: one copy, made without the interpreter's lock."""
        size = tensor.nbytes
        if not size:
            return
        part = self.buffer(offset, size)
        # Not by its bytes where there is an array: one that is not contiguous would be copied twice.
        source = (
            np.frombuffer(tensor.data, np.uint8) if tensor.has_data or _is_strings(tensor) else tensor.numpy()
        )
        target = np.frombuffer(part, source.dtype).reshape(source.shape)
        if source.flags.c_contiguous and _address(source) == _address(target):
            return
        np.copyto(target, source)

    def buffer(self, offset: int, byte_size: int) -> memoryview:
        """A part of it for somebody to write to."""
        assert self._memory is not None, "a region in use is not closed"
        return self._memory[offset : offset + byte_size]

    def close(self) -> None:
        """Gives the mapping up; it goes with the last view of it."""
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
        os.close(descriptor)  # the mapping has one of its own


def _invalid(region: str) -> ConchError:
    return InvalidArgumentError(f"failed to register shared memory region '{region}': invalid args")
