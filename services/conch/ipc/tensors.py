"""One end of the conversation between server and worker: messages with tensors, both ways.

A message describes its tensors at the end of its fields:

    =======================  =========================================================================
    part                     contents
    =======================  =========================================================================
    head                     number of lists; whether one layout serves all; whether tensors are placed
    sizes, if in the message of lists with strings: of each tensor
    places, if placed        of each tensor: number of a block, offset, bytes; on a GPU UUID and handle
    =======================  =========================================================================

Its last texts are the layouts, one for all lists or one for each: JSON with name, datatype and shape of each
tensor. Tensors in the message lie list after list, each on a multiple of eight. A place names the block that
comes with the message, or one of the receiver's (`RETURNED` set). A place on a GPU has `ON_DEVICE` set, and a
number for the receiver to return after use, or 0 if the sender needs no notice. A tensor in a block that is
passed on has that block's number.

Threads: any thread sends, one receives.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from math import prod
from typing import ClassVar, NamedTuple, Protocol

import numpy as np

from conch.core.compiled import mypyc_attr
from conch.core.errors import InternalError, UnavailableError
from conch.core.recognition import Table
from conch.core.tensor import ELEMENT_SIZES, NUMPY_DTYPES, POSITIONS, Array, Buffer, Tensor
from conch.ipc.blocks import Block, MappedBlock, Mappings, PassedBlock, Pool
from conch.ipc.channel import (
    BUFFER_BYTES,
    MOST_INLINE,
    MOST_PACKET,
    MOST_RELEASED,
    NEW_BLOCK,
    OUTLINE,
    RETURNED,
    ChannelClosedError,
    Kind,
    Message,
    PacketChannel,
    ReceivedTexts,
    SentTexts,
    Text,
    WireError,
    decode_numbers,
    encode,
    encode_numbers,
    encode_texts,
    lose,
)

ON_DEVICE = 1 << 32
"""Set in the place of a tensor on a GPU."""

UUID_BYTES = 16
HANDLE_BYTES = 64

_MOST_LAYOUTS = 512
"""Layouts that a sender keeps encoded."""

_MOST_IN_FILE = 1 << 30
"""More bytes of tensors than this travel in a block, however many blocks are lent."""

_NO_BLOCK = 0, 0, False

_MOST_FIELDS = MOST_PACKET - MOST_INLINE
"""More bytes of fields and small tensors may have to travel in a file, once texts and padding are added."""

_MOST_NEW_TEXTS = 16 * 1024
"""A message has at most so many bytes of new texts if these are to be kept."""

_MOST_DIMS = 32
"""Every numpy version supports as many dimensions."""

_ALIGNMENT = 64
_HEAD = struct.Struct("<IB")
_COMMON, _PLACED = 1, 2
_PLACE = struct.Struct("<QQQ")
_MOST_DIM = (1 << 63) - 1

LayoutKey = tuple[tuple[str, str, tuple[int, ...]], ...]
"""Name, datatype and shape of each tensor of a list."""


@mypyc_attr(native_class=False)
class UnreachableError(InternalError):
    """The memory of a received tensor can't be opened here."""


@mypyc_attr(native_class=False)
class UnmappedError(UnreachableError, UnavailableError):
    """A received tensor or message is in memory that a process can't map now."""


def unmapped_error(why: str = "this process can't open further files") -> UnmappedError:
    """The error of a request whose tensors or message can't be mapped."""
    return UnmappedError(
        f"memory between the server and a worker can't be mapped: {why}; the request may be sent again, and "
        f"a higher limit of open files (ulimit -n) for the server avoids this"
    )


# --- classes of received tensors ---------------------------------------------------------------------------


class Origin(NamedTuple):
    """Block of the other side, which may be passed on, and offset of a tensor in it."""

    block: MappedBlock
    offset: int


