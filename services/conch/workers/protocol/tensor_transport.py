"""Packs the tensors of a message: into the message, into a block, or as places where they already are.

Also declares `Devices`, the transport of tensors on GPUs; the module `devices` implements it, and only
processes that use GPUs import that.
Used by: `message_stream`, the worker connection, the worker host.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import numpy as np

from conch.core.errors import InternalError, UnavailableError
from conch.core.tensor import Array, Buffer, Tensor
from conch.workers.protocol import tensor_layouts
from conch.workers.protocol.blocks import Block, Mappings, Pool
from conch.workers.protocol.tensor_kinds import LentTensor, ReceivedTensor
from conch.workers.protocol.tensor_layouts import Description, Place, TensorLayout
from conch.workers.protocol.wire import RETURNED, WireError

_ALIGNMENT = 64


class UnreachableError(InternalError):
    """The memory of a received tensor can't be opened here."""


class UnmappedError(UnreachableError, UnavailableError):
    """A received tensor or message is in memory that a process can't map now."""


def unmapped_error(why: str = "this process can't open further files") -> UnmappedError:
    """The error of a request whose tensors or message can't be mapped."""
    return UnmappedError(
        f"memory between the server and a worker can't be mapped: {why}; the request may be sent again, and "
        f"a higher limit of open files (ulimit -n) for the server avoids this"
    )


class Payload:
    """The tensors of a message to be sent.

    Attributes:
        fields: The description of the tensors; see `tensor_layouts`.
        data: Bytes of small tensors.
        block: The block of large ones, or None.
        bytes_copied: Bytes copied into that block.
        kept: Tensors in the receiver's blocks, which must stay referenced until the message is sent.
        lent: Numbers that the receiver returns after it has used tensors on GPUs.
    """

    __slots__ = ("block", "bytes_copied", "data", "fields", "kept", "lent")

    def __init__(self) -> None:
        self.fields = b""
        self.data: list[Buffer] = []
        self.block: Block | None = None
        self.bytes_copied = 0
        self.kept: list[Tensor] = []
        self.lent: list[int] = []


class Devices(Protocol):
    """Sends and receives tensors on GPUs as places; implemented in `conch.workers.protocol.devices`."""

    def describe(self, lists: Sequence[Collection[Tensor]], payload: Payload) -> dict[int, Place]:
        """The places of the tensors that stay on a GPU, by identity."""

    def received(self, layout: TensorLayout, place: Place) -> Tensor:
        """Makes a received tensor.

        Raises:
            WireError: It lies outside its memory.
            UnreachableError: Its memory can't be opened here.
        """

    def give_back(self, number: int) -> None:
        """Takes back a lent tensor that the receiver no longer uses.

        Raises:
            WireError: It is not lent.
        """

    def tidy(self) -> None:
        """Frees idle memory; never blocks."""

    def close(self) -> None:
        """Frees all memory."""


def pack_inline(
    payload: Payload, lists: Sequence[Collection[Tensor]], layouts: Sequence[Description]
) -> None:
    """Places tensors in the message.

    Args:
        payload: Gets the parts, and sizes.
        lists: The tensors.
        layouts: The layout of each list, or the common one.

    Raises:
        WireError: A tensor's bytes do not match its shape.
    """
    common = layouts[0] if len(layouts) == 1 else None
    parts: list[Buffer] = []
    sizes: list[bytes] = []
    for index, tensors in enumerate(lists):
        start = len(parts)
        for tensor in tensors:
            parts.append(tensor.data)
        if common is None or common.nbytes < 0:
            own = list(map(len, parts[start:]))
            layout = common or layouts[index]
            if layout.nbytes < 0:
                sizes.append(tensor_layouts.encode_sizes(own))
            else:
                _check_size(layout.nbytes, sum(own))
    if common is not None and common.nbytes >= 0:
        nbytes = sum(map(len, parts))
        if nbytes != common.nbytes * len(lists):
            _check_size(common.nbytes * len(lists), nbytes)
        if common.aligned:
            parts = [b"".join(parts)]
    payload.data = parts
    if sizes:
        payload.fields = b"".join([payload.fields, *sizes])


def pack_block(
    payload: Payload,
    lists: Sequence[Collection[Tensor]],
    layouts: Sequence[Description],
    size: int,
    pool: Pool,
    described: Mapping[int, Place],
    mappings: Mappings | None,
) -> None:
    """Copies tensors into one block, except those that stay where they are.

    Args:
        payload: Gets the places; the caller returns its `block` if this fails.
        lists: The tensors.
        layouts: The layout of each list, or the common one.
        size: Bytes of all tensors.
        pool: Provides the block.
        described: Places of tensors on GPUs, by identity.
        mappings: The receiver's blocks, if tensors in them may stay there.

    Raises:
        OSError: There is no memory for a block.
        WireError: A tensor's bytes do not match its shape.
    """
    count = sum(map(len, lists))
    stays = dict(described)
    for tensor in itertools.chain.from_iterable(lists):
        place = stays.get(id(tensor))
        if place is None and mappings is not None and (place := _returned(tensor, mappings)) is not None:
            payload.kept.append(tensor)
            stays[id(tensor)] = place
        size -= 0 if place is None else place.nbytes
    block: Block | None = None
    offset = 0
    parts: list[bytes] = [payload.fields]
    for index, tensors in enumerate(lists):
        packed = 0
        for tensor in tensors:
            place = stays.get(id(tensor)) if stays else None
            if place is None:
                if block is None:
                    block = payload.block = pool.take(size + _ALIGNMENT * count)
                place = Place(block.number, offset, _write(tensor, block.memory, offset))
                offset += place.nbytes + -place.nbytes % _ALIGNMENT
            parts.append(place.encode())
            packed += place.nbytes
        layout = layouts[index if len(layouts) > 1 else 0]
        if layout.nbytes >= 0:
            _check_size(layout.nbytes, packed)
    payload.fields = b"".join(parts)
    payload.bytes_copied = offset


def _returned(tensor: Tensor, mappings: Mappings) -> Place | None:
    """The place of an input, or of a part of one, in the receiver's block; None for other tensors."""
    if isinstance(tensor, ReceivedTensor):
        if not isinstance(tensor, LentTensor) or tensor.block >= RETURNED:
            return None
        return Place(tensor.block | RETURNED, tensor.offset, tensor.nbytes)
    if tensor.has_data or tensor.datatype == "BYTES" or tensor.on_device:
        return None
    array = tensor.numpy()
    if not array.flags.c_contiguous or not array.nbytes:
        return None
    found = mappings.find(array)
    return None if found is None else Place(found[0] | RETURNED, found[1], array.nbytes)


def _check_size(expected: int, nbytes: int) -> None:
    """Raises `WireError` if a tensor's array was resized after the tensor was made."""
    if expected != nbytes:
        raise WireError(f"tensors have {nbytes} bytes, not {expected} as their shapes say")


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
