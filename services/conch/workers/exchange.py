"""One side of the conversation between the server and a worker: messages with tensors, both ways."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol

import numpy as np

from conch.core.errors import InternalError
from conch.core.tensor import POSITIONS, Array, Buffer, Tensor
from conch.workers import wire
from conch.workers.blocks import Block, Mappings, Pool
from conch.workers.channel import BUFFER_BYTES, Channel
from conch.workers.wire import RETURNED, Kind, Layouts, Message, Place, Reader, TensorLayout, WireError

_ALIGNMENT = 64
_HERE = Place(0, 0, 0)

Memory = memoryview | Array


class UnreachableError(InternalError):
    """A tensor on a GPU has come whose memory can't be opened here."""


class Devices(Protocol):
    """Sends and receives tensors on GPUs as descriptions; see `conch.workers.devices`."""

    def describe(self, lists: Sequence[Sequence[Tensor]], payload: Payload) -> dict[int, Place]:
        """The places of those tensors that stay where they are, by their identity."""

    def received(self, layout: TensorLayout, place: Place) -> Tensor:
        """A tensor on a GPU.

        Raises:
            WireError: It is not where it should be.
            UnreachableError: Its memory can't be opened here.
        """

    def give_back(self, number: int) -> None:
        """Says that the other side does not use a tensor any more.

        Raises:
            WireError: It is not lent.
        """

    def tidy(self) -> None:
        """Gives back what is idle; never waits."""

    def close(self) -> None:
        """Forgets everything."""


