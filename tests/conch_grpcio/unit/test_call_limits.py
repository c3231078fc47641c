"""Calls on asyncio: how long a writer waits for its reader, late watches, facts of a call."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from conch.frontends.grpc.open_calls import OpenCalls
from conch_grpcio.asyncio_calls import CallHead, RefusalError, StreamCall, UnaryCall
from conch_grpcio.grpcio_server import call_head

HEAD = CallHead("ipv4:127.0.0.1:50000", (("key", "value"),))
MOST, MESSAGE = 100, bytes(60)


class Stream:
    """A stream whose client sends without end; its handler answers each message with two."""

    def __init__(self) -> None:
        self.received = 0
        self.cancelled: list[str] = []
        self.open_calls = OpenCalls(MOST)
        self.call = StreamCall(HEAD, self.open_calls, self.receive)
        self.call.start(self.answer, lambda: self.cancelled.append("stream"))

    async def receive(self) -> bytes:
        self.received += 1
        return b"message"

    def answer(self, message: object) -> None:
        self.call.write(MESSAGE)
        self.call.write(MESSAGE)
        self.call.read_next()


def test_a_writer_waits_until_its_reader_has_caught_up() -> None:
    async def work() -> None:
        stream = Stream()
        responses = stream.call.responses()
        assert await anext(responses) == MESSAGE
        assert (stream.received, stream.call.backpressure) == (1, True)
        waiting = asyncio.create_task(asyncio.to_thread(stream.call.wait_until_writable))
        assert await anext(responses) == MESSAGE  # the client has taken the first
        await waiting
        assert await anext(responses) == MESSAGE
        assert stream.received == 2
        await responses.aclose()
        assert stream.cancelled == ["stream"]
        assert stream.open_calls.wait_until_none(0)

    asyncio.run(work())


@pytest.mark.parametrize("end", ["closed", "left"])
def test_a_writer_waits_no_more_once_its_stream_has_ended(end: str) -> None:
    async def work() -> None:
        stream = Stream()
        responses = stream.call.responses()
        await anext(responses)
        waiting = asyncio.create_task(asyncio.to_thread(stream.call.wait_until_writable))
        if end == "closed":
            stream.call.close()
        else:
            await responses.aclose()
        await waiting
        stream.call.write(MESSAGE)
        assert [each async for each in responses] == ([MESSAGE] if end == "closed" else [])
        assert stream.cancelled == ([] if end == "closed" else ["stream"])

    asyncio.run(work())


def test_a_message_that_cannot_be_handled_ends_its_stream(caplog: pytest.LogCaptureFixture) -> None:
    def fail(message: object) -> None:
        raise ValueError("for the log only")

    async def work() -> None:
        stream = Stream()
        call = StreamCall(HEAD, OpenCalls(), stream.receive)
        call.start(fail, lambda: None)
        with pytest.raises(RefusalError) as raised:
            await anext(call.responses())
        assert raised.value.end.status == 13
        stream.call.finish()

    asyncio.run(work())
    assert "for the log only" in caplog.text


def test_a_watch_that_comes_after_its_client_has_gone() -> None:
    async def work() -> None:
        call = UnaryCall(HEAD, OpenCalls())
        answering = asyncio.create_task(call.answer())
        await asyncio.sleep(0)
        answering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await answering
        cancelled: asyncio.Queue[str] = asyncio.Queue()
        call.watch(cancelled.put_nowait, "request")
        assert await cancelled.get() == "request"

    asyncio.run(work())


@pytest.mark.parametrize(
    ("left_s", "deadline_ns"), [(None, None), (2.0**63, None), (0.0, 5), (0.25, 250_000_005)]
)
def test_a_deadline(left_s: float | None, deadline_ns: int | None) -> None:
    assert call_head(context(left_s), 5, certificates=False).deadline_ns == deadline_ns


@pytest.mark.parametrize("certificates", [True, False])
def test_the_names_of_a_certificate(certificates: bool) -> None:
    names = ("cn:web", "dns:a.example", "dns:b.example") if certificates else ()
    head = call_head(context(None), 5, certificates)
    assert (head.client, head.certificate_names) == ("ipv6:[::1]:50000", names)


def context(left_s: float | None) -> Any:
    names = {"x509_common_name": [b"web"], "peer_dns": [b"a.example", b"b.example"]}
    return SimpleNamespace(
        time_remaining=lambda: left_s,
        peer=lambda: "ipv6:%5B::1%5D:50000",
        invocation_metadata=lambda: (),
        auth_context=lambda: names,
    )
