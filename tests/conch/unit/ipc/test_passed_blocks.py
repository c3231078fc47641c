"""Blocks that a core passes on between a front and a worker: not copied, not written to, and returned."""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some
from tests.support.clocks import Clock
from tests.support.workers import arrived

from conch.core.tensor import Array, Tensor
from conch.ipc import blocks
from conch.ipc.blocks import IDLE_NS, Mappings, Pool
from conch.ipc.channel import ChannelClosedError, Kind, PacketChannel, WireError, encode, outline
from conch.ipc.tensors import (
    BlockTensor,
    MessageStream,
    StableTensor,
    UnmappedError,
)

LARGE = np.arange(100_000, dtype=np.float32)
PASSING = StableTensor
OpenPair = Callable[[bool], tuple[MessageStream, MessageStream]]


@contextmanager
def opened() -> Iterator[OpenPair]:
    """Opens the core's end and the other one of connections to workers (True) and fronts."""
    with ExitStack() as stack:

        def pair(worker: bool) -> tuple[MessageStream, MessageStream]:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            sides = (
                MessageStream(
                    PacketChannel(ours, blocking=False), False, trusted=not worker, passes_blocks=True
                ),
                MessageStream(PacketChannel(theirs, blocking=False), worker, trusted=not worker),
            )
            for side in sides:
                stack.callback(side.close)
                stack.callback(side.channel.close)
            return sides

        yield pair


def move(
    source: MessageStream,
    target: MessageStream,
    lists: list[list[Tensor]],
    passing: type[BlockTensor] | None = None,
) -> list[list[Tensor]]:
    """Sends lists of tensors, and reads them."""
    source.send(Kind.DONE, 0, payload=source.pack(lists, passing=passing))
    return target.receive().lists(len(lists))


def tell(source: MessageStream, target: MessageStream) -> None:
    """Any message: what is to be given back goes with it."""
    source.send(Kind.DONE)
    target.receive()


def inputs(*arrays: Array) -> list[list[Tensor]]:
    return [[Tensor.from_array("IN", array)] for array in arrays]


def test_a_worker_reads_a_fronts_block() -> None:
    with opened() as pair:
        (link, front), (core, worker) = pair(False), pair(True)
        ((given_tensor,),) = received = move(front, link, inputs(LARGE))
        assert not given_tensor.shared
        payload = core.pack(received, passing=PASSING)
        assert payload.bytes_copied == 0
        assert payload.block is None
        core.send(Kind.EXECUTE, 0, payload=payload)
        ((read,),) = worker.receive().lists(1)
        array = read.numpy()
        assert np.array_equal(array, LARGE)
        assert not read.writable
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.flags.writeable = True

        # The core knows the block by the front's number, so what lies there goes back as a copy.
        ((output,),) = move(worker, core, [[Tensor.from_array("OUT", array[:50_000])]])
        assert np.array_equal(output.numpy(), LARGE[:50_000])
        del payload, received, given_tensor
        tell(link, front)
        assert front.pool.lent == 1  # the worker still has it
        del read, array
        tell(worker, core)
        tell(link, front)
        assert (front.pool.lent, core.pool.lent) == (0, 0)


def test_a_front_reads_a_workers_block() -> None:
    with opened() as pair:
        (link, front), (core, worker) = pair(False), pair(True)
        ((output,),) = answers = move(worker, core, inputs(LARGE))
        assert output.shared
        payload = link.pack([[output.renamed("OUT", (1, LARGE.size))]], passing=BlockTensor)
        assert payload.bytes_copied == 0
        link.send(Kind.RESPONSES, 0, payload=payload)
        del payload, output, answers
        ((read,),) = front.receive().lists(1)
        assert (read.name, read.shape) == ("OUT", (1, LARGE.size))
        assert read.shared
        assert np.array_equal(read.numpy()[0], LARGE)
        tell(core, worker)
        assert worker.pool.lent == 1
        del read
        tell(front, link)
        tell(core, worker)
        assert worker.pool.lent == 0


@given(some.lists(some.tuples(some.integers(0, 1), some.integers(1, 100_000)), min_size=1, max_size=12))
def test_a_batch_has_the_bytes_of_each_of_its_requests(requests: list[tuple[int, int]]) -> None:
    """Requests of two fronts, large and small, in blocks and in messages, some of them together."""
    with opened() as pair:
        links, (core, worker) = [pair(False), pair(False)], pair(True)
        arrays = [np.full(size, index, np.float32) for index, (_, size) in enumerate(requests)]
        lists: dict[int, list[Tensor]] = {}
        for number, (link, front) in enumerate(links):
            mine = [index for index, (of, _) in enumerate(requests) if of == number]
            if mine:
                moved = move(front, link, inputs(*(arrays[index] for index in mine)))
                lists.update(zip(mine, moved, strict=True))
        read = move(core, worker, [lists[index] for index in range(len(requests))], PASSING)
        for (tensor,), array in zip(read, arrays, strict=True):
            assert np.array_equal(tensor.numpy(), array)
        del tensor, read, lists
        moved = []
        tell(worker, core)
        for link, front in links:
            tell(link, front)
            assert front.pool.lent == 0
        assert core.pool.lent == 0


