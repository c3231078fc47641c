"""CUDA devices and their memory: opened IPC handles of other processes and memory of the server.

A handle is opened once per device, however many regions name it: depending on its age, the driver refuses a
second open or counts it. It is closed when no region, no tensor and no array that a framework made of a
tensor uses it any more. An access to closed memory would destroy the CUDA context of the server.

Owns: the primary contexts, one stream per device, the table of open handles.
Threads and locks: any thread; `CudaDevices` has one re-entrant lock, as finalizers may run at any point.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial

import numpy as np

from conch.core.device import DeviceMemory
from conch.core.errors import InternalError, ResourceExhaustedError
from conch.core.tensor import Buffer
from conch.memory.cuda_driver import HANDLE_BYTES, LIBRARY, CudaError, Driver, IpcHandle

log = logging.getLogger(__name__)

_LAZY_PEER_ACCESS = 1  # CUipcMem_flags; there is no other way to open a handle
_POINTER_DEVICE = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
_MEMORY_POOLS = 115  # CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED
_BLOCKING = 0  # CUstream_flags: in order with the default stream
_DEFAULT_STREAM = None
_UUID_BYTES = 16


class CudaDevice:
    """One GPU: its primary context and one stream.

    The stream synchronises with the default stream in both directions, so results of a model are ready before
    they are copied. The context is never released, as frameworks use it too.

    Raises:
        CudaError: The device can't be used.
    """

    def __init__(self, driver: Driver, number: int) -> None:
        self._driver = driver
        self.number = number
        device, pools = ctypes.c_int(), ctypes.c_int()
        self._context, self._stream = ctypes.c_void_p(), ctypes.c_void_p()
        driver.call("cuDeviceGet", ctypes.byref(device), number)
        driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device.value)
        with self.current():
            driver.call("cuStreamCreate", ctypes.byref(self._stream), _BLOCKING)
        if driver.has_pools:
            driver.call("cuDeviceGetAttribute", ctypes.byref(pools), _MEMORY_POOLS, device.value)
        self._pools = bool(pools.value)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Makes the context current on the calling thread."""
        self._driver.call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._driver.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def open(self, handle: bytes) -> tuple[int, int]:
        """Opens memory of another process; returns its address and size.

        Raises:
            CudaError: It can't be opened, or is on another device.
        """
        pointer = ctypes.c_uint64()
        with self.current():
            self._driver.call(
                "cuIpcOpenMemHandle_v2",
                ctypes.byref(pointer),
                IpcHandle.from_buffer_copy(handle),
                _LAZY_PEER_ACCESS,
            )
            with ExitStack() as undo:
                undo.callback(self._driver.call, "cuIpcCloseMemHandle", pointer)
                size = self._checked(pointer.value)
                undo.pop_all()
        return pointer.value, size

    def _checked(self, pointer: int) -> int:
        """Size of the memory from an address on; raises CudaError if it is on another device."""
        call = self._driver.call
        owner, base, size = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_size_t()
        call("cuPointerGetAttribute", ctypes.byref(owner), _POINTER_DEVICE, pointer)
        if owner.value != self.number:
            # Frameworks would use it on the wrong device.
            raise CudaError(f"the memory is on device {owner.value}, not on device {self.number}")
        call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), pointer)
        return base.value + size.value - pointer

    def close(self, pointer: int) -> None:
        """Closes memory of another process. Raises CudaError: it could not be closed."""
        with self.current():
            self._driver.call("cuIpcCloseMemHandle", pointer)

    def export(self, pointer: int) -> tuple[bytes, int]:
        """The IPC handle of the allocation that contains an address, and the offset in it.

        Raises:
            CudaError: Memory of pools and of other processes has no handle.
        """
        base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), IpcHandle()
        with self.current():
            self._driver.call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), pointer)
            self._driver.call("cuIpcGetMemHandle", ctypes.byref(handle), base)
        return bytes(handle), pointer - base.value

    def settle(self) -> None:
        """Synchronises the default stream, as other processes do not wait for our streams.

        Raises:
            CudaError: Something in it failed.
        """
        with self.current():
            self._driver.call("cuStreamSynchronize", _DEFAULT_STREAM)

    def copy(self, copies: Iterable[tuple[int, int, int]]) -> None:
        """Copies between host or device addresses and waits; each copy is (target, source, size).

        Raises:
            CudaError: A copy failed.
        """
        call = self._driver.call
        with self.current():
            try:
                for target, source, nbytes in copies:
                    call("cuMemcpyAsync", target, source, nbytes, self._stream)
            finally:
                # Also after a failure: earlier copies still use their memory.
                call("cuStreamSynchronize", self._stream)

    def allocate(self, nbytes: int) -> int | None:
        """Allocates from the memory pool; None if the device has none.

        Without a pool, freeing would wait for everything that runs on the device.

        Raises:
            CudaError: There is too little memory.
        """
        if not self._pools:
            return None
        pointer = ctypes.c_uint64()
        with self.current():
            self._driver.call("cuMemAllocAsync", ctypes.byref(pointer), nbytes, self._stream)
            self._driver.call("cuStreamSynchronize", self._stream)
        return pointer.value

    def free(self, pointer: int) -> None:
        """Frees memory from `allocate`. Raises CudaError: the driver refused."""
        with self.current():
            self._driver.call("cuMemFreeAsync", pointer, self._stream)


