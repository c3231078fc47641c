"""Sends tensors on GPUs as places: GPU UUID, IPC handle, offset.

Regions: the worker opens a client's region once, and closes it when the server reports it closed.
Outputs: the worker keeps an output until the server returns its number. Opening memory is slow, so the server
keeps a few allocations open, each with one small tensor leased. CUDA requires that memory outlives all of its
openings, so a lease closes the memory before it returns the number.
Other tensors go through host memory.
Threads and locks: one lock per side, reentrant because finalizers run inside it; sends from it never block.
"""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial

from conch.core.device import DeviceMemory, DeviceTensor
from conch.core.tensor import Tensor
from conch.ipc.channel import RETURNED, Kind, WireError, encode
from conch.ipc.tensors import (
    HANDLE_BYTES,
    ON_DEVICE,
    UUID_BYTES,
    MessageStream,
    Payload,
    Place,
    TensorLayout,
    UnreachableError,
)
from conch.memory.cuda import CudaDevices, CudaMemory, Opened
from conch.memory.cuda_driver import CudaError, CudaUnavailableError

log = logging.getLogger(__name__)

MOST_KEPT = 8
"""Unused allocations of a worker that the server keeps open."""
MOST_KEPT_BYTES = 16 * 1024 * 1024
"""Larger outputs are returned at once: the worker keeps the tensor of an open allocation."""


class ServerDevices:
    """The server's side; `lends` tells whether inputs on GPUs stay there, else copies are sent."""

    def __init__(self, stream: MessageStream, gpus: CudaDevices, lends: bool) -> None:
        self._stream = stream
        self._gpus = gpus
        self.lends = lends
        self._watched: dict[bytes, weakref.ref[Opened]] = {}
        self._closed: deque[bytes] = deque()
        self._lock = threading.RLock()
        self._leases: OrderedDict[bytes, _Lease] = OrderedDict()

    def describe(self, lists: Sequence[Collection[Tensor]], payload: Payload) -> dict[int, Place]:
        """The places of inputs in clients' regions; tensors of other workers are copied."""
        places: dict[int, Place] = {}
        for tensor in _on_devices(lists) if self.lends else ():
            memory = tensor.memory
            opened = self._gpus.opened_at(memory)
            if opened is None or not opened.lendable:
                continue
            device = self._gpus.uuids()[memory.device_id] + opened.handle
            self._watch(device, opened)
            places[id(tensor)] = Place(ON_DEVICE, memory.pointer - opened.pointer, memory.nbytes, device)
        if self._closed:
            self._report_closed()
        return places

    def received(self, layout: TensorLayout, place: Place) -> Tensor:
        """Makes an output, whose memory is returned to the worker after use.

        If it can't be opened, the worker sends copies from now on.
        """
        number = place.source & (RETURNED - 1)
        if not number:
            memory = self._open(place.device, True)
            return _tensor(layout, place, memory, memory)
        large = place.nbytes > MOST_KEPT_BYTES
        release = partial(self._stream.mappings.queue_release, number | RETURNED, large)
        with self._lock:
            kept = self._leases.get(place.device)
            try:
                memory = self._open(place.device, False) if kept is None else kept.memories[0]
            except UnreachableError:
                release()
                raise
            lease = _Lease(memory, release)
            if not large:
                self._leases[place.device] = lease
                self._leases.move_to_end(place.device)
                if len(self._leases) > MOST_KEPT:
                    self._leases.popitem(last=False)
        return _tensor(layout, place, memory, lease)

    def return_memory(self, number: int) -> None:
        """Refuses: inputs live as long as their requests and are not lent."""
        raise WireError(f"tensor {number} is given back, but is not lent")

    def tidy(self) -> None:
        """Closes allocations that have been unused since the last call."""
        if self._closed:
            self._report_closed()
        with self._lock:
            for device, kept in list(self._leases.items()):
                if kept.idle:
                    del self._leases[device]
                kept.idle = True

    def close(self) -> None:
        """Closes unused allocations, and watches regions no longer."""
        with self._lock:
            self._leases.clear()
        self._watched.clear()

    def _open(self, device: bytes, lendable: bool) -> CudaMemory:
        try:
            return _open(self._gpus, device, lendable)
        except UnreachableError as error:
            log.warning("what a worker has on GPUs goes through the host from now on: %s", error)
            self._stream.channel.try_send([encode(Kind.DEVICES)])
            raise

    def _watch(self, device: bytes, opened: Opened) -> None:
        watched = self._watched.get(device)
        if watched is None or watched() is not opened:
            self._watched[device] = weakref.ref(opened, partial(self._on_closed, device))

    def _on_closed(self, device: bytes, reference: weakref.ref[Opened]) -> None:
        """Reports closed memory; may run inside any code, from a weak reference."""
        if self._watched.get(device) is reference:
            self._watched.pop(device, None)
        self._closed.append(device)
        self._report_closed()

    def _report_closed(self) -> None:
        """Tells the worker to close memory that is closed here; never blocks."""
        while self._closed:
            try:
                device = self._closed.popleft()
            except IndexError:
                return  # taken by another thread
            if not self._stream.channel.try_send([encode(Kind.FREED, fields=device)]):
                self._closed.appendleft(device)
                return


