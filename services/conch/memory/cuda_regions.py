"""CUDA regions: GPU memory that clients share by its IPC handle."""

from __future__ import annotations

from collections.abc import Callable

from conch.core.device import DeviceTensor
from conch.core.errors import InvalidArgumentError
from conch.core.tensor import ELEMENT_SIZES, Buffer, Tensor
from conch.memory.cuda import CudaDevices, CudaMemory, cuda_devices
from conch.memory.cuda_driver import CudaError, CudaUnavailableError
from conch.memory.region import CudaOpener, CudaRegion

_MOST_COPIED_BYTES = 2**31 - 1  # as a message; the host may have less memory than its GPUs


class OpenedRegion(CudaRegion):
    """An open region.

    The memory is closed once the region is closed and the last tensor in it is freed, including arrays that
    frameworks made of it. `memory` may be longer than the region.
    """

    def __init__(self, name: str, byte_size: int, memory: CudaMemory) -> None:
        super().__init__(name, memory.device_id, byte_size)
        self._memory: CudaMemory | None = memory

    def check(self) -> None:
        """Never fails: CUDA keeps memory that other processes have open."""

    def tensor(self, offset: int, byte_size: int, name: str, datatype: str, shape: tuple[int, ...]) -> Tensor:
        """A part as a device tensor, or as a copy in host memory if devices can't use it.

        The copy is for strings and for unaligned elements: a kernel that reads them would destroy the CUDA
        context of the server.
        """
        part = self._part(offset, byte_size)
        size = ELEMENT_SIZES.get(datatype)
        if size is None or part.pointer % size:
            if byte_size > _MOST_COPIED_BYTES:
                raise InvalidArgumentError(
                    f"input '{name}' in shared memory region '{self.name}' has {byte_size} bytes, but of "
                    f"datatype {datatype} at most {_MOST_COPIED_BYTES} are taken there"
                )
            return Tensor(name, datatype, shape, part.read())
        return DeviceTensor(name, datatype, shape, part)

    def write(self, offset: int, byte_size: int, tensor: Tensor) -> None:
        """Writes a tensor into a part: one copy, complete on return."""
        source: Buffer | CudaMemory
        if isinstance(tensor, DeviceTensor) and isinstance(tensor.memory, CudaMemory):
            source = tensor.memory
        else:
            source = tensor.data
        part = self._part(offset, tensor.nbytes)
        if not (isinstance(source, CudaMemory) and source.pointer == part.pointer):
            part.write([source])

    def device(self, offset: int, byte_size: int) -> CudaMemory:
        """A part in device memory, for models to write to."""
        return self._part(offset, byte_size)

    def close(self) -> None:
        """Releases the memory; it is closed with the last tensor in it."""
        self._memory = None

    def _part(self, offset: int, byte_size: int) -> CudaMemory:
        assert self._memory is not None, "a region in use is not closed"
        return self._memory.part(offset, byte_size)


def cuda_opener(devices: Callable[[], CudaDevices] = cuda_devices) -> CudaOpener:
    """Creates the opener for the GPUs of this process; `devices` is called on the first open."""

    def open_region(name: str, raw_handle: bytes, device_id: int, byte_size: int) -> CudaRegion:
        try:
            memory = devices().open(raw_handle, device_id)
        except CudaUnavailableError as error:
            raise InvalidArgumentError(
                f"failed to register CUDA shared memory region: '{name}', GPUs not supported"
            ) from error
        except CudaError as error:
            raise InvalidArgumentError(
                f"failed to register CUDA shared memory region '{name}': failed to open CUDA IPC handle: "
                f"{error}"
            ) from error
        if not 0 < byte_size <= memory.nbytes:
            del memory  # before the error, which might keep it
            # Without "CUDA": this is Triton's text, which its tests check.
            raise InvalidArgumentError(f"failed to register shared memory region '{name}': invalid args")
        return OpenedRegion(name, byte_size, memory)

    return open_region
