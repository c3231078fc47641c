"""Lists of tensors with one description arrive like others, and others are not sent that way."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from conch.core.tensor import Tensor
from conch.workers.connection.message_stream import MessageStream
from conch.workers.connection.packet_channel import PacketChannel
from conch.workers.protocol import tensor_layouts, wire
from conch.workers.protocol.wire import Kind


def _floats(count: int, name: str = "A") -> Tensor:
    return Tensor.from_array(name, np.arange(count, dtype=np.float32))


def _flags(count: int, name: str = "B") -> Tensor:
    return Tensor(name, "BOOL", (count,), bytes([1] * count))


def _text(text: bytes) -> Tensor:
    return Tensor.from_array("T", np.array([text], np.object_))


Send = Callable[[list[list[Tensor]], bool], list[list[Tensor]]]

MOST = wire.MOST_INLINE // 4

HOMOGENEOUS = {
    "one": [[_floats(4)]],
    "several": [[_floats(4)], [_floats(4)], [_floats(4)]],
    "of several tensors": [[_floats(4), _flags(8)], [_floats(4), _flags(8)]],
    "that have to be filled up": [[_flags(3), _floats(1)], [_flags(3), _floats(1)], [_flags(3), _floats(1)]],
    "with gaps": [[Tensor.from_array("A", np.arange(8, dtype=np.float32)[::2])]] * 2,
    "empty tensors": [[_floats(0), _flags(0)]] * 3,
    "no tensors": [[], [], []],
    "as much as there may be": [[_floats(MOST // 2)], [_floats(MOST // 2)]],
    "without a numpy type": [[Tensor("A", "BF16", (1, 3), bytes(6))]] * 2,
}

OTHERS: dict[str, list[list[Tensor]]] = {
    "none": [],
    "other names": [[_floats(4)], [_floats(4, "B")]],
    "other datatypes": [[_floats(1)], [Tensor("A", "INT32", (1,), bytes(4))]],
    "other shapes": [[_floats(4)], [_floats(4)], [_floats(5)]],
    "another order": [[_floats(1), _flags(1)], [_flags(1), _floats(1)]],
    "more of them": [[_floats(4)], [_floats(4), _floats(4)], []],
    "the last one has more": [[_floats(4)], [_floats(4), _floats(4)]],
    "texts": [[_text(b"abc")], [_text(b"abc")]],
    "a text among others": [[_floats(2), _text(b"abc")], [_floats(2), _text(b"")]],
    "large": [[_floats(MOST // 2)], [_floats(MOST // 2)], [_floats(MOST // 2)]],
    "one large": [[_floats(MOST + 1)]],
}


@pytest.fixture(params=["to the worker", "to the server"])
def send(
    request: pytest.FixtureRequest,
) -> Iterator[Send]:
    """Sends lists to the other side, which reads them as the sender says."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server, worker = MessageStream(PacketChannel(ends[0]), False), MessageStream(PacketChannel(ends[1]), True)
    source, target = (server, worker) if request.param == "to the worker" else (worker, server)

    def sent(lists: list[list[Tensor]], homogeneous: bool) -> list[list[Tensor]]:
        payload = source.pack(lists)
        assert (payload.homogeneous is not None) is homogeneous
        fields = payload.homogeneous if payload.homogeneous is not None else b"".join(payload.lists)
        source.send(Kind.DONE, 7, fields, payload)
        received = target.receive()
        read = (
            received.homogeneous_tensors(len(lists)) if homogeneous else [received.tensors() for _ in lists]
        )
        received.reader.end()
        return read

    try:
        yield sent
    finally:
        for side in (server, worker):
            side.channel.close()
            side.close()


@pytest.mark.parametrize(
    ("lists", "homogeneous"),
    [(lists, True) for lists in HOMOGENEOUS.values()] + [(lists, False) for lists in OTHERS.values()],
    ids=[*HOMOGENEOUS, *OTHERS],
)
def test_lists_arrive_as_they_were_sent(lists: list[list[Tensor]], homogeneous: bool, send: Send) -> None:
    for _ in range(2):  # the second time its description is known
        assert [
            [(each.name, each.datatype, each.shape, bytes(each.data)) for each in tensors]
            for tensors in send(lists, homogeneous)
        ] == [
            [(each.name, each.datatype, each.shape, bytes(each.data)) for each in tensors]
            for tensors in lists
        ]


def test_small_inputs_can_be_written_to_and_do_not_share_their_memory(
    send: Send,
) -> None:
    (first,), (second,) = send([[_floats(4)], [_floats(4)]], True)
    assert (second.numpy() == np.arange(4)).all()
    if first.writable:  # in a worker
        first.numpy()[:] = 7
        assert (second.numpy() == np.arange(4)).all()
    else:
        assert not first.numpy().flags.writeable


def test_a_datatype_that_does_not_exist_is_for_the_other_side_to_refuse() -> None:
    layouts = tensor_layouts.Layouts()
    fields = tensor_layouts.encode_inline(layouts, (("A", "FP33", (1,)),), [bytes(8)])
    with pytest.raises(wire.WireError, match="there is no datatype 'FP33'"):
        tensor_layouts.decode_tensors(layouts, wire.Reader(memoryview(fields)))