class BlockTensor(Tensor):
    """An output in a worker's block; the worker may write to it at any time.

    Attributes:
        origin: None if it can't be passed on.
    """

    __slots__ = ("origin",)

    shared: ClassVar[bool] = True

    def __init__(
        self, name: str, datatype: str, shape: tuple[int, ...], data: Buffer, origin: Origin | None
    ) -> None:
        Tensor.__init__(self, name, datatype, shape, data)
        self.origin = origin

    def reshaped(self, shape: tuple[int, ...]) -> Tensor:
        """The same elements under another shape of the same size, without a copy."""
        return self.renamed(self.name, shape)

    def renamed(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The same elements under another name and another shape of the same size, without a copy."""
        return type(self)(name, self.datatype, shape, self.data, self.origin)


class StableTensor(BlockTensor):
    """A tensor in a block of conch's own process, which does not write to it before it is returned."""

    __slots__ = ()

    shared: ClassVar[bool] = False


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


# --- layouts and places ------------------------------------------------------------------------------------


class TensorLayout(NamedTuple):
    """A tensor without its data; `nbytes` is -1 if only the message has the size, as for BYTES."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    nbytes: int


class Span(NamedTuple):
    """A tensor in a message: where it lies in its list; its dtype if a worker makes an array of it."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int
    dtype: np.dtype[np.generic] | None


class Layout(NamedTuple):
    """The layout of a list, as received.

    Attributes:
        spans: The tensors in the message; empty if sizes follow, as for strings.
        nbytes: Bytes of the list in the message, padding included; -1 if sizes follow.
    """

    tensors: tuple[TensorLayout, ...]
    spans: tuple[Span, ...]
    nbytes: int


_NO_TENSORS = Layout((), (), 0)

Area = tuple[Layout, tuple[int, ...], Buffer]
"""A list of tensors in memory: their layout, address and bytes of each, and what keeps the memory."""


class Description(NamedTuple):
    """The layout of a list, as sent.

    Attributes:
        nbytes: Bytes of all tensors; -1 if the layout does not say.
        aligned: True if no tensor needs padding.
    """

    text: bytes
    nbytes: int
    aligned: bool


class Place(NamedTuple):
    """Location of a tensor's bytes: number of a block and offset in it; UUID and handle if on a GPU."""

    source: int
    offset: int
    nbytes: int
    device: bytes = b""

    def encode(self) -> bytes:
        """Encodes the place."""
        return _PLACE.pack(*self[:3]) + self.device


def describe_layout(key: LayoutKey) -> Description:
    """Describes a list of tensors.

    Raises:
        WireError: The receiver would refuse it.
    """
    for name, datatype, shape in key:
        if not all(0 <= dim <= _MOST_DIM for dim in shape):
            raise WireError(f"tensor '{name}' can't be sent: {datatype} of shape {list(shape)}")
    text = json.dumps(key, separators=(",", ":")).encode("ascii")
    if not all(datatype in ELEMENT_SIZES for _, datatype, _ in key):
        return Description(text, -1, False)
    sizes = [prod(shape) * ELEMENT_SIZES[datatype] for _, datatype, shape in key]
    return Description(text, sum(sizes), not any(size % 8 for size in sizes))


def read_layout(text: Text) -> Layout:
    """The layout that a text describes; the text keeps it.

    Raises:
        WireError: It is malformed.
    """
    if isinstance(text.layout, Layout):
        return text.layout
    try:
        value = json.loads(text.content)
    except (ValueError, RecursionError) as error:
        raise WireError(f"the layout of tensors can't be read: {error}") from None
    if not isinstance(value, list):
        raise WireError("the layout of tensors is not a list")
    tensors = tuple([_tensor_layout(entry) for entry in value])
    if any(tensor.nbytes < 0 for tensor in tensors):
        layout = Layout(tensors, (), -1)
    else:
        layout = Layout(tensors, *_spans(tensors, [tensor.nbytes for tensor in tensors]))
    text.layout = layout
    return layout


def _tensor_layout(entry: object) -> TensorLayout:
    match entry:
        case [str() as name, str() as datatype, list() as dims] if all(
            type(dim) is int and 0 <= dim <= _MOST_DIM for dim in dims
        ):
            pass
        case _:
            raise WireError("the layout of a tensor is not a name, a datatype and a shape")
    if datatype == "BYTES":
        return TensorLayout(name, datatype, tuple(dims), -1)
    size = ELEMENT_SIZES.get(datatype)
    if size is None:
        raise WireError(f"there is no datatype '{datatype}'")
    return TensorLayout(name, datatype, tuple(dims), prod(dims) * size)


def _spans(tensors: Sequence[TensorLayout], sizes: Sequence[int]) -> tuple[tuple[Span, ...], int]:
    """The tensors of a list in the message, and their bytes."""
    spans = []
    start = 0
    for (name, datatype, shape, _), size in zip(tensors, sizes, strict=True):
        dtype = NUMPY_DTYPES.get(datatype) if datatype != "BYTES" else None
        made = dtype if size and len(shape) <= _MOST_DIMS else None
        spans.append(Span(name, datatype, shape, start, size, made))
        start += size + -size % 8
    return tuple(spans), start


def _check_size(tensor: TensorLayout, nbytes: int) -> None:
    if tensor.nbytes not in (-1, nbytes):
        raise WireError(f"tensor '{tensor.name}' has {nbytes} bytes, not {tensor.nbytes}")


# --- sending -----------------------------------------------------------------------------------------------


class Payload:
    """The tensors of a message to be sent.

    Attributes:
        fields: Their description, without the layouts.
        texts: Their layouts.
        data: Bytes of small tensors.
        block: The block of large ones, or None.
        bytes_copied: Bytes copied into that block.
        lent_tensors: Tensors in the receiver's blocks, which must stay referenced until the message is sent.
        passed: Blocks of third processes.
        lent: Numbers that the receiver returns after it has used tensors on GPUs.
    """

    __slots__ = ("block", "bytes_copied", "data", "fields", "lent", "lent_tensors", "passed", "texts")

    def __init__(self) -> None:
        self.fields = b""
        self.texts: list[bytes] = []
        self.data: list[Buffer] = []
        self.block: Block | None = None
        self.bytes_copied = 0
        self.lent_tensors: list[Tensor] = []
        self.passed: list[PassedBlock] = []
        self.lent: list[int] = []

    def copy_small_tensors(self) -> int:
        """Copies small tensors that others may still write to; returns the bytes of tensors and layouts."""
        nbytes = 0
        for index, part in enumerate(self.data):
            nbytes += len(part)
            if type(part) is not bytes:
                self.data[index] = bytes(part)
        return nbytes + sum(map(len, self.texts))


def joined_payload(payloads: Sequence[Payload]) -> Payload:
    """The payload of lists that were packed one by one; one in a block stays alone."""
    if len(payloads) == 1:
        return payloads[0]
    joined = Payload()
    texts = [payload.texts[0] for payload in payloads]
    common = bool(texts) and texts.count(texts[0]) == len(texts)
    joined.texts = texts[:1] if common else texts
    joined.fields = b"".join(
        [
            _HEAD.pack(len(payloads), _COMMON if common else 0),
            *[payload.fields[_HEAD.size :] for payload in payloads],
        ]
    )
    for payload in payloads:
        joined.data += payload.data
    return joined


def lists_in_one(layout: Description, count: int, data: bytes) -> Payload:
    """The payload of `count` lists of one layout, which says their sizes; `data` has the padded tensors."""
    payload = Payload()
    payload.fields = _HEAD.pack(count, _COMMON)
    payload.texts, payload.data = [layout.text], [data]
    return payload


class Devices(Protocol):
    """Sends and receives tensors on GPUs as places; implemented in `devices`, which only some import."""

    def describe(self, lists: Sequence[Collection[Tensor]], payload: Payload) -> dict[int, Place]:
        """The places of the tensors that stay on a GPU, by identity."""

    def received(self, layout: TensorLayout, place: Place) -> Tensor:
        """Makes a received tensor.

        Raises:
            WireError: It lies outside its memory.
            UnreachableError: Its memory can't be opened here.
        """

    def return_memory(self, number: int) -> None:
        """Takes back a lent tensor that the receiver no longer uses.

        Raises:
            WireError: It is not lent.
        """

    def tidy(self) -> None:
        """Frees idle memory; never blocks."""

    def close(self) -> None:
        """Frees all memory."""


def _pack_block(
    payload: Payload,
    lists: Sequence[Collection[Tensor]],
    layouts: Sequence[Description],
    size: int,
    take: Callable[[int], Block],
    described: Mapping[int, Place],
    mappings: Mappings | None,
) -> None:
    """Copies tensors into one block, except those that stay where they are.

    Args:
        payload: Gets the places; the caller returns its `block` if this fails.
        lists: The tensors.
        layouts: The layout of each list, or the common one.
        size: Bytes of all tensors.
        take: Provides the block.
        described: Places of tensors on GPUs or passed on, by identity.
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
            payload.lent_tensors.append(tensor)
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
                    block = payload.block = take(size + _ALIGNMENT * count)
                place = Place(block.number, offset, _write(tensor, block.memory, offset))
                offset += place.nbytes + -place.nbytes % _ALIGNMENT
            parts.append(place.encode())
            packed += place.nbytes
        layout = layouts[index if len(layouts) > 1 else 0]
        if layout.nbytes >= 0:
            _check_total(layout.nbytes, packed)
    payload.fields = b"".join(parts)
    payload.bytes_copied = offset


def _blocks_of(
    lists: Sequence[Collection[Tensor]], passing: type[BlockTensor] | None
) -> dict[MappedBlock, list[tuple[Tensor, int]]]:
    """The tensors of a class by their blocks, with their offsets there."""
    found: dict[MappedBlock, list[tuple[Tensor, int]]] = {}
    if passing is None:
        return found
    for tensor in itertools.chain.from_iterable(lists):
        if isinstance(tensor, passing) and tensor.origin is not None:
            found.setdefault(tensor.origin.block, []).append((tensor, tensor.origin.offset))
    return found


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


def _sizes(layout: Description, parts: Sequence[Buffer]) -> bytes:
    """The sizes of the tensors of a list, if their layout does not say them."""
    sizes = list(map(len, parts))
    if layout.nbytes < 0:
        return struct.pack(f"<{len(sizes)}Q", *sizes)
    _check_total(layout.nbytes, sum(sizes))
    return b""


def _check_total(expected: int, nbytes: int) -> None:
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


# --- receiving ---------------------------------------------------------------------------------------------


class ReceivedMessage(Message):
    """A message whose tensors are read on demand, by one thread; made by `MessageStream.receive`.

    A cursor separates what is read from what is not: `seek` moves it behind what a decoder has read, and
    `lists` reads the tensors, with which fields and texts must end.

    Attributes:
        stream: The receiver.
        texts: Its texts.
        position: The cursor in the fields.
        texts_read: The cursor in the texts.
        placed: True if the tensors that were read lie in blocks or on GPUs.
        unreachable: Reasons for which lists of tensors, by index, can't be opened here; None if all can.
        root: The memory of the block that came with it.
        others: The memory of third processes' blocks that came with it, by number, or why it is missing.
        unmapped: The reason that this block is missing, or None.
    """

    __slots__ = (
        "others",
        "placed",
        "position",
        "root",
        "stream",
        "texts",
        "texts_read",
        "unmapped",
        "unreachable",
    )

    stream: MessageStream
    texts: Sequence[Text]
    position: int
    texts_read: int
    placed: bool
    unreachable: dict[int, UnreachableError] | None
    root: Array | None
    others: Mapping[int, Array | UnmappedError]
    unmapped: UnmappedError | None

    def seek(self, position: int, texts_read: int) -> None:
        """Moves the cursor behind so many bytes of the fields and so many texts."""
        self.position, self.texts_read = position, texts_read

    def lists(self, count: int) -> list[list[Tensor]]:
        """Reads `count` lists of tensors, which end the message; `unreachable` ones stay empty.

        Raises:
            WireError: Their description is malformed, or a tensor lies outside its memory.
        """
        try:
            described, flags = _HEAD.unpack_from(self.fields, self.position)
        except struct.error as error:
            raise WireError(f"a message ends too early: {error}") from None
        if described != count or flags > _COMMON + _PLACED:
            raise WireError(f"{described} lists of tensors are described, not {count}")
        self.position += _HEAD.size
        texts, common = self.texts[self.texts_read :], flags & _COMMON
        if len(texts) != (1 if common else count):
            raise WireError(f"a message has {len(texts)} layouts for {count} lists of tensors")
        layout = read_layout(texts[0]) if count else _NO_TENSORS
        if common and layout.nbytes >= 0 and not flags & _PLACED:
            lists = self._read_inline(count, layout.spans, layout.nbytes, 0)
        else:
            lists = []
            at = 0
            for index in range(count):
                layout = layout if common else read_layout(texts[index])
                if flags & _PLACED:
                    lists.append(self._read_places(index, layout))
                    continue
                spans, nbytes = layout.spans, layout.nbytes
                if nbytes < 0:
                    spans, nbytes = self._read_sizes(layout)
                lists += self._read_inline(1, spans, nbytes, at)
                at += nbytes
        if self.position != len(self.fields):
            raise WireError(f"a message has {len(self.fields) - self.position} bytes too many")
        return lists

    def areas(self, count: int) -> list[Area] | None:
        """As `lists`, without an object for each tensor; for a reader in C.

        None if only `lists` can read them, or can tell what is wrong: unless they lie in the message with one
        layout that says their sizes. That saves 13 % of a worker's time for a request, 25 % in batches of 8.
        """
        position, texts, data = self.position, self.texts, self.data
        if len(self.fields) - position != _HEAD.size or len(texts) - self.texts_read != 1:
            return None
        if _HEAD.unpack_from(self.fields, position) != (count, _COMMON):
            return None
        layout = read_layout(texts[-1])
        nbytes = layout.nbytes
        if nbytes < 0 or count * nbytes > len(data):
            return None
        at = ctypes.addressof(ctypes.c_char.from_buffer(data)) if len(data) else 0
        areas: list[Area] = []
        for _ in range(count):
            words: list[int] = []
            for _, _, _, start, size, _ in layout.spans:
                words += (at + start, size)
            areas.append((layout, tuple(words), data))
            at += nbytes
        return areas

    def _read_inline(self, count: int, spans: Sequence[Span], nbytes: int, begin: int) -> list[list[Tensor]]:
        """Reads lists with one layout, which lie in the message one after the other."""
        data, end = self.data, begin + count * nbytes
        if end > len(data):
            raise WireError(f"tensors end at {end}, but there are {len(data)} bytes")
        lists: list[list[Tensor]] = list(map(list, itertools.repeat((), count)))
        worker = self.stream.in_worker
        for name, datatype, shape, start, size, dtype in spans:
            at = begin + start
            for tensors in lists:
                if not worker:
                    tensors.append(Tensor(name, datatype, shape, data[at : at + size]))
                elif dtype is None:
                    tensors.append(ReceivedTensor(name, datatype, shape, data[at : at + size]))
                else:  # with its array: nearly every model uses it
                    array: Array = np.ndarray(shape, dtype, data, at)
                    tensors.append(ReceivedTensor(name, datatype, shape, None, array))
                at += nbytes
        return lists

    def _read_sizes(self, layout: Layout) -> tuple[tuple[Span, ...], int]:
        """The tensors of a list whose layout does not say their sizes."""
        sizes = self._unpack(struct.Struct(f"<{len(layout.tensors)}Q"))
        for tensor, size in zip(layout.tensors, sizes, strict=True):
            _check_size(tensor, size)
        return _spans(layout.tensors, sizes)

    def _read_places(self, index: int, layout: Layout) -> list[Tensor]:
        """Reads the tensors of a list in blocks or on GPUs."""
        self.placed = True
        devices = self.stream.devices
        tensors: list[Tensor] = []
        failure: UnreachableError | None = None
        for tensor in layout.tensors:
            place = self._read_place(tensor)
            try:
                if not place.device:
                    tensors.append(self._placed(tensor, self._memory(place), place))
                elif devices is None:
                    raise WireError(f"tensor '{tensor.name}' is on a GPU, but this side uses none")
                else:
                    tensors.append(devices.received(tensor, place))
            except UnreachableError as error:  # the other tensors must be received to be returned
                failure = error
        if failure is not None:
            tensors.clear()
            self.unreachable = {**(self.unreachable or {}), index: failure}
        return tensors

    def _read_place(self, tensor: TensorLayout) -> Place:
        source, offset, nbytes = self._unpack(_PLACE)
        _check_size(tensor, nbytes)
        if source & ON_DEVICE == 0:
            return Place(source, offset, nbytes)
        if tensor.nbytes < 0:
            raise WireError(f"tensor '{tensor.name}' of {tensor.datatype} can't be on a GPU")
        start, self.position = self.position, self.position + UUID_BYTES + HANDLE_BYTES
        if self.position > len(self.fields):
            raise WireError("a message ends within a place on a GPU")
        return Place(source, offset, nbytes, bytes(self.fields[start : self.position]))

    def _unpack(self, layout: struct.Struct) -> tuple[int, ...]:
        try:
            values: tuple[int, ...] = layout.unpack_from(self.fields, self.position)
        except struct.error as error:
            raise WireError(f"a message ends too early: {error}") from None
        self.position += layout.size
        return values

    def _placed(self, layout: TensorLayout, memory: memoryview, place: Place) -> Tensor:
        """Makes a tensor in a block."""
        name, datatype, shape, _ = layout
        stream, source = self.stream, place.source
        if stream.in_worker:
            if source in self.others:
                return Tensor(name, datatype, shape, memory)
            tensor = LentTensor(name, datatype, shape, memory)
            tensor.block, tensor.offset = source, place.offset
            return tensor
        origin = None
        if source == self.block:
            block = stream.mappings.block(source)
            origin = None if block is None or block.fd < 0 else Origin(block, place.offset)
            if stream.trusted:
                return StableTensor(name, datatype, shape, memory, origin)
        # The worker may write to its block meanwhile. Strings are measured before they are parsed; for
        # integers used as indices see `POSITIONS`.
        if datatype == "BYTES" or datatype in POSITIONS:
            # numpy copies without the interpreter's lock.
            memory = np.frombuffer(memory, np.uint8).copy().data if memory.nbytes else memory
            return Tensor(name, datatype, shape, memory)
        kind = ReturnedTensor if source & RETURNED else BlockTensor
        return kind(name, datatype, shape, memory, origin)

    def _memory(self, place: Place) -> memoryview:
        source, offset, nbytes, _ = place
        memory: memoryview
        if source & RETURNED:
            memory = self.stream.pool.view(source & ~RETURNED).data
        elif source == self.block and self.root is not None:
            memory = self.root.data
        elif source in self.others:
            found = self.others[source]
            if isinstance(found, UnmappedError):
                raise found
            memory = found.data
        elif source == self.block and self.unmapped is not None:
            raise self.unmapped
        else:
            raise WireError(f"a tensor is in block {source}, which did not come with its message")
        if offset + nbytes > memory.nbytes:
            raise WireError(f"a tensor ends at {offset + nbytes}, but there are {memory.nbytes} bytes")
        return memory[offset : offset + nbytes]


# --- both ways ---------------------------------------------------------------------------------------------


_NO_OTHERS: Mapping[int, Array | UnmappedError] = {}


class MessageStream:
    """Sends and receives messages with tensors. The channel stays the caller's to close.

    Args:
        channel: The channel.
        in_worker: True for the worker's end, False for the server's.
        trusted: True if the other side is conch's own code, so that its blocks don't change while lent.
        passes_blocks: True if its blocks may be passed on to third processes, as by a core that has fronts.

    Attributes:
        pool: The blocks of this side.
        mappings: The blocks of the other side.
        devices: Transport of tensors on GPUs; None until a GPU is used.
    """

    def __init__(
        self, channel: PacketChannel, in_worker: bool, trusted: bool = False, passes_blocks: bool = False
    ) -> None:
        self.channel = channel
        self.in_worker = in_worker
        self.trusted = trusted
        self.pool = Pool()
        self.mappings = Mappings(in_worker, self._release_many, passes_blocks)
        self.devices: Devices | None = None
        self._layouts: Table[LayoutKey, Description] = Table(_MOST_LAYOUTS)
        self._sent = SentTexts()
        self._numbering = False  # a packet with numbers is being encoded, under the channel's lock
        self._received = ReceivedTexts()
        self._buffer = bytearray(BUFFER_BYTES)

    def use_devices(self, devices: Devices) -> None:
        """Sends tensors on GPUs by a transport from now on."""
        self.devices = devices

    def pack(
        self,
        lists: Sequence[Collection[Tensor]],
        on_device: bool = False,
        returned: bool = False,
        passing: type[BlockTensor] | None = None,
        owner: object = None,
    ) -> Payload:
        """Places the tensors of a message; the payload must be sent or discarded.

        Args:
            lists: The tensors.
            on_device: Tensors on GPUs may stay there.
            returned: Tensors in blocks of the other side may stay there: no later write happens.
            passing: Tensors of this class may stay in blocks of third processes.
            owner: Blocks are only used again for the same one.

        Raises:
            OSError: No memory.
            WireError: The receiver would refuse a tensor, or its bytes do not match its shape.
        """
        payload = Payload()
        described: dict[int, Place] = {}
        known = self._layouts
        try:
            if on_device and self.devices is not None:
                described = self.devices.describe(lists, payload)
            layouts: list[Description] = []
            for tensors in lists:
                key = tuple([(tensor.name, tensor.datatype, tensor.shape) for tensor in tensors])
                layout = known.get(key)
                layouts.append(known.keep(key, describe_layout(key)) if layout is None else layout)
            size = -1
            common = bool(layouts) and layouts.count(layouts[0]) == len(layouts)
            if common:
                del layouts[1:]
                size = layouts[0].nbytes * len(lists)
            for layout in layouts:
                payload.texts.append(layout.text)
            whole = size  # -1 for strings, and for lists that differ
            if size < 0:
                size = sum(tensor.nbytes for tensors in lists for tensor in tensors)
            inline = not described and (size <= MOST_INLINE or (size <= _MOST_IN_FILE and self.pool.all_lent))
            flags = (_COMMON if common else 0) | (0 if inline else _PLACED)
            payload.fields = _HEAD.pack(len(lists), flags)
            if not inline:
                mappings = self.mappings if returned else None
                stays = {**described, **self._lend_foreign_blocks(payload, lists, passing)}
                take = partial(self.pool.take_block, owner=owner)
                _pack_block(payload, lists, layouts, size, take, stays, mappings)
                return payload
            parts = payload.data
            for index, tensors in enumerate(lists):
                start = len(parts)
                for tensor in tensors:
                    parts.append(tensor.data)
                if whole < 0:
                    payload.fields += _sizes(layouts[0 if common else index], parts[start:])
            if whole >= 0:
                nbytes = sum(map(len, parts))
                if nbytes != whole:
                    _check_total(whole, nbytes)
                if layouts[0].aligned:
                    payload.data = [b"".join(parts)]
        except BaseException:  # raised again
            self.discard_payload(payload)
            raise
        return payload

    def _lend_foreign_blocks(
        self, payload: Payload, lists: Sequence[Collection[Tensor]], passing: type[BlockTensor] | None
    ) -> dict[int, Place]:
        """Lends blocks that have enough of the tensors; returns the places of those, by identity."""
        places: dict[int, Place] = {}
        for block, tensors in _blocks_of(lists, passing).items():
            if sum(tensor.nbytes for tensor, _ in tensors) <= MOST_INLINE:
                continue  # to copy them costs less
            passed = self.pool.lend_foreign_block(block, [tensor for tensor, _ in tensors])
            if passed is None:
                continue
            if not passed.sent and not self._introduce(passed, block):
                self.pool.take_back(passed)
                continue
            payload.passed.append(passed)
            for tensor, offset in tensors:
                places[id(tensor)] = Place(passed.number, offset, tensor.nbytes)
        return places

    def _introduce(self, passed: PassedBlock, block: MappedBlock) -> bool:
        """Sends a block's descriptor; False if that is not possible now."""
        message = encode(Kind.BLOCK, 0, b"", (), passed.number, block.memory.nbytes, True)
        with self.channel.lock:  # another thread may just be sending it
            try:
                if not passed.sent:
                    self.channel.send([message], (block.fd,))
                    passed.sent = True
            except (ChannelClosedError, OSError):
                pass  # the tensors are copied
        return passed.sent

    def send(
        self,
        kind: Kind,
        subject: int = 0,
        fields: bytes = b"",
        payload: Payload | None = None,
        texts: Sequence[bytes] = (),
    ) -> None:
        """Sends a message, and the numbers of blocks to give back with it.

        Args:
            kind: Its kind.
            subject: Number of a batch, a request or a call.
            fields: Its fields, without the description of the tensors.
            payload: Its tensors.
            texts: Its texts, without those of the tensors.

        Raises:
            ChannelClosedError: The channel is closed.
            OSError: No memory or no descriptor; nothing was sent.
        """
        if self.pool.dropped:
            self.channel.send([encode(Kind.DROP, 0, encode_numbers(self.pool.take_dropped()))])
        mappings, sent, channel = self.mappings, self._sent, self.channel
        data: Sequence[Buffer] = ()
        block: Block | None = None
        released = mappings.take_released(MOST_RELEASED) if mappings.released else []
        all_texts = tuple(texts)
        try:
            if payload is not None:
                fields += payload.fields
                all_texts = (*texts, *payload.texts)
                data, block = payload.data, payload.block
            large = len(fields) + sum(map(len, data)) > _MOST_FIELDS
            if released and (large or sum(map(len, all_texts)) > _MOST_NEW_TEXTS):
                # It may go in a file, and a receiver that can't read that would not get them back.
                channel.send([encode(Kind.RELEASE, released=released)])
                released = []
            place = _NO_BLOCK if block is None else (block.number, block.size, block.fd >= 0)
            passed = (
                [each.number for each in payload.passed] if payload is not None and payload.passed else ()
            )
            if large or not all_texts:
                encoded = encode_texts(all_texts)
                self._post(encode(kind, subject, fields, data, *place, released, encoded, passed), block)
                return
            with channel.lock:
                if self._numbering:
                    encoded = encode_texts(all_texts)
                    self._post(encode(kind, subject, fields, data, *place, released, encoded, passed), block)
                    return
                self._numbering = True
                try:
                    known = sent.encoded.get(all_texts)
                    encoded = self._encode_new(all_texts, data) if known is None else known
                    packet = encode(kind, subject, fields, data, *place, released, encoded, passed)
                    if block is None:
                        channel.send([packet])
                    else:
                        self._post(packet, block)
                except BaseException:  # raised again
                    sent.forget()
                    raise
                finally:
                    self._numbering = False
        except BaseException:  # raised again
            mappings.put_back(released)
            if payload is not None:
                self.discard_payload(payload)
            raise

    def _encode_new(self, texts: tuple[bytes, ...], data: Sequence[Buffer]) -> bytes:
        """Encodes texts of which the receiver may lack some; without numbers if a file may take them."""
        padded = sum(map(len, texts)) + 8 * (len(texts) + len(data)) > _MOST_NEW_TEXTS
        return encode_texts(texts) if padded else self._sent.encode(texts)

    def _post(self, packet: bytes, block: Block | None) -> None:
        """Sends a packet, and the descriptor of its block the first time."""
        if block is None or block.fd < 0:
            self.channel.send([packet])
            return
        # The other side may return the block, and another thread reuse it, before this thread continues.
        fd, block.fd = block.fd, -1
        try:
            self.channel.send([packet], (fd,))
        except BaseException:  # raised again
            block.fd = fd
            raise
        os.close(fd)

    def discard_payload(self, payload: Payload) -> None:
        """Frees a payload that is not sent. May be called twice."""
        block, payload.block = payload.block, None
        if block is not None:
            self.pool.discard_block(block)
        passed, payload.passed = payload.passed, []
        for each in passed:
            self.pool.take_back(each)
        lent, payload.lent = payload.lent, []
        if self.devices is not None:
            for number in lent:
                self.devices.return_memory(number)

    def _release_many(self) -> None:
        """Returns blocks at once; never blocks, whatever its caller holds."""
        mappings = self.mappings
        released = mappings.take_released(MOST_RELEASED)
        if not self.channel.try_send([encode(Kind.RELEASE, released=released)]):
            mappings.put_back(released)

    def tidy(self) -> None:
        """Returns idle memory in messages of its own; never blocks.

        The server calls it periodically; the worker's end follows when it receives the server's message.
        """
        self.pool.tidy()
        if self.devices is not None:
            self.devices.tidy()
        dropped = self.pool.take_dropped()
        packet = [encode(Kind.DROP, 0, encode_numbers(dropped))]
        if dropped and not self.channel.try_send(packet):
            self.pool.put_back_dropped(dropped)
        if self.mappings.released or (self.mappings.count and not self.in_worker):
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
                message = ReceivedMessage(packet)
                failure = self._map(message, fds) if message.flags & (NEW_BLOCK | OUTLINE) else None
                message.others = self._lend_passed(message) if message.passed else _NO_OTHERS
            finally:
                for fd in fds:
                    os.close(fd)
            for number in message.released:
                if number < RETURNED:
                    self.pool.return_block(number)
                elif self.devices is not None:
                    self.devices.return_memory(number & ~RETURNED)
                else:
                    raise WireError(f"tensor {number & ~RETURNED} is given back, but is not lent")
            if not message.numbers:
                message.texts = ()
            elif message.contents or message.reset:
                message.texts = self._received.take_texts(message)
            else:
                try:
                    message.texts = list(map(self._received.known.__getitem__, message.numbers))
                except IndexError:
                    raise WireError(f"there is no text {max(message.numbers)}") from None
            kind = message.kind
            if kind is Kind.RELEASE or kind is Kind.DROP or kind is Kind.UNMAPPED or kind is Kind.BLOCK:
                self._take_blocks(message)
                self.mark_handled()
                continue
            message.stream, message.unmapped, message.unreachable = self, failure, None
            message.position = message.texts_read = 0
            message.placed = False
            message.root = None
            if failure is not None:
                if message.outline:
                    lose(message)
            elif message.block:
                message.root = self.mappings.lend(message.block)
            if len(message.data):
                # One copy for all small tensors: the next message overwrites the buffer.
                message.data = memoryview(bytearray(message.data)) if self.in_worker else bytes(message.data)
            return message

    def _take_blocks(self, message: Message) -> None:
        """Handles a message that is only about blocks."""
        if message.kind is Kind.RELEASE:
            if self.in_worker:
                self.tidy()
            return
        if message.kind is Kind.BLOCK:
            return  # it is mapped, or asked for again by `UNMAPPED`
        for number in decode_numbers(message.fields):
            if message.kind is Kind.DROP:
                self.mappings.drop(number)
            else:
                self.pool.unmapped(number)

    def _map(self, message: Message, fds: Sequence[int]) -> UnmappedError | None:
        """Maps a message's new block; returns the error if that fails or if the message itself is lost.

        Raises:
            WireError: The block or its descriptor is missing.
        """
        error = unmapped_error()
        if message.new_block and fds:
            try:
                if message.kind is Kind.BLOCK:
                    self._check_passing()
                    self.mappings.add_passed(message.block, fds[0])
                    return None
                self.mappings.map_block(message.block, message.block_size, fds[0])
                return None
            except OSError as failed:
                error = unmapped_error(str(failed))
        elif message.new_block and not self.channel.fds_lost:
            raise WireError("a new block has come without its descriptor")
        if message.block and message.kind is not Kind.BLOCK:
            self.channel.send([encode(Kind.UNMAPPED, 0, encode_numbers([message.block]))])
        return error

    def _lend_passed(self, message: ReceivedMessage) -> dict[int, Array | UnmappedError]:
        """The memory of third processes' blocks that a message lends; those that are not there are returned.

        Raises:
            WireError: This side gets none.
        """
        self._check_passing()
        found: dict[int, Array | UnmappedError] = {}
        for number in message.passed:
            memory = None if message.outline else self.mappings.lend_passed(number)
            if memory is None:
                self.channel.send([encode(Kind.UNMAPPED, 0, encode_numbers([number]))])
            found[number] = unmapped_error() if memory is None else memory
        return found

    def _check_passing(self) -> None:
        if not (self.in_worker or self.trusted):
            raise WireError("a worker passes on no blocks")

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