class Opened:
    """An open handle with its address in this process and its reference count.

    Attributes:
        uses: Number of references.
        lendable: True if the handle may be passed on to other processes.
    """

    __slots__ = ("__weakref__", "handle", "lendable", "nbytes", "pointer", "uses")

    def __init__(self, handle: bytes, pointer: int, nbytes: int, lendable: bool) -> None:
        self.handle = handle
        self.pointer = pointer
        self.nbytes = nbytes
        self.uses = 0
        self.lendable = lendable


class _Held:
    """Keeps memory alive while it is referenced; a finalizer frees it."""

    __slots__ = ("__weakref__", "opened")

    def __init__(self, opened: Opened | None = None) -> None:
        self.opened = opened


class CudaMemory(DeviceMemory):
    """A range of GPU memory, which `owner` keeps alive."""

    __slots__ = ("_device", "device_id", "nbytes", "owner", "pointer")

    def __init__(self, device: CudaDevice, pointer: int, nbytes: int, owner: object) -> None:
        self._device = device
        self.owner = owner
        self.device_id = device.number
        self.pointer = pointer
        self.nbytes = nbytes

    def part(self, offset: int, nbytes: int) -> CudaMemory:
        """A part, which must lie inside."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise ValueError(f"{nbytes} bytes from {offset} on do not lie inside {self.nbytes} bytes")
        return CudaMemory(self._device, self.pointer + offset, nbytes, self.owner)

    def read(self) -> memoryview:
        """A copy in host memory."""
        host = np.empty(self.nbytes, np.uint8)
        if self.nbytes:
            self._copy([(host.ctypes.data, self.pointer, self.nbytes)])
        return host.data

    def write(self, parts: Iterable[Buffer | DeviceMemory]) -> None:
        """Copies host or device memory into it, back to back from the start."""
        target, end = self.pointer, self.pointer + self.nbytes
        copies: list[tuple[int, int, int]] = []
        kept: list[object] = []
        for part in parts:
            if isinstance(part, DeviceMemory):
                source, nbytes = part.pointer, part.nbytes
            else:
                array = np.frombuffer(part, np.uint8)
                source, nbytes = array.ctypes.data, array.nbytes
                kept.append(array)
            if target + nbytes > end:
                raise ValueError(f"more is to be written than {self.nbytes} bytes")
            if nbytes:
                copies.append((target, source, nbytes))
            target += nbytes
            kept.append(part)
        if copies:
            self._copy(copies)

    def view_owned_by(self, pointer: int, nbytes: int, owner: object) -> CudaMemory:
        """Memory on the same device that `owner` keeps alive."""
        return CudaMemory(self._device, pointer, nbytes, owner)

    def new_memory(self, nbytes: int) -> CudaMemory | None:
        """New memory on the same device; None if the device has no pool."""
        device = self._device
        try:
            pointer = device.allocate(max(nbytes, 1))
        except CudaError as error:
            raise ResourceExhaustedError(
                f"{nbytes} bytes can't be had on CUDA device {self.device_id}: {error}"
            ) from error
        if pointer is None:
            return None
        owner = _Held()
        _when_gone(owner, partial(device.free, pointer), f"memory of CUDA device {self.device_id}")
        return CudaMemory(device, pointer, nbytes, owner)

    def _copy(self, copies: list[tuple[int, int, int]]) -> None:
        try:
            self._device.copy(copies)
        except CudaError as error:
            raise InternalError(f"a copy on CUDA device {self.device_id} failed: {error}") from error


class CudaDevices:
    """The GPUs of this process; the driver is loaded on first use.

    Models may fork, and CUDA does not work in the children of a process that has used it.

    Attributes:
        in_use: True once the driver is loaded.
    """

    in_use = False

    def __init__(self, library: str = LIBRARY) -> None:
        self._library = library
        # Re-entrant: the garbage collector may run a finalizer at any point.
        self._lock = threading.RLock()
        self._driver: Driver | None = None
        self._devices: dict[int, CudaDevice] = {}
        self._opened: dict[tuple[int, bytes], Opened] = {}
        self._uuids: list[bytes] = []

    @property
    def open_handles(self) -> int:
        """Number of open handles."""
        with self._lock:
            return len(self._opened)

    def device(self, number: int) -> CudaDevice:
        """The GPU of a number.

        Raises:
            CudaUnavailableError: There is no GPU.
            CudaError: There is none of that number, or it does not work.
        """
        with self._lock:
            driver = self._found()
            if not 0 <= number < driver.gpus:
                raise CudaError("invalid device ordinal")
            device = self._devices.get(number)
            if device is None:
                device = self._devices[number] = CudaDevice(driver, number)
            return device

    def _found(self) -> Driver:
        driver = self._driver
        if driver is None:
            driver = self._driver = Driver(self._library)
            self.in_use = True
        return driver

    def uuids(self) -> list[bytes]:
        """UUIDs of the GPUs, which unlike numbers are the same in all processes.

        Raises:
            CudaUnavailableError: There is no GPU.
            CudaError: The driver does not tell.
        """
        with self._lock:
            driver = self._found()
            while len(self._uuids) < driver.gpus:
                # Without a context, which would take memory on each GPU.
                device, uuid = ctypes.c_int(), (ctypes.c_char * _UUID_BYTES)()
                driver.call("cuDeviceGet", ctypes.byref(device), len(self._uuids))
                driver.call("cuDeviceGetUuid", uuid, device.value)
                self._uuids.append(bytes(uuid))
            return self._uuids

    def opened_at(self, memory: DeviceMemory) -> Opened | None:
        """The open handle that contains a range of memory."""
        if isinstance(memory, CudaMemory) and isinstance(memory.owner, _Held):
            return memory.owner.opened
        start, number = memory.pointer, memory.device_id
        with self._lock:
            for (device, _), opened in self._opened.items():
                if device == number and 0 <= start - opened.pointer <= opened.nbytes - memory.nbytes:
                    return opened
        return None

    def open(self, handle: bytes, number: int, lendable: bool = True) -> CudaMemory:
        """Opens an allocation of another process.

        Args:
            handle: Its ``cudaIpcMemHandle_t``.
            number: The GPU it is on.
            lendable: True if the handle may be passed on to other processes.

        Raises:
            CudaUnavailableError: There is no GPU.
            CudaError: The handle can't be opened on that GPU.
        """
        key = (number, handle)
        with self._lock:
            device = self.device(number)
            if len(handle) != HANDLE_BYTES:
                raise CudaError("invalid argument")
            opened = self._opened.get(key)
            if opened is None:
                for other, its_handle in self._opened:
                    if its_handle == handle:  # the driver may mix them up
                        raise CudaError(f"the memory is on device {other}, not on device {number}")
                opened = self._opened[key] = Opened(handle, *device.open(handle), lendable)
            opened.uses += 1
            owner = _Held(opened)
            _when_gone(owner, partial(self._close, device, key), f"memory of CUDA device {number}")
            return CudaMemory(device, opened.pointer, opened.nbytes, owner)

    def memory(self, pointer: int, number: int, nbytes: int, owner: object) -> CudaMemory:
        """Memory of a framework on a GPU, which `owner` keeps alive.

        Raises:
            CudaUnavailableError: There is no GPU.
            CudaError: There is none of that number.
        """
        return CudaMemory(self.device(number), pointer, nbytes, owner)

    def _close(self, device: CudaDevice, key: tuple[int, bytes]) -> None:
        with self._lock:
            opened = self._opened[key]
            opened.uses -= 1
            if not opened.uses:
                del self._opened[key]
                device.close(opened.pointer)


def _when_gone(owner: _Held, release: partial[None], what: str) -> None:
    """Calls `release` when the last reference to the owner is dropped."""

    def run() -> None:
        try:
            release()
        except CudaError as error:
            log.error("%s could not be given back: %s", what, error)

    # At exit the driver frees it, and may be unloaded first.
    weakref.finalize(owner, run).atexit = False


@cache
def cuda_devices() -> CudaDevices:
    """The `CudaDevices` of this process; contexts and open handles belong to processes."""
    return CudaDevices()
