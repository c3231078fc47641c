"""Lists of tensors arrive as they were sent, whether their description is known already or not."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from conch.core.tensor import NUMPY_DTYPES, Tensor
from conch.workers.connection.message_stream import MessageStream
from conch.workers.connection.packet_channel import PacketChannel
from conch.workers.protocol import wire
from conch.workers.protocol.wire import Kind

Lists = list[list[Tensor]]
Send = Callable[[Lists], Lists]

MOST = wire.MOST_INLINE // 4


def _floats(count: int, name: str = "A") -> Tensor:
    return Tensor.from_array(name, np.arange(count, dtype=np.float32))


def _flags(count: int, name: str = "B") -> Tensor:
    return Tensor(name, "BOOL", (count,), bytes([1] * count))


def _text(text: bytes) -> Tensor:
    return Tensor.from_array("T", np.array([text], np.object_))


LISTS: dict[str, Lists] = {
    "one": [[_floats(4)]],
    "several": [[_floats(4)], [_floats(4)], [_floats(4)]],
    "of several tensors": [[_floats(4), _flags(8)], [_floats(4), _flags(8)]],
    "that have to be filled up": [[_flags(3), _floats(1)], [_flags(3), _floats(1)], [_flags(3), _floats(1)]],
    "with gaps": [[Tensor.from_array("A", np.arange(8, dtype=np.float32)[::2])]] * 2,
    "empty tensors": [[_floats(0), _flags(0)]] * 3,
    "no tensors": [[], [], []],
    "as much as there may be": [[_floats(MOST // 2)], [_floats(MOST // 2)]],
    "without a numpy type": [[Tensor("A", "BF16", (1, 3), bytes(6))]] * 2,
    "none": [],
    "other names": [[_floats(4)], [_floats(4, "B")]],
    "other datatypes": [[_floats(1)], [Tensor("A", "INT32", (1,), bytes(4))]],
    "other shapes": [[_floats(4)], [_floats(4)], [_floats(5)]],
    "another order": [[_floats(1), _flags(1)], [_flags(1), _floats(1)]],
    "more of them": [[_floats(4)], [_floats(4), _floats(4)], []],
    "texts": [[_text(b"abc")], [_text(b"abcd")]],
    "a text among others": [[_floats(2), _text(b"abc")], [_floats(2), _text(b"")]],
    "texts and other shapes": [[_text(b"abc")], [_floats(3)]],
    "large": [[_floats(MOST // 2)], [_floats(MOST // 2)], [_floats(MOST // 2)]],
    "one large": [[_floats(MOST + 1)]],
    "large and others": [[_floats(MOST + 1)], [_text(b"a"), _floats(1)]],
}


@pytest.fixture(params=["to the worker", "to the server"])
def send(request: pytest.FixtureRequest) -> Iterator[Send]:
    """Sends lists to the other side, which reads them."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server, worker = MessageStream(PacketChannel(ends[0]), False), MessageStream(PacketChannel(ends[1]), True)
    source, target = (server, worker) if request.param == "to the worker" else (worker, server)

    def sent(lists: Lists) -> Lists:
        payload = source.pack(lists)
        source.send(Kind.DONE, 7, payload.fields, payload)
        return target.receive().lists(len(lists))

    try:
        yield sent
    finally:
        for side in (server, worker):
            side.channel.close()
            side.close()


def _contents(lists: Lists) -> list[list[tuple[str, str, tuple[int, ...], bytes]]]:
    return [[(each.name, each.datatype, each.shape, bytes(each.data)) for each in one] for one in lists]


@pytest.mark.parametrize("lists", LISTS.values(), ids=LISTS.keys())
def test_lists_arrive_as_they_were_sent(lists: Lists, send: Send) -> None:
    for _ in range(2):  # the second time their description is known
        assert _contents(send(lists)) == _contents(lists)


def test_small_inputs_can_be_written_to_and_do_not_share_their_memory(send: Send) -> None:
    for tensor in (_floats(3), Tensor("A", "UINT8", (5,), bytes(5)), Tensor("A", "INT64", (), bytes(8))):
        (first,), (second,) = send([[tensor], [tensor]])
        before = bytes(second.data)
        if not first.writable:  # in the server
            assert not first.numpy().flags.writeable
            continue
        array = first.numpy()
        assert (array.dtype, array.shape) == (NUMPY_DTYPES[tensor.datatype], tensor.shape)
        array[...] = 9
        assert (np.frombuffer(first.data, array.dtype) == 9).all()
        assert bytes(second.data) == before
