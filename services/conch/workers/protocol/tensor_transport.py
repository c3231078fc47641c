"""Packs the tensors of a message: into the message, into a block, or as places where they already are.

Also declares `Devices`, the transport of tensors on GPUs; the module `devices` implements it, and only
processes that use GPUs import that.
Used by: `message_stream`, the worker connection, the worker host.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import numpy as np

from conch.core.errors import InternalError, UnavailableError
from conch.core.tensor import Array, Buffer, Tensor
from conch.workers.protocol import tensor_layouts
from conch.workers.protocol.blocks import Block, Mappings, Pool
from conch.workers.protocol.tensor_kinds import LentTensor, ReceivedTensor
from conch.workers.protocol.tensor_layouts import LayoutKey, Layouts, Place, TensorLayout
from conch.workers.protocol.wire import MOST_INLINE, RETURNED, WireError

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
        lists: The description of each list of tensors.
        homogeneous: One description for all lists, if they are small and equal; else None.
        data: Bytes of small tensors.
        block: The block of large ones, or None.
        bytes_copied: Bytes copied into that block.
        kept: Tensors in the receiver's blocks, which must stay referenced until the message is sent.
        lent: Numbers that the receiver returns after it has used tensors on GPUs.
    """

    __slots__ = ("block", "bytes_copied", "data", "homogeneous", "kept", "lent", "lists")

    def __init__(self) -> None:
        self.lists: Sequence[bytes] = ()
        self.homogeneous: bytes | None = None
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


def pack_homogeneous(payload: Payload, lists: Sequence[Collection[Tensor]], sent: Layouts) -> bool:
    """Packs lists into the message if they are small and have one layout; returns whether they do."""
    length = len(lists)
    if not length:
        return False
    tensors = [tensor for each in lists for tensor in each]
    keys = [(tensor.name, tensor.datatype, tensor.shape) for tensor in tensors]
    if length > 1:
        counts = list(map(len, lists))
        first = keys[: counts[0]]
        if counts.count(counts[0]) != length or first * length != keys:
            return False
        keys = first
    inline, _, _, nbytes, aligned = sent.encode(tuple(keys))
    if not 0 <= nbytes * length <= MOST_INLINE:
        return False
    parts: list[Buffer] = [tensor.data for tensor in tensors]
    if aligned:
        parts = [b"".join(parts)]
    if sum(map(len, parts)) != nbytes * length:
        return False  # one would shift the tensors of other requests; `pack_inline` refuses it
    payload.homogeneous = inline
    payload.lists = [inline] * length
    payload.data = parts
    return True


def pack_inline(payload: Payload, lists: Sequence[Collection[Tensor]], sent: Layouts) -> None:
    """Packs small tensors into the message.

    Raises:
        WireError: A tensor's bytes do not match its shape.
    """
    described: list[bytes] = []
    for tensors in lists:
        parts = [tensor.data for tensor in tensors]
        payload.data += parts
        key = _key(tensors)
        _check_size(sent, key, sum(map(len, parts)))
        described.append(tensor_layouts.encode_inline(sent, key, parts))
    payload.lists = described


def pack_block(
    payload: Payload,
    lists: Sequence[Collection[Tensor]],
    size: int,
    sent: Layouts,
    pool: Pool,
    described: Mapping[int, Place],
    mappings: Mappings | None,
) -> None:
    """Copies tensors into one block, except those that stay where they are.

    Args:
        payload: The caller returns its `block` if this fails.
        lists: The tensors.
        size: Bytes of all tensors.
        sent: Layouts sent so far.
        pool: Provides the block.
        described: Places of tensors on GPUs, by identity.
        mappings: The receiver's blocks, if tensors in them may stay there.

    Raises:
        OSError: There is no memory for a block.
        WireError: A tensor's bytes do not match its shape.
    """
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
            if mappings is not None and (place := _returned(tensor, mappings)) is not None:
                places.append(place)
                payload.kept.append(tensor)
                continue
            if block is None:
                block = payload.block = pool.take(size + _ALIGNMENT * count)
            nbytes = _write(tensor, block.memory, offset)
            places.append(Place(block.number, offset, nbytes))
            offset += nbytes + -nbytes % _ALIGNMENT
        key = _key(tensors)
        _check_size(sent, key, sum([place.nbytes for place in places]))
        described_lists.append(tensor_layouts.encode_tensors(sent, key, places))
    payload.lists = described_lists
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


def _check_size(sent: Layouts, key: LayoutKey, nbytes: int) -> None:
    """Raises `WireError` if a tensor's array was resized after the tensor was made."""
    expected = sent.encode(key).nbytes
    if expected not in (-1, nbytes):
        raise WireError(f"tensors have {nbytes} bytes, not {expected} as their shapes say")


def _key(tensors: Collection[Tensor]) -> LayoutKey:
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
