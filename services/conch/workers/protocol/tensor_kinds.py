"""The kinds of tensors that come in messages between the server and a worker."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from conch.core.tensor import NUMPY_DTYPES, POSITIONS, Buffer, Tensor
from conch.workers.protocol.tensor_layouts import Layout, Place, TensorLayout
from conch.workers.protocol.wire import RETURNED

_MOST_DIMS = 32
"""Arrays of so many dimensions every numpy has."""


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
    """An input in a worker; the model may write to it, as it has the only reference."""

    __slots__ = ()

    writable: ClassVar[bool] = True


class LentTensor(ReceivedTensor):
    """An input in a worker that is in a block.

    Attributes:
        block: Number of the block that it came in.
        offset: Where it begins there.
    """

    __slots__ = ("block", "offset")

    block: int
    offset: int


def server_tensor(layout: TensorLayout, memory: memoryview, place: Place) -> Tensor:
    """A tensor in a block from a worker: a view, or a copy where the bytes must not change any more.

    Strings are counted before they are taken apart; for numbers that kernels take for positions see
    `POSITIONS`.
    """
    if layout.datatype == "BYTES" or layout.datatype in POSITIONS:
        # Through an array: that copies without the interpreter's lock.
        memory = np.frombuffer(memory, np.uint8).copy().data if memory.nbytes else memory
        return Tensor(layout.name, layout.datatype, layout.shape, memory)
    kind = ReturnedTensor if place.source & RETURNED else BlockTensor
    return kind(layout.name, layout.datatype, layout.shape, memory)


def worker_tensor(layout: TensorLayout, memory: memoryview, place: Place) -> Tensor:
    """A tensor in a block from the server."""
    tensor = LentTensor(layout.name, layout.datatype, layout.shape, memory)
    tensor.block, tensor.offset = place.source, place.offset
    return tensor


def worker_inputs(layout: Layout, memory: Buffer, count: int) -> list[dict[str, Tensor]]:
    """So many lists of small tensors from the server, which are all the same and follow one another.

    Their arrays are made at once: hardly a model does not ask for them.
    """
    lists: list[dict[str, Tensor]] = [{} for _ in range(count)]
    for (name, datatype, shape, nbytes), first, _ in layout.spans:
        start = first
        dtype = NUMPY_DTYPES.get(datatype)
        certain = dtype is not None and nbytes and len(shape) <= _MOST_DIMS  # that there is such an array
        for inputs in lists:
            if certain:
                array = np.ndarray(shape, dtype, memory, start)
                inputs[name] = ReceivedTensor(name, datatype, shape, None, array)
            else:
                inputs[name] = ReceivedTensor(name, datatype, shape, memory[start : start + nbytes])
            start += layout.nbytes
    return lists
