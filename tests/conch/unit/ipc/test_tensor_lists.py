"""Lists of tensors arrive as they were sent, whether their description is known already or not."""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from conch.core.tensor import NUMPY_DTYPES, Tensor
from conch.ipc import channel as wire
from conch.ipc import tensors as tensors_module
from conch.ipc.channel import Kind, PacketChannel
from conch.ipc.tensors import MessageStream

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
        source.send(Kind.DONE, 7, payload=payload)
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


Ends = tuple[MessageStream, MessageStream]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """Both ends of a connection, the server's first."""
    sockets = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made = (
        MessageStream(PacketChannel(sockets[0], blocking=False), False),
        MessageStream(PacketChannel(sockets[1]), True),
    )
    yield made
    for side in made:
        side.channel.close()
        side.close()


IN_ONE_LAYOUT = (
    *("one", "several", "of several tensors", "that have to be filled up", "with gaps", "empty tensors"),
    *("no tensors", "as much as there may be", "without a numpy type"),
)


@pytest.mark.parametrize("name", [name for name in LISTS if name != "none"])
def test_areas_are_where_lists_lie(name: str, ends: Ends) -> None:
    server, worker = ends
    lists = LISTS[name]
    for _ in range(2):
        server.send(Kind.DONE, 7, payload=server.pack(lists))
        received = worker.receive()
        areas = received.areas(len(lists))
        assert (areas is not None) == (name in IN_ONE_LAYOUT)
        read = received.lists(len(lists))  # also after areas
        assert _contents(read) == _contents(lists)
        found = []
        for layout, words, _ in areas or ():
            places = zip(layout.tensors, words[::2], words[1::2], strict=True)
            found.append([(*each[:3], ctypes.string_at(at, nbytes)) for each, at, nbytes in places])
        assert found == (_contents(read) if areas is not None else [])


# --- what repeats is sent once ---------------------------------------------------------------------------


def _named(name: str) -> Lists:
    return [[_floats(4, name)]]


@pytest.mark.parametrize("worker", [0, 1])
def test_a_layout_that_repeats_is_sent_twice(ends: Ends, worker: int) -> None:
    source, target = ends[worker], ends[1 - worker]
    packets = []
    for _ in range(5):
        source.send(Kind.DONE, payload=source.pack(_named("A" * 100)))
        with socket.socket(fileno=os.dup(target.channel.fileno())) as arrived:
            packets.append(arrived.recv(wire.MOST_PACKET, socket.MSG_PEEK))
        assert _contents(target.receive().lists(1)) == _contents(_named("A" * 100))
    assert [b"A" * 100 in packet for packet in packets] == [True, True, False, False, False]


@pytest.mark.pure("replaces the send of a channel")
def test_a_message_that_is_not_sent_teaches_nothing(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one has all its texts, and the receiver forgets those before."""
    server, worker = ends

    def fails(parts: Sequence[bytes], fds: Sequence[int] = ()) -> None:
        raise OSError(errno.ETOOMANYREFS, "Too many references")

    for _ in range(3):
        for name in ("A", "B"):
            for broken in (False, True, True, False):
                payload = server.pack(_named(name))
                if broken:
                    with monkeypatch.context() as patch, pytest.raises(OSError, match="Too many"):
                        patch.setattr(server.channel, "send", fails)
                        server.send(Kind.DONE, payload=payload)
                    continue
                server.send(Kind.DONE, payload=payload)
                assert _contents(worker.receive().lists(1)) == _contents(_named(name))


def test_a_message_in_a_file_teaches_nothing(ends: Ends) -> None:
    """It can be lost: the receiver may have no descriptor left."""
    server, worker = ends
    for fields in (bytes(wire.MOST_PACKET), b"", bytes(wire.MOST_PACKET), b"", b""):
        server.send(Kind.EXECUTE, 1, fields, server.pack(_named("A")))
        received = worker.receive()
        received.seek(len(fields), 0)
        if fields:
            assert all(number == wire.NEW for number in received.numbers)
        assert _contents(received.lists(1)) == _contents(_named("A"))


@pytest.mark.pure("sends from within a function that is compiled")
def test_a_message_within_another_has_its_own_texts(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the garbage collector runs while a packet is encoded, and the model sends."""
    server, worker = ends
    real = wire.encode
    nested: list[bool] = []

    def encode(kind: Kind, *arguments: Any, **named: Any) -> bytes:
        if kind is Kind.DONE and len(nested) < 10:
            nested.append(True)
            worker.send(Kind.RESPONSES, payload=worker.pack(_named("B")))
        return real(kind, *arguments, **named)

    monkeypatch.setattr(tensors_module, "encode", encode)
    for _ in range(15):
        worker.send(Kind.DONE, payload=worker.pack(_named("A")))
        received = server.receive()
        if received.kind is Kind.RESPONSES:
            assert list(received.numbers) == [wire.NEW]
            assert _contents(received.lists(1)) == _contents(_named("B"))
            received = server.receive()
        assert _contents(received.lists(1)) == _contents(_named("A"))
    assert len(nested) == 10


def test_threads_may_send_what_repeats_and_what_does_not(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables are full now and then."""
    monkeypatch.setattr(wire, "MOST_TEXTS", 8)
    server, worker = ends
    count = 200

    def send_all(thread: int) -> None:
        for number in range(count):
            lists = [[_floats(1 + (number * thread) % 11, f"T{thread}")]]
            worker.send(Kind.DONE, thread, payload=worker.pack(lists))

    threads = [threading.Thread(target=send_all, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for _ in range(count * len(threads)):
        received = server.receive()
        ((tensor,),) = received.lists(1)
        assert tensor.name == f"T{received.subject}"
        assert tensor.numpy().tolist() == list(range(tensor.shape[0]))
    for thread in threads:
        thread.join()


def test_a_connection_begins_with_no_texts(ends: Ends) -> None:
    """As that of a worker that is started again."""
    server, _ = ends
    for _ in range(3):
        server.send(Kind.EXECUTE, payload=server.pack(_named("A")))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    again, worker = MessageStream(PacketChannel(ours), False), MessageStream(PacketChannel(theirs), True)
    try:
        again.send(Kind.EXECUTE, payload=again.pack(_named("A")))
        received = worker.receive()
        assert list(received.numbers) == [wire.NEW]
        assert _contents(received.lists(1)) == _contents(_named("A"))
    finally:
        for side in (again, worker):
            side.channel.close()
            side.close()
