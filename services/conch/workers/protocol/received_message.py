"""A received message, whose tensors are read on demand.

Owns: the position in the fields and in the bytes of small tensors, and a reference to the message's block.
Threads and locks: one thread reads a message. Used by: the worker connection and the worker host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from conch.core.tensor import Array, Buffer, Tensor
from conch.workers.protocol import tensor_layouts
from conch.workers.protocol.blocks import Pool
from conch.workers.protocol.tensor_layouts import Layout, Layouts, Place, TensorLayout
from conch.workers.protocol.tensor_transport import Devices, UnmappedError, UnreachableError
from conch.workers.protocol.wire import RETURNED, Message, Reader, WireError

InlineTensorFactory = Callable[[str, str, tuple[int, ...], Buffer, int, int], Tensor]
"""Makes a tensor in the message from name, datatype, shape, memory, and start and size there."""


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
        placed: Whether the tensors that were read lie in blocks or on GPUs.
        unreachable: Why lists of tensors, by index, can't be opened here; None if all can.
    """

    __slots__ = (
        "_data",
        "_offset",
        "_root",
        "_side",
        "_unmapped",
        "message",
        "placed",
        "reader",
        "unreachable",
    )

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
        self.placed = False
        self.unreachable: dict[int, UnreachableError] | None = None
        # One copy for all small tensors: the next message overwrites the buffer.
        self._data: Buffer = side.own(message.data) if message.data.nbytes else message.data

    def lists(self, count: int) -> list[list[Tensor]]:
        """Reads `count` lists of tensors, whose description ends the fields; `unreachable` ones stay empty.

        Descriptions are recognised by their bytes: most say the same of each message of a model.

        Raises:
            WireError: Their description is malformed, or a tensor lies outside its memory.
        """
        layouts = self._side.received
        text = bytes(self.reader.rest())
        known = layouts.whole.get(text)
        if known is not None and known[0] == count:
            return self._read_inline(count, known[1])
        reader = Reader(memoryview(text))
        common, placed = tensor_layouts.read_head(reader, count)
        lists: list[list[Tensor]] = []
        if not count:
            reader.end()
            return lists
        described = [layouts.read(reader) for _ in range(1 if common else count)]
        if placed:
            self.placed = True
            for index in range(count):
                lists.append(self._read_places(reader, index, described[0 if common else index]))
        elif common and described[0].nbytes >= 0:
            layouts.recognise(text, count, described[0])
            lists = self._read_inline(count, described[0])
        else:
            for index in range(count):
                layout = described[0 if common else index]
                if layout.nbytes < 0:
                    layout = tensor_layouts.read_sizes(reader, layout)
                lists += self._read_inline(1, layout)
        reader.end()
        return lists

    def _read_inline(self, count: int, layout: Layout) -> list[list[Tensor]]:
        """Reads lists with one layout, which lie in the message one after the other."""
        make, data, begin = self._side.small, self._data, self._offset
        lists: list[list[Tensor]] = [[] for _ in range(count)]
        self._offset = begin + count * layout.nbytes
        if self._offset > len(data):
            raise WireError(f"tensors end at {self._offset}, but there are {len(data)} bytes")
        for (name, datatype, shape, _), start, nbytes in layout.spans:
            at = begin + start
            for tensors in lists:
                tensors.append(make(name, datatype, shape, data, at, nbytes))
                at += layout.nbytes
        return lists

    def _read_places(self, reader: Reader, index: int, layout: Layout) -> list[Tensor]:
        """Reads the tensors of a list in blocks or on GPUs."""
        side = self._side
        tensors: list[Tensor] = []
        failure: UnreachableError | None = None
        for tensor in layout.tensors:
            place = tensor_layouts.read_place(reader, tensor)
            try:
                if not place.device:
                    tensors.append(side.make(tensor, self._memory(place), place))
                elif side.devices is None:
                    raise WireError(f"tensor '{tensor.name}' is on a GPU, but this side uses none")
                else:
                    tensors.append(side.devices.received(tensor, place))
            except UnreachableError as error:  # the other tensors must be received to be returned
                failure = error
        if failure is not None:
            tensors.clear()
            self.unreachable = {**(self.unreachable or {}), index: failure}
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
