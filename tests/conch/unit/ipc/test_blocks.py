"""Blocks: returned after their last view is gone, dropped when idle, never shrunk."""

from __future__ import annotations

import fcntl
import os
import socket
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from tests.support.clocks import Clock
from tests.support.workers import inline, placed

from conch.core.errors import InternalError
from conch.core.tensor import Tensor
from conch.ipc import channel
from conch.ipc.blocks import IDLE_NS, LEAST_BYTES, MANY, MOST_IDLE, Block, Mappings, Pool, block_size
from conch.ipc.channel import BUFFER_BYTES, ChannelClosedError, Kind, Message, PacketChannel, WireError
from conch.ipc.tensors import BlockTensor, MessageStream, Place

LARGE = np.arange(100_000, dtype=np.float32)


@contextmanager
def exchanges() -> Iterator[tuple[MessageStream, MessageStream]]:
    """The server's side and the worker's, in one process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sides = (
        MessageStream(PacketChannel(ours, blocking=False), False),
        MessageStream(PacketChannel(theirs), True),
    )
    try:
        yield sides
    finally:
        for side in sides:
            side.channel.close()
            side.close()


def send(source: MessageStream, target: MessageStream, tensors: list[Tensor]) -> list[Tensor]:
    payload = source.pack([tensors])
    source.send(Kind.DONE, 0, payload=payload)
    del payload
    return target.receive().lists(1)[0]


def tell(source: MessageStream, target: MessageStream) -> None:
    """Any message: what is to be given back goes with it."""
    source.send(Kind.DONE)
    target.receive()


def test_sizes_are_few() -> None:
    assert block_size(1) == LEAST_BYTES
    assert block_size(LEAST_BYTES) == LEAST_BYTES
    assert block_size(LEAST_BYTES + 1) == 2 * LEAST_BYTES
    assert block_size(4_000_000) == 4 * 1024 * 1024


def test_a_block_is_used_again_when_it_has_been_given_back() -> None:
    pool = Pool()
    first, second = pool.take_block(1000), pool.take_block(1000)
    assert first.number != second.number
    pool.return_block(first.number)
    assert pool.take_block(2000) is first
    assert (pool.count, pool.lent) == (2, 2)
    with pytest.raises(WireError, match="block 7 is given back, but is not lent"):
        pool.return_block(7)
    pool.return_block(second.number)
    with pytest.raises(WireError):
        pool.return_block(second.number)
    pool.close()


def test_a_block_is_used_again_for_its_owner_only() -> None:
    pool = Pool()
    block = pool.take_block(1, "one")
    pool.return_block(block.number)
    assert pool.take_block(1, "another") is not block
    assert pool.take_block(1, "one") is block
    pool.close()


def test_idle_blocks_beyond_the_cap_and_old_ones_are_dropped() -> None:
    clock = Clock()
    pool = Pool(clock, most_idle=2 * LEAST_BYTES)
    blocks = [pool.take_block(1) for _ in range(3)]
    for block in blocks:
        pool.return_block(block.number)
    assert pool.take_dropped() == [blocks[0].number]
    assert pool.take_dropped() == []
    block = pool.take_block(1)
    clock.now = IDLE_NS + 1
    pool.return_block(block.number)
    assert pool.take_dropped() == [blocks[1].number]
    assert pool.count == 1
    pool.close()


def test_not_too_many_blocks_are_idle() -> None:
    pool = Pool()
    blocks = [pool.take_block(1) for _ in range(MOST_IDLE + 3)]
    for block in blocks:
        pool.return_block(block.number)
    assert pool.take_dropped() == [block.number for block in blocks[:3]]
    assert pool.count == MOST_IDLE
    pool.close()


def test_a_view_of_a_block_of_ones_own_keeps_it_lent() -> None:
    pool = Pool()
    block = pool.take_block(1)
    view = pool.view(block.number)[10:20]
    pool.return_block(block.number)
    assert pool.take_block(1) is not block
    del view
    assert pool.take_block(1) is block
    with pytest.raises(WireError, match="block 9 is not lent"):
        pool.view(9)
    pool.close()


def test_blocks_can_neither_shrink_nor_grow() -> None:
    block = Block(1, LEAST_BYTES)
    for size in (0, 2 * LEAST_BYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(block.fd, size)
    block.sent()


@pytest.mark.parametrize("kind", ["not sealed", "a file", "a pipe", "another size", "holes"])
def test_what_is_no_block_is_not_mapped(kind: str, tmp_path: object) -> None:
    mappings = Mappings(False, lambda: None)
    more: list[int] = []
    size = 1 << 31 if kind == "holes" else LEAST_BYTES
    if kind == "a pipe":
        fd, *more = os.pipe()
    elif kind == "a file":
        fd = os.open(f"{tmp_path}/file", os.O_RDWR | os.O_CREAT)
        os.ftruncate(fd, LEAST_BYTES)
    else:
        fd = os.memfd_create("x", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, 4096 if kind == "another size" else size)
        if kind != "not sealed":
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    try:
        with pytest.raises(WireError):
            mappings.map_block(1, size, fd)
        assert mappings.count == 0
    finally:
        for each in (fd, *more):
            os.close(each)


def test_large_tensors_take_one_block_that_goes_back_with_the_last_view() -> None:
    with exchanges() as (server, worker):
        sent = [Tensor.from_array("A", LARGE), Tensor.from_array("B", LARGE.reshape(1000, 100)[::2].T)]
        first, second = send(server, worker, sent)
        assert (first.numpy() == LARGE).all()
        assert (second.numpy() == LARGE.reshape(1000, 100)[::2].T).all()
        first.numpy()[0] = 7  # a model may write to what it gets
        assert (server.pool.count, server.pool.lent, worker.mappings.count) == (1, 1, 1)
        kept = first.numpy()[5:10].reshape(5, 1)
        del first, second
        tell(worker, server)
        assert server.pool.lent == 1
        del kept
        tell(worker, server)
        assert server.pool.lent == 0
        # The next one needs no new memory, and no descriptor.
        again = send(server, worker, sent)
        assert server.pool.count == worker.mappings.count == 1
        assert (again[0].numpy() == LARGE).all()


def test_small_tensors_take_no_block() -> None:
    with exchanges() as (server, worker):
        small = [
            Tensor.from_array("A", LARGE[:10]),
            Tensor.from_array("B", np.array([b"x", b""], np.object_)),
        ]
        one, two = send(server, worker, [*small, Tensor.from_array("C", LARGE[:0])])[:2]
        assert (one.numpy() == LARGE[:10]).all()
        assert two.numpy().tolist() == [b"x", b""]
        one.numpy()[0] = 1
        assert server.pool.count == 0


def test_what_a_worker_sends_can_be_read_only_and_positions_are_copied() -> None:
    with exchanges() as (server, worker):
        payload = worker.pack(
            [
                [
                    Tensor.from_array("F", LARGE),
                    Tensor.from_array("P", np.arange(50_000)),
                    Tensor.from_array("S", np.array([b"x" * 50_000], np.object_)),
                ]
            ]
        )
        block = payload.block
        assert block is not None
        worker.send(Kind.DONE, 0, payload=payload)
        floats, positions, strings = server.receive().lists(1)[0]
        assert isinstance(floats, BlockTensor)
        assert floats.shared and floats.renamed("X", (10, 10_000)).shared
        assert not floats.numpy().flags.writeable
        assert not positions.shared and not strings.shared
        # Whatever the worker writes to its block from now on, those stay as they were.
        block.memory[:] = 255
        assert (positions.numpy() == np.arange(50_000)).all()
        assert strings.numpy().tolist() == [b"x" * 50_000]


def test_an_input_that_goes_back_as_it_came_is_not_copied() -> None:
    with exchanges() as (server, worker):
        (given,) = send(server, worker, [Tensor.from_array("A", LARGE)])
        assert worker.pack([[given]]).bytes_copied == LARGE.nbytes  # the model may go on to write to it
        payload = worker.pack([[given]], returned=True)
        assert (payload.block, payload.bytes_copied) == (None, 0)
        worker.send(Kind.DONE, 0, payload=payload)
        del given, payload
        (returned,) = server.receive().lists(1)[0]
        assert (returned.numpy() == LARGE).all()
        tell(worker, server)  # the worker gives it back, but the server still looks at it
        server.pool.tidy()
        assert server.pool.lent == 1
        del returned
        server.pool.tidy()
        assert server.pool.lent == 0


@pytest.mark.parametrize("part", [slice(None), slice(100, 60_000), slice(99_990, None)])
def test_a_part_of_an_input_stays_where_it_is(part: slice) -> None:
    with exchanges() as (server, worker):
        (given,) = send(server, worker, [Tensor.from_array("A", LARGE)])
        array = given.numpy()
        array += 1
        small, large = Tensor.from_array("B", array[part].reshape(-1, 1)), Tensor.from_array("C", LARGE)
        payload = worker.pack([[small, large]], returned=True)
        assert payload.bytes_copied == LARGE.nbytes
        worker.send(Kind.DONE, 0, payload=payload)
        del given, array, small, payload
        back, other = server.receive().lists(1)[0]
        assert (back.numpy() == LARGE[part].reshape(-1, 1) + 1).all()
        assert (other.numpy() == LARGE).all()
        tell(worker, server)
        server.pool.tidy()
        assert server.pool.lent == 1
        del back
        server.pool.tidy()
        assert server.pool.lent == 0


def test_what_may_change_or_has_gaps_is_copied() -> None:
    class Elsewhere:
        """Says that it is a part of an input, but has memory of its own."""

        def __init__(self, base: object) -> None:
            self.base = base
            self.own = np.arange(10, dtype=np.float32)
            self.__array_interface__ = self.own.__array_interface__

    with exchanges() as (server, worker):
        (given,) = send(server, worker, [Tensor.from_array("A", LARGE)])
        for array, returned in (
            (given.numpy(), False),  # the sender may still write to it
            (given.numpy()[::2], True),
            (given.numpy().copy(), True),
            (given.numpy()[:0], True),
            (np.asarray(Elsewhere(given.numpy())), True),
        ):
            tensors = [Tensor.from_array("B", array), Tensor.from_array("C", LARGE)]
            payload = worker.pack([tensors], returned=returned)
            size = payload.bytes_copied - LARGE.nbytes
            assert array.nbytes <= size < array.nbytes + 64
            worker.discard_payload(payload)


def test_lists_must_have_all_their_bytes() -> None:
    with exchanges() as (server, worker):
        payload = worker.pack([[Tensor.from_array("A", LARGE[:4])]] * 2)
        payload.data = [bytes(24)]
        worker.send(Kind.DONE, 0, payload=payload)
        with pytest.raises(WireError, match="tensors end at 32, but there are 24 bytes"):
            server.receive().lists(2)
        payload = worker.pack([[Tensor.from_array("A", LARGE[:4])]] * 2)
        worker.send(Kind.DONE, 0, payload=payload)
        with pytest.raises(WireError, match="2 lists of tensors are described, not 3"):
            server.receive().lists(3)


def test_a_worker_can_not_name_blocks_that_it_does_not_have() -> None:
    with exchanges() as (server, worker):
        for source in (5, 5 | channel.RETURNED):
            worker.send(Kind.DONE, payload=placed((("A", "FP32", (1,)),), [Place(source, 0, 4)]))
            with pytest.raises(WireError):
                server.receive().lists(1)[0]


def test_small_tensors_must_be_in_their_message() -> None:
    with exchanges() as (server, worker):
        for key, size in (((("A", "FP32", (3,)),), 12), ((("A", "BYTES", (1,)),), 2**64 - 8)):
            sizes = [size] if key[0][1] == "BYTES" else []
            worker.send(Kind.DONE, payload=inline(key, sizes, bytes(8)))
            with pytest.raises(WireError, match="but there are 8 bytes"):
                server.receive().lists(1)[0]


@pytest.mark.parametrize("offset", [LEAST_BYTES - 2, LEAST_BYTES, 2**63, 2**64 - 4])
def test_a_tensor_must_lie_within_its_block(offset: int) -> None:
    with exchanges() as (server, worker):
        payload = worker.pack([[Tensor.from_array("A", np.zeros(16_000, np.float32))]])
        assert payload.block is not None and payload.block.size == LEAST_BYTES
        elsewhere = placed((("A", "FP32", (1,)),), [Place(payload.block.number, offset, 4)])
        elsewhere.block = payload.block
        worker.send(Kind.DONE, payload=elsewhere)
        with pytest.raises(WireError, match="a tensor ends at"):
            server.receive().lists(1)[0]


def test_much_that_waits_is_given_back_without_a_message() -> None:
    with exchanges() as (server, worker):
        kept = [send(server, worker, [Tensor.from_array("A", LARGE)]) for _ in range(MANY)]
        assert server.pool.lent == MANY
        kept.clear()
        worker.send(Kind.DONE)
        server.receive()
        assert server.pool.lent == 0


def test_what_is_idle_is_given_back_without_a_message() -> None:
    """As when traffic has stopped: nothing but time goes on."""
    clock = Clock()

    def read(side: MessageStream) -> None:
        with pytest.raises(BlockingIOError):
            side.receive(wait=False)

    def tidy() -> None:
        server.tidy()
        read(worker)
        read(server)

    with exchanges() as (server, worker):
        for side in (server, worker):
            side.pool = Pool(clock)
        send(server, worker, [Tensor.from_array("A", LARGE)])
        send(worker, server, [Tensor.from_array("A", LARGE)])
        tidy()
        tidy()
        assert (server.pool.lent, worker.pool.lent) == (0, 0)
        assert (server.pool.count, worker.pool.count) == (1, 1)
        assert (server.mappings.count, worker.mappings.count) == (1, 1)
        clock.now += IDLE_NS + 1
        tidy()
        assert (server.pool.count, worker.pool.count) == (0, 0)
        assert (server.mappings.count, worker.mappings.count) == (0, 0)
        server.channel.shut_down()
        server.tidy()  # the worker is not notified


@pytest.mark.pure("replaces the send of a channel")
def test_what_can_not_be_given_back_now_is_given_back_later(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    with exchanges() as (server, worker):
        server.pool = Pool(clock)
        send(server, worker, [Tensor.from_array("A", LARGE)])
        tell(worker, server)
        clock.now += IDLE_NS + 1
        with monkeypatch.context() as patch:
            patch.setattr(server.channel, "try_send", lambda parts: False)
            server.tidy()
        assert (server.pool.count, worker.mappings.count) == (0, 1)
        server.tidy()
        with pytest.raises(BlockingIOError):
            worker.receive(wait=False)
        assert worker.mappings.count == 0


def test_a_long_message_travels_in_a_file() -> None:
    with exchanges() as (server, worker):
        text = bytes(range(256)) * 4096
        worker.send(Kind.QUERY, 3, text)
        message = server.receive()
        assert (message.kind, message.subject, bytes(message.fields)) == (Kind.QUERY, 3, text)
        # Also with a block.
        (tensor,) = send(worker, server, [Tensor.from_array("n" * 200_000, LARGE)])
        assert (tensor.numpy() == LARGE).all()


@pytest.mark.parametrize("watched", [False, True])
def test_what_can_not_be_sent_at_once_is_sent_later_and_in_order(watched: bool) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sender, receiver = PacketChannel(ours, blocking=False), PacketChannel(theirs)
    if watched:
        os.set_blocking(sender.fileno(), False)  # as loops do
    for number in range(2000):
        sender.send([number.to_bytes(4, "little"), bytes(2000)])
    buffer = bytearray(BUFFER_BYTES)
    for number in range(2000):
        packet, fds = receiver.receive(buffer)
        assert (bytes(packet[:4]), fds) == (number.to_bytes(4, "little"), [])
    sender.close()
    with pytest.raises(ChannelClosedError):
        receiver.receive(buffer)
    with pytest.raises(ChannelClosedError):
        receiver.send([b"x"])
    receiver.close()


def test_an_unread_backlog_is_freed_with_the_channel() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sender = PacketChannel(ours, blocking=False)
    os.set_blocking(sender.fileno(), False)  # as loops do
    with theirs, open(os.devnull, "rb") as file:
        for _ in range(2000):
            sender.send([bytes(2000)], [file.fileno()])
        sender.close()
        with pytest.raises(ChannelClosedError):
            sender.send([b"x"])


def test_who_is_interrupted_knows_whether_a_message_is_lost() -> None:
    with exchanges() as (server, host):
        for kind in (Kind.RELEASE, Kind.DROP):
            server.send(kind)
        with pytest.raises(BlockingIOError):
            host.receive(wait=False)
        assert not host.interrupted(), "those have been seen to"
        server.send(Kind.CREDIT)
        host.receive()
        assert host.interrupted()
        host.mark_handled()
        assert not host.interrupted()


def test_unexpected_descriptors_are_closed() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server = MessageStream(PacketChannel(ours, blocking=False), False)
    worker = PacketChannel(theirs)
    with open(os.devnull, "rb") as file:
        worker.send([channel.encode(Kind.DONE)], [file.fileno()] * 3)
        worker.send([channel.encode(Kind.DONE, new_block=True, block=1)])
        worker.send([channel.outline(channel.encode(Kind.DONE), 100)])
        worker.send([channel.outline(channel.encode(Kind.DONE), 100)], [file.fileno()] * 2)
    server.receive()
    for _ in range(3):
        with pytest.raises(WireError):
            server.receive()
    server.channel.close()
    worker.close()


@pytest.mark.parametrize(
    ("kind", "size", "written", "why"),
    [
        (Kind.DONE, 1 << 31, 0, "may have 2147483647"),
        (Kind.DONE, (1 << 31) - 1, 0, "has holes"),
        (Kind.DONE, 1 << 30, 1 << 20, "has holes"),
        *[
            (
                kind,
                (1 << 20) + 1,
                (1 << 20) + 1,
                f"a message {kind.name} has 1048577 bytes, and may have 1048576",
            )
            for kind in (Kind.LOG, Kind.NOTE, Kind.METRIC, Kind.SPAN, Kind.FAILED, Kind.LOADED, Kind.READY)
        ],
    ],
)
def test_what_a_file_may_hold(kind: Kind, size: int, written: int, why: str) -> None:
    """A worker may claim anything; no wrong claim becomes memory of the server."""
    with exchanges() as (server, worker), memory_of_files() as file:
        os.truncate(file, size)
        os.pwrite(file, bytes(written), 0)
        tracemalloc.start()
        try:
            worker.channel.send([channel.outline(channel.encode(kind), size)], [file])
            with pytest.raises(WireError, match=why):
                server.receive()
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()


@contextmanager
def memory_of_files() -> Iterator[int]:
    file = os.memfd_create("x", os.MFD_CLOEXEC)
    try:
        yield file
    finally:
        os.close(file)


def test_what_a_sender_refuses_to_send() -> None:
    with exchanges() as (_, worker), pytest.raises(InternalError, match="too large: 1048576 is the most"):
        worker.send(Kind.LOG, 0, bytes(1 << 20))


def test_what_was_sent_before_the_other_side_went_is_received() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    here, there = PacketChannel(ours), PacketChannel(theirs)
    here.send([b"unread"])
    there.send([channel.encode(Kind.DONE, 5)])
    there.close()
    buffer = bytearray(BUFFER_BYTES)
    assert Message(here.receive(buffer)[0]).subject == 5
    with pytest.raises(ChannelClosedError):
        here.receive(buffer)
    here.close()
