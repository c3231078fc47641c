"""Amounts that are read, written, copied and joined at once: nothing else runs meanwhile."""

from __future__ import annotations

import asyncio
import resource
import sys
import threading
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.core import make_request
from tests.support.raw_http import request
from tests.support.rest import Wire

from conch.core.request import InferenceResponse
from conch.core.tensor import Tensor, copied
from conch.frontends.http.flow_control import (
    AT_ONCE_BYTES,
    PIECE_BYTES,
    PauseReason,
    ReadControl,
    RequestBody,
    body_pieces,
    body_size,
)
from conch.frontends.http.http_exchange import HttpExchange, Reply
from conch.frontends.http.infer.infer_response import BinaryOutputs, ResponseEncoder, write_elements

LONG = AT_ONCE_BYTES + 1000


@pytest.fixture
def wire() -> Wire:
    return Wire(lambda exchange: None, SimpleNamespace(call_soon=None))


@pytest.fixture
def control(wire: Wire) -> ReadControl:
    return ReadControl(wire)


@given(st.lists(st.integers(0, 3 * PIECE_BYTES), max_size=3))
def test_pieces_are_short_and_together_the_body(sizes: list[int]) -> None:
    body = [bytes([number]) * size for number, size in enumerate(sizes)]
    found = list(body_pieces(body))
    assert b"".join(found) == b"".join(body)
    assert max(map(len, found), default=0) <= PIECE_BYTES
    assert body_size(body) == sum(sizes)


BODY = bytes(range(256)) * (LONG // 256)
GET = request("GET", "/")


def respond(exchange: HttpExchange) -> None:
    """Sends a long response."""
    exchange.respond(200, [], BODY)


def test_a_long_response_goes_out_a_piece_in_each_turn() -> None:
    async def ask() -> list[bytes]:
        wire = Wire(respond)
        wire.send(GET)
        seen = []
        while sum(map(len, wire.written[1:])) < len(BODY):
            seen.append(len(wire.written))
            await asyncio.sleep(0)
        assert all(later - before <= 1 for before, later in pairwise(seen))
        return wire.written[1:]

    pieces = asyncio.run(ask())
    assert b"".join(pieces) == BODY
    assert max(map(len, pieces)) <= PIECE_BYTES


def test_a_long_response_waits_for_its_reader() -> None:
    async def ask() -> list[bytes]:
        exchanges: list[HttpExchange] = []

        def handle(exchange: HttpExchange) -> None:
            exchanges.append(exchange)
            respond(exchange)

        wire = Wire(handle, reads=4)
        wire.send(GET)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(wire.written) == 4
        assert exchanges[0].unsent == len(BODY) - 3 * PIECE_BYTES
        for _ in range(20):
            wire.read()
            await asyncio.sleep(0)
        assert exchanges[0].done
        return wire.written[1:]

    assert b"".join(asyncio.run(ask())) == BODY


def test_what_its_client_does_not_wait_for_is_not_sent() -> None:
    async def ask() -> int:
        wire = Wire(respond)
        wire.send(GET)
        await asyncio.sleep(0)
        before = len(wire.written)
        wire.hang_up()
        await wire.ended()
        return len(wire.written) - before

    assert asyncio.run(ask()) == 0


def test_reading_goes_on_once_no_request_waits_and_all_is_parsed(control: ReadControl, wire: Wire) -> None:
    control.pause(PauseReason.WAITING)
    control.pause(PauseReason.UNPARSED)
    assert control.paused
    control.resume(PauseReason.UNPARSED)
    assert not wire.reading
    control.pause(PauseReason.UNPARSED)
    control.resume(PauseReason.WAITING)
    assert not wire.reading
    control.resume(PauseReason.UNPARSED)
    assert (wire.reading, control.paused) == (True, False)


@pytest.mark.parametrize("length", [None, 6, 1 << 20])
def test_a_body_is_what_has_come(length: int | None) -> None:
    body = RequestBody(length)
    for piece in (b"abc", b"", b"def"):
        body.add(piece)
    assert bytes(body.body()) == b"abcdef"
    assert body.body().readonly


def test_a_body_takes_memory_only_as_it_comes() -> None:
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    gathered = RequestBody(1 << 30)
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


def encoded(encoder: ResponseEncoder, tensor: Tensor) -> Reply:
    """The reply to a request for a binary output."""
    request = make_request()
    request.model = SimpleNamespace(spec=SimpleNamespace(name="m"), version_text="1")
    reply = encoder(request, InferenceResponse([tensor]), BinaryOutputs(True))
    assert isinstance(reply, Reply)
    return reply


def test_long_bodies_are_not_joined() -> None:
    encoder = ResponseEncoder()
    name = "x" * (9 << 20)
    bodies = [encoded(encoder, Tensor(name, "UINT8", (1,), b"y")).body for _ in range(2)]
    longest = [max(body, key=len) for body in bodies if not isinstance(body, bytes)]
    assert len(longest) == 2 and longest[0] is longest[1], "the JSON is remembered, and not copied"
    assert all(body_size(body) > 9 << 20 for body in bodies)
    short = encoded(encoder, Tensor("x", "UINT8", (1,), memoryview(b"y")))
    assert isinstance(short.body, bytes) and short.body.endswith(b"]}y")


def test_what_a_model_may_write_to_is_copied_however_long_it_is() -> None:
    array = np.zeros(LONG, np.uint8)
    reply = encoded(ResponseEncoder(), Tensor("x", "UINT8", (LONG,), array.data))
    array += 1
    assert not isinstance(reply.body, bytes)
    assert not any(np.frombuffer(reply.body[-1], np.uint8))
