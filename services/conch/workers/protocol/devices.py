"""Tensors on GPUs between the server and a worker: what travels is where they are, not what is in them.

Both sides open the memory that the other one describes by its IPC handle, and by the UUID of its GPU, whose
number may be another one in a worker. Clients' regions are opened by a worker once, until the server says
that they are gone. What a model has made is kept by its worker until the server has done with it; the server
keeps the handles of a few such allocations open, each with one small tensor in it, as to open one takes long.
CUDA wants memory kept until all have closed it, and so it is.

What can't be described goes through the host, like everything else.
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
from conch.memory.cuda import CudaDevices, CudaMemory, Opened
from conch.memory.cuda_driver import CudaError, CudaUnavailableError
from conch.workers.connection.message_stream import Exchange
from conch.workers.protocol.tensor_layouts import HANDLE_BYTES, ON_DEVICE, UUID_BYTES, Place, TensorLayout
from conch.workers.protocol.tensor_transport import Payload, UnreachableError
from conch.workers.protocol.wire import RETURNED, Kind, WireError, encode

log = logging.getLogger(__name__)

_MOST_KEPT = 8
"""How many allocations of a worker's stay open when no tensor in them is used."""
_MOST_KEPT_BYTES = 16 * 1024 * 1024
"""A worker keeps a tensor as long as its allocation is open, and larger ones it should have back."""


class ServerDevices:
    """The server's side.

    Args:
        exchange: The conversation with the worker.
        gpus: The GPUs.

    Attributes:
        lends: Whether inputs on GPUs are described to the worker; their copies are sent otherwise.
    """

    def __init__(self, exchange: Exchange, gpus: CudaDevices, lends: bool) -> None:
        self._exchange = exchange
        self._gpus = gpus
        self.lends = lends
        self._told: dict[bytes, weakref.ref[Opened]] = {}
        self._gone: deque[bytes] = deque()
        self._lock = threading.RLock()
        self._kept: OrderedDict[bytes, _Lease] = OrderedDict()

    def describe(self, lists: Sequence[Collection[Tensor]], payload: Payload) -> dict[int, Place]:
        """The places of inputs in clients' regions; what a worker has made is not for another one."""
        places: dict[int, Place] = {}
        for tensor in _on_devices(lists) if self.lends else ():
            memory = tensor.memory
            opened = self._gpus.opened_at(memory)
            if opened is None or not opened.lendable:
                continue
            device = self._gpus.uuids()[memory.device_id] + opened.handle
            self._watch(device, opened)
            places[id(tensor)] = Place(ON_DEVICE, memory.pointer - opened.pointer, memory.nbytes, device)
        if self._gone:
            self._tell()
        return places

    def received(self, layout: TensorLayout, place: Place) -> Tensor:
        """What a model has made or got; the worker gets it back when its memory is no longer used.

        What can't be opened here comes as a copy the next time.
        """
        number = place.source & (RETURNED - 1)
        if not number:
            memory = self._open(place.device, True)
            return _tensor(layout, place, memory, memory)
        large = place.nbytes > _MOST_KEPT_BYTES
        owe = partial(self._exchange.mappings.owe, number | RETURNED, large)
        with self._lock:
            kept = self._kept.get(place.device)
            try:
                memory = self._open(place.device, False) if kept is None else kept.held[0]
            except UnreachableError:
                owe()
                raise
            lease = _Lease(memory, owe)
            if not large:
                self._kept[place.device] = lease
                self._kept.move_to_end(place.device)
                if len(self._kept) > _MOST_KEPT:
                    self._kept.popitem(last=False)
        return _tensor(layout, place, memory, lease)

    def give_back(self, number: int) -> None:
        """Refused: nothing is lent, as inputs are there as long as their requests."""
        raise WireError(f"tensor {number} is given back, but is not lent")

    def tidy(self) -> None:
        """Closes what has not been used since this was last called."""
        if self._gone:
            self._tell()
        with self._lock:
            for device, kept in list(self._kept.items()):
                if kept.idle:
                    del self._kept[device]
                kept.idle = True

    def close(self) -> None:
        """Closes what no tensor uses, and watches nothing any more."""
        with self._lock:
            self._kept.clear()
        self._told.clear()

    def _open(self, device: bytes, lendable: bool) -> CudaMemory:
        try:
            return _open(self._gpus, device, lendable)
        except UnreachableError as error:
            log.warning("what a worker has on GPUs goes through the host from now on: %s", error)
            self._exchange.channel.try_send([encode(Kind.DEVICES)])
            raise

    def _watch(self, device: bytes, opened: Opened) -> None:
        told = self._told.get(device)
        if told is None or told() is not opened:
            self._told[device] = weakref.ref(opened, partial(self._on_gone, device))

    def _on_gone(self, device: bytes, reference: weakref.ref[Opened]) -> None:
        """Takes note that memory has been closed, possibly in the middle of anything."""
        if self._told.get(device) is reference:
            self._told.pop(device, None)
        self._gone.append(device)
        self._tell()

    def _tell(self) -> None:
        """Tells the worker to close what is closed here; never waits."""
        while self._gone:
            try:
                device = self._gone.popleft()
            except IndexError:
                return  # another thread was faster
            if not self._exchange.channel.try_send([encode(Kind.GONE, fields=device)]):
                self._gone.appendleft(device)
                return


