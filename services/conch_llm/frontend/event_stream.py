"""Sends an event stream, however fast its client reads.

While the socket is writable, parts are sent as they come: deltas, or events that a native model has made.
Otherwise they wait in one list, which is encoded as a whole when it is sent. Beyond `MOST_PENDING` the stream
takes no more parts, and the model waits.

Threads and locks: event loop only.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from conch.frontends.http.http_exchange import EVENT_STREAM, Headers, HttpExchange
from conch_llm.calls.generation import Generation
from conch_llm.calls.model_calls import NativeAnswer
from conch_llm.deltas import Delta
from conch_llm.frontend.answer_maker import Encoder
from conch_llm.frontend.openai_answers import joined

T = TypeVar("T")

MOST_PENDING = 1 << 20
"""Characters or bytes that wait for a client to read before its model waits."""
SILENCE_S = 15.0
"""Seconds without an event after which a comment is sent: proxies close connections that are silent."""
COMMENT = b":\n\n"
_OF_A_DELTA = 64  # characters that a delta counts besides its text


class OpenStreams:
    """Sends comments on silent streams, with one timer for all.

    Args:
        silence_s: Seconds of silence before a comment.
    """

    def __init__(self, silence_s: float = SILENCE_S) -> None:
        self._silence_s = silence_s
        self._streams: set[EventStream[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, stream: EventStream[Any]) -> None:
        """Watches a stream that has begun."""
        self._streams.add(stream)
        if self._timer is None:
            self._look_later()

    def remove(self, stream: EventStream[Any]) -> None:
        """Leaves a stream that ends."""
        self._streams.discard(stream)
        if not self._streams and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._silence_s / 3, self._look)

    def _look(self) -> None:
        latest = asyncio.get_running_loop().time() - self._silence_s
        for stream in self._streams:
            stream.comment(latest)
        self._look_later()


class Parts(ABC, Generic[T]):
    """Parts of a stream, and their encoding."""

    @abstractmethod
    async def take(self) -> Sequence[T] | None:
        """The parts that have come, at least one; None after the last. Raises ConchError: the model fails."""

    @abstractmethod
    def size(self, part: T) -> int:
        """Size that a part counts while it waits."""

    @abstractmethod
    def encode(self, parts: Sequence[T]) -> bytes:
        """The bytes of parts."""

    @abstractmethod
    def last(self) -> bytes:
        """The bytes behind the last part."""


class DeltaParts(Parts[Delta]):
    """Deltas of an answer, each counted on arrival.

    Args:
        generation: The answer, delta by delta.
        answer: Encodes the events.
    """

    def __init__(self, generation: Generation, answer: Encoder) -> None:
        self._generation = generation
        self._answer = answer

    async def take(self) -> Sequence[Delta] | None:
        """The deltas that have come."""
        return await self._generation.take()

    def size(self, part: Delta) -> int:
        """Number of its characters, plus an allowance for its other fields."""
        return _OF_A_DELTA + len(part.text) + len(part.reasoning)

    def encode(self, parts: Sequence[Delta]) -> bytes:
        """Their events, with the texts of neighbours joined."""
        return self._answer.events(parts if len(parts) < 2 else joined(parts))

    def last(self) -> bytes:
        """The end of the answer."""
        return self._answer.end()


class NativeParts(Parts[bytes]):
    """Events that a native model has made."""

    def __init__(self, answer: NativeAnswer) -> None:
        self._answer = answer

    async def take(self) -> Sequence[bytes] | None:
        """The bytes that have come."""
        piece = await self._answer.take()
        return None if piece is None else (piece,)

    def size(self, part: bytes) -> int:
        """Number of its bytes."""
        return len(part)

    def encode(self, parts: Sequence[bytes]) -> bytes:
        """The bytes as they are."""
        return b"".join(parts)

    def last(self) -> bytes:
        """Empty: the model has sent the end."""
        return b""


class EventStream(Generic[T]):
    """One answer on its way to a client.

    Args:
        exchange: The request; its response has not begun.
        parts: Parts of the answer.
        streams: Watches for silence.
        most_pending: Limit of the size of waiting parts.
    """

    def __init__(
        self,
        exchange: HttpExchange,
        parts: Parts[T],
        streams: OpenStreams,
        most_pending: int = MOST_PENDING,
    ) -> None:
        self._exchange = exchange
        self._parts = parts
        self._streams = streams
        self._most_pending = most_pending
        self._pending: list[T] = []
        self._size = 0
        self._loop = asyncio.get_running_loop()
        self._sent_s = self._loop.time()

    def begin(self, status: int = 200, headers: Headers | None = None) -> None:
        """Sends status and headers."""
        self._exchange.begin_response(status, headers or EVENT_STREAM, COMMENT)
        self._streams.add(self)

    async def send(self, parts: Sequence[T]) -> Sequence[T] | None:
        """Sends parts, or keeps them; returns the next ones, or None after the last.

        Raises:
            ConchError: The model fails.
        """
        self._pending += parts
        if self._exchange.writable:
            self._flush()
            return await self._parts.take()
        self._size += sum(map(self._parts.size, parts))
        if self._size <= self._most_pending:
            return await self._take_or_flush()
        await self._exchange.wait_writable()
        self._flush()
        return await self._parts.take()

    async def end(self) -> None:
        """Sends what is left and the end, as the client reads."""
        await self._finish(self._parts.last)

    async def fail(self, events: Callable[[], bytes]) -> None:
        """Sends what is left and the events of an error, which are made behind it."""
        await self._finish(events)

    def close(self) -> None:
        """Ends the watch for silence."""
        self._streams.remove(self)

    def comment(self, latest_s: float) -> None:
        """Sends a comment if the last event is older."""
        if self._sent_s < latest_s and self._exchange.writable:
            self._exchange.write(COMMENT)
            self._sent_s = self._loop.time()

    async def _take_or_flush(self) -> Sequence[T] | None:
        """The next parts; meanwhile sends what waits once the client has read."""
        taken = asyncio.ensure_future(self._parts.take())
        writable = asyncio.ensure_future(self._exchange.wait_writable())
        try:
            await asyncio.wait((taken, writable), return_when=asyncio.FIRST_COMPLETED)
            if self._exchange.writable:
                self._flush()
            return await taken
        finally:
            writable.cancel()
            taken.cancel()

    async def _finish(self, last: Callable[[], bytes]) -> None:
        await self._exchange.wait_writable()
        self._flush()
        ending = last()
        if ending:
            self._exchange.write(ending)
        self.close()
        self._exchange.end()

    def _flush(self) -> None:
        pending, self._pending, self._size = self._pending, [], 0
        data = self._parts.encode(pending) if pending else b""
        if data:
            self._exchange.write(data)
            self._sent_s = self._loop.time()
