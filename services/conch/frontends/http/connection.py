"""One connection of a listener: uvicorn's, with a shorter way for some requests.

A request that the direct way takes is answered without ASGI: no task, no scope, no messages. It costs a
third of the time. All others, and those that come while one is answered, go uvicorn's way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sized
from enum import Enum, auto
from typing import Any, Protocol

from httptools import HttpParserError, HttpParserUpgrade
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from conch.frontends.http.patience import Progress, Seen, Waits

_log = logging.getLogger("conch.uvicorn")  # uvicorn's own is that of the whole process
_log.setLevel(logging.ERROR)  # what clients do wrong is no warning

CONNECTION = "conch.connection"
"""The key of a scope under which its `Connection` is found."""

RAW_NAMES = "conch.raw_headers"
"""The key of a scope under which its headers are found with names as the client wrote them."""

_MOST_HEADER_BYTES = 128 << 10  # to take a header costs far more than its bytes
_MOST_CHUNKS = 65536
_MOST_ANNOUNCED = 1 << 30
_JOINED_BYTES = 64 * 1024

TOO_MANY_CHUNKS = (
    f"Chunked request body exceeds maximum of {_MOST_CHUNKS} non-empty chunks. Send fewer or larger HTTP "
    f"chunks."
)


class Gathered:
    """A body, or what has come of it so far.

    Args:
        length: How long it will be; None if nobody knows.
        most: How long it may be.

    Attributes:
        size: How much has come.
        most: How long it may be.
    """

    def __init__(self, length: int | None, most: int) -> None:
        # The system gives memory only as it is written to, so a client has to send what it announces.
        known = length is not None and length <= _MOST_ANNOUNCED
        self._block = bytearray(length) if length is not None and known else None
        self._parts: list[bytes] = []
        self.size = 0
        self.most = most

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


class DirectCall(Protocol):
    """A request that is answered directly."""

    @property
    def length(self) -> int | None:
        """How long its body is to be; None where nobody knows."""

    @property
    def most(self) -> int:
        """How long its body may be."""

    @property
    def expects_continue(self) -> bool:
        """Whether the client waits for leave to send the body."""

    def complete(self, body: Gathered) -> None:
        """Takes the body, once it has come."""

    def refuse_size(self, size: int) -> None:
        """Says that the body is longer than it may be: as long as this, or longer."""

    def refuse_chunks(self) -> None:
        """Says that the body comes in too many pieces."""

    def abandon(self) -> None:
        """Says that the client is gone."""


class Answering(Protocol):
    """Where a direct call is answered."""

    def send(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes, closes: bool) -> None:
        """Sends the response, once; on the loop."""


Direct = Callable[["Connection", "Answering"], DirectCall | None]
"""Takes a request whose headers have come, or leaves it; may answer it before it returns."""


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
        self.progress = Progress()
        self.on_disconnect: Callable[[], None] | None = None
        self.chunks = 0
        self.lost = False
        self._gathered: Gathered | None = None
        self._running: Any = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected."""
        super().connection_made(transport)
        self.flow = _Flow(transport, self.pipeline)

    def data_received(self, data: bytes) -> None:
        """Takes what the client has sent."""
        self._received += len(data)
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
        if self.transport.is_closing() or self.transport.get_write_buffer_size():
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
                if cycle.response_complete or (type(cycle) is not _DirectCycle and cycle.response_started):
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
        unsent = transport.get_write_buffer_size()
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
        self.chunks = 0

    @property
    def raw_headers(self) -> list[tuple[bytes, bytes]]:
        """The headers with names as the client wrote them."""
        return self._raw

    @property
    def peer(self) -> str:
        """The client's address."""
        return f"{self.client[0]}:{self.client[1]}" if self.client else ""

    def on_header(self, name: bytes, value: bytes) -> None:
        """Takes a header."""
        self._raw.append((name, value))

    def on_headers_complete(self) -> None:
        """The headers have come: takes the direct way if there is one, else uvicorn's."""
        self._received_before = self._received
        if self.parser.should_upgrade():
            return  # see `_feed`
        if self._direct is not None and self._free():
            cycle = _DirectCycle(self)
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
        cycle: Any = self.cycle
        if type(cycle) is _DirectCycle:
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
        if type(cycle) is _DirectCycle:
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
        super().connection_lost(exc)
        if on_disconnect is not None:
            on_disconnect()
        self._state.on_lost()


class _Flow(FlowControl):
    """Reads no more from a client while requests of it wait that it has sent ahead.

    Args:
        transport: The connection.
        waiting: These requests.
    """

    def __init__(self, transport: asyncio.Transport, waiting: Sized) -> None:
        super().__init__(transport)
        self._waiting = waiting

    def resume_reading(self) -> None:
        """Reads on, unless there are any."""
        if not self._waiting:
            super().resume_reading()


class _DirectCycle:
    """What stands where uvicorn has its cycle of request and response, while a request is answered directly.

    Attributes:
        response_complete: Whether the response has been sent.
        keep_alive: Whether the connection goes on after it.
        disconnected: Set by uvicorn.
        message_event: Set by uvicorn; nobody waits for it.
    """

    __slots__ = (
        "_body",
        "_call",
        "_connection",
        "disconnected",
        "keep_alive",
        "message_event",
        "response_complete",
    )

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._call: DirectCall | None = None
        self._body: Gathered | None = None
        self.response_complete = False
        self.keep_alive: bool = connection.parser.should_keep_alive()
        self.disconnected = False
        self.message_event = _NO_EVENT

    def begin(self, call: DirectCall) -> None:
        """Begins to read the body, unless it has been answered already."""
        if self.response_complete:
            return
        connection = self._connection
        self._call = call
        self._body = Gathered(call.length, call.most)
        connection.on_disconnect = call.abandon
        if call.expects_continue:
            connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def add(self, part: bytes) -> None:
        """Takes a piece of the body."""
        if self.response_complete or self._body is None or self._call is None:
            return
        body = self._body
        if self._connection.too_many_chunks:
            self._call.refuse_chunks()
            return
        body.add(part)
        if body.size > body.most:
            self._call.refuse_size(body.size)

    def complete(self) -> None:
        """The body has come."""
        body, self._body = self._body, None
        if body is not None and self._call is not None and not self.response_complete:
            self._call.complete(body)

    def send(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes, closes: bool) -> None:
        """Sends the response, once."""
        connection = self._connection
        self.response_complete = True
        self._call = self._body = None
        connection.on_disconnect = None
        transport = connection.transport
        if transport.is_closing():
            return
        if closes:
            self.keep_alive = False
        lines = [STATUS_LINE[status]]
        for name, value in headers:
            lines += (name, b": ", value, b"\r\n")
        lines.append(b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n")
        if len(body) <= _JOINED_BYTES:
            lines.append(body)
            transport.write(b"".join(lines))
        else:
            transport.writelines((b"".join(lines), body))
        if not self.keep_alive:
            transport.close()
        elif connection.pipeline:
            connection.on_response_complete()
        # Else there is nothing to do: reading goes on, and a client may be idle for as long as it likes.


class _NoEvent(asyncio.Event):
    """An event that nobody waits for."""


_NO_EVENT = _NoEvent()
