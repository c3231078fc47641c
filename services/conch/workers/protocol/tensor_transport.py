"""Puts the tensors of a message where they will travel: in the message, in a block, or where they are."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from conch.core.tensor import Array, Buffer, Tensor
from conch.workers.protocol import wire
from conch.workers.protocol.blocks import Block, Mappings, Pool
from conch.workers.protocol.tensor_kinds import LentTensor, ReceivedTensor
from conch.workers.protocol.wire import RETURNED, Layouts, Place, WireError

_ALIGNMENT = 64


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


def pack_alike(payload: Payload, lists: Sequence[Collection[Tensor]], sent: Layouts) -> bool:
    """Puts tensors into the message itself if they are small and one description holds for all lists.

    Args:
        payload: Takes them.
        lists: The tensors.
        sent: The layouts that the other side has been told.

    Returns:
        Whether that is so.
    """
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
    if not 0 <= nbytes * length <= wire.MOST_INLINE:
        return False
    parts: list[Buffer] = [tensor.data for tensor in tensors]
    if aligned:
        parts = [b"".join(parts)]
    if sum(map(len, parts)) != nbytes * length:
        return False  # or what follows would be taken for another request's: with care it is refused
    payload.alike = inline
    payload.lists = [inline] * length
    payload.data = parts
    return True


def pack_inline(payload: Payload, lists: Sequence[Collection[Tensor]], sent: Layouts) -> None:
    """Puts small tensors into the message itself.

    Args:
        payload: Takes them.
        lists: The tensors.
        sent: The layouts that the other side has been told.

    Raises:
        WireError: A list has not the bytes that its shapes say.
    """
    described: list[bytes] = []
    for tensors in lists:
        parts = [tensor.data for tensor in tensors]
        payload.data += parts
        key = _key(tensors)
        _check_size(sent, key, sum(map(len, parts)))
        described.append(wire.encode_inline(sent, key, parts))
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
    """Copies tensors into one block, but for those that stay where they are.

    Args:
        payload: Takes them; `Payload.block` is to be given back also if this fails.
        lists: The tensors.
        size: The bytes of all of them.
        sent: The layouts that the other side has been told.
        pool: Has the block.
        described: The places of tensors on GPUs, by their identity.
        mappings: Where the other side's blocks are, if what is in them may stay there.

    Raises:
        OSError: There is no memory for them.
        WireError: A list has not the bytes that its shapes say.
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
        described_lists.append(wire.encode_tensors(sent, key, places))
    payload.lists = described_lists
    payload.bytes_copied = offset


def _returned(tensor: Tensor, mappings: Mappings) -> Place | None:
    """Where a tensor is in a block of the other side's, if it is an input or a part of one."""
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


def _check_size(sent: Layouts, key: wire.LayoutKey, nbytes: int) -> None:
    """Whoever has made a tensor may have given its array another size since."""
    expected = sent.encode(key).nbytes
    if expected not in (-1, nbytes):
        raise WireError(f"tensors have {nbytes} bytes, not {expected} as their shapes say")


def _key(tensors: Collection[Tensor]) -> wire.LayoutKey:
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
