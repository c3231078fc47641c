"""HTTP in a front: serves the connections that the core gives it, and passes their exchanges on.

The connections are those of the HTTP front end, with its limits and timeouts. An exchange goes to the core
once its head has come, with as much of its body as is there. More of the body follows in pieces: as much as
needs no ASK, and the rest after it, as fast as the core takes them.

Threads and locks: the event loop of its own.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import sys
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from conch.frontends.http.http_exchange import UNASKED_BYTES, HttpExchange
from conch.frontends.http.http_loop import ConnectionSet, LoopThread
from conch.frontends.http.timeouts import ClientTimeouts
from conch.fronts.http_messages import (
    READ_STEP,
    Head,
    HttpRecord,
    PortSettings,
    Record,
    RecordSender,
    decode_json,
    decode_port,
    decode_records,
    encode_json,
    headers_from_json,
    headers_to_json,
)
from conch.workers.protocol import codec
from conch.workers.protocol.channel import ChannelClosedError
from conch.workers.protocol.spec_json import record_from_json
from conch.workers.protocol.tensors import MessageStream

log = logging.getLogger(__name__)

_READS = 8
_TIDY_S = 10.0
_MOST_UNREAD_BYTES = 2 << 20
"""Pieces of a body that the core has not read, before the client waits."""
_NUMBER_MASK = (1 << 32) - 1
_PORT_BYTES = 4


class _Passed:
    """An exchange that was passed on."""

    __slots__ = (
        "_asked",
        "_came",
        "_ended",
        "_pieces",
        "_unread",
        "exchange",
        "fresh",
        "number",
        "port",
        "read",
    )

    def __init__(self, number: int, port: int, exchange: HttpExchange) -> None:
        self.number = number
        self.port = port
        self.exchange = exchange
        self.read = 0  # bytes of the response that were read since the last READ
        self.fresh = True  # no OPEN has been sent
        self._asked = self._ended = False
        self._came = self._unread = 0  # bytes of the body; those that the core has not read
        self._pieces: list[bytes] = []

    def add(self, piece: bytes) -> None:
        """Takes a piece of the body."""
        self._pieces.append(piece)
        self._came += len(piece)
        self._unread += len(piece)
        much = self._unread > _MOST_UNREAD_BYTES if self._asked else self._came > UNASKED_BYTES
        if much and not self.exchange.held:
            self.exchange.hold(True)

    def ask(self) -> None:
        """Has the client send the body."""
        exchange = self.exchange
        self._asked = True
        if not exchange.complete and exchange.then is not None:
            exchange.read_body(sys.maxsize, exchange.then)
            exchange.most = -1

    def note_read(self, count: int) -> None:
        """Notes that the core has read so much of the body."""
        self._unread -= count
        exchange = self.exchange
        if self._asked and exchange.held and self._unread <= _MOST_UNREAD_BYTES // 2:
            exchange.hold(False)

    def record(self) -> HttpRecord | None:
        """What the core has not been told yet; None if there is nothing."""
        exchange = self.exchange
        body = b"".join(self._pieces) if len(self._pieces) != 1 else self._pieces[0]
        self._pieces.clear()
        complete = exchange.complete
        if not self.fresh:
            if self._ended or not (body or complete):
                return None
            self._ended = complete
            return HttpRecord(Record.BODY, self.number, complete, exchange.chunks, body=body)
        self.fresh, self._ended = False, complete
        target = f"{exchange.path}?{exchange.query}" if exchange.query else exchange.path
        head = Head(
            self.port,
            exchange.client,
            exchange.certificate_names,
            exchange.method,
            target,
            exchange.version,
            exchange.length,
            exchange.keep_alive,
            exchange.chunks,
            complete,
            headers_to_json(exchange.headers),
        )
        return HttpRecord(Record.OPEN, self.number, text=encode_json(head), body=body)


class HttpFront:
    """HTTP in a front.

    Args:
        stream: The messages.
        connections: Where connections come from.
        on_over: Called when the core is gone, or its messages can't be read.
    """

    def __init__(
        self, stream: MessageStream, connections: socket.socket, on_over: Callable[[], None]
    ) -> None:
        self._stream = stream
        connections.setblocking(False)
        self._connections = connections
        self._on_over = on_over
        self._thread = LoopThread("conch-front-http")
        self._thread.start()
        self._loop = self._thread.loop
        self._sender = RecordSender(stream, self._loop.call_soon, self._fail)
        self._numbers = itertools.count()
        self._ports: dict[int, ConnectionSet] = {}
        self._received: Counter[int] = Counter()
        self._closing: set[int] = set()
        self._passed: dict[int, _Passed] = {}
        self._changed: dict[int, _Passed] = {}
        self._tasks: set[asyncio.Task[object]] = set()
        self._handle: dict[Record, Callable[[HttpRecord], None]] = {
            Record.LISTEN: self._listen,
            Record.CLOSE: self._close,
            Record.ASK: lambda record: self._passed[record.number].ask(),
            Record.RESPOND: self._respond,
            Record.BEGIN: self._begin,
            Record.WRITE: self._write,
            Record.END: lambda record: self._forget(record).end(),
            Record.ABORT: lambda record: self._forget(record).abort(),
            Record.READ: lambda record: self._passed[record.number].note_read(record.amount),
        }
        self._loop.call_soon_threadsafe(self._start)

    def _start(self) -> None:
        self._loop.add_reader(self._stream.channel.fileno(), self._on_ready)
        self._loop.add_reader(self._connections, self._accept)
        self._sender.add(HttpRecord(Record.SERVING, 0))
        self._tidy()

    def _fail(self, reason: str) -> None:
        log.error("HTTP can't be passed on to the core: %s", reason)
        self._on_over()

    # --- from the core -------------------------------------------------------------------------------------

    def _on_ready(self) -> None:
        """Handles some of the messages that have come; ends the process if the core is gone."""
        try:
            for _ in range(_READS):
                for record in decode_records(self._stream.receive(wait=False)):
                    if record.kind >= Record.ASK and record.number not in self._passed:
                        continue  # its client is gone
                    self._handle[record.kind](record)
        except BlockingIOError:
            pass
        except ChannelClosedError:
            self._loop.remove_reader(self._stream.channel.fileno())
            self._on_over()
        except Exception:  # boundary: the core starts another front
            log.exception("a message of the core can't be read")
            self._on_over()

    def _listen(self, record: HttpRecord) -> None:
        settings = record_from_json(PortSettings, codec.decode_json(record.text))
        self._ports[record.number] = ConnectionSet(
            self._loop,
            partial(self._open, record.number),
            None if settings.tls is None else settings.tls.context(),
            ClientTimeouts(idle_s=settings.idle_s),
            settings.most_connections,
            partial(self._count, record.number),
        )

    def _accept(self) -> None:
        """Serves the connections that have come."""
        while True:
            try:
                packet, fds, _, _ = socket.recv_fds(self._connections, _PORT_BYTES, 1)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if not packet:
                self._loop.remove_reader(self._connections)
                return
            number = decode_port(packet)
            self._received[number] += 1
            accepted = socket.socket(fileno=fds[0]) if fds else None
            port = self._ports.get(number)
            if accepted is None or port is None or number in self._closing:
                # This process has no descriptors left, or the port is being closed.
                if accepted is not None:
                    accepted.close()
                self._count(number)
                continue
            port.serve(accepted)

    def _close(self, record: HttpRecord) -> None:
        port = self._ports.get(record.number)
        if port is not None and record.number not in self._closing:
            self._closing.add(record.number)
            self._run(port.close(record.amount / 1000))

    def _forget(self, record: HttpRecord) -> HttpExchange:
        self._changed.pop(record.number, None)
        return self._passed.pop(record.number).exchange

    def _respond(self, record: HttpRecord) -> None:
        status, headers = decode_json(record.text)
        self._forget(record).respond(status, headers_from_json(headers), bytes(record.body), record.flag)

    def _begin(self, record: HttpRecord) -> None:
        exchange = self._passed[record.number].exchange
        status, headers, filler, size = decode_json(record.text)
        if record.flag:
            exchange.keep_alive = False
        exchange.begin_response(status, headers_from_json(headers), filler.encode("latin-1"), size)

    def _write(self, record: HttpRecord) -> None:
        passed = self._passed[record.number]
        passed.exchange.write(bytes(record.body))
        passed.read += len(record.body)
        if passed.read < READ_STEP:
            return
        if passed.exchange.writable:
            self._report_read(passed)
        else:
            self._run(self._report_later(passed))

    def _report_read(self, passed: _Passed) -> None:
        count, passed.read = passed.read, 0
        if count and passed.number in self._passed:
            self._sender.add(HttpRecord(Record.READ, passed.number, amount=count))

    async def _report_later(self, passed: _Passed) -> None:
        await passed.exchange.wait_writable()
        self._report_read(passed)

    def _run(self, work: Coroutine[Any, Any, object]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- to the core ---------------------------------------------------------------------------------------

    def _open(self, port: int, exchange: HttpExchange) -> None:
        """Passes an exchange on, with what has come of its body when the round ends."""
        number = next(self._numbers) & _NUMBER_MASK
        passed = self._passed[number] = _Passed(number, port, exchange)
        if exchange.size:
            passed.add(bytes(exchange.take_body()))
        exchange.sink = partial(self._add, passed)
        exchange.most = -1  # so that a body in one piece is for the sink, too
        exchange.then = partial(self._change, passed)
        exchange.on_disconnect = partial(self._gone, number)
        self._change(passed)

    def _add(self, passed: _Passed, piece: bytes) -> None:
        passed.add(piece)
        self._change(passed)

    def _change(self, passed: _Passed) -> None:
        if not self._changed:
            self._loop.call_soon(self._flush)
        self._changed[passed.number] = passed

    def _flush(self) -> None:
        """Sends what has come in the round."""
        changed, self._changed = self._changed, {}
        for passed in changed.values():
            record = passed.record()
            if record is not None:
                self._sender.add(record)
        self._sender.flush()

    def _gone(self, number: int) -> None:
        passed = self._passed.pop(number, None)
        self._changed.pop(number, None)
        if passed is not None and not passed.fresh:
            self._sender.add(HttpRecord(Record.GONE, number))

    def _count(self, port: int) -> None:
        self._loop.call_soon(self._report_count, port)

    def _report_count(self, port: int) -> None:
        served = self._ports.get(port)
        ended = self._received[port] - (0 if served is None else len(served))
        self._sender.add(HttpRecord(Record.CONNS, port, amount=ended))

    def _tidy(self) -> None:
        self._stream.tidy()
        self._loop.call_later(_TIDY_S, self._tidy)