class BlockTensor(Tensor):
    """A tensor in a block of the other side's, on the server: the worker may write to it at any time."""

    __slots__ = ()

    shared: ClassVar[bool] = True

    def reshaped(self, shape: tuple[int, ...]) -> Tensor:
        """The same elements under another shape of the same size, without a copy."""
        return self.renamed(self.name, shape)

    def renamed(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The same elements under another name and another shape of the same size, without a copy."""
        return BlockTensor(name, self.datatype, shape, self.data)


class ReturnedTensor(BlockTensor):
    """A tensor in a block of the server's own, which the worker has as an input, and its model may keep."""

    __slots__ = ()


class ReceivedTensor(Tensor):
    """An input in a worker: a model may write to it, as nobody else has it.

    Attributes:
        block: Number of the block that it came in; 0 for none.
        offset: Where it begins there.
    """

    __slots__ = ("block", "offset")

    writable: ClassVar[bool] = True

    block: int
    offset: int


def server_tensor(layout: TensorLayout, memory: memoryview, place: Place) -> Tensor:
    """A tensor from a worker: a view, but a copy where nobody may change the bytes any more.

    Strings are counted before they are taken apart; for numbers that kernels take for positions see
    `POSITIONS`.
    """
    if not place.source:
        return Tensor(layout.name, layout.datatype, layout.shape, memory)
    if layout.datatype == "BYTES" or layout.datatype in POSITIONS:
        # Through an array: that copies without the interpreter's lock.
        memory = np.frombuffer(memory, np.uint8).copy().data if memory.nbytes else memory
        return Tensor(layout.name, layout.datatype, layout.shape, memory)
    kind = ReturnedTensor if place.source & RETURNED else BlockTensor
    return kind(layout.name, layout.datatype, layout.shape, memory)


def worker_tensor(layout: TensorLayout, memory: memoryview, place: Place) -> Tensor:
    """A tensor from the server."""
    tensor = ReceivedTensor(layout.name, layout.datatype, layout.shape, memory)
    tensor.block, tensor.offset = place.source, place.offset
    return tensor


class Payload:
    """The tensors of a message that is about to be sent.

    Attributes:
        lists: The fields that describe each list of tensors.
        alike: The fields that describe any of them, if they are all the same and small; else None.
        data: Bytes of small tensors.
        block: The block with large ones, or None.
        bytes_copied: Bytes copied into that block.
        kept: Tensors in blocks of the other side's: these must not be given back before the message is sent.
        lent: Numbers that the other side is to give back when it does not use tensors on GPUs any more.
    """

    __slots__ = ("alike", "block", "bytes_copied", "data", "kept", "lent", "lists")

    def __init__(self) -> None:
        self.lists: Sequence[bytes] = ()
        self.alike: bytes | None = None
        self.data: list[Buffer] = []
        self.block: Block | None = None
        self.bytes_copied = 0
        self.kept: list[Tensor] = []
        self.lent: list[int] = []


class Incoming:
    """A message that was received, with what it takes to read its tensors.

    Attributes:
        message: The message.
        reader: Reads its fields.
    """

    __slots__ = ("_data", "_exchange", "_offset", "_root", "message", "reader")

    def __init__(self, message: Message, exchange: Exchange, root: Array | None) -> None:
        self.message = message
        self.reader = Reader(message.fields)
        self._exchange = exchange
        self._root = root
        self._offset = 0  # of the next list of small tensors
        # One copy for all small tensors: the buffer is needed for the next message.
        self._data = exchange.own(message.data) if message.data.nbytes else message.data

    def tensors(self) -> list[Tensor]:
        """Reads a list of tensors.

        Raises:
            WireError: It is none, or one is not where it should be.
            UnreachableError: One on a GPU can't be opened here; the next list can be read all the same.
        """
        exchange = self._exchange
        make = exchange.make
        inline, nbytes, others = wire.decode_tensors(exchange.received, self.reader)
        if others:
            if exchange.devices is not None:
                return self._on_devices(others, exchange.devices)
            return [make(layout, self._memory(place), place) for layout, place in others]
        data, start = self._data, self._offset
        self._offset = start + nbytes
        if self._offset > len(data):
            raise WireError(f"tensors end at {self._offset}, but there are {len(data)} bytes")
        return [make(layout, data[start + first : start + end], _HERE) for layout, first, end in inline]

    def tensors_alike(self, count: int) -> list[list[Tensor]]:
        """Reads so many lists of small tensors that have one description.

        Raises:
            WireError: They are none.
        """
        make = self._exchange.make
        inline, nbytes, others = wire.decode_tensors(self._exchange.received, self.reader)
        if others:
            raise WireError("lists of tensors in blocks can't be alike")
        data, start = self._data, self._offset
        self._offset = start + count * nbytes
        if self._offset > len(data):
            raise WireError(f"tensors end at {self._offset}, but there are {len(data)} bytes")
        lists: list[list[Tensor]] = []
        for _ in range(count):
            lists.append(
                [make(layout, data[start + first : start + end], _HERE) for layout, first, end in inline]
            )
            start += nbytes
        return lists

    def _on_devices(self, others: Sequence[tuple[TensorLayout, Place]], devices: Devices) -> list[Tensor]:
        make = self._exchange.make
        tensors: list[Tensor] = []
        failure: UnreachableError | None = None
        for layout, place in others:
            if not place.device:
                tensors.append(make(layout, self._memory(place), place))
                continue
            try:
                tensors.append(devices.received(layout, place))
            except UnreachableError as error:  # the others of the list have to be given back too
                failure = error
        if failure is not None:
            raise failure
        return tensors

    def _memory(self, place: Place) -> memoryview:
        source, offset, nbytes, _ = place
        memory: memoryview
        if source & RETURNED:
            memory = self._exchange.pool.view(source & ~RETURNED).data
        elif source == self.message.block and self._root is not None:
            memory = self._root.data
        else:
            raise WireError(f"a tensor is in block {source}, which did not come with its message")
        if offset + nbytes > memory.nbytes:
            raise WireError(f"a tensor ends at {offset + nbytes}, but there are {memory.nbytes} bytes")
        return memory[offset : offset + nbytes]


class Exchange:
    """Sends from any thread, receives on one.

    Args:
        channel: The socket; it stays the caller's to close.
        in_worker: Whether this is the worker's side.

    Attributes:
        pool: The blocks of this side.
        mappings: The blocks of the other side.
        received: The layouts of tensors that have come.
        make: Makes a tensor from a message.
        own: Copies small tensors out of the buffer.
        devices: For tensors on GPUs; None until there are any.
    """

    devices: Devices | None = None

    def __init__(self, channel: Channel, in_worker: bool) -> None:
        self.channel = channel
        self.pool = Pool()
        self.mappings = Mappings(in_worker, self._release_many)
        self.received = Layouts()
        self.make: Callable[[TensorLayout, memoryview, Place], Tensor] = (
            worker_tensor if in_worker else server_tensor
        )
        self.own: Callable[[memoryview], memoryview] = _writable_copy if in_worker else _copy
        self._returns = in_worker
        self._sent = Layouts()
        self._buffer = bytearray(BUFFER_BYTES)

    def pack(
        self, lists: Sequence[Sequence[Tensor]], on_device: bool = False, returned: bool = False
    ) -> Payload:
        """Puts the tensors of a message where they will travel; what comes of it is to be sent or discarded.

        Args:
            lists: The tensors.
            on_device: Whether those on GPUs may stay there.
            returned: Whether those in memory that the other side has sent may stay there: nobody is going to
                write to them.

        Raises:
            OSError: There is no memory for them.
        """
        payload = Payload()
        size = 0
        for tensors in lists:
            for tensor in tensors:
                size += tensor.nbytes
        described: dict[int, Place] = {}
        try:
            if on_device and self.devices is not None:
                described = self.devices.describe(lists, payload)
            if size <= wire.MOST_INLINE and not described:
                self._pack_inline(payload, lists)
            else:
                self._pack_block(payload, lists, size, described, returned)
        except BaseException:
            self.discard(payload)
            raise
        return payload

    def send(self, kind: Kind, subject: int = 0, fields: bytes = b"", payload: Payload | None = None) -> None:
        """Sends a message, and with it what is to be given back.

        Raises:
            ChannelClosedError: Nobody will receive it.
            OSError: There is no memory for it, or no descriptor. Nothing has been sent then.
        """
        dropped = self.pool.take_dropped()
        if dropped:
            self.channel.send([wire.encode(Kind.DROP, 0, wire.encode_numbers(dropped))])
        mappings = self.mappings
        released = mappings.take_released(wire.MOST_RELEASED) if mappings.waiting else []
        try:
            if payload is None:
                self.channel.send([wire.encode(kind, subject, fields, released=released)])
                return
            block = payload.block
            if block is None:
                self.channel.send([wire.encode(kind, subject, fields, payload.data, released=released)])
                return
            new = block.fd >= 0
            packet = wire.encode(kind, subject, fields, payload.data, block.number, block.size, new, released)
            if new:
                self._send_new(packet, block)
            else:
                self.channel.send([packet])
        except BaseException:
            mappings.put_back(released)
            if payload is not None:
                self.discard(payload)
            raise

    def discard(self, payload: Payload) -> None:
        """Takes back what was packed and is not going to be sent; does nothing when called again."""
        block, payload.block = payload.block, None
        if block is not None:
            self.pool.discard(block)
        lent, payload.lent = payload.lent, []
        if self.devices is not None:
            for number in lent:
                self.devices.give_back(number)

    def _send_new(self, packet: bytes, block: Block) -> None:
        # The other side may give the block back, and another thread send it again, before this one goes on.
        fd, block.fd = block.fd, -1
        try:
            self.channel.send([packet], (fd,))
        except BaseException:
            block.fd = fd
            raise
        os.close(fd)

    def _release_many(self) -> None:
        """Gives back what waits for it; never waits itself, whatever its caller is in the middle of."""
        mappings = self.mappings
        released = mappings.take_released(wire.MOST_RELEASED)
        if not self.channel.try_send([wire.encode(Kind.RELEASE, released=released)]):
            mappings.put_back(released)

    def tidy(self) -> None:
        """Gives back what is idle, without another message that it could go with; never waits.

        The server's side is to call it now and then; the worker's does so itself when it hears from that.
        """
        self.pool.tidy()
        if self.devices is not None:
            self.devices.tidy()
        dropped = self.pool.take_dropped()
        packet = [wire.encode(Kind.DROP, 0, wire.encode_numbers(dropped))]
        if dropped and not self.channel.try_send(packet):
            self.pool.put_back_dropped(dropped)
        if self.mappings.waiting or (self.mappings.count and not self._returns):
            self._release_many()

    def receive(self, wait: bool = True) -> Incoming:
        """Waits for the next message that is not only about blocks.

        Args:
            wait: Whether to wait if there is none.

        Raises:
            BlockingIOError: There is none, and it is not to be waited for.
            ChannelClosedError: There will be none.
            WireError: What came is none.
        """
        while True:
            packet, fds = self.channel.receive(self._buffer, wait)
            try:
                message = wire.decode(packet)
                if message.new_block:
                    if not fds:
                        raise WireError("a new block has come without its descriptor")
                    self.mappings.add(message.block, message.block_size, fds[0])
            finally:
                for fd in fds:
                    os.close(fd)
            for number in message.released:
                if number < RETURNED:
                    self.pool.give_back(number)
                elif self.devices is not None:
                    self.devices.give_back(number & ~RETURNED)
                else:
                    raise WireError(f"tensor {number & ~RETURNED} is given back, but is not lent")
            if message.kind is Kind.RELEASE:
                if self._returns:
                    self.tidy()
                self.seen_to()
                continue
            if message.kind is Kind.DROP:
                for number in wire.decode_numbers(message.fields):
                    self.mappings.drop(number)
                self.seen_to()
                continue
            root = self.mappings.lend(message.block) if message.block else None
            return Incoming(message, self, root)

    def interrupted(self) -> bool:
        """Whether a message has come and has not been seen to, when `receive` has failed."""
        return self._buffer[0] != 0

    def seen_to(self) -> None:
        """Says that the last message has been seen to; only for those who ask whether `interrupted`."""
        self._buffer[0] = 0  # messages begin with something else

    def forked(self) -> None:
        """Says that this process is a fork of the one whose conversation this is: nothing is sent here."""
        self.channel.forked()
        self.pool = Pool()  # a thread that is not here may have had the lock of the other one

    def close(self) -> None:
        """Forgets all blocks; tensors in them stay as they are."""
        if self.devices is not None:
            self.devices.close()
        self.pool.close()
        self.mappings.close()

    def _pack_inline(self, payload: Payload, lists: Sequence[Sequence[Tensor]]) -> None:
        keys = [_key(tensors) for tensors in lists]
        if keys and keys.count(keys[0]) == len(keys):
            payload.alike = wire.encode_fixed(self._sent, keys[0])
        if payload.alike is not None:
            payload.lists = [payload.alike] * len(keys)
            payload.data = [tensor.data for tensors in lists for tensor in tensors]
            return
        described: list[bytes] = []
        for tensors, key in zip(lists, keys, strict=True):
            parts = [tensor.data for tensor in tensors]
            payload.data += parts
            described.append(wire.encode_inline(self._sent, key, parts))
        payload.lists = described

    def _pack_block(
        self,
        payload: Payload,
        lists: Sequence[Sequence[Tensor]],
        size: int,
        described: dict[int, Place],
        returned: bool,
    ) -> None:
        count = sum(map(len, lists))
        size -= sum(place.nbytes for place in described.values())
        block: Block | None = None
        offset = 0
        described_lists: list[bytes] = []
        for tensors in lists:
            places: list[Place] = []
            for tensor in tensors:
                if described and (place := described.get(id(tensor))) is not None:
                    places.append(place)
                    continue
                if returned and (place := self._returned(tensor)) is not None:
                    places.append(place)
                    payload.kept.append(tensor)
                    continue
                if block is None:
                    block = payload.block = self.pool.take(size + _ALIGNMENT * count)
                nbytes = _write(tensor, block.memory, offset)
                places.append(Place(block.number, offset, nbytes))
                offset += nbytes + -nbytes % _ALIGNMENT
            described_lists.append(wire.encode_tensors(self._sent, _key(tensors), places))
        payload.lists = described_lists
        payload.bytes_copied = offset

    def _returned(self, tensor: Tensor) -> Place | None:
        """Where a tensor is in a block of the other side's, if it is an input or a part of one."""
        if isinstance(tensor, ReceivedTensor):
            if not 0 < tensor.block < RETURNED:
                return None
            return Place(tensor.block | RETURNED, tensor.offset, tensor.nbytes)
        if tensor.has_data or tensor.datatype == "BYTES" or tensor.on_device:
            return None
        array = tensor.numpy()
        if not array.flags.c_contiguous or not array.nbytes:
            return None
        found = self.mappings.find(array)
        return None if found is None else Place(found[0] | RETURNED, found[1], array.nbytes)


def _key(tensors: Sequence[Tensor]) -> wire.LayoutKey:
    return tuple([(tensor.name, tensor.datatype, tensor.shape) for tensor in tensors])


def _write(tensor: Tensor, memory: Array, offset: int) -> int:
    """Copies a tensor into memory, without the interpreter's lock; returns its size."""
    if tensor.has_data or tensor.datatype == "BYTES" or tensor.on_device:
        data = tensor.data
        nbytes = data.nbytes if isinstance(data, memoryview) else len(data)
        if nbytes:
            memory[offset : offset + nbytes] = np.frombuffer(data, np.uint8)
        return nbytes
    source = tensor.numpy()
    target = memory[offset : offset + source.nbytes].view(source.dtype).reshape(source.shape)
    np.copyto(target, source)
    return source.nbytes


def _copy(data: memoryview) -> memoryview:
    return memoryview(bytes(data))


def _writable_copy(data: memoryview) -> memoryview:
    return memoryview(bytearray(data))
