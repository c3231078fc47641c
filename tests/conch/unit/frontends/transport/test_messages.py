"""Length-prefixed messages: however their bytes are cut, the same messages come out."""

from __future__ import annotations

import gzip
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conch.core.tensor import Buffer
from conch.frontends.grpc.transport.messages import (
    OWN_BUFFER_BYTES,
    PREFIX,
    CompressedMessage,
    MessageError,
    MessageReader,
    Received,
    compress,
)

MOST = 300_000
SIZES = st.sampled_from([0, 1, 4, 5, 100, OWN_BUFFER_BYTES - 1, OWN_BUFFER_BYTES, OWN_BUFFER_BYTES + 1, MOST])


def buffer(message: Received) -> Buffer:
    assert not isinstance(message, CompressedMessage)
    return message


def fed(reader: MessageReader, data: bytes, start: int, end: int) -> list[Received]:
    """The messages that are complete with a piece of data."""
    found: list[Received] = []
    while start < end and reader.failure is None:
        start, message = reader.feed(data, start, end)
        if message is not None:
            found.append(message)
    return found


def framed(message: bytes, flag: int = 0) -> bytes:
    return PREFIX.pack(flag, len(message)) + message


@given(st.lists(SIZES, max_size=4), st.data())
def test_any_cuts(sizes: list[int], data: st.DataObject) -> None:
    messages = [bytes([index + 1]) * size for index, size in enumerate(sizes)]
    wire = b"".join(map(framed, messages))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=6)))
    reader = MessageReader(MOST, "identity")
    found: list[bytes] = []
    position = 0
    for cut in [*cuts, len(wire)]:
        room = reader.receive_buffer()
        if room is not None and data.draw(st.booleans()):  # received into the message's own buffer
            count = min(len(room), cut - position)
            room[:count] = wire[position : position + count]
            position += count
            message = reader.received(count)
            if message is not None:
                found.append(bytes(buffer(message)))
        # In the middle of a larger buffer, as DATA frames are.
        found += map(bytes, map(buffer, fed(reader, b"##" + wire[:cut] + b"##", position + 2, cut + 2)))
        position = cut
    assert found == messages
    assert reader.empty


def test_a_message_over_the_limit_is_refused_by_its_prefix() -> None:
    """Those before it are taken."""
    reader = MessageReader(10, "identity")
    wire = framed(b"one") + PREFIX.pack(0, 11) + b"x"
    assert fed(reader, wire, 0, len(wire)) == [b"one"]
    assert str(reader.failure) == "Received message larger than max (11 vs. 10)"
    assert reader.failure is not None
    assert reader.failure.status == 8


def test_an_announced_length_takes_no_memory() -> None:
    reader = MessageReader(2**31 - 1, "identity")
    reader.feed(PREFIX.pack(0, 2**31 - 1) + b"x", 0, 6)
    room = reader.receive_buffer()
    assert room is not None
    assert len(room) < 2 << 20


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_compressed(encoding: str) -> None:
    message = b"conch" * 1000
    packed = gzip.compress(message) if encoding == "gzip" else zlib.compress(message)
    for each in (packed, compress(message, encoding)):
        wire = framed(each, 1)
        (found,) = fed(MessageReader(MOST, encoding), wire, 0, len(wire))
        assert isinstance(found, CompressedMessage)
        assert found.plain(lambda size: None) == message
    with pytest.raises(MessageError, match="larger than max") as raised:
        CompressedMessage(packed, encoding, len(message) - 1).plain(lambda size: None)
    assert raised.value.status == 8
    for broken in (b"no " + encoding.encode(), packed[:-3], packed + b"more"):
        with pytest.raises(MessageError, match=encoding) as raised:
            CompressedMessage(broken, encoding, MOST).plain(lambda size: None)
        assert raised.value.status == 13


@pytest.mark.parametrize("flag", [1, 2, 255])
def test_a_wrong_compression_flag(flag: int) -> None:
    wire = framed(b"x", flag)
    reader = MessageReader(MOST, "identity")
    assert fed(reader, wire, 0, len(wire)) == []
    assert reader.failure is not None
    assert reader.failure.status == 13
