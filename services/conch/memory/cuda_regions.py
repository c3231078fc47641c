"""Regions on GPUs: memory that clients have allocated and named to us by its handle."""

from __future__ import annotations

from collections.abc import Callable

from conch.core.device import DeviceTensor
from conch.core.errors import InvalidArgumentError
from conch.core.tensor import ELEMENT_SIZES, Buffer, Tensor
from conch.memory.cuda import CudaDevices, CudaMemory, cuda_devices
from conch.memory.cuda_driver import CudaError, CudaUnavailableError
from conch.memory.region import CudaOpener, CudaRegion

_MOST_COPIED_BYTES = 2**31 - 1  # as much as a message may have; the host may have less memory than its GPUs


class OpenedRegion(CudaRegion):
    """A region that is open.

    Tensors in it have the memory for themselves: it is closed when the region is and the last of them is
    gone, whatever a framework has made of it included.

    Args:
        name: The client's name for it.
        byte_size: How long it is.
        memory: Where it is; at least as long.
    """

    def __init__(self, name: str, byte_size: int, memory: CudaMemory) -> None:
        super().__init__(name, memory.device_id, byte_size)
        self._memory: CudaMemory | None = memory

    def check(self) -> None:
        """Nothing that could be seen has happened to it; CUDA has clients keep what others have open."""

    def tensor(self, offset: int, byte_size: int, name: str, datatype: str, shape: tuple[int, ...]) -> Tensor:
        """A part of it as a tensor where it is, or as a copy in host memory if no device can use it there.

        That is so for strings, and for elements at odd addresses: a kernel that reads them ends the context
        of the whole server.
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
        """Writes a tensor into a part of it: one copy, which is over when this returns."""
        source: Buffer | CudaMemory
        if isinstance(tensor, DeviceTensor) and isinstance(tensor.memory, CudaMemory):
            source = tensor.memory
        else:
            source = tensor.data
        part = self._part(offset, tensor.nbytes)
        if not (isinstance(source, CudaMemory) and source.pointer == part.pointer):
            part.write([source])

    def device(self, offset: int, byte_size: int) -> CudaMemory:
        """A part of it, for somebody on the device to write to."""
        return self._part(offset, byte_size)

    def close(self) -> None:
        """Gives the memory up; it goes with the last tensor in it."""
        self._memory = None

    def _part(self, offset: int, byte_size: int) -> CudaMemory:
        assert self._memory is not None, "a region in use is not closed"
        return self._memory.part(offset, byte_size)


def cuda_opener(devices: Callable[[], CudaDevices] = cuda_devices) -> CudaOpener:
    """What opens regions on the GPUs of this process, or refuses them all where there are none.

    Args:
        devices: Gives the GPUs, when the first region is registered.
    """

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
            # Without "CUDA", as Triton has it and its own tests look for it.
            raise InvalidArgumentError(f"failed to register shared memory region '{name}': invalid args")
        return OpenedRegion(name, byte_size, memory)

    return open_region
