"""One end of the conversation between server and worker: messages with tensors, both ways.

Owns: this side's block pool, the mappings of the other side's blocks, the receive buffer.
Threads: any thread sends, one receives. Used by: the server's worker_connection and the worker's main loop.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence

from conch.core.tensor import Buffer, Tensor
from conch.workers.connection.packet_channel import BUFFER_BYTES, PacketChannel
from conch.workers.protocol import tensor_layouts, wire
from conch.workers.protocol.blocks import Block, Mappings, Pool
from conch.workers.protocol.received_message import InlineTensorFactory, ReceivedMessage
from conch.workers.protocol.tensor_kinds import (
    server_inline,
    server_tensor,
    worker_inline,
    worker_tensor,
)
from conch.workers.protocol.tensor_layouts import LayoutKey, Layouts, Place, TensorLayout
from conch.workers.protocol.tensor_transport import (
    Devices,
    Payload,
    UnmappedError,
    pack_block,
    pack_inline,
    unmapped_error,
)
from conch.workers.protocol.wire import RETURNED, Kind, Message, WireError

_MOST_IN_FILE = 1 << 30
"""More bytes of tensors than this travel in a block, however many blocks are lent."""


class MessageStream:
    """Sends from any thread, receives on one. The channel stays the caller's to close.

    Attributes:
        pool: The blocks of this side.
        mappings: The blocks of the other side.
        received: Layouts of received tensors.
        sent: Layouts of sent tensors.
        make: Makes a tensor from its place.
        small: Makes a tensor that lies in the message itself.
        own: Copies small tensors out of the buffer.
        devices: Transport of tensors on GPUs; None until a GPU is used.
    """

    devices: Devices | None = None

    def __init__(self, channel: PacketChannel, in_worker: bool) -> None:
        self.channel = channel
        self.pool = Pool()
        self.mappings = Mappings(in_worker, self._release_many)
        self.received = Layouts()
        self.make: Callable[[TensorLayout, memoryview, Place], Tensor] = (
            worker_tensor if in_worker else server_tensor
        )
        self.small: InlineTensorFactory = worker_inline if in_worker else server_inline
        self.own: Callable[[memoryview], Buffer] = _writable_copy if in_worker else bytes
        self._returns = in_worker
        self.sent = Layouts()
        self._buffer = bytearray(BUFFER_BYTES)

    def pack(
        self, lists: Sequence[Collection[Tensor]], on_device: bool = False, returned: bool = False
    ) -> Payload:
        """Places the tensors of a message; the payload must be sent or discarded.

        Args:
            lists: The tensors.
            on_device: Tensors on GPUs may stay there.
            returned: Tensors in blocks of the other side may stay there: no later write happens.

        Raises:
            OSError: No memory.
        """
        payload = Payload()
        described: dict[int, Place] = {}
        try:
            if on_device and self.devices is not None:
                described = self.devices.describe(lists, payload)
            keys: list[LayoutKey] = []
            for tensors in lists:
                keys.append(tuple([(tensor.name, tensor.datatype, tensor.shape) for tensor in tensors]))
            common = bool(keys) and keys.count(keys[0]) == len(keys)
            if common:
                layouts = [self.sent.encode(keys[0])]
                size = layouts[0].nbytes * len(keys)
            else:
                layouts, size = [self.sent.encode(key) for key in keys], -1
            if size < 0:  # strings, or lists that differ
                size = sum(tensor.nbytes for tensors in lists for tensor in tensors)
            inline = not described and (
                size <= wire.MOST_INLINE or (size <= _MOST_IN_FILE and self.pool.crowded)
            )
            payload.fields = tensor_layouts.encode_head(len(keys), common, not inline, layouts)
            if not inline:
                mappings = self.mappings if returned else None
                pack_block(payload, lists, layouts, size, self.pool, described, mappings)
            elif keys:
                pack_inline(payload, lists, layouts)
        except BaseException:
            self.discard(payload)
            raise
        return payload

    def send(self, kind: Kind, subject: int = 0, fields: bytes = b"", payload: Payload | None = None) -> None:
        """Sends a message, and the numbers of blocks to give back with it.

        Raises:
            ChannelClosedError: The channel is closed.
            OSError: No memory or no descriptor; nothing was sent.
        """
        if self.pool.dropped:
            dropped = self.pool.take_dropped()
            self.channel.send([wire.encode(Kind.DROP, 0, wire.encode_numbers(dropped))])
        mappings = self.mappings
        released = mappings.take_released(wire.MOST_RELEASED) if mappings.released else []
        try:
            if released and _in_file(fields, payload):  # an unreadable file would lose them
                self.channel.send([wire.encode(Kind.RELEASE, released=released)])
                released = []
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
        """Frees a payload that is not sent. May be called twice."""
        block, payload.block = payload.block, None
        if block is not None:
            self.pool.discard(block)
        lent, payload.lent = payload.lent, []
        if self.devices is not None:
            for number in lent:
                self.devices.give_back(number)

    def _send_new(self, packet: bytes, block: Block) -> None:
        # The other side may return the block, and another thread reuse it, before this thread continues.
        fd, block.fd = block.fd, -1
        try:
            self.channel.send([packet], (fd,))
        except BaseException:
            block.fd = fd
            raise
        os.close(fd)

    def _release_many(self) -> None:
        """Returns blocks at once; never blocks, whatever its caller holds."""
        mappings = self.mappings
        released = mappings.take_released(wire.MOST_RELEASED)
        if not self.channel.try_send([wire.encode(Kind.RELEASE, released=released)]):
            mappings.put_back(released)

    def tidy(self) -> None:
        """Returns idle memory in messages of its own; never blocks.

        The server calls it periodically; the worker's end follows when it receives the server's message.
        """
        self.pool.tidy()
        if self.devices is not None:
            self.devices.tidy()
        dropped = self.pool.take_dropped()
        packet = [wire.encode(Kind.DROP, 0, wire.encode_numbers(dropped))]
        if dropped and not self.channel.try_send(packet):
            self.pool.put_back_dropped(dropped)
        if self.mappings.released or (self.mappings.count and not self._returns):
            self._release_many()

    def receive(self, wait: bool = True) -> ReceivedMessage:
        """Receives the next message that is not only about blocks.

        Raises:
            BlockingIOError: None has arrived, and `wait` is False.
            ChannelClosedError: The channel is closed.
            WireError: The message is malformed.
        """
        while True:
            packet, fds = self.channel.receive(self._buffer, wait)
            try:
                message = wire.decode(packet)
                failure = self._map(message, fds) if message.new_block or message.outline else None
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
                self.mark_handled()
                continue
            if message.kind is Kind.DROP:
                for number in wire.decode_numbers(message.fields):
                    self.mappings.drop(number)
                self.mark_handled()
                continue
            if message.kind is Kind.UNMAPPED:
                for number in wire.decode_numbers(message.fields):
                    self.pool.unmapped(number)
                self.mark_handled()
                continue
            if failure is not None:
                return ReceivedMessage(
                    wire.lost(message) if message.outline else message, self, None, failure
                )
            root = self.mappings.lend(message.block) if message.block else None
            return ReceivedMessage(message, self, root)

    def _map(self, message: Message, fds: Sequence[int]) -> UnmappedError | None:
        """Maps a message's new block; returns the error if that fails or if the message itself is lost.

        Raises:
            WireError: The block or its descriptor is missing.
        """
        error = unmapped_error()
        if message.new_block and fds:
            try:
                self.mappings.add(message.block, message.block_size, fds[0])
                return None
            except OSError as failed:
                error = unmapped_error(str(failed))
        elif message.new_block and not self.channel.fds_lost:
            raise WireError("a new block has come without its descriptor")
        if message.block:
            self.channel.send([wire.encode(Kind.UNMAPPED, 0, wire.encode_numbers([message.block]))])
        return error

    def interrupted(self) -> bool:
        """True if a received message was not marked as handled, after `receive` has failed."""
        return self._buffer[0] != 0

    def mark_handled(self) -> None:
        """Marks the last message as handled, for `interrupted`."""
        self._buffer[0] = 0  # messages begin with something else

    def forked(self) -> None:
        """Stops sending in a fork of the process."""
        self.channel.forked()
        self.pool = Pool()  # a thread that the fork lacks may hold the old lock

    def close(self) -> None:
        """Drops all blocks; tensors in them stay valid."""
        if self.devices is not None:
            self.devices.close()
        self.pool.close()
        self.mappings.close()


def _in_file(fields: bytes, payload: Payload | None) -> bool:
    """True if a message may be long enough to travel in a file."""
    nbytes = len(fields) + (0 if payload is None else sum(map(len, payload.data)))
    return nbytes > wire.MOST_PACKET - wire.MOST_INLINE


def _writable_copy(data: memoryview) -> memoryview:
    return memoryview(bytearray(data))