class WorkerDevices:
    """The worker's side.

    Args:
        gpus: The GPUs.

    Attributes:
        reachable: UUIDs of the GPUs whose memory the server can open.
    """

    def __init__(self, gpus: CudaDevices) -> None:
        self._gpus = gpus
        self.reachable: frozenset[bytes] = frozenset()
        self._opened: dict[bytes, CudaMemory] = {}
        self._lock = threading.RLock()
        self._numbers = itertools.count(1)
        self._lent: dict[int, list[DeviceMemory]] = {}

    def describe(self, lists: Sequence[Collection[Tensor]], payload: Payload) -> dict[int, Place]:
        """The places of outputs that the server can open, which is when they are complete."""
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
                continue  # it goes through the host, and if the device has failed that says so
            if place is None:
                continue
            places[id(tensor)] = place
            if number := place.source & (RETURNED - 1):
                with self._lock:
                    self._lent.setdefault(number, []).append(memory)
                payload.lent.append(number)
        return places

    def received(self, layout: TensorLayout, place: Place) -> Tensor:
        """An input in a client's region."""
        with self._lock:
            memory = self._opened.get(place.device)
            if memory is None:
                memory = self._opened[place.device] = _open(self._gpus, place.device, True)
        return _tensor(layout, place, memory, memory)

    def give_back(self, number: int) -> None:
        """Lets go of an output, once for each time it was sent."""
        with self._lock:
            lent = self._lent.get(number)
            if lent is None:
                raise WireError(f"tensor {number} is given back, but is not lent")
            memory = lent.pop()
            if not lent:
                del self._lent[number]
        del memory  # frameworks take locks of their own when they free it

    def gone(self, device: bytes) -> None:
        """Closes a region, when the model has nothing of it any more."""
        with self._lock:
            memory = self._opened.pop(device, None)
        del memory

    def tidy(self) -> None:
        """Does nothing: the server says what is not used any more."""

    def close(self) -> None:
        """Lets go of everything."""
        with self._lock:
            lent, opened = self._lent, self._opened
            self._lent, self._opened = {}, {}
        del lent, opened

    def _place(self, memory: DeviceMemory) -> Place | None:
        uuid = self._gpus.uuids()[memory.device_id]
        if uuid not in self.reachable:
            return None
        opened = self._gpus.opened_at(memory)
        if opened is not None:  # an input as it came, or a part of one
            return Place(ON_DEVICE, memory.pointer - opened.pointer, memory.nbytes, uuid + opened.handle)
        handle, offset = self._gpus.device(memory.device_id).export(memory.pointer)
        number = next(self._numbers) % (RETURNED - 1) + 1
        return Place(ON_DEVICE | number, offset, memory.nbytes, uuid + handle)


class _Lease:
    """A tensor that a worker keeps for the server, which lets go of its memory before it says so.

    Args:
        memory: The memory.
        owe: Says it.

    Attributes:
        held: The memory, for as long as this is there.
        idle: Whether it has been there for a while.
    """

    __slots__ = ("__weakref__", "held", "idle")

    def __init__(self, memory: CudaMemory, owe: Callable[[], None]) -> None:
        self.held = [memory]
        self.idle = False
        weakref.finalize(self, _end_lease, self.held, owe).atexit = False


def _end_lease(held: list[CudaMemory], owe: Callable[[], None]) -> None:
    held.clear()
    owe()


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
    part = memory.owned(memory.pointer + place.offset, place.nbytes, owner)
    return DeviceTensor(layout.name, layout.datatype, layout.shape, part)


def use_on_server(
    exchange: Exchange, gpus: CudaDevices, lends: bool, tell: Callable[[bytes], None]
) -> ServerDevices:
    """Has tensors on GPUs described, now that the server uses some.

    Args:
        exchange: The conversation with the worker.
        gpus: The server's GPUs.
        lends: Whether the model takes inputs on GPUs.
        tell: Sends the fields of `Kind.DEVICES`.
    """
    devices = exchange.devices = ServerDevices(exchange, gpus, lends)
    try:
        uuids = gpus.uuids()
    except CudaError as error:
        log.warning("outputs on GPUs go through the host, as the driver does not name them: %s", error)
        devices.lends = False
        uuids = []
    tell(b"".join(uuids))
    return devices


def use_in_worker(exchange: Exchange, gpus: CudaDevices, fields: bytes) -> None:
    """Has tensors on GPUs described, as the fields of `Kind.DEVICES` say."""
    if len(fields) % UUID_BYTES:
        raise WireError(f"UUIDs of GPUs have {UUID_BYTES} bytes each")
    devices = exchange.devices
    if not isinstance(devices, WorkerDevices):
        devices = exchange.devices = WorkerDevices(gpus)
    devices.reachable = frozenset(
        fields[start : start + UUID_BYTES] for start in range(0, len(fields), UUID_BYTES)
    )
