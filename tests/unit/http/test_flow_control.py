"""How much is read, written, copied and joined at once: nothing else runs meanwhile."""

from __future__ import annotations

import asyncio
import resource
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conch.core.tensor import Tensor, copied
from conch.frontends.http.flow_control import (
    AT_ONCE_BYTES,
    PIECE_BYTES,
    TURN_BYTES,
    HttpFlowControl,
    RequestBody,
    body_pieces,
    body_size,
)
from conch.frontends.http.infer.infer_response import success, write_elements

LONG = AT_ONCE_BYTES + 1000


class Transport(asyncio.Transport):
    """A transport that says what it was asked for; its client reads when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.flow: HttpFlowControl | None = None
        self.written: list[Any] = []
        self.pauses_from: int | None = None
        self.reading = True
        self.closing = False

    def write(self, data: Any) -> None:
        self.written.append(data)
        if len(self.written) == self.pauses_from and self.flow is not None:
            self.flow.pause_writing()

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def is_closing(self) -> bool:
        return self.closing


class Loop:
    """A loop whose turns a test makes."""

    def __init__(self) -> None:
        self.soon: list[Callable[[], object]] = []

    def call_soon(self, callback: Callable[[], object]) -> None:
        """As a loop has it."""
        self.soon.append(callback)

    def turn(self) -> bool:
        """Calls what is due; returns whether there was anything."""
        due, self.soon = self.soon, []
        for each in due:
            each()
        return bool(due)


@pytest.fixture
def loop() -> Loop:
    return Loop()


@pytest.fixture
def transport() -> Transport:
    return Transport()


@pytest.fixture
def waiting() -> list[object]:
    """Requests behind the one that runs."""
    return []


@pytest.fixture
def flow(loop: Loop, transport: Transport, waiting: list[object]) -> Iterator[HttpFlowControl]:
    own = asyncio.new_event_loop()  # for the event of uvicorn's part
    asyncio.set_event_loop(own)
    transport.flow = HttpFlowControl(transport, cast(Any, loop), waiting)
    yield transport.flow
    asyncio.set_event_loop(None)
    own.close()


@given(st.lists(st.integers(0, 3 * PIECE_BYTES), max_size=3))
def test_pieces_are_short_and_together_the_body(sizes: list[int]) -> None:
    body = [bytes([number]) * size for number, size in enumerate(sizes)]
    found = list(body_pieces(body))
    assert b"".join(found) == b"".join(body)
    assert max(map(len, found), default=0) <= PIECE_BYTES
    assert body_size(body) == sum(sizes)


def test_a_long_response_goes_out_a_piece_in_each_turn(
    flow: HttpFlowControl, loop: Loop, transport: Transport
) -> None:
    body = bytes(range(256)) * (LONG // 256)
    ended: list[bool] = []
    flow.send(body, lambda: ended.append(True))
    turns = 1
    while not ended:
        assert len(transport.written) == turns
        assert flow.unsent == len(body) - sum(map(len, transport.written))
        assert loop.turn()
        turns += 1
    assert b"".join(transport.written) == body
    assert max(map(len, transport.written)) <= PIECE_BYTES
    assert not loop.turn()
    assert flow.unsent == 0


def test_a_long_response_waits_for_its_reader(
    flow: HttpFlowControl, loop: Loop, transport: Transport
) -> None:
    transport.pauses_from = 3
    body = bytes(LONG)
    ended: list[bool] = []
    flow.send(body, lambda: ended.append(True))
    while loop.turn():
        pass
    assert len(transport.written) == 3
    assert flow.unsent == LONG - 3 * PIECE_BYTES
    flow.resume_writing()
    while loop.turn():
        pass
    assert ended == [True]
    assert b"".join(transport.written) == body


def test_what_its_client_does_not_wait_for_is_not_sent(
    flow: HttpFlowControl, loop: Loop, transport: Transport
) -> None:
    ended: list[bool] = []
    flow.send(bytes(LONG), lambda: ended.append(True))
    flow.stop()
    assert flow.unsent == 0
    while loop.turn():
        pass
    flow.resume_writing()
    assert not loop.turn()
    assert len(transport.written) == 1
    assert not ended


def test_others_have_their_turn_before_much_more_is_read(
    flow: HttpFlowControl, loop: Loop, transport: Transport
) -> None:
    states: list[bool] = []
    for size in (TURN_BYTES - 1, 1):
        flow.has_read(size)
        states.append(transport.reading)
    loop.turn()
    assert [*states, transport.reading] == [True, False, True]


def test_a_turn_does_not_end_another_pause(flow: HttpFlowControl, loop: Loop, transport: Transport) -> None:
    flow.has_read(TURN_BYTES)
    flow.pause_reading()
    loop.turn()
    states = [transport.reading]
    flow.resume_reading()
    assert [*states, transport.reading] == [False, True]
    transport.closing = True
    flow.has_read(TURN_BYTES)
    assert not loop.turn()


def test_reading_goes_on_once_no_request_waits_and_all_is_parsed(
    flow: HttpFlowControl, transport: Transport, waiting: list[object]
) -> None:
    flow.pause_reading()
    waiting.append(object())
    flow.resume_reading()
    assert not transport.reading
    waiting.clear()
    flow.hold()
    flow.resume_reading()
    assert not transport.reading
    flow.release()
    assert transport.reading


def test_a_body_takes_memory_only_as_it_comes() -> None:
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    gathered = RequestBody(1 << 30, 1 << 30)
    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
    assert faults < 100, "the memory has been written to"
    gathered.add(b"abc")
    gathered.add(b"d")
    assert bytes(gathered.body()) == b"abcd"
    assert gathered.body().readonly


@pytest.mark.parametrize("size", [0, 10, (4 << 20) + 1])
def test_a_copy_is_one(size: int) -> None:
    array = np.arange(size, dtype=np.uint32)
    copy = copied(array.data.cast("B") if size else b"")
    assert np.array_equal(np.frombuffer(copy, np.uint32), array)
    array += 1
    assert not size or not np.array_equal(np.frombuffer(copy, np.uint32), array)


def test_other_threads_run_while_much_is_copied() -> None:
    much = memoryview(bytearray(32 << 20))
    begun, ran = threading.Event(), threading.Event()

    def other() -> None:
        begun.wait()
        ran.set()

    interval = sys.getswitchinterval()
    # A thread lets others run only where it waits, or where what it calls lets go of the interpreter.
    sys.setswitchinterval(1000)
    try:
        for _ in range(50):
            begun.clear()
            ran.clear()
            thread = threading.Thread(target=other)
            thread.start()
            begun.set()
            copied(much)
            seen = ran.is_set()
            thread.join()
            if seen:
                return
    finally:
        sys.setswitchinterval(interval)
    pytest.fail("nobody ran meanwhile")


def test_json_is_written_in_short_pieces() -> None:
    parts: list[bytes] = []
    write_elements(Tensor.from_array("x", np.linspace(0, 1, 1 << 20)), parts)
    assert max(map(len, parts)) < 1 << 20
    assert np.array_equal(np.array(b"".join(parts).split(b","), float), np.linspace(0, 1, 1 << 20))


def test_long_bodies_are_not_joined() -> None:
    head = [b"x" * (1 << 20)] * 9
    reply = success(head, [], None)
    assert not isinstance(reply.body, bytes)
    assert all(part is given for part, given in zip(reply.body, head, strict=True))
    assert dict(reply.headers)[b"content-length"] == b"%d" % (9 << 20)
    short = success([b"x"], [memoryview(b"y")], None)
    assert short.body == b"xy"


def test_what_a_model_may_write_to_is_copied_however_long_it_is() -> None:
    array = np.zeros(LONG, np.uint8)
    reply = success([b"{}"], [array.data], None)
    array += 1
    assert not isinstance(reply.body, bytes)
    assert not any(np.frombuffer(reply.body[1], np.uint8))
