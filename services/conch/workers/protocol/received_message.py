"""A message that has come, whose tensors are read as they are needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from conch.core.tensor import Array, Buffer, Tensor
from conch.workers.protocol import wire
from conch.workers.protocol.blocks import Pool
from conch.workers.protocol.gpu_tensors import Devices, UnmappedError, UnreachableError
from conch.workers.protocol.wire import (
    RETURNED,
    Layout,
    Layouts,
    Message,
    Place,
    Reader,
    TensorLayout,
    WireError,
)

Small = Callable[[str, str, tuple[int, ...], Buffer], Tensor]
"""Makes a tensor that is in the message itself, of its name, its datatype, its shape and its bytes."""


class Side(Protocol):
    """The side that a message has come to.

    Attributes:
        pool: The blocks of this side: tensors may come back in them.
        received: The layouts of tensors that have come.
        make: Makes a tensor from where a message says it is.
        small: Makes one that is in the message itself.
        own: Copies small tensors out of the buffer.
        devices: For tensors on GPUs; None until there are any.
    """

    pool: Pool
    received: Layouts
    make: Callable[[TensorLayout, memoryview, Place], Tensor]
    small: Small
    own: Callable[[memoryview], Buffer]
    devices: Devices | None


class Incoming:
    """A message that was received, with what it takes to read its tensors.

    Args:
        message: The message.
        side: The side that it has come to.
        root: The memory of the block that came with it.
        unmapped: Why there is none although a block came with it; None where nothing is wrong.

    Attributes:
        message: The message.
        reader: Reads its fields.
    """

    __slots__ = ("_data", "_offset", "_root", "_side", "_unmapped", "message", "reader")

    def __init__(
        self, message: Message, side: Side, root: Array | None, unmapped: UnmappedError | None = None
    ) -> None:
        self.message = message
        self.reader = Reader(message.fields)
        self._side = side
        self._root = root
        self._unmapped = unmapped
        self._offset = 0  # of the next list of small tensors
        # One copy for all small tensors: the buffer is needed for the next message.
        self._data: Buffer = side.own(message.data) if message.data.nbytes else message.data

    def tensors(self) -> list[Tensor]:
        """Reads a list of tensors.

        Raises:
            WireError: It is none, or one is not where it should be.
            UnreachableError: The memory of one can't be opened here; the next list can be read all the same.
        """
        side = self._side
        inline, nbytes, others = wire.decode_tensors(side.received, self.reader)
        if others:
            if side.devices is not None:
                return self._on_devices(others, side.devices)
            make = side.make
            return [make(layout, self._memory(place), place) for layout, place in others]
        return self._small(inline, nbytes, 1)[0]

    def tensors_alike(self, count: int) -> list[list[Tensor]]:
        """Reads so many lists of small tensors that have one description, with which the fields end.

        Raises:
            WireError: They are none.
        """
        layout, _ = self.lists_alike(count)
        return self._small(layout.spans, layout.nbytes, count)

    def _small(
        self, inline: Sequence[tuple[TensorLayout, int, int]], nbytes: int, count: int
    ) -> list[list[Tensor]]:
        """The next lists of tensors in the message, which are so many and take so many bytes each."""
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

    def lists_alike(self, count: int) -> tuple[Layout, Buffer]:
        """Reads what so many lists of small tensors have in common, with which the fields end.

        Returns:
            What is in each list, and the memory in which they follow one another from the beginning.

        Raises:
            WireError: It is something else, or there is less memory.
        """
        layout = self._side.received.decode_fixed(self.reader)
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
            except UnreachableError as error:  # the others of the list have to be given back too
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
