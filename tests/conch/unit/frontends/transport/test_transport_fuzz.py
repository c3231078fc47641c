"""Mutated recordings of clients: a connection ends or goes on, takes bounded memory, and leaves nothing.

`python -m tests.conch.unit.frontends.transport.test_transport_fuzz SECONDS` goes on for as long as told.
"""

from __future__ import annotations

import random
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import grpc
import pytest
from tests.support.http2_peer import (
    PREFACE,
    call,
    header_block,
    headers,
    ping,
    reset,
    settings,
    window_update,
)
from tests.support.servers import WAIT_S

from conch.core.clock import monotonic_ns
from conch.core.tensor import Buffer
from conch.frontends.grpc.rpc_calls import StreamRpc
from conch.frontends.grpc.transport.grpc_connection import GrpcConnection
from conch.frontends.grpc.transport.port_state import PortOptions, PortState
from conch.ipc.loop import IoLoop

EXAMPLES = 1500
MOST_SENT = 4 << 20
"""Bytes that a recording of some kilobytes may draw out of the server."""

UNARY, STREAM = "/t.T/Echo", "/t.T/Each"


class Loop(IoLoop):
    """Stands in for the I/O loop: work runs when the test says so, timers never."""

    def __init__(self) -> None:
        super().__init__()
        self.soon: deque[Callable[[], object]] = deque()
        self.sinks: dict[Any, None] = {}

    @property
    def on_thread(self) -> bool:
        return True

    def register(self, file: int, source: object, events: int = 0) -> None:
        pass

    def modify(self, file: int, events: int) -> None:
        pass

    def unregister(self, file: int) -> None:
        pass

    def call_soon(self, work: Callable[[], object]) -> None:
        self.soon.append(work)

    def flush_later(self, sink: Any) -> None:
        self.sinks[sink] = None

    def round(self) -> None:
        while self.soon or self.sinks:
            while self.soon:
                self.soon.popleft()()
            sinks, self.sinks = self.sinks, {}
            for sink in sinks:
                sink.flush()


class Wire:
    """Stands in for the socket: gives what the client sent, in pieces, then its end."""

    reads_all = True

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = deque(pieces)
        self.sent = 0
        self.open = True

    def fileno(self) -> int:
        return 0

    def handshake(self, loop: object, connection: object) -> bool:
        return True

    def recv(self, size: int) -> bytes:
        if not self.pieces:
            return b""
        piece = self.pieces.popleft()
        if len(piece) > size:
            self.pieces.appendleft(piece[size:])
        return piece[:size]

    def recv_into(self, room: memoryview) -> int:
        piece = self.recv(len(room))
        room[: len(piece)] = piece
        return len(piece)

    def send(self, buffers: Sequence[Buffer]) -> int:
        size = sum(map(len, buffers))
        self.sent += size
        return size

    def pending(self) -> int:
        return 0

    def shut_down(self) -> None:
        pass

    def say_goodbye(self) -> None:
        pass

    def close(self) -> None:
        self.open = False

    def certificate_names(self) -> tuple[str, ...]:
        return ()


def _each(call: StreamRpc) -> None:
    def take(message: Any) -> None:
        if message is None:
            call.close()
        else:
            call.write(bytes(message))
            call.read_next()

    call.start(take, lambda: None)


def new_port() -> tuple[Any, PortState]:
    loop: Any = Loop()
    port = PortState(PortOptions(most_message_bytes=1 << 20), monotonic_ns)
    port.use(loop)
    port.unary[UNARY] = lambda call, message: call.reply(bytes(message))
    port.streams[STREAM] = _each
    return loop, port


def play(pieces: Sequence[bytes]) -> None:
    """Has a connection receive what a client sent, and checks what is left."""
    loop, port = new_port()
    wire = Wire(pieces)
    connection = GrpcConnection(port, wire, "ipv4:127.0.0.1:1")
    connection.start()
    for _ in range(len(pieces) + 1000):
        loop.round()
        if not wire.open:
            break
        connection.on_ready(1)
    assert not wire.open, "the connection ends with its client"
    assert not port.connections
    assert port.open_calls.wait_until_none(0)
    assert port.received.total == 0
    assert wire.sent < MOST_SENT
    loop.round()


