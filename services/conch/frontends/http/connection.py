"""One connection of a listener: uvicorn's, with a say in what happens when it is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

CONNECTION = "conch.connection"
"""The key of a scope under which its `Connection` is found."""

RAW_NAMES = "conch.raw_headers"
"""The key of a scope under which its headers are found with names as the client wrote them."""

_MOST_HEADER_BYTES = 1 << 20
_MOST_CHUNKS = 65536
_MOST_ANNOUNCED = 1 << 30

TOO_MANY_CHUNKS = (
    f"Chunked request body exceeds maximum of {_MOST_CHUNKS} non-empty chunks. Send fewer or larger HTTP "
    f"chunks."
)


class ClosingState(ServerState):
    """What the connections of one listener share.

    Attributes:
        on_lost: Called when one of them is gone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.default_headers = []
        self.on_lost: Callable[[], None] = _nothing


class Gathered:
    """A body, or what has come of it so far.

    Args:
        length: How long it will be; None if nobody knows.

    Attributes:
        size: How much has come.
    """

    def __init__(self, length: int | None) -> None:
        # The system gives memory only as it is written to, so a client has to send what it announces.
        known = length is not None and length <= _MOST_ANNOUNCED
        self._block = bytearray(length) if length is not None and known else None
        self._parts: list[bytes] = []
        self.size = 0

    def add(self, part: bytes) -> None:
        """Adds a piece."""
        block = self._block
        if block is None:
            self._parts.append(part)
        else:
            block[self.size : self.size + len(part)] = part
        self.size += len(part)

    def body(self) -> memoryview:
        """The body, once it is complete; may copy all of it."""
        if self._block is not None:
            return memoryview(self._block)[: self.size].toreadonly()
        return memoryview(b"".join(self._parts))


def _nothing() -> None:
    """What is called where nobody waits."""


class Connection(HttpToolsProtocol):
    """One connection.

    Attributes:
        on_disconnect: Called once when the client goes away while a request runs; None where no request
            wants to know.
        chunks: How many chunks the request that is being read has had.
        lost: Whether the client is gone.
    """

    def __init__(self, config: Config, state: ClosingState, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(config=config, server_state=state, app_state={}, _loop=loop)
        self._state = state
        self._raw: list[tuple[bytes, bytes]] = []
        self._header_bytes = 0
        self.on_disconnect: Callable[[], None] | None = None
        self.chunks = 0
        self.lost = False
        self._gathered: Gathered | None = None

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._raw = []
        self._header_bytes = 0
        self.chunks = 0
        scope: Any = self.scope
        scope[CONNECTION] = self
        scope[RAW_NAMES] = self._raw

    def on_url(self, url: bytes) -> None:
        """Takes a piece of the target."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Takes a header; there is no end to them otherwise."""
        self._count(len(name) + len(value))
        self._raw.append((name, value))
        super().on_header(name, value)

    def _count(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > _MOST_HEADER_BYTES:
            raise ValueError("the headers are too large")  # the parser ends the connection with a 400

    def on_chunk_header(self) -> None:
        """Counts the chunks of a body: each costs far more than its bytes."""
        self.chunks += 1

    def gather(self, scope: Any, length: int | None) -> Gathered | None:
        """Begins to gather the rest of the body of the request that is being read.

        It comes without a message for each piece, and into one block if its length is known.

        Args:
            scope: The request's.
            length: The length of the whole body, or None.

        Returns:
            Where the body will be; the `receive` of the request tells when it is complete. None if the
            request is not the one that is being read.
        """
        cycle = self.cycle
        if cycle is None or cycle.scope is not scope or not cycle.more_body or self.parser is None:
            return None
        self._gathered = gathered = Gathered(length)
        if cycle.body:
            gathered.add(bytes(cycle.body))
            cycle.body = bytearray()
        cycle.message_event.clear()
        return gathered

    def on_body(self, body: bytes) -> None:
        """Takes a piece of a body."""
        if self._gathered is None or self.cycle.response_complete:
            super().on_body(body)
        elif self.too_many_chunks:
            self.cycle.message_event.set()  # enough has come to refuse it
        else:
            self._gathered.add(body)

    def on_message_complete(self) -> None:
        """The request is complete."""
        self._gathered = None
        super().on_message_complete()

    @property
    def too_many_chunks(self) -> bool:
        """Whether the body comes in more chunks than are taken; the one that ends it does not count."""
        return self.chunks > _MOST_CHUNKS + 1

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone; so is whoever waited for an answer on it."""
        self.lost = True
        self._gathered = None
        on_disconnect, self.on_disconnect = self.on_disconnect, None
        # Of pipelined requests uvicorn tells only the last.
        for cycle, _ in self.pipeline:
            cycle.disconnected = True
        self.pipeline.clear()
        super().connection_lost(exc)
        if on_disconnect is not None:
            on_disconnect()
        self._state.on_lost()
