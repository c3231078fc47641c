"""One connection of a listener: uvicorn's, with a shorter way for some requests.

A request that the direct way takes is answered without ASGI: no task, no scope, no messages. It costs a
third of the time. All others, and those that come while one is answered, go uvicorn's way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from enum import Enum, auto
from typing import Any

from httptools import HttpParserError, HttpParserUpgrade
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from conch.core.errors import InvalidArgumentError
from conch.frontends.http.flow import MUCH_BYTES, Flow
from conch.frontends.http.gathered import Gathered
from conch.frontends.http.patience import Progress, Seen, Waits
from conch.frontends.http.shortcut import Direct, DirectCycle

_log = logging.getLogger("conch.uvicorn")  # uvicorn's own is that of the whole process
_log.setLevel(logging.ERROR)  # what clients do wrong is no warning

CONNECTION = "conch.connection"
"""The key of a scope under which its `Connection` is found."""

RAW_NAMES = "conch.raw_headers"
"""The key of a scope under which its headers are found with names as the client wrote them."""

_CODING = b"transfer-encoding"
_CODING_LENGTH = len(_CODING)
_MOST_HEADER_BYTES = 128 << 10  # to take a header costs far more than its bytes
_MOST_CHUNKS = 65536


class UnreadBodyError(InvalidArgumentError):
    """A body without a length is not read to its end: the connection is closed with the answer."""


class TooManyChunksError(UnreadBodyError):
    """A body comes in too many pieces."""

    def __init__(self) -> None:
        super().__init__(
            f"Chunked request body exceeds maximum of {_MOST_CHUNKS} non-empty chunks. Send fewer or larger "
            f"HTTP chunks."
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


def _nothing() -> None:
    """What is called where nobody waits."""


class _Reading(Enum):
    """What of a request is being read."""

    NOTHING = auto()
    HEADERS = auto()
    BODY = auto()


class Connection(HttpToolsProtocol):
    """One connection.

    Attributes:
        progress: Whether its client takes too long.
        on_disconnect: Called once when the client goes away while a request runs; None where no request
            wants to know.
        chunks: How many chunks the request that is being read has had.
        lost: Whether the client is gone.
    """

    flow: Flow

    def __init__(
        self,
        config: Config,
        state: ClosingState,
        loop: asyncio.AbstractEventLoop,
        direct: Direct | None = None,
    ) -> None:
        super().__init__(config=config, server_state=state, app_state={}, _loop=loop)
        self.logger = _log
        self.access_log = False
        self._state = state
        self._direct = direct
        self._raw: list[tuple[bytes, bytes]] = []
        self._received = 0
        self._received_before = 0  # the headers that are being read
        self._requests = 0
        self._reading = _Reading.NOTHING
        self._broken = False
        self._unknown_coding = False
        self.progress = Progress()
        self.on_disconnect: Callable[[], None] | None = None
        self.chunks = 0
        self.lost = False
        self._gathered: Gathered | None = None
        self._running: Any = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected."""
        super().connection_made(transport)
        self.flow = Flow(transport, self.loop, self.pipeline)

    def data_received(self, data: bytes) -> None:
        """Takes what the client has sent."""
        size = len(data)
        self._received += size
        if size >= MUCH_BYTES:
            self.flow.has_read(size)
        if self._broken:
            return
        try:
            self._feed(data)
        except HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
        else:
            if self._received - self._received_before > _MOST_HEADER_BYTES:
                self.send_400_response("The headers are too large.")

    def _feed(self, data: bytes) -> None:
        rest: bytes | memoryview = data
        while len(rest):
            try:
                self.parser.feed_data(rest)
                return
            except HttpParserUpgrade as upgrade:
                # Nobody here speaks another protocol, so it is a request as any other. The parser takes what
                # comes behind the headers for that protocol, not for a body: it gets them without the wish.
                rest = memoryview(rest)[upgrade.args[0] :]
                self.parser.feed_data(self._head_without_upgrade())

    def _head_without_upgrade(self) -> bytes:
        method = self.parser.get_method()
        if method == b"CONNECT":
            raise HttpParserError("a tunnel is asked for")
        lines = [method, b" ", self.url, b" HTTP/", self.parser.get_http_version().encode(), b"\r\n"]
        for name, value in self._raw:
            if name.lower() != b"upgrade":
                lines += (name, b": ", value, b"\r\n")
        return b"".join([*lines, b"\r\n"])

    def send_400_response(self, msg: str) -> None:
        """Ends the connection as its client does not keep to HTTP; what came before that is answered."""
        self._give_up(400, msg)

    def give_up(self) -> None:
        """Ends the connection as its client takes too long."""
        if self.transport.is_closing() or self._unsent():
            self.transport.abort()
        elif self._reading is _Reading.NOTHING:
            self.transport.close()
        else:
            self._give_up(408, "The request has not come in time.")

    def _give_up(self, status: int, text: str) -> None:
        self._broken = True
        cycle: Any = self.cycle
        if self._reading is _Reading.BODY:
            if not self.pipeline:
                if cycle.response_complete or (type(cycle) is not DirectCycle and cycle.response_started):
                    self.transport.close()
                else:
                    self._refuse(status, text)
                return
            self.pipeline.popleft()  # what comes before it is answered
            self.cycle = cycle = self.pipeline[0][0] if self.pipeline else self._running
        if cycle is None or cycle.response_complete:
            self._refuse(status, text)
        else:
            cycle.keep_alive = False

    def _refuse(self, status: int, text: str) -> None:
        body = text.encode("ascii")
        self.transport.write(
            b"%bcontent-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
            % (STATUS_LINE[status], len(body), body)
        )
        self.transport.close()

    def seen(self) -> Seen:
        """What it looks like now."""
        transport, cycle = self.transport, self.cycle
        unsent = self._unsent()
        if transport.is_closing():
            waits = Waits.CLOSE
        elif unsent:
            waits = Waits.READER
        elif self._reading is _Reading.BODY:
            waits = Waits.SERVER if self.pipeline or self.flow.read_paused else Waits.REST
        elif cycle is not None and not cycle.response_complete:
            waits = Waits.SERVER
        else:
            waits = Waits.REQUEST if self._reading is _Reading.NOTHING else Waits.REST
        return Seen(waits, self._requests, self._received, unsent)

    def _unsent(self) -> int:
        """How many bytes wait for the client to read them."""
        return self.transport.get_write_buffer_size() + self.flow.unsent

    def shutdown(self) -> None:
        """Ends the connection once the requests that have come on it are answered."""
        if self.transport.is_closing():
            return
        super().shutdown()

    def on_message_begin(self) -> None:
        """A request begins."""
        self._reading = _Reading.HEADERS
        self._requests += 1
        self.url = b""
        self._raw = []
        self._unknown_coding = False
        self.chunks = 0

    @property
    def raw_headers(self) -> list[tuple[bytes, bytes]]:
        """The headers with names as the client wrote them."""
        return self._raw

    @property
    def running(self) -> Any:
        """The cycle of the request that runs."""
        return self._running

    @property
    def peer(self) -> str:
        """The client's address."""
        return f"{self.client[0]}:{self.client[1]}" if self.client else ""

    def on_header(self, name: bytes, value: bytes) -> None:
        """Takes a header."""
        self._raw.append((name, value))
        if len(name) == _CODING_LENGTH and name.lower() == _CODING and value.strip().lower() != b"chunked":
            self._unknown_coding = True

    def on_headers_complete(self) -> None:
        """The headers have come: takes the direct way if there is one, else uvicorn's."""
        self._received_before = self._received
        if self._broken:
            return
        if self._unknown_coding:
            self._give_up(501, "Of transfer encodings only 'chunked' is supported.")
            return
        if self.parser.should_upgrade():
            return  # see `_feed`
        if self._direct is not None and self._free():
            cycle = DirectCycle(self)
            call = self._direct(self, cycle)
            if call is not None:
                any_cycle: Any = cycle
                self.cycle = self._running = any_cycle
                self._reading = _Reading.BODY
                cycle.begin(call)
                return
        url = self.url
        super().on_message_begin()
        self.url = url
        for name, value in self._raw:
            super().on_header(name, value)
        scope: Any = self.scope
        scope[CONNECTION] = self
        scope[RAW_NAMES] = self._raw
        super().on_headers_complete()
        self._reading = _Reading.BODY

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        """A response has been sent: the next request of the pipeline is begun, or more is read."""
        if self.transport.is_closing():
            return
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        self.flow.resume_reading()

    def _free(self) -> bool:
        """Whether the request may be answered directly, as far as the connection goes."""
        parser = self.parser
        return (
            (self.cycle is None or self.cycle.response_complete)
            and not self.flow.write_paused
            and parser.get_method() == b"POST"
            and parser.get_http_version() == "1.1"
        )

    def on_chunk_header(self) -> None:
        """Counts the chunks of a body: each costs far more than its bytes."""
        self.chunks += 1

    def gather(self, scope: Any, length: int | None, most: int) -> Gathered | None:
        """Begins to gather the rest of the body of the request that is being read.

        It comes without a message for each piece, and into one block if its length is known.

        Args:
            scope: The request's.
            length: The length of the whole body, or None.
            most: How long it may be; what is more is not kept, and `receive` returns at once.

        Returns:
            Where the body will be; the `receive` of the request tells when it is complete. None if the
            request is not the one that is being read.
        """
        cycle = self.cycle
        if cycle is None or cycle.scope is not scope or not cycle.more_body or self.parser is None:
            return None
        self._gathered = gathered = Gathered(length, most)
        if cycle.body:
            gathered.add(bytes(cycle.body))
            cycle.body = bytearray()
        cycle.message_event.clear()
        return gathered

    def on_body(self, body: bytes) -> None:
        """Takes a piece of a body."""
        self._received_before = self._received
        if self._reading is not _Reading.BODY:
            return  # that of a request that has been refused
        cycle: Any = self.cycle
        if type(cycle) is DirectCycle:
            cycle.add(body)
        elif self._gathered is None or cycle.response_complete:
            super().on_body(body)
        elif self.too_many_chunks or self._gathered.size > self._gathered.most:
            self.cycle.message_event.set()  # enough has come to refuse it
        else:
            self._gathered.add(body)

    def on_message_complete(self) -> None:
        """The request is complete."""
        if self._reading is _Reading.HEADERS:
            return  # see `_feed`
        self._reading = _Reading.NOTHING
        cycle: Any = self.cycle
        if type(cycle) is DirectCycle:
            cycle.complete()
            return
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
        # Of pipelined requests uvicorn tells only the last: neither the one that runs, nor those between.
        for cycle in (self._running, *(cycle for cycle, _ in self.pipeline)):
            if cycle is not None:
                cycle.disconnected = True
                cycle.message_event.set()
        self._running = None
        self.pipeline.clear()
        self.flow.stop()
        super().connection_lost(exc)
        if on_disconnect is not None:
            on_disconnect()
        self._state.on_lost()