def recordings() -> list[bytes]:
    """Bytes of clients: frames by hand, and those of grpcio."""
    stream = header_block(
        (":method", "POST"), (":scheme", "http"), (":path", STREAM), (":authority", "x"),
        ("content-type", "application/grpc"), ("te", "trailers"), ("grpc-timeout", "5S"),
    )  # fmt: skip
    by_hand = (
        PREFACE
        + settings((4, 1 << 20))
        + b"".join(call(number, b"m" * number, UNARY) for number in (1, 3, 5))
        + ping()
        + headers(7, stream)
        + window_update(0, 1000)
        + window_update(7, 9)
        + reset(7)
    )
    return [by_hand, _grpcio()]


def _grpcio() -> bytes:
    """Records a connection of grpcio with calls of all kinds, through a relay to a server of ours."""
    from tests.conch.unit.frontends.transport.test_server import Site, grpc_server

    recorded = bytearray()
    with closing(Site(grpc_server("own"))) as site, socket.create_server(("127.0.0.1", 0)) as listener:

        def relay() -> None:
            client, _ = listener.accept()
            with client, socket.create_connection(("127.0.0.1", site.port)) as server:
                back = threading.Thread(target=_pass_on, args=(server, client, bytearray()))
                back.start()
                _pass_on(client, server, recorded)
                back.join(WAIT_S)

        thread = threading.Thread(target=relay)
        thread.start()
        with grpc.insecure_channel(f"127.0.0.1:{listener.getsockname()[1]}") as channel:
            for size in (0, 10, 70_000):
                channel.unary_unary(UNARY)(bytes(size), timeout=WAIT_S, metadata=(("key", "value"),))
            list(channel.stream_stream(STREAM)(iter([b"a", b"b" * 5000]), timeout=WAIT_S))
        thread.join(WAIT_S)
    return bytes(recorded)


def _pass_on(source: socket.socket, target: socket.socket, recorded: bytearray) -> None:
    try:
        while part := source.recv(65536):
            recorded += part
            target.sendall(part)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        pass  # the other side is gone


def mutated(recording: bytes, dice: random.Random) -> list[bytes]:
    """Changes bytes, or repeats, drops, moves and inserts some; cuts the rest anywhere."""
    changed = bytearray(recording)
    for _ in range(dice.choice((0, 1, 1, 2, 5, 30))):
        at = dice.randrange(24, len(changed)) if dice.random() < 0.95 else dice.randrange(len(changed))
        length = dice.choice((1, 1, 4, 9, 40, 1000))
        what = dice.randrange(5)
        if what == 0:
            changed[at] = dice.choice((0, 1, 4, 5, 127, 128, 255, dice.randrange(256)))
        elif what == 1:
            del changed[at : at + length]
        elif what == 2:
            changed[at:at] = changed[at : at + length] * dice.choice((1, 3))
        elif what == 3:
            changed[at:at] = dice.randbytes(length)
        else:
            other = dice.randrange(len(changed))
            changed[at:at] = changed[other : other + length]
        if len(changed) <= 25:
            break
    pieces, position = [], 0
    while position < len(changed):
        size = dice.choice((1, 7, 100, 5000, 70_000))
        pieces.append(bytes(changed[position : position + size]))
        position += size
    return pieces


@pytest.fixture(scope="module")
def recorded() -> list[bytes]:
    return recordings()


def test_recordings_as_they_are(recorded: list[bytes]) -> None:
    for recording in recorded:
        play([recording])
        play([recording[index : index + 1] for index in range(len(recording) // 10)])


def test_mutated_recordings(recorded: list[bytes]) -> None:
    for seed in range(EXAMPLES):
        dice = random.Random(seed)
        try:
            play(mutated(dice.choice(recorded), dice))
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error


if __name__ == "__main__":
    found, end = recordings(), time.monotonic() + float(sys.argv[1])
    number = random.SystemRandom().randrange(2**60)
    tried = 0
    while time.monotonic() < end:
        rolled = random.Random(number + tried)
        try:
            play(mutated(rolled.choice(found), rolled))
        except BaseException:
            sys.stdout.write(f"seed {number + tried}\n")
            raise
        tried += 1
    sys.stdout.write(f"{tried} connections\n")
