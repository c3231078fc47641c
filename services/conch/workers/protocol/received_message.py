"""A received message, whose tensors are read on demand.

Owns: the position in the fields and in the bytes of small tensors, and a reference to the message's block.
Threads and locks: one thread reads a message. Used by: the worker connection and the worker host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from conch.core.tensor import Array, Buffer, Tensor
from conch.workers.protocol import tensor_layouts
from conch.workers.protocol.blocks import Pool
from conch.workers.protocol.tensor_layouts import Layout, Layouts, Place, TensorLayout
from conch.workers.protocol.tensor_transport import Devices, UnmappedError, UnreachableError
from conch.workers.protocol.wire import RETURNED, Message, Reader, WireError

InlineTensorFactory = Callable[[str, str, tuple[int, ...], Buffer], Tensor]
"""Makes a tensor in the message from name, datatype, shape and bytes."""


class ReceivingSide(Protocol):
    """What reading a message needs of the receiver.

    Attributes:
        pool: The receiver's own blocks, in which tensors may come back.
        received: Layouts received so far.
        make: Makes a tensor in a block.
        small: Makes a tensor in the message.
        own: Copies small tensors out of the receive buffer.
        devices: Reads tensors on GPUs; None until there are any.
    """

    pool: Pool
    received: Layouts
    make: Callable[[TensorLayout, memoryview, Place], Tensor]
    small: InlineTensorFactory
    own: Callable[[memoryview], Buffer]
    devices: Devices | None


class ReceivedMessage:
    """A message with the memory of its tensors.

    Args:
        message: The decoded header and fields.
        side: The receiver.
        root: The memory of the block that came with the message.
        unmapped: The reason that this block is missing, or None.

    Attributes:
        reader: Reads the fields.
    """

    __slots__ = ("_data", "_offset", "_root", "_side", "_unmapped", "message", "reader")

    def __init__(
        self,
        message: Message,
        side: ReceivingSide,
        root: Array | None,
        unmapped: UnmappedError | None = None,
    ) -> None:
        self.message = message
        self.reader = Reader(message.fields)
        self._side = side
        self._root = root
        self._unmapped = unmapped
        self._offset = 0  # of the next list of small tensors
        # One copy for all small tensors: the next message overwrites the buffer.
        self._data: Buffer = side.own(message.data) if message.data.nbytes else message.data

    def tensors(self) -> list[Tensor]:
        """Reads a list of tensors.

        Raises:
            WireError: The list is malformed, or a tensor lies outside its memory.
            UnreachableError: The memory of one can't be opened here; the next list can still be read.
        """
        side = self._side
        inline, nbytes, others = tensor_layouts.decode_tensors(side.received, self.reader)
        if others:
            if side.devices is not None:
                return self._on_devices(others, side.devices)
            make = side.make
            return [make(layout, self._memory(place), place) for layout, place in others]
        return self._small(inline, nbytes, 1)[0]

    def homogeneous_tensors(self, count: int) -> list[list[Tensor]]:
        """Reads `count` lists of small tensors with one description, which ends the fields.

        Raises:
            WireError: They are malformed.
        """
        layout, _ = self.homogeneous_lists(count)
        return self._small(layout.spans, layout.nbytes, count)

    def _small(
        self, inline: Sequence[tuple[TensorLayout, int, int]], nbytes: int, count: int
    ) -> list[list[Tensor]]:
        """The next `count` lists of tensors in the message, of `nbytes` each."""
        small, data, start = self._side.small, self._data, self._offset
        self._offset = start + count * nbytes
        if self._offset > len(data):
            raise WireError(f"tensors end at {self._offset}, but there are {len(data)} bytes")
        lists: list[list[Tensor]] = [[] for _ in range(count)]
        for (name, datatype, shape, _), first, end in inline:
            at, size = start + first, end - first
            for tensors in lists:
                tensors.append(small(name, datatype, shape, data[at : at + size]))
                at += nbytes
        return lists

    def homogeneous_lists(self, count: int) -> tuple[Layout, Buffer]:
        """Reads the description of `count` lists of small tensors, which ends the fields.

        Returns:
            The layout of each list, and the memory in which the lists lie one after the other.

        Raises:
            WireError: The description is malformed, or the memory too small.
        """
        layout = self._side.received.decode_homogeneous(self.reader)
        end = count * layout.nbytes
        if end > len(self._data):
            raise WireError(f"tensors end at {end}, but there are {len(self._data)} bytes")
        return layout, self._data

    def _on_devices(self, others: Sequence[tuple[TensorLayout, Place]], devices: Devices) -> list[Tensor]:
        make = self._side.make
        tensors: list[Tensor] = []
        failure: UnreachableError | None = None
        for layout, place in others:
            if not place.device:
                tensors.append(make(layout, self._memory(place), place))
                continue
            try:
                tensors.append(devices.received(layout, place))
            except UnreachableError as error:  # the other tensors must be received to be returned
                failure = error
        if failure is not None:
            raise failure
        return tensors

    def _memory(self, place: Place) -> memoryview:
        source, offset, nbytes, _ = place
        memory: memoryview
        if source & RETURNED:
            memory = self._side.pool.view(source & ~RETURNED).data
        elif source == self.message.block and self._root is not None:
            memory = self._root.data
        elif source == self.message.block and self._unmapped is not None:
            raise self._unmapped
        else:
            raise WireError(f"a tensor is in block {source}, which did not come with its message")
        if offset + nbytes > memory.nbytes:
            raise WireError(f"a tensor ends at {offset + nbytes}, but there are {memory.nbytes} bytes")
        return memory[offset : offset + nbytes]
