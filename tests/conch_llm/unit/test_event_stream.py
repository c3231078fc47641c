"""Event streams to clients that read slowly, and comments on silent ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any
from unittest.mock import Mock

from tests.support.rest import Wire
from tests.support.waiting import PATIENCE_S

from conch.frontends.http.http_exchange import HttpExchange
from conch_llm.frontend.event_stream import EventStream, OpenStreams, Parts

GET = b"GET / HTTP/1.1\r\nHost: conch\r\n\r\n"


class Told(Parts[bytes]):
    """Parts that a test puts in.

    Attributes:
        taken: Number of times parts were taken.
    """

    def __init__(self) -> None:
        self.taken = 0
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue()

    def put(self, *parts: bytes | None) -> None:
        for part in parts:
            self._queue.put_nowait(part)

    async def take(self) -> Sequence[bytes] | None:
        part = await self._queue.get()
        self.taken += 1
        return None if part is None else [part]

    def size(self, part: bytes) -> int:
        return len(part)

    def encode(self, parts: Sequence[bytes]) -> bytes:
        return b"<" + b"+".join(parts) + b">"

    def last(self) -> bytes:
        return b"END"


Scenario = Callable[[Wire, Told, "asyncio.Task[None]"], Coroutine[Any, Any, None]]


def play(
    scenario: Scenario, parts: Callable[[], Told] = Told, reads: float = 1e9, silence_s: float = 60
) -> None:
    """Plays a scenario with a stream whose client reads so many writes."""

    async def run() -> None:
        told = parts()
        streams = OpenStreams(silence_s)
        tasks: list[asyncio.Task[None]] = []

        async def answer(exchange: HttpExchange) -> None:
            stream = EventStream(exchange, told, streams, most_pending=10)
            taken = await told.take()
            stream.begin()
            try:
                while taken is not None:
                    taken = await stream.send(taken)
                await stream.end()
            finally:
                stream.close()

        def handle(exchange: HttpExchange) -> None:
            tasks.append(asyncio.ensure_future(answer(exchange)))

        wire = Wire(handle, reads=reads)
        wire.send(GET)
        try:
            await scenario(wire, told, tasks[0])
        finally:
            wire.hang_up()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0)


async def settled() -> None:
    """Lets the loop run until nothing is left to do: nothing here waits for time or sockets."""
    for _ in range(100):
        await asyncio.sleep(0)


def sent(wire: Wire) -> bytes:
    """Bytes that the server has written behind the headers, without the frames of chunks."""
    return b"".join(each.split(b"\r\n")[1] for each in wire.written[1:])


def test_parts_are_sent_as_they_come() -> None:
    async def scenario(wire: Wire, told: Told, task: asyncio.Task[None]) -> None:
        for part in (b"a", b"b"):
            told.put(part)
            await until(lambda part=part: sent(wire).endswith(b"<%b>" % part))  # type: ignore[misc]
        told.put(None)
        await task
        assert sent(wire) == b"<a><b>END"

    play(scenario)


def test_parts_wait_for_a_slow_client_and_are_sent_together() -> None:
    async def scenario(wire: Wire, told: Told, task: asyncio.Task[None]) -> None:
        told.put(b"a", b"bbbb", b"cccc")
        await until(lambda: told.taken == 3)
        await settled()
        assert sent(wire) == b"<a>"
        wire.read()
        await until(lambda: sent(wire) == b"<a><bbbb+cccc>")
        assert told.taken == 3  # without a further part
        told.put(b"dddd", None)
        await settled()
        assert told.taken == 5
        assert sent(wire) == b"<a><bbbb+cccc>"
        wire.read()
        wire.read()
        await task
        assert sent(wire) == b"<a><bbbb+cccc><dddd>END"

    play(scenario, reads=2)


def test_a_model_waits_for_a_client_that_is_far_behind() -> None:
    async def scenario(wire: Wire, told: Told, task: asyncio.Task[None]) -> None:
        told.put(b"a", b"12345", b"678901", b"late", None)
        await until(lambda: told.taken == 3)
        await settled()
        assert told.taken == 3
        wire.read()
        await until(lambda: told.taken == 5)
        wire.read()
        wire.read()
        await task
        assert sent(wire) == b"<a><12345+678901><late>END"

    play(scenario, reads=2)


def test_a_silent_stream_has_comments_and_a_slow_client_none() -> None:
    async def scenario(wire: Wire, told: Told, task: asyncio.Task[None]) -> None:
        told.put(b"a")
        await until(lambda: sent(wire).count(b":\n\n") >= 2)
        told.put(None)
        await task
        assert sent(wire).replace(b":\n\n", b"") == b"<a>END"

    play(scenario, silence_s=0.03)

    async def silent(wire: Wire, told: Told, task: asyncio.Task[None]) -> None:
        told.put(b"a")
        await until(lambda: bool(sent(wire)))
        end = asyncio.get_running_loop().time() + 0.1
        await until(lambda: asyncio.get_running_loop().time() > end)
        assert sent(wire) == b"<a>"

    play(silent, reads=2, silence_s=0.03)


def test_comments_go_on_with_the_next_stream() -> None:
    async def run() -> None:
        streams = OpenStreams(0.003)
        for _ in range(2):
            stream: Any = Mock()
            streams.add(stream)
            await until(lambda stream=stream: stream.comment.called)  # type: ignore[misc]
            streams.remove(stream)

    asyncio.run(run())
