"""One connection of a listener: uvicorn's, with a shorter way for some requests.

A request that the fast_path way takes is answered without ASGI: no task, no scope, no messages. It costs a
third of the time. All others, and those that come while one is answered, go uvicorn's way.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import deque
from collections.abc import Callable
from enum import Enum, auto
from typing import Any

from httptools import HttpParserError, HttpParserUpgrade
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from conch.core.errors import InvalidArgumentError
from conch.frontends.http.fast_path import FastPath, FastPathCycle
from conch.frontends.http.flow_control import MUCH_BYTES, HttpFlowControl
from conch.frontends.http.request_body import RequestBody
from conch.frontends.http.timeouts import ConnectionSnapshot, ProgressCheck, WaitsFor

_log = logging.getLogger("conch.uvicorn")  # uvicorn's own is that of the whole process
_log.setLevel(logging.ERROR)  # what clients do wrong is no warning

CONNECTION = "conch.connection"
"""The key of a scope under which its `Connection` is found."""

RAW_NAMES = "conch.raw_headers"
"""The key of a scope under which its headers are found with names as the client wrote them."""

_CODING = b"transfer-encoding"
_CODING_LENGTH = len(_CODING)
_LENGTH = b"content-length"
_LENGTH_LENGTH = len(_LENGTH)
_MOST_HEADER_BYTES = 32 << 10  # to take a header costs far more than its bytes
_MOST_HEADERS = 200
_LARGE_HEADERS = f"The headers are too large: at most {_MOST_HEADERS}, of 32 KiB together, are taken."
_MOST_CHUNKS = 65536
_PARSED_BYTES = 4 << 10
"""So much is parsed at once of what may hold many requests, headers or chunks."""
_PARSING_S = 0.002
"""So long one connection parses before others have their turn."""
_PROBE_S = 0.5
"""So long after a client has sent its last it is looked at whether it still reads, later less often."""
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_TCP_CLOSE = 7


class UnreadBodyError(InvalidArgumentError):
    """A body without a length is not read to its end: the connection is closed with the answer."""


class TooManyChunksError(UnreadBodyError):
    """A body comes in too many pieces."""

    def __init__(self) -> None:
        super().__init__(
            f"Chunked request body exceeds maximum of {_MOST_CHUNKS} non-empty chunks. Send fewer or larger "
            f"HTTP chunks."
        )


class ListenerState(ServerState):
    """What the connections of one listener share.

    Attributes:
        on_lost: Called when one of them is gone.
        most_connections: How many there may be.
    """

    def __init__(self, most_connections: int) -> None:
        super().__init__()
        self.most_connections = most_connections
        self._unparsed: deque[Connection] = deque()
        self.default_headers = []
        self.on_lost: Callable[[], None] = _nothing

    def parse_later(self, connection: Connection) -> None:
        """Has a connection parse on when it is its turn: one does between other events of the loop."""
        self._unparsed.append(connection)
        if len(self._unparsed) == 1:
            connection.loop.call_soon(self._parse_one)

    def _parse_one(self) -> None:
        connection = self._unparsed.popleft()
        if self._unparsed:
            connection.loop.call_soon(self._parse_one)
        connection.parse_on()


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
        filler: What may be sent at any time within the response that has begun, and means nothing.
    """

    flow: HttpFlowControl

    def __init__(
        self,
        config: Config,
        state: ListenerState,
        loop: asyncio.AbstractEventLoop,
        fast_path: FastPath | None = None,
    ) -> None:
        super().__init__(config=config, server_state=state, app_state={}, _loop=loop)
        self.logger = _log
        self.access_log = False
        self._state = state
        self._fast_path = fast_path
        self._raw: list[tuple[bytes, bytes]] = []
        self._received = 0
        self._requests = 0
        self._reading = _Reading.NOTHING
        self._broken = False
        self._unknown_coding = False
        self._unparsed: bytes | memoryview = b""
        self._parsed = 0
        self._parsed_before = 0  # the headers that are being read
        self._body_left = 0
        self._declared: bytes | None = None
        # Whether the request that is being read has both a length and chunks.
        self._ambiguous = self._chunked = self._chunk_begins = False
        self._parsing_on = False
        self.filler = b""
        self.parser.set_dangerous_leniencies(lenient_chunked_length=True)  # see `on_headers_complete`
        self.progress = ProgressCheck()
        self.on_disconnect: Callable[[], None] | None = None
        self.chunks = 0
        self.lost = False
        self._collected: RequestBody | None = None
        self._running: Any = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected."""
        super().connection_made(transport)
        self.flow = HttpFlowControl(transport, self.loop, self.pipeline)
        if len(self._state.connections) > self._state.most_connections:
            self._broken = True
            self._refuse(503, "There are too many connections.")

    def data_received(self, data: bytes) -> None:
        """Takes what the client has sent."""
        size = len(data)
        self._received += size
        if size >= MUCH_BYTES:
            self.flow.has_read(size)
        if size <= _PARSED_BYTES and not len(self._unparsed):
            self._parse_piece(data)
            return
        self._unparsed = data if not len(self._unparsed) else bytes(self._unparsed) + data
        self._parse()

    def _parse(self) -> None:
        """Parses what has been read, up to where other connections are to have their turn.

        A few bytes can be a request, a header or a chunk, so much is not parsed at once, unless it is the
        rest of a body.
        """
        rest = self._unparsed
        if len(rest) <= _PARSED_BYTES:
            self._unparsed = b""
            self._parse_piece(rest)
        else:
            began = time.monotonic()
            rest = memoryview(rest)
            while rest and not self._broken:
                size = max(_PARSED_BYTES, self._body_left)
                self._parse_piece(rest[:size])
                rest = rest[size:]
                if self.pipeline or time.monotonic() - began > _PARSING_S:
                    break
            self._unparsed = b"" if self._broken else rest
        if len(self._unparsed):
            self.flow.hold()
            self._parse_later()
        elif self.flow.held:
            self.flow.release()

    def _parse_later(self) -> None:
        """Has more parsed when others have had their turn, once no requests wait."""
        if len(self._unparsed) and not self.pipeline and not self._parsing_on:
            self._parsing_on = True
            self._state.parse_later(self)

    def parse_on(self) -> None:
        """Parses more of what has been read; see `ListenerState.parse_later`."""
        self._parsing_on = False
        if not self.lost:
            self._parse()

    def _parse_piece(self, data: bytes | memoryview) -> None:
        if self._broken:
            return
        self._parsed += len(data)
        try:
            self._feed(data)
        except HttpParserError:
            if not self._broken:
                self.send_400_response("Invalid HTTP request received.")
        else:
            if not self._broken and self._parsed - self._parsed_before > _MOST_HEADER_BYTES:
                self._give_up(431, _LARGE_HEADERS)

    def _feed(self, data: bytes | memoryview) -> None:
        rest = data
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
                if cycle.response_complete or (type(cycle) is not FastPathCycle and cycle.response_started):
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

    def snapshot(self) -> ConnectionSnapshot:
        """What it looks like now."""
        transport, cycle = self.transport, self.cycle
        unsent = self._unsent()
        if transport.is_closing():
            waits = WaitsFor.CLOSE
        elif unsent:
            waits = WaitsFor.READER
        elif self._reading is _Reading.BODY:
            waits = WaitsFor.SERVER if self.pipeline or self.flow.read_paused else WaitsFor.REST
        elif cycle is not None and not cycle.response_complete:
            waits = WaitsFor.SERVER
        else:
            waits = WaitsFor.REQUEST if self._reading is _Reading.NOTHING else WaitsFor.REST
        return ConnectionSnapshot(waits, self._requests, self._received, unsent)

    def _unsent(self) -> int:
        """How many bytes wait for the client to read them."""
        return self.transport.get_write_buffer_size() + self.flow.unsent

    def shutdown(self) -> None:
        """Ends the connection once the requests that have come on it are answered."""
        if self.transport.is_closing():
            return
        super().shutdown()

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more; it may still wait for the answers to what it has sent.

        One that has hung up looks the same until something is sent to it. So one whose answer takes a while
        is sent what clients ignore, such as ``100 Continue``: one that is gone answers that with a reset.

        Returns:
            Whether the connection stays open; over TLS it can't.
        """
        cycle: Any = self.cycle
        if self.scheme == "https":
            return False
        if not self._broken:
            if self._reading is not _Reading.NOTHING:
                self._give_up(400, "The request ends too early.")
            elif cycle is None or cycle.response_complete:
                return False
            else:
                self._end_after(cycle)
        self.loop.call_later(_PROBE_S, self._probe, _PROBE_S)
        return True

    def _end_after(self, cycle: Any) -> None:
        """Ends the connection with the response of a request: what comes behind it is not looked at."""
        self._broken = True
        cycle.keep_alive = False

    def _probe(self, delay_s: float) -> None:
        """Looks whether a client that sends no more is gone, from time to time."""
        if self.lost or self.transport.is_closing():
            return
        connected = self.transport.get_extra_info("socket")
        if connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE:
            self.transport.abort()
            return
        running: Any = self._running
        if running is not None and not running.response_complete and not self._unsent():
            started = type(running) is not FastPathCycle and running.response_started
            if started:
                self.transport.write(self.filler)
            elif self.parser.get_http_version() != "1.0":
                self.transport.write(_CONTINUE)
        self.loop.call_later(2 * delay_s, self._probe, 2 * delay_s)

    def on_message_begin(self) -> None:
        """A request begins."""
        self._reading = _Reading.HEADERS
        self._requests += 1
        self.url = b""
        self._raw = []
        self._unknown_coding = self._ambiguous = self._chunked = self._chunk_begins = False
        self._declared = None
        self._body_left = 0
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
        if len(self._raw) > _MOST_HEADERS:
            return  # it is refused
        self._raw.append((name, value))
        if len(name) == _CODING_LENGTH and name.lower() == _CODING:
            if self._chunked or value.strip().lower() != b"chunked":
                self._unknown_coding = True
            self._chunked = True
        elif len(name) == _LENGTH_LENGTH and name.lower() == _LENGTH:
            self._declared = value

    def on_headers_complete(self) -> None:
        """The headers have come: takes the fast_path way if there is one, else uvicorn's.

        A request with both a length and chunks is read by its chunks, as RFC 9112 (6.3) has it. A proxy that
        goes by its length may take a part of it for the next request, so no other is read behind it: the
        connection ends with the response.
        """
        self._parsed_before = self._parsed
        if self._broken:
            return
        if len(self._raw) > _MOST_HEADERS:
            self._give_up(431, _LARGE_HEADERS)
            return
        if self._unknown_coding:
            self._give_up(501, "Of transfer encodings only 'chunked' is supported.")
            return
        if self.parser.should_upgrade():
            return  # see `_feed`
        if self._declared is not None:
            if self._chunked:
                self._ambiguous = True
            else:
                self._body_left = int(self._declared)
        if self._fast_path is not None and self._free():
            cycle = FastPathCycle(self)
            call = self._fast_path(self, cycle)
            if call is not None:
                any_cycle: Any = cycle
                self.cycle = self._running = any_cycle
                self._reading = _Reading.BODY
                if self._ambiguous:
                    cycle.keep_alive = False
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
        if self._ambiguous:
            any_cycle = self.cycle
            any_cycle.keep_alive = False

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        """A response has been sent: the next request of the pipeline is begun, or more is read."""
        self.filler = b""
        if self.transport.is_closing():
            return
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        if len(self._unparsed):
            self._parse_later()
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
        """A chunk begins, or there are no more."""
        self._chunk_begins = True

    def collect_body(self, scope: Any, length: int | None, most: int) -> RequestBody | None:
        """Begins to collect_body the rest of the body of the request that is being read.

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
        self._collected = collected = RequestBody(length, most)
        if cycle.body:
            collected.add(bytes(cycle.body))
            cycle.body = bytearray()
        cycle.message_event.clear()
        return collected

    def on_body(self, body: bytes) -> None:
        """Takes a piece of a body."""
        if self._chunk_begins:  # each costs far more than its bytes; the one that ends a body has none
            self._chunk_begins = False
            self.chunks += 1
        self._parsed_before = self._parsed
        self._body_left = max(self._body_left - len(body), 0)
        if self._reading is not _Reading.BODY:
            return  # that of a request that has been refused
        cycle: Any = self.cycle
        if type(cycle) is FastPathCycle:
            cycle.add(body)
        elif self._collected is None or cycle.response_complete:
            super().on_body(body)
        elif self.too_many_chunks or self._collected.size > self._collected.most:
            self.cycle.message_event.set()  # enough has come to refuse it
        else:
            self._collected.add(body)

    def on_message_complete(self) -> None:
        """The request is complete."""
        if self._reading is _Reading.HEADERS:
            return  # see `_feed`
        self._reading = _Reading.NOTHING
        cycle: Any = self.cycle
        if self._ambiguous:
            self._broken = True  # what comes behind it is not looked at
        if type(cycle) is FastPathCycle:
            cycle.complete()
            return
        self._collected = None
        super().on_message_complete()

    @property
    def too_many_chunks(self) -> bool:
        """Whether the body comes in more chunks than are taken."""
        return self.chunks > _MOST_CHUNKS

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone; so is whoever waited for an answer on it."""
        self.lost = True
        self._collected = None
        on_disconnect, self.on_disconnect = self.on_disconnect, None
        # Of pipelined requests uvicorn tells only the last: neither the one that runs, nor those between.
        for cycle in (self._running, *(cycle for cycle, _ in self.pipeline)):
            if cycle is not None:
                cycle.disconnected = True
                cycle.message_event.set()
        self._running = None
        self._unparsed = b""
        self.pipeline.clear()
        self.flow.stop()
        super().connection_lost(exc)
        if on_disconnect is not None:
            on_disconnect()
        self._state.on_lost()
