"""One side of the conversation between the server and a worker: messages with tensors, both ways."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence

from conch.core.tensor import Buffer, Tensor
from conch.workers.connection.packet_channel import BUFFER_BYTES, Channel
from conch.workers.protocol import wire
from conch.workers.protocol.blocks import Block, Mappings, Pool
from conch.workers.protocol.received_message import InlineTensorFactory, ReceivedMessage
from conch.workers.protocol.tensor_kinds import ReceivedTensor, server_tensor, worker_tensor
from conch.workers.protocol.tensor_layouts import Layouts, Place, TensorLayout
from conch.workers.protocol.tensor_transport import (
    Devices,
    Payload,
    UnmappedError,
    pack_block,
    pack_homogeneous,
    pack_inline,
    unmapped_error,
)
from conch.workers.protocol.wire import RETURNED, Kind, Message, WireError

_MOST_IN_FILE = 1 << 30
"""Tensors with more bytes than this travel in a block however many are lent."""


class Exchange:
    """Sends from any thread, receives on one.

    Args:
        channel: The socket; it stays the caller's to close.
        in_worker: Whether this is the worker's side.

    Attributes:
        pool: The blocks of this side.
        mappings: The blocks of the other side.
        received: The layouts of tensors that have come.
        make: Makes a tensor from where a message says it is.
        small: Makes one that is in the message itself.
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
        self.small: InlineTensorFactory = ReceivedTensor if in_worker else Tensor
        self.own: Callable[[memoryview], Buffer] = _writable_copy if in_worker else bytes
        self._returns = in_worker
        self._sent = Layouts()
        self._buffer = bytearray(BUFFER_BYTES)

    def pack(
        self, lists: Sequence[Collection[Tensor]], on_device: bool = False, returned: bool = False
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
        described: dict[int, Place] = {}
        try:
            if on_device and self.devices is not None:
                described = self.devices.describe(lists, payload)
            if not described and pack_homogeneous(payload, lists, self._sent):
                return payload
            size = sum(tensor.nbytes for tensors in lists for tensor in tensors)
            if not described and (size <= wire.MOST_INLINE or (size <= _MOST_IN_FILE and self.pool.crowded)):
                pack_inline(payload, lists, self._sent)
            else:
                mappings = self.mappings if returned else None
                pack_block(payload, lists, size, self._sent, self.pool, described, mappings)
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
            if released and _in_file(fields, payload):  # or they would be lost if that could not be read
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

    def receive(self, wait: bool = True) -> ReceivedMessage:
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
                self.seen_to()
                continue
            if message.kind is Kind.DROP:
                for number in wire.decode_numbers(message.fields):
                    self.mappings.drop(number)
                self.seen_to()
                continue
            if message.kind is Kind.UNMAPPED:
                for number in wire.decode_numbers(message.fields):
                    self.pool.unmapped(number)
                self.seen_to()
                continue
            if failure is not None:
                return ReceivedMessage(
                    wire.lost(message) if message.outline else message, self, None, failure
                )
            root = self.mappings.lend(message.block) if message.block else None
            return ReceivedMessage(message, self, root)

    def _map(self, message: Message, fds: Sequence[int]) -> UnmappedError | None:
        """Maps the new block of a message; the error if this process can't, or if the message itself is lost.

        Raises:
            WireError: There is no block, or it is none.
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


def _in_file(fields: bytes, payload: Payload | None) -> bool:
    """Whether a message may be so long that it travels in a file."""
    nbytes = len(fields) + (0 if payload is None else sum(map(len, payload.data)))
    return nbytes > wire.MOST_PACKET - wire.MOST_INLINE


def _writable_copy(data: memoryview) -> memoryview:
    return memoryview(bytearray(data))
