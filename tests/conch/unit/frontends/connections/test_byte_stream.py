"""Streams of bytes on real sockets."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.servers import WAIT_S, eventually

from conch.frontends.connections.byte_stream import ByteStream
from conch.frontends.connections.wire import open_wire
from conch.ipc.loop import IoLoop


class Taker:
    """Notes the calls of a stream.

    Attributes:
        data: Bytes that have come.
        held: True while it is to wait with writing.
        told: Names of the other calls, in order.
    """

    def __init__(self, stays: bool = True) -> None:
        self.data = b""
        self.held = False
        self.told: list[str] = []
        self._stays = stays

    def opened(self) -> None:
        self.told.append("opened")

    def received(self, data: bytes) -> None:
        self.data += data

    def ended(self) -> bool:
        self.told.append("ended")
        return self._stays

    def pause_writing(self) -> None:
        self.held = True

    def resume_writing(self) -> None:
        self.held = False

    def closed(self) -> None:
        self.told.append("closed")


@pytest.fixture(scope="module")
def loop() -> Iterator[IoLoop]:
    loop = IoLoop(name="test-loop")
    loop.start()
    yield loop
    assert loop.stop(WAIT_S)


def on_loop(loop: IoLoop, work: Callable[[], object]) -> None:
    """Does work on the loop's thread, and waits for it."""
    done = threading.Event()
    loop.call_soon(work)
    loop.call_soon(done.set)
    assert done.wait(WAIT_S)


def opened(loop: IoLoop, taker: Taker) -> tuple[ByteStream, socket.socket]:
    """A stream and its client."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        client = socket.create_connection(listening.getsockname(), WAIT_S)
        accepted, _ = listening.accept()
    made: list[ByteStream] = []

    def start() -> None:
        made.append(ByteStream(loop, open_wire(accepted, None, http2=False), taker))
        made[0].start()

    on_loop(loop, start)
    return made[0], client


def rest_of(client: socket.socket) -> bytes:
    whole = bytearray()
    while part := client.recv(1 << 20):
        whole += part
    return bytes(whole)


@given(sizes=st.lists(st.sampled_from([0, 1, 100, 70_000, 3 << 20]), max_size=5))
def test_what_is_written_before_a_close_comes_in_order(loop: IoLoop, sizes: list[int]) -> None:
    taker = Taker()
    stream, client = opened(loop, taker)
    pieces = [bytes([number]) * size for number, size in enumerate(sizes)]

    def write() -> None:
        stream.write(*pieces)
        stream.close()
        stream.write(b"not sent")

    with client:
        on_loop(loop, write)
        assert rest_of(client) == b"".join(pieces)
    eventually(lambda: taker.told == ["opened", "closed"], "it is closed once")
    assert stream.unsent == 0


def test_a_client_that_reads_slowly_holds_its_writer(loop: IoLoop) -> None:
    taker = Taker()
    stream, client = opened(loop, taker)
    much = bytes(32 << 20)

    held_at_once: list[bool] = []

    def write() -> None:
        stream.write(much)
        held_at_once.append(taker.held)

    with client:
        on_loop(loop, write)
        assert held_at_once == [True], "a coroutine may go on in this round"
        eventually(lambda: taker.held and 0 < stream.unsent < len(much), "the socket is full")
        got = 0
        while got < len(much):
            got += len(client.recv(1 << 20))
        eventually(lambda: not taker.held and not stream.unsent, "all is sent")
        on_loop(loop, stream.abort)
    eventually(lambda: taker.told == ["opened", "closed"], "it is closed")


def test_nothing_comes_while_reading_is_paused(loop: IoLoop) -> None:
    taker = Taker()
    stream, client = opened(loop, taker)
    with client:
        client.sendall(b"one")
        eventually(lambda: taker.data == b"one", "it is read")
        on_loop(loop, stream.pause_reading)
        client.sendall(b"two")
        on_loop(loop, lambda: None)
        assert taker.data == b"one"
        on_loop(loop, stream.resume_reading)
        eventually(lambda: taker.data == b"onetwo", "it is read on")
        on_loop(loop, stream.close)


@pytest.mark.parametrize("paused", [False, True])
def test_a_client_that_resets_is_gone_whether_it_is_read_or_not(loop: IoLoop, paused: bool) -> None:
    taker = Taker()
    stream, client = opened(loop, taker)
    if paused:
        on_loop(loop, stream.pause_reading)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
    eventually(lambda: taker.told == ["opened", "closed"], "it is noticed")


@pytest.mark.parametrize("stays", [False, True])
def test_a_client_that_ends_its_side_may_still_read(loop: IoLoop, stays: bool) -> None:
    taker = Taker(stays)
    stream, client = opened(loop, taker)
    with client:
        client.shutdown(socket.SHUT_WR)
        eventually(lambda: "ended" in taker.told, "the end has come")
        if stays:
            on_loop(loop, lambda: stream.write(b"answer"))
            on_loop(loop, stream.close)
        assert rest_of(client) == (b"answer" if stays else b"")
    eventually(lambda: taker.told == ["opened", "ended", "closed"], "it is closed")


@pytest.mark.parametrize("error", [ValueError("unforeseen"), FileNotFoundError("of a handler")])
def test_a_handler_that_fails_ends_its_connection_alone(
    loop: IoLoop, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    """An error of its own is logged; that of a client who left is not."""

    class Failing(Taker):
        def received(self, data: bytes) -> None:
            raise error

    failing, other = Failing(), Taker()
    _, client = opened(loop, failing)
    stream, neighbour = opened(loop, other)
    with client, neighbour:
        client.sendall(b"x")
        eventually(lambda: failing.told == ["opened", "closed"], "it is closed")
        neighbour.sendall(b"y")
        eventually(lambda: other.data == b"y", "the other goes on")
        on_loop(loop, stream.close)
    assert [each.exc_info[1] for each in caplog.records if each.exc_info] == [error]


def test_nothing_comes_after_an_abort(loop: IoLoop) -> None:
    class Aborting(Taker):
        def received(self, data: bytes) -> None:
            super().received(data)
            on_abort[0]()

    taker = Aborting()
    stream, client = opened(loop, taker)
    on_abort = [stream.abort]
    with client:
        on_loop(loop, stream.pause_reading)
        client.sendall(bytes(1 << 20))  # more than is read at once
        on_loop(loop, stream.resume_reading)
        eventually(lambda: taker.told == ["opened", "closed"], "it is closed")
    assert len(taker.data) <= 64 << 10
