"""Tensor classes of received messages, and functions that make them.

Used by: `message_stream`, the worker connection, the worker host.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from conch.core.tensor import NUMPY_DTYPES, POSITIONS, Buffer, Tensor
from conch.workers.protocol.tensor_layouts import Place, TensorLayout
from conch.workers.protocol.wire import RETURNED

_MOST_DIMS = 32
"""Every numpy version supports as many dimensions."""


class BlockTensor(Tensor):
    """An output in a worker's block; the worker may write to it at any time."""

    __slots__ = ()

    shared: ClassVar[bool] = True

    def reshaped(self, shape: tuple[int, ...]) -> Tensor:
        """The same elements under another shape of the same size, without a copy."""
        return self.renamed(self.name, shape)

    def renamed(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The same elements under another name and another shape of the same size, without a copy."""
        return BlockTensor(name, self.datatype, shape, self.data)


class ReturnedTensor(BlockTensor):
    """An output in the server's own block: an input passed through, which the model may keep."""

    __slots__ = ()


class ReceivedTensor(Tensor):
    """An input in a worker; the model may write to its private copy."""

    __slots__ = ()

    writable: ClassVar[bool] = True


class LentTensor(ReceivedTensor):
    """An input in a block of the server's, at an offset."""

    __slots__ = ("block", "offset")

    block: int
    offset: int


def server_tensor(layout: TensorLayout, memory: memoryview, place: Place) -> Tensor:
    """Makes an output in a block; copies it if a change by the worker could break its reader.

    Strings are measured before they are parsed; for integers used as indices see `POSITIONS`.
    """
    if layout.datatype == "BYTES" or layout.datatype in POSITIONS:
        # numpy copies without the interpreter's lock.
        memory = np.frombuffer(memory, np.uint8).copy().data if memory.nbytes else memory
        return Tensor(layout.name, layout.datatype, layout.shape, memory)
    kind = ReturnedTensor if place.source & RETURNED else BlockTensor
    return kind(layout.name, layout.datatype, layout.shape, memory)


def worker_tensor(layout: TensorLayout, memory: memoryview, place: Place) -> Tensor:
    """Makes an input in a block."""
    tensor = LentTensor(layout.name, layout.datatype, layout.shape, memory)
    tensor.block, tensor.offset = place.source, place.offset
    return tensor


def server_inline(
    name: str, datatype: str, shape: tuple[int, ...], memory: Buffer, start: int, nbytes: int
) -> Tensor:
    """Makes a small output in a message."""
    return Tensor(name, datatype, shape, memory[start : start + nbytes])


def worker_inline(
    name: str, datatype: str, shape: tuple[int, ...], memory: Buffer, start: int, nbytes: int
) -> Tensor:
    """Makes a small input in a message, with its array: nearly every model uses it."""
    dtype = NUMPY_DTYPES.get(datatype) if datatype != "BYTES" else None
    if dtype is not None and nbytes and len(shape) <= _MOST_DIMS:
        return ReceivedTensor(name, datatype, shape, None, np.ndarray(shape, dtype, memory, start))
    return ReceivedTensor(name, datatype, shape, memory[start : start + nbytes])
