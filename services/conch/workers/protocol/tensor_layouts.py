"""Describes the tensors of a message: their layouts, and where the bytes of each are.

    =====================  ==========================================================================
    part                   contents
    =====================  ==========================================================================
    head                   number of lists; whether one layout serves all; whether tensors are placed
    layouts                JSON: name, datatype and shape of each tensor; one, or one for each list
    sizes, if in message   of lists with strings, of each tensor
    places, if placed      of each tensor: number of a block, offset, bytes; on a GPU UUID and handle
    =====================  ==========================================================================

Tensors in the message lie list after list, each on a multiple of eight. A place names the block that comes
with the message, or one of the receiver's (`RETURNED` set). A place on a GPU has `ON_DEVICE` set, and a
number for the receiver to return after use, or 0 if the sender needs no notice. Both sides keep layouts
parsed: those of most requests of a model are the same.
Used by: `tensor_transport` (sender), `received_message` (receiver), `devices`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from conch.core.recognition import Table
from conch.core.tensor import ELEMENT_SIZES
from conch.workers.protocol.wire import Reader, WireError, encode_json

ON_DEVICE = 1 << 32
"""Set in the place of a tensor on a GPU."""

UUID_BYTES = 16
HANDLE_BYTES = 64

_MOST_LAYOUTS = 512
"""Entries of each cache of layouts; a full cache is emptied."""

_HEAD = struct.Struct("<IB")
_COMMON, _PLACED = 1, 2
_LENGTH = struct.Struct("<I")
_PLACE = struct.Struct("<QQQ")
_MOST_DIM = (1 << 63) - 1

LayoutKey = tuple[tuple[str, str, tuple[int, ...]], ...]
"""Name, datatype and shape of each tensor of a list."""


class TensorLayout(NamedTuple):
    """A tensor without its data; `nbytes` is -1 if only the message has the size, as for BYTES."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    nbytes: int


class Span(NamedTuple):
    """Where a tensor lies in its list, in the message."""

    tensor: TensorLayout
    start: int
    nbytes: int


class Layout(NamedTuple):
    """The layout of a list, as received.

    Attributes:
        spans: The tensors in the message; empty if sizes follow, as for strings.
        nbytes: Bytes of the list in the message, padding included; -1 if sizes follow.
    """

    tensors: tuple[TensorLayout, ...]
    spans: tuple[Span, ...]
    nbytes: int


class Description(NamedTuple):
    """The layout of a list, as sent.

    Attributes:
        text: Encoded, with its length.
        nbytes: Bytes of all tensors; -1 if the layout does not say.
        aligned: Whether no tensor needs padding.
    """

    text: bytes
    nbytes: int
    aligned: bool


class Place(NamedTuple):
    """Where a tensor's bytes are: the number of a block, the offset there; UUID and handle if on a GPU."""

    source: int
    offset: int
    nbytes: int
    device: bytes = b""

    def encode(self) -> bytes:
        """Encodes the place."""
        return _PLACE.pack(*self[:3]) + self.device


class Layouts:
    """Layouts that one side has sent or received; in bounded tables."""

    def __init__(self) -> None:
        self._encoded: Table[LayoutKey, Description] = Table(_MOST_LAYOUTS)
        self._decoded: Table[bytes, Layout] = Table(_MOST_LAYOUTS)
        # Descriptions of lists in the message with one layout for all, which say everything.
        self.whole: Table[bytes, tuple[int, Layout]] = Table(_MOST_LAYOUTS)

    def encode(self, key: LayoutKey) -> Description:
        """The description of a list.

        Raises:
            WireError: The receiver would refuse it.
        """
        return self._encoded.get(key) or self._encoded.keep(key, _description(key))

    def read(self, reader: Reader) -> Layout:
        """Reads a layout.

        Raises:
            WireError: It is malformed.
        """
        (length,) = reader.unpack(_LENGTH)
        text = bytes(reader.take(length))
        return self._decoded.get(text) or self._decoded.keep(text, _layout(_parse_layout(text)))

    def recognise(self, text: bytes, count: int, layout: Layout) -> None:
        """Keeps a description of `count` lists with one layout, and nothing else."""
        self.whole.keep(text, (count, layout))


