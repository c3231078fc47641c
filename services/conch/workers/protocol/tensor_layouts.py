"""Encodes lists of tensors: their layout, and where the bytes of each are.

A layout (names, datatypes, shapes) is the same for most requests of a model, so both sides keep it parsed.
Small tensors lie in the message, list after list, each on a multiple of eight; only strings need sizes. For
others a place names the block that comes with the message, or one of the receiver's (`RETURNED` set). A place
on a GPU has `ON_DEVICE` set, is followed by GPU UUID and IPC handle, and carries a number for the receiver to
return after use, or 0 if the sender needs no notice.
Used by: `tensor_transport` (sender), `received_message` (receiver), `devices`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from conch.core.tensor import ELEMENT_SIZES, Buffer
from conch.workers.protocol.wire import Reader, WireError, encode_json

ON_DEVICE = 1 << 32
"""Set in the place of a tensor on a GPU."""

UUID_BYTES = 16
HANDLE_BYTES = 64

_MOST_LAYOUTS = 512
"""Entries of each cache of layouts; a full cache is emptied."""

_LIST = struct.Struct("<IIB")
"""Bytes of the layout, number of tensors, and whether their bytes are in the message."""
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


class Layout(NamedTuple):
    """The layout of a list, as received.

    Attributes:
        strings: Whether the message has sizes of its own.
        spans: Start and end of each tensor in the message; empty with `strings`.
        nbytes: Bytes of the list in the message, padding included.
    """

    tensors: tuple[TensorLayout, ...]
    strings: bool
    spans: tuple[tuple[TensorLayout, int, int], ...]
    nbytes: int


class Description(NamedTuple):
    """The layout of a list, as sent.

    Attributes:
        inline: Encoded, for tensors in the message.
        placed: Encoded, for tensors in blocks.
        strings: Whether sizes follow.
        nbytes: Bytes of all tensors; -1 if the layout does not say.
        aligned: Whether no tensor needs padding.
    """

    inline: bytes
    placed: bytes
    strings: bool
    nbytes: int
    aligned: bool


class Place(NamedTuple):
    """Where a tensor's bytes are.

    Attributes:
        source: Number of a block, or 0 for the message.
        offset: From the start of the block, or of the list in the message.
        device: GPU UUID and IPC handle; empty for host memory.
    """

    source: int
    offset: int
    nbytes: int
    device: bytes = b""


class Layouts:
    """Layouts that one side has sent or received; bounded caches."""

    def __init__(self) -> None:
        self._encoded: dict[LayoutKey, Description] = {}
        self._decoded: dict[bytes, Layout] = {}
        self._homogeneous: dict[bytes, Layout] = {}

    def encode(self, key: LayoutKey) -> Description:
        """The description of a list.

        Raises:
            WireError: The receiver would refuse it.
        """
        encoded = self._encoded.get(key)
        if encoded is None:
            _check_key(key)
            encoded = _description(key)
            if len(self._encoded) >= _MOST_LAYOUTS:
                self._encoded.clear()
            self._encoded[key] = encoded
        return encoded

    def decode(self, text: bytes) -> Layout:
        """Parses a layout.

        Raises:
            WireError: It is malformed.
        """
        decoded = self._decoded.get(text)
        if decoded is None:
            decoded = _layout(_parse_layout(text))
            if len(self._decoded) >= _MOST_LAYOUTS:
                self._decoded.clear()
            self._decoded[text] = decoded
        return decoded

    def decode_homogeneous(self, reader: Reader) -> Layout:
        """Reads the one description of all lists, at the end of the fields; sizes are fixed.

        Raises:
            WireError: It is malformed, or has strings or places.
        """
        text = bytes(reader.rest())
        layout = self._homogeneous.get(text)
        if layout is None:
            whole = Reader(memoryview(text))
            length, count, inline = whole.unpack(_LIST)
            layout = self.decode(bytes(whole.take(length)))
            if count != len(layout.tensors) or inline > 1:
                raise _miscounted(count, layout)
            if layout.strings or not inline:
                raise WireError("lists of strings, and of tensors in blocks, can't be alike")
            whole.end()
            if len(self._homogeneous) >= _MOST_LAYOUTS:
                self._homogeneous.clear()
            self._homogeneous[text] = layout
        return layout


def encode_tensors(layouts: Layouts, key: LayoutKey, places: Sequence[Place]) -> bytes:
    """Encodes a list of tensors in blocks."""
    return b"".join(
        [layouts.encode(key).placed, *[_PLACE.pack(*place[:3]) + place.device for place in places]]
    )


def encode_inline(layouts: Layouts, key: LayoutKey, parts: Sequence[Buffer]) -> bytes:
    """Encodes a list of tensors whose bytes are in the message."""
    description = layouts.encode(key)
    if description.strings:
        return description.inline + struct.pack(f"<{len(parts)}Q", *map(len, parts))
    return description.inline


def decode_tensors(
    layouts: Layouts, reader: Reader
) -> tuple[Sequence[tuple[TensorLayout, int, int]], int, Sequence[tuple[TensorLayout, Place]]]:
    """Reads a list of tensors; `ReceivedMessage` checks the places.

    Returns:
        Tensors in the message, with start and end from the start of the list; their bytes with padding;
        tensors in blocks.

    Raises:
        WireError: The list is malformed, or a size does not match its shape.
    """
    length, count, inline = reader.unpack(_LIST)
    layout = layouts.decode(bytes(reader.take(length)))
    if count != len(layout.tensors) or inline > 1:
        raise _miscounted(count, layout)
    if inline:
        if not layout.strings:
            return layout.spans, layout.nbytes, ()
        sizes = reader.unpack(struct.Struct(f"<{count}Q"))
        for tensor, size in zip(layout.tensors, sizes, strict=True):
            _check_size(tensor, size)
        return *_spans(layout.tensors, sizes), ()
    tensors: list[tuple[TensorLayout, Place]] = []
    for tensor in layout.tensors:
        place = Place(*reader.unpack(_PLACE))
        _check_size(tensor, place.nbytes)
        if place.source & ON_DEVICE:
            if tensor.nbytes < 0:
                raise WireError(f"tensor '{tensor.name}' of {tensor.datatype} can't be on a GPU")
            place = place._replace(device=bytes(reader.take(UUID_BYTES + HANDLE_BYTES)))
        tensors.append((tensor, place))
    return (), 0, tensors


def _check_key(key: LayoutKey) -> None:
    for name, datatype, shape in key:
        if not all(0 <= dim <= _MOST_DIM for dim in shape):
            raise WireError(f"tensor '{name}' can't be sent: {datatype} of shape {list(shape)}")


def _description(key: LayoutKey) -> Description:
    text = encode_json(key)
    inline, placed = (_LIST.pack(len(text), len(key), there) + text for there in (True, False))
    strings = any(datatype == "BYTES" for _, datatype, _ in key)
    if not all(datatype in ELEMENT_SIZES for _, datatype, _ in key):
        return Description(inline, placed, strings, -1, False)
    sizes = [prod(shape) * ELEMENT_SIZES[datatype] for _, datatype, shape in key]
    return Description(inline, placed, strings, sum(sizes), not any(size % 8 for size in sizes))


def _layout(tensors: tuple[TensorLayout, ...]) -> Layout:
    if any(tensor.nbytes < 0 for tensor in tensors):
        return Layout(tensors, True, (), 0)
    return Layout(tensors, False, *_spans(tensors, [tensor.nbytes for tensor in tensors]))


def _spans(
    tensors: Sequence[TensorLayout], sizes: Sequence[int]
) -> tuple[tuple[tuple[TensorLayout, int, int], ...], int]:
    spans = []
    start = 0
    for tensor, size in zip(tensors, sizes, strict=True):
        spans.append((tensor, start, start + size))
        start += size + -size % 8
    return tuple(spans), start


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


def _miscounted(count: int, layout: Layout) -> WireError:
    return WireError(f"a list of {count} tensors has a layout of {len(layout.tensors)}")


def _check_size(tensor: TensorLayout, nbytes: int) -> None:
    if tensor.nbytes not in (-1, nbytes):
        raise WireError(f"tensor '{tensor.name}' has {nbytes} bytes, not {tensor.nbytes}")
