"""Calls without a connection: cancellation at any moment, and streams whose clients read late."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tests.support.http2_peer import call_pairs, message

from conch.frontends.grpc.open_calls import MOST_UNREAD_BYTES, OpenCalls
from conch.frontends.grpc.transport.calls import StreamCall, UnaryCall
from conch.frontends.grpc.transport.messages import compress
from conch.frontends.grpc.transport.metadata import RequestHead
from conch.ipc.loop import IoLoop

PAIRS = [(name.encode(), value.encode()) for name, value in call_pairs("/t.T/Call")]
HEAD = RequestHead((*PAIRS, (b"grpc-encoding", b"gzip")))


class Loop(IoLoop):
    """Stands in for the I/O loop: work runs at once."""

    @property
    def on_thread(self) -> bool:
        return True

    def call_soon(self, work: Callable[[], object]) -> None:
        work()


class Connection:
    """Stands in for the connection of a call.

    Attributes:
        decompressed: Takes the message of the last call that was compressed.
        turns: Streams that have more to deliver in the next turn.
    """

    peer = ""
    certificate_names = ()
    most_message_bytes = 1000
    decompressed: Callable[[bytes], None]

    def __init__(self) -> None:
        self.loop = Loop()
        self.open_calls = OpenCalls()
        self.turns: list[StreamCall] = []

    def deliver_later(self, call: StreamCall) -> None:
        self.turns.append(call)

    def give_back(self, call: object) -> None:
        pass

    def decompress(self, call: object, packed: object, done: Callable[[bytes], None]) -> None:
        self.decompressed = done

    def begin_answer(self, call: object, head: object) -> None:
        pass

    def send_message(self, call: object, parts: object) -> None:
        pass


def stream(connection: Any) -> StreamCall:
    return StreamCall(connection, 1, HEAD, 0)


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
    call = stream(connection)
    call.start(taken.append, lambda: None)
    long = memoryview(bytearray(MOST_UNREAD_BYTES + 1))
    call.write(long)
    sent = message(b"abc")
    call.receive(sent, 0, len(sent))
    call.sent(long.nbytes)
    assert not taken
    connection.turns.pop().deliver()
    assert not taken
    call.sent(0)
    connection.turns.pop().deliver()
    assert taken == [b"abc"]
    call.finish()


@given(st.lists(st.integers(0, 12), max_size=60), st.lists(st.integers(0, 999), max_size=8), st.data())
def test_a_stream_delivers_all_in_order_and_some_at_a_time(
    sizes: list[int], cuts: list[int], data: st.DataObject
) -> None:
    """However its bytes are cut, and whether its handler asks for the next message at once or later."""
    connection, taken, turns = Connection(), list[object](), [0]
    call = stream(connection)

    def take(message: object) -> None:
        taken.append(message)
        turns[-1] += 1
        if data.draw(st.booleans()):
            call.read_next()

    def turn(work: Callable[[], None]) -> None:
        turns.append(0)
        work()

    messages = [bytes([index]) * size for index, size in enumerate(sizes)]
    wire = b"".join(map(message, messages))
    call.start(take, lambda: None)
    places = sorted({0, len(wire), *(cut % (len(wire) + 1) for cut in cuts)})
    for start, end in pairwise(places):
        turn(partial(call.receive, b"#" + wire, start + 1, end + 1))
    turn(call.half_close)
    while len(taken) <= len(messages):
        while connection.turns:
            turn(connection.turns.pop(0).deliver)
        turn(call.read_next)
    assert taken == [*messages, None]
    assert max(turns) <= 8
    call.finish()
