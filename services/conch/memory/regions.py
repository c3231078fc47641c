"""The table of registered shared-memory regions; system and CUDA regions share one set of names.

Threads and locks: any thread; one lock for the table, not held while a region is mapped.
"""

from __future__ import annotations

import threading
from typing import Any

from conch.core.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnsupportedError,
)
from conch.core.process_setup import REGION_SHARES, most_descriptors
from conch.memory.region import CudaOpener, CudaRegion, Region
from conch.memory.sigbus_guard import process_guard
from conch.memory.system_region import SystemRegion

MOST_REGIONS = 4096
"""Largest number of regions; each system region keeps a file descriptor."""


def no_cuda(name: str, raw_handle: bytes, device_id: int, byte_size: int) -> CudaRegion:
    """The opener without a GPU: refuses; the text is Triton's."""
    raise InvalidArgumentError(f"failed to register CUDA shared memory region: '{name}', GPUs not supported")


class Regions:
    """Registers and finds regions, from any thread.

    A region that is unregistered while requests use it loses its name at once and is closed after the last
    of them.

    Args:
        allowed: True if clients may register and unregister.
        most: Largest number of regions; None for a share of the process's file descriptors.

    Attributes:
        most: Largest number of regions.
    """

    def __init__(
        self, allowed: bool = True, open_cuda: CudaOpener = no_cuda, most: int | None = None
    ) -> None:
        self._allowed = allowed
        self._open_cuda = open_cuda
        self.most = min(MOST_REGIONS, most_descriptors(REGION_SHARES)) if most is None else most
        self._lock = threading.Lock()
        self._regions: dict[str, Region] = {}
        self._opening: set[str] = set()

    def register_system(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Registers a part of a shared-memory object.

        Raises:
            UnsupportedError: Clients may not register.
            AlreadyExistsError: A region of this name exists, of either kind.
            ResourceExhaustedError: There are too many regions.
            ConchError: The object can't be mapped; texts and codes are Triton's.
        """
        self._reserve(name, "system")
        region = None
        try:
            region = SystemRegion(name, key, offset, byte_size, process_guard())
        finally:
            self._settle(name, region)

    def register_cuda(self, name: str, raw_handle: bytes, device_id: int, byte_size: int) -> None:
        """Registers memory on a GPU; for the errors see `register_system`."""
        self.check_allowed()
        if self._open_cuda is no_cuda:
            no_cuda(name, raw_handle, device_id, byte_size)  # before any other fault, as in Triton
        self._reserve(name, "cuda")
        region = None
        try:
            region = self._open_cuda(name, raw_handle, device_id, byte_size)
        finally:
            self._settle(name, region)

    def system_regions(self, name: str = "") -> list[SystemRegion]:
        """The system region of a name, or all of them by name.

        Raises:
            NotFoundError: There is no such region; the text is Triton's.
        """
        return self._named(name, "system", "CUDA shared memory, not system shared memory")

    def cuda_regions(self, name: str = "") -> list[CudaRegion]:
        """The CUDA region of a name, or all of them by name.

        Raises:
            NotFoundError: There is no such region; the text is Triton's.
        """
        return self._named(name, "cuda", "system shared memory, not CUDA shared memory")

    def unregister_system(self, name: str = "") -> None:
        """Unregisters the system region of a name, if there is one, or all of them.

        Raises:
            UnsupportedError: Clients may not unregister.
        """
        self.check_allowed()
        self._forget(name, "system")

    def unregister_cuda(self, name: str = "") -> None:
        """Unregisters the CUDA region of a name, or all of them; see `unregister_system`."""
        self.check_allowed()
        self._forget(name, "cuda")

    def acquire_region(self, name: str) -> Region:
        """Returns a region and counts a user, until `release`.

        Raises:
            NotFoundError: There is no such region; the text is Triton's.
        """
        with self._lock:
            region = self._regions.get(name)
            if region is None:
                raise NotFoundError(f"Unable to find shared memory region: '{name}'")
            region.users += 1
        return region

    def release_region(self, region: Region) -> None:
        """Ends a use; closes the region if it was the last one and the region is unregistered."""
        with self._lock:
            region.users -= 1
            last = region.retired and not region.users
        if last:
            region.close()

    def byte_size(self, kind: str) -> int:
        """Total bytes of all regions of a kind, ``system`` or ``cuda``."""
        with self._lock:
            return sum(region.byte_size for region in self._regions.values() if region.kind == kind)

    def close(self) -> None:
        """Unregisters all regions; those in use are closed after their last user."""
        self._forget("", "")

    def _reserve(self, name: str, kind: str) -> None:
        """Reserves a name, so that a slow open does not hold the lock."""
        self.check_allowed()
        if not name:
            raise InvalidArgumentError(f"'region name' is necessary to register {kind} shared memory region")
        with self._lock:
            if name in self._regions or name in self._opening:
                raise AlreadyExistsError(f"shared memory region '{name}' already in manager")
            if len(self._regions) + len(self._opening) >= self.most:
                raise ResourceExhaustedError(
                    f"failed to register shared memory region '{name}': there are {self.most} regions, and "
                    f"there may be no more; unregister those that are not needed"
                )
            self._opening.add(name)

    def _settle(self, name: str, region: Region | None) -> None:
        with self._lock:
            self._opening.discard(name)
            if region is not None:
                self._regions[name] = region

    def _named(self, name: str, kind: str, other: str) -> list[Any]:
        with self._lock:
            if not name:
                regions = [region for region in self._regions.values() if region.kind == kind]
                return sorted(regions, key=lambda region: region.name)
            region = self._regions.get(name)
        if region is None:
            raise NotFoundError(f"Unable to find {kind} shared memory region: '{name}'")
        if region.kind != kind:
            raise NotFoundError(f"The region named '{name}' is registered as {other}")
        return [region]

    def _forget(self, name: str, kind: str) -> None:
        """Unregisters the region of a name and a kind; an empty name or kind means all."""
        with self._lock:
            names = [name] if name else [*self._regions]
            gone = [
                self._regions.pop(each)
                for each in names
                if each in self._regions and kind in ("", self._regions[each].kind)
            ]
            for region in gone:
                region.retired = True
            unused = [region for region in gone if not region.users]
        for region in unused:
            region.close()

    def check_allowed(self) -> None:
        """Raises UnsupportedError if clients may not register and unregister."""
        if not self._allowed:
            raise UnsupportedError(
                "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."
            )
