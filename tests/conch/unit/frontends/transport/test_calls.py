"""Calls without a connection: cancellation at any moment, and streams whose clients read late."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.support.http2_peer import call_pairs, message

from conch.frontends.grpc.open_calls import MOST_UNREAD_BYTES, OpenCalls
from conch.frontends.grpc.transport.calls import StreamCall, UnaryCall
from conch.frontends.grpc.transport.messages import compress
from conch.frontends.grpc.transport.metadata import RequestHead

PAIRS = [(name.encode(), value.encode()) for name, value in call_pairs("/t.T/Call")]
HEAD = RequestHead((*PAIRS, (b"grpc-encoding", b"gzip")))


class Connection:
    """Stands in for the connection of a call and its loop, whose work runs at once.

    Attributes:
        decompressed: Takes the message of the last call that was compressed.
    """

    on_thread = True
    peer = ""
    certificate_names = ()
    most_message_bytes = 1000
    decompressed: Callable[[bytes], None]

    def __init__(self) -> None:
        self.loop: Any = self
        self.open_calls = OpenCalls()

    def call_soon(self, work: Callable[[], object]) -> None:
        work()

    def decompress(self, call: object, packed: object, done: Callable[[bytes], None]) -> None:
        self.decompressed = done

    def begin_answer(self, call: object, head: object) -> None:
        pass

    def send_message(self, call: object, parts: object) -> None:
        pass


def unary(connection: Any, handler: Callable[..., None]) -> UnaryCall:
    call = UnaryCall(connection, 1, HEAD, 0, handler)
    connection.open_calls.unary.add(call)
    return call


def test_a_handler_that_watches_late_is_told_of_the_cancellation() -> None:
    told: list[str] = []
    call = unary(Connection(), lambda call, message: None)
    sent = message(b"abc")
    call.receive(sent, 0, len(sent))
    call.cancelled()
    call.watch(told.append, "cancelled")
    assert told == ["cancelled"]


def test_a_call_that_ends_while_it_is_decompressed_is_not_open_any_more() -> None:
    connection, handled = Connection(), list[object]()
    call = unary(connection, lambda call, message: handled.append(message))
    packed = compress(b"abc", "gzip")
    sent = b"\1" + message(packed)[1:]
    call.receive(sent, 0, len(sent))
    call.cancelled()
    assert connection.open_calls.unary == {call}, "its memory is in use"
    connection.decompressed(b"abc")
    assert not (handled or connection.open_calls.unary)


def test_a_stream_reads_on_when_its_client_has_read() -> None:
    connection, taken = Connection(), list[object]()
    call = StreamCall(connection, 1, HEAD, 0)  # type: ignore[arg-type]
    call.start(taken.append, lambda: None)
    long = memoryview(bytearray(MOST_UNREAD_BYTES + 1))
    call.write(long)
    sent = message(b"abc")
    call.receive(sent, 0, len(sent))
    call.sent(long.nbytes)
    assert not taken
    call.sent(0)
    assert taken == [b"abc"]
    call.finish()