def encode_head(count: int, common: bool, placed: bool, layouts: Sequence[Description]) -> bytes:
    """Encodes the head of a description of `count` lists, and their layouts."""
    head = _HEAD.pack(count, (_COMMON if common else 0) | (_PLACED if placed else 0))
    if common:
        return head + layouts[0].text
    return b"".join([head, *[layout.text for layout in layouts]])


def read_head(reader: Reader, count: int) -> tuple[bool, bool]:
    """Reads the head of a description of `count` lists; whether it has one layout for all, and places.

    Raises:
        WireError: It is malformed.
    """
    described, flags = reader.unpack(_HEAD)
    if described != count or flags > _COMMON + _PLACED:
        raise WireError(f"{described} lists of tensors are described, not {count}")
    return flags & _COMMON != 0, flags & _PLACED != 0


def encode_sizes(sizes: Sequence[int]) -> bytes:
    """Encodes the sizes of tensors in the message."""
    return struct.pack(f"<{len(sizes)}Q", *sizes)


def read_sizes(reader: Reader, layout: Layout) -> Layout:
    """Reads the sizes of a list's tensors in the message; the layout with spans.

    Raises:
        WireError: A size does not match its shape.
    """
    sizes = reader.unpack(struct.Struct(f"<{len(layout.tensors)}Q"))
    for tensor, size in zip(layout.tensors, sizes, strict=True):
        _check_size(tensor, size)
    return _with_spans(layout.tensors, sizes)


def read_place(reader: Reader, tensor: TensorLayout) -> Place:
    """Reads a place; `ReceivedMessage` checks whether it lies in its memory.

    Raises:
        WireError: It is malformed, or its size does not match the tensor's shape.
    """
    place = Place(*reader.unpack(_PLACE))
    _check_size(tensor, place.nbytes)
    if place.source & ON_DEVICE:
        if tensor.nbytes < 0:
            raise WireError(f"tensor '{tensor.name}' of {tensor.datatype} can't be on a GPU")
        place = place._replace(device=bytes(reader.take(UUID_BYTES + HANDLE_BYTES)))
    return place


def _description(key: LayoutKey) -> Description:
    for name, datatype, shape in key:
        if not all(0 <= dim <= _MOST_DIM for dim in shape):
            raise WireError(f"tensor '{name}' can't be sent: {datatype} of shape {list(shape)}")
    text = encode_json(key)
    text = _LENGTH.pack(len(text)) + text
    if not all(datatype in ELEMENT_SIZES for _, datatype, _ in key):
        return Description(text, -1, False)
    sizes = [prod(shape) * ELEMENT_SIZES[datatype] for _, datatype, shape in key]
    return Description(text, sum(sizes), not any(size % 8 for size in sizes))


def _layout(tensors: tuple[TensorLayout, ...]) -> Layout:
    if any(tensor.nbytes < 0 for tensor in tensors):
        return Layout(tensors, (), -1)
    return _with_spans(tensors, [tensor.nbytes for tensor in tensors])


def _with_spans(tensors: tuple[TensorLayout, ...], sizes: Sequence[int]) -> Layout:
    spans = []
    start = 0
    for tensor, size in zip(tensors, sizes, strict=True):
        spans.append(Span(tensor, start, size))
        start += size + -size % 8
    return Layout(tensors, tuple(spans), start)


def _parse_layout(text: bytes) -> tuple[TensorLayout, ...]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WireError(f"the layout of tensors can't be read: {error}") from None
    if not isinstance(value, list):
        raise WireError("the layout of tensors is not a list")
    return tuple(_tensor_layout(entry) for entry in value)


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


def _check_size(tensor: TensorLayout, nbytes: int) -> None:
    if tensor.nbytes not in (-1, nbytes):
        raise WireError(f"tensor '{tensor.name}' has {nbytes} bytes, not {tensor.nbytes}")
