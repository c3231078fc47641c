"""One HTTP/1.1 connection: uvicorn's protocol with a fast path for infer requests.

The fast path answers a request without ASGI task, scope and messages, in a third of the time. Other requests,
and those that arrive while one is running, go through uvicorn.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from enum import Enum, auto
from typing import Any

from httptools import HttpParserError, HttpParserUpgrade
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from conch.frontends.http.fast_path import FastPath, FastPathCycle
from conch.frontends.http.flow_control import (
    MOST_CHUNKS,
    MUCH_BYTES,
    HttpFlowControl,
    ListenerState,
    RequestBody,
)
from conch.frontends.http.timeouts import ConnectionSnapshot, ProgressCheck, WaitsFor

_log = logging.getLogger("conch.uvicorn")  # uvicorn's own is that of the whole process
_log.setLevel(logging.ERROR)  # what clients do wrong is no warning

CONNECTION = "conch.connection"
"""Scope key of the `Connection`."""

RAW_NAMES = "conch.raw_headers"
"""Scope key of the headers with names as received."""

_CODING = b"transfer-encoding"
_LENGTH = b"content-length"
_FRAMING_LENGTHS = frozenset((len(_CODING), len(_LENGTH)))
_MOST_HEADER_BYTES = 32 << 10  # parsing a header costs far more than its bytes
_MOST_HEADERS = 200
_LARGE_HEADERS = f"The headers are too large: at most {_MOST_HEADERS}, of 32 KiB together, are taken."
_PARSED_BYTES = 4 << 10  # parsed at once, as they may hold many requests, headers or chunks
_PARSING_S = 0.002  # time slice of parsing per connection
_PROBE_S = 0.5  # delay of the first probe of a half-closed client; doubles with each probe
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_TCP_CLOSE = 7


class _Reading(Enum):
    """The part of a request that is being read."""

    NOTHING = auto()
    HEADERS = auto()
    BODY = auto()


class Connection(HttpToolsProtocol):
    """One connection.

    Attributes:
        progress: Detects clients that exceed their timeouts.
        on_disconnect: Called once if the client disconnects while a request runs, or None.
        chunks: Number of chunks received for the current request.
        lost: True once the connection is closed.
        filler: Bytes that clients ignore within the current response, sent as a probe.
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
        # `_ambiguous`: the current request has both a length and chunks.
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
        """Sets up flow control; refuses the connection if there are too many."""
        super().connection_made(transport)
        self.flow = HttpFlowControl(transport, self.loop, self.pipeline)
        if len(self._state.connections) > self._state.most_connections:
            self._broken = True
            self._refuse(503, "There are too many connections.")

    def data_received(self, data: bytes) -> None:
        """Parses received bytes, or buffers them where there are many."""
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
        """Parses buffered bytes for one time slice.

        A few bytes can be a request, a header or a chunk, so pieces are small unless they belong to a body.
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
        """Schedules the rest of the buffer, once the pipeline is empty."""
        if len(self._unparsed) and not self.pipeline and not self._parsing_on:
            self._parsing_on = True
            self._state.parse_later(self)

    def parse_on(self) -> None:
        """Parses the next time slice; see `ListenerState.parse_later`."""
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
                # No other protocol is supported, so the upgrade is ignored. The parser would not read a body
                # after an upgrade: it gets the headers again without that header.
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
        """Closes the connection after a protocol error; earlier requests are still answered."""
        self._give_up(400, msg)

    def give_up(self) -> None:
        """Closes the connection of a client that timed out."""
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
            self.pipeline.popleft()  # earlier requests are still answered
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
        """Returns the state that timeouts are checked against."""
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
        """Returns the number of bytes not yet sent to the client."""
        return self.transport.get_write_buffer_size() + self.flow.unsent

    def shutdown(self) -> None:
        """Closes the connection once its requests are answered."""
        if self.transport.is_closing():
            return
        super().shutdown()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Handles a half-close: the client may still wait for responses.

        A closed client looks the same until bytes are sent to it. So during a long request the connection
        sends bytes that clients ignore, such as ``100 Continue``; a closed client answers with a reset.

        Returns:
            True if the connection stays open, which TLS does not allow.
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
                # The connection closes after the response; later input is ignored.
                self._broken = True
                cycle.keep_alive = False
        self.loop.call_later(_PROBE_S, self._probe, _PROBE_S)
        return True

    def _probe(self, delay_s: float) -> None:
        """Checks whether a half-closed client is still connected; reschedules itself."""
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
        """Resets the state for a new request."""
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
        """Headers with names as received."""
        return self._raw

    @property
    def running(self) -> Any:
        """Cycle of the running request."""
        return self._running

    @property
    def peer(self) -> str:
        """The client's address."""
        return f"{self.client[0]}:{self.client[1]}" if self.client else ""

    def on_header(self, name: bytes, value: bytes) -> None:
        """Stores a header; notes transfer coding and length."""
        raw = self._raw
        if len(raw) > _MOST_HEADERS:
            return  # the request is refused
        raw.append((name, value))
        if len(name) in _FRAMING_LENGTHS:  # rules out most headers at once
            lower = name.lower()
            if lower == _LENGTH:
                self._declared = value
            elif lower == _CODING:
                if self._chunked or value.strip().lower() != b"chunked":
                    self._unknown_coding = True
                self._chunked = True

    def on_headers_complete(self) -> None:
        """Starts the request on the fast path if possible, else on uvicorn's.

        A request with both a length and chunks is read by its chunks (RFC 9112, 6.3). A proxy that uses the
        length may take part of the body for another request, so the connection closes with the response.
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
        """Starts the next pipelined request, or resumes reading."""
        self.filler = b""
        if self.transport.is_closing():
            return
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        if len(self._unparsed):
            self._parse_later()
        self.flow.resume_reading()

    def _free(self) -> bool:
        """True if the connection can serve the request on the fast path."""
        parser = self.parser
        return (
            (self.cycle is None or self.cycle.response_complete)
            and not self.flow.write_paused
            and parser.get_method() == b"POST"
            and parser.get_http_version() == "1.1"
        )

    def on_chunk_header(self) -> None:
        """Notes the begin of a chunk; the last one has no body."""
        self._chunk_begins = True

    def collect_body(self, scope: Any, length: int | None, most: int) -> RequestBody | None:
        """Collects the body without one ASGI message per piece, in one block if its length is known.

        Args:
            scope: Scope of the request.
            length: Length of the whole body, or None.
            most: Limit in bytes; on excess the rest is dropped and `receive` returns at once.

        Returns:
            The body; `receive` returns when it is complete. None if another request is being read.
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
        """Passes a piece of the body to the fast path, the collected body, or uvicorn."""
        if self._chunk_begins:  # the last chunk has no body
            self._chunk_begins = False
            self.chunks += 1
        self._parsed_before = self._parsed
        self._body_left = max(self._body_left - len(body), 0)
        if self._reading is not _Reading.BODY:
            return  # the request was refused
        cycle: Any = self.cycle
        if type(cycle) is FastPathCycle:
            cycle.add(body)
        elif self._collected is None or cycle.response_complete:
            super().on_body(body)
        elif self.too_many_chunks or self._collected.size > self._collected.most:
            self.cycle.message_event.set()  # wakes `receive`, which refuses the request
        else:
            self._collected.add(body)

    def on_message_complete(self) -> None:
        """Completes the body of the current request."""
        if self._reading is _Reading.HEADERS:
            return  # see `_feed`
        self._reading = _Reading.NOTHING
        cycle: Any = self.cycle
        if self._ambiguous:
            self._broken = True  # later input is ignored
        if type(cycle) is FastPathCycle:
            cycle.complete()
            return
        self._collected = None
        super().on_message_complete()

    @property
    def too_many_chunks(self) -> bool:
        """True if the body exceeds the limit of chunks."""
        return self.chunks > MOST_CHUNKS

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancels the requests of the connection and releases its buffers."""
        self.lost = True
        self._collected = None
        on_disconnect, self.on_disconnect = self.on_disconnect, None
        # uvicorn notifies only the last pipelined request: not the running one, nor those between.
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