def test_a_block_outlives_the_front_that_made_it() -> None:
    with opened() as pair:
        (link, front), (core, worker) = pair(False), pair(True)
        received = move(front, link, inputs(LARGE))
        for side in (front, link):
            side.channel.close()
            side.close()
        ((read,),) = move(core, worker, received, PASSING)
        assert np.array_equal(read.numpy(), LARGE)


def test_blocks_of_a_worker_that_dies_are_returned() -> None:
    with opened() as pair:
        (link, front), (core, worker) = pair(False), pair(True)
        sent = move(core, worker, move(front, link, inputs(LARGE)), PASSING)
        worker.channel.close()
        refused = core.pack(move(front, link, inputs(LARGE)), passing=PASSING)
        with pytest.raises(ChannelClosedError):
            core.send(Kind.EXECUTE, 0, payload=refused)
        del refused
        core.close()
        tell(link, front)
        assert front.pool.lent == 0
        assert np.array_equal(sent[0][0].numpy(), LARGE)


def test_a_block_is_mapped_once_and_dropped_with_its_makers() -> None:
    with opened() as pair:
        (link, front), (core, worker) = pair(False), pair(True)
        clock = Clock()
        front.pool = Pool(clock)
        for value in range(5):
            array = np.full(LARGE.size, value, np.float32)
            ((read,),) = move(core, worker, move(front, link, inputs(array)), PASSING)
            assert np.array_equal(read.numpy(), array)
            assert worker.mappings.passed == 1
            del read
            tell(worker, core)
            tell(link, front)
        clock.now = 2 * IDLE_NS
        front.pool.tidy()
        tell(front, link)
        tell(core, worker)
        assert worker.mappings.passed == 0


def test_beyond_so_many_blocks_tensors_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "MOST_PASSED_ON", 2)
    with opened() as pair:
        (link, front), (core, worker) = pair(False), pair(True)
        received = [move(front, link, inputs(LARGE)) for _ in range(3)]
        read = [move(core, worker, each, PASSING) for each in received]
        assert (worker.mappings.passed, core.pool.lent) == (2, 1)
        assert all(np.array_equal(each.numpy(), LARGE) for ((each,),) in read)


@pytest.mark.parametrize("in_file", [False, True])
def test_a_block_that_can_not_be_mapped_is_returned(monkeypatch: pytest.MonkeyPatch, in_file: bool) -> None:
    """Then it is sent again; also if the message that lends it is in a file that can't be read."""
    with opened() as pair:
        (link, front), (core, worker) = pair(False), pair(True)
        with monkeypatch.context() as patched:
            if not in_file:
                patched.setattr(Mappings, "add_passed", _no_descriptors)
            payload = core.pack(move(front, link, inputs(LARGE)), passing=PASSING)
            if in_file:
                worker.channel.fds_lost = True
                packet = encode(Kind.EXECUTE, passed=[each.number for each in payload.passed])
                core.channel.send([outline(packet, len(packet))])
            else:
                core.send(Kind.EXECUTE, 0, payload=payload)
            message = worker.receive()
        if in_file:
            assert message.kind is Kind.LOST
        else:
            assert message.lists(1) == [[]]
            assert isinstance((message.unreachable or {})[0], UnmappedError)
        del payload, message
        tell(worker, core)
        tell(link, front)
        assert front.pool.lent == 0
        ((read,),) = move(core, worker, move(front, link, inputs(LARGE)), PASSING)
        assert np.array_equal(read.numpy(), LARGE)


def _no_descriptors(mappings: Mappings, number: int, fd: int) -> Array:
    raise OSError("no descriptors")


@pytest.mark.parametrize(
    ("packet", "in_worker"),
    [
        pytest.param(encode(Kind.BLOCK, 0, b"", (), 1, 4096, True), True, id="no descriptor"),
        pytest.param(encode(Kind.DONE, passed=(1,)), False, id="from a worker"),
        pytest.param(encode(Kind.EXECUTE, passed=(1,))[:30], True, id="cut"),
    ],
)
def test_malformed_messages_with_passed_blocks(packet: bytes, in_worker: bool) -> None:
    with pytest.raises(WireError):
        arrived(packet, in_worker=in_worker)


def test_descriptors_are_closed_with_their_blocks() -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    with opened() as pair:
        (link, front), (core, worker) = pair(False), pair(True)
        move(core, worker, move(front, link, inputs(LARGE)), PASSING)
    del pair, link, front, core, worker
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_worker_can_not_name_a_passed_block_as_the_cores_own() -> None:
    with opened() as pair:
        (link, front), (core, worker) = pair(False), pair(True)
        payload = core.pack(move(front, link, inputs(LARGE)), passing=PASSING)
        with pytest.raises(WireError, match="is not lent"):
            core.pool.view(payload.passed[0].number)
        core.send(Kind.EXECUTE, 0, payload=payload)
        assert worker.receive().lists(1)