class WorkerDevices:
    """The worker's side; `reachable` has the UUIDs of the GPUs whose memory the server can open."""

    def __init__(self, gpus: CudaDevices) -> None:
        self._gpus = gpus
        self.reachable: frozenset[bytes] = frozenset()
        self._opened: dict[bytes, CudaMemory] = {}
        self._lock = threading.RLock()
        self._numbers = itertools.count(1)
        self._lent: dict[int, list[DeviceMemory]] = {}

    def describe(self, lists: Sequence[Collection[Tensor]], payload: Payload) -> dict[int, Place]:
        """The places of outputs that the server can open; waits until they are computed."""
        places: dict[int, Place] = {}
        settled: set[int] = set()
        for tensor in _on_devices(lists) if self.reachable else ():
            memory, place = tensor.memory, places.get(id(tensor))
            try:
                if place is None:
                    place = self._place(memory)
                    if place is not None and memory.device_id not in settled:
                        self._gpus.device(memory.device_id).settle()
                        settled.add(memory.device_id)
            except (CudaError, CudaUnavailableError):
                continue  # goes through the host, which reports a failed device
            if place is None:
                continue
            places[id(tensor)] = place
            if number := place.source & (RETURNED - 1):
                with self._lock:
                    self._lent.setdefault(number, []).append(memory)
                payload.lent.append(number)
        return places

    def received(self, layout: TensorLayout, place: Place) -> Tensor:
        """Makes an input in a client's region."""
        with self._lock:
            memory = self._opened.get(place.device)
            if memory is None:
                memory = self._opened[place.device] = _open(self._gpus, place.device, True)
        return _tensor(layout, place, memory, memory)

    def return_memory(self, number: int) -> None:
        """Releases an output, once for each time it was sent."""
        with self._lock:
            lent = self._lent.get(number)
            if lent is None:
                raise WireError(f"tensor {number} is given back, but is not lent")
            memory = lent.pop()
            if not lent:
                del self._lent[number]
        del memory  # frameworks take locks of their own when they free it

    def freed(self, device: bytes) -> None:
        """Closes a region as soon as the model no longer uses it."""
        with self._lock:
            memory = self._opened.pop(device, None)
        del memory

    def tidy(self) -> None:
        """Frees nothing: the server reports closed regions."""

    def close(self) -> None:
        """Releases all memory."""
        with self._lock:
            lent, opened = self._lent, self._opened
            self._lent, self._opened = {}, {}
        del lent, opened

    def _place(self, memory: DeviceMemory) -> Place | None:
        uuid = self._gpus.uuids()[memory.device_id]
        if uuid not in self.reachable:
            return None
        opened = self._gpus.opened_at(memory)
        if opened is not None:  # an input, or a part of one
            return Place(ON_DEVICE, memory.pointer - opened.pointer, memory.nbytes, uuid + opened.handle)
        handle, offset = self._gpus.device(memory.device_id).export(memory.pointer)
        number = next(self._numbers) % (RETURNED - 1) + 1
        return Place(ON_DEVICE | number, offset, memory.nbytes, uuid + handle)


class _Lease:
    """Keeps a worker's output open; when collected, closes it and then calls `release`.

    `idle` is set by `ServerDevices.tidy`.
    """

    __slots__ = ("__weakref__", "idle", "memories")

    def __init__(self, memory: CudaMemory, release: Callable[[], None]) -> None:
        self.memories = [memory]
        self.idle = False
        weakref.finalize(self, _end_lease, self.memories, release).atexit = False


def _end_lease(held: list[CudaMemory], release: Callable[[], None]) -> None:
    held.clear()
    release()


def _on_devices(lists: Sequence[Collection[Tensor]]) -> Iterator[DeviceTensor]:
    for tensors in lists:
        for tensor in tensors:
            if tensor.on_device and isinstance(tensor, DeviceTensor) and tensor.nbytes:
                yield tensor


def _open(gpus: CudaDevices, device: bytes, lendable: bool) -> CudaMemory:
    uuid, handle = device[:UUID_BYTES], device[UUID_BYTES : UUID_BYTES + HANDLE_BYTES]
    try:
        uuids = gpus.uuids()
        if uuid not in uuids:
            raise CudaError(f"there is no GPU {uuid.hex()} here")
        return gpus.open(handle, uuids.index(uuid), lendable)
    except (CudaError, CudaUnavailableError) as error:
        raise UnreachableError(f"memory on a GPU can't be opened in another process: {error}") from error


def _tensor(layout: TensorLayout, place: Place, memory: CudaMemory, owner: object) -> DeviceTensor:
    end = place.offset + place.nbytes
    if end > memory.nbytes:
        raise WireError(f"tensor '{layout.name}' ends at {end}, but there are {memory.nbytes} bytes")
    part = memory.view_owned_by(memory.pointer + place.offset, place.nbytes, owner)
    return DeviceTensor(layout.name, layout.datatype, layout.shape, part)


def use_on_server(
    stream: MessageStream, gpus: CudaDevices, lends: bool, tell: Callable[[bytes], None]
) -> ServerDevices:
    """Starts to send tensors on GPUs as places; `tell` sends the fields of `Kind.DEVICES`.

    Inputs are sent so only if `lends`.
    """
    devices = ServerDevices(stream, gpus, lends)
    stream.use_devices(devices)
    try:
        uuids = gpus.uuids()
    except CudaError as error:
        log.warning("outputs on GPUs go through the host, as the driver does not name them: %s", error)
        devices.lends = False
        uuids = []
    tell(b"".join(uuids))
    return devices


def use_in_worker(stream: MessageStream, gpus: CudaDevices, fields: bytes) -> None:
    """Starts to send tensors on the GPUs that the fields of `Kind.DEVICES` name as places."""
    if len(fields) % UUID_BYTES:
        raise WireError(f"UUIDs of GPUs have {UUID_BYTES} bytes each")
    devices = stream.devices
    if not isinstance(devices, WorkerDevices):
        devices = WorkerDevices(gpus)
        stream.use_devices(devices)
    devices.reachable = frozenset(
        fields[start : start + UUID_BYTES] for start in range(0, len(fields), UUID_BYTES)
    )
