"""HTTP in a front: serves the connections that the core gives it, and passes their exchanges on.

The connections are those of the HTTP front end, with its limits and timeouts. An exchange goes to the core
once its head has come, with as much of its body as is there. More of the body follows in pieces: as much as
needs no ASK, and the rest after it, as fast as the core takes them.

An infer request whose short body has come with its head goes to the core decoded, with the others of the
round. A longer or compressed body is kept here until the core asks for it, and decoded then. Bodies that
can't be decoded or packed go as they came: the core finds the error.

Threads and locks: the I/O loop; what takes long is decoded and encoded on a pool.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import socket
import sys
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any
from urllib.parse import unquote

from conch.core.clock import monotonic_ns
from conch.core.errors import ConchError, InternalError, UnavailableError
from conch.core.request import InferenceRequest, InferenceResponse
from conch.door.operation_table import INFER, path_pattern
from conch.frontends.fair_pool import FairPool
from conch.frontends.http.http_exchange import UNASKED_BYTES, HttpExchange, Reply
from conch.frontends.http.http_loop import ConnectionSet, HttpLoop, client_address
from conch.frontends.http.infer.infer_request import (
    QUICK_BODY,
    InferHead,
    RequestDecoder,
    read_head,
    unpacked_body,
)
from conch.frontends.http.infer.infer_response import BinaryOutputs, ResponseEncoder, failure
from conch.frontends.http.jsontext.json_loader import SlowTextError
from conch.frontends.http.timeouts import ClientTimeouts
from conch.fronts.connection_passing import ConnectionReceiver
from conch.fronts.http_messages import (
    MOST_HEADS,
    MOST_HEADS_BYTES,
    OPENED,
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
from conch.fronts.queued_requests import RequestSender, ResponseReader
from conch.ipc import codec
from conch.ipc.channel import ChannelClosedError, Kind
from conch.ipc.codec import BINARY_OUTPUTS
from conch.ipc.spec_json import record_from_json
from conch.ipc.tensors import MessageStream, ReceivedMessage

log = logging.getLogger(__name__)

_READS = 8
_TIDY_S = 10.0
_MOST_UNREAD_BYTES = 2 << 20
"""Pieces of a body that the core has not read, before the client waits."""
_NUMBER_MASK = (1 << 32) - 1
_MOST_DECODED_BYTES = 1 << 30
_NO_THREAD = "no thread can be started to encode the response"
_INFER_PATH = re.compile(path_pattern(INFER.paths[0]))


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
        if much and not self.exchange.body_paused:
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
        if self._asked and exchange.body_paused and self._unread <= _MOST_UNREAD_BYTES // 2:
            exchange.hold(False)

    def opening(self, head: int) -> HttpRecord:
        """The beginning, with what has come of the body."""
        self.fresh = False
        body, complete = self._take()
        chunks = self.exchange.chunks
        text = b"%d" % chunks if chunks else b""
        return HttpRecord(Record.OPEN, self.number, complete, head, text, body)

    def rest(self) -> HttpRecord | None:
        """Part of the body that has come since then; None if nothing has."""
        if self._ended:
            return None
        body, complete = self._take()
        if not (body or complete):
            return None
        return HttpRecord(Record.BODY, self.number, complete, self.exchange.chunks, body=body)

    def _take(self) -> tuple[bytes, bool]:
        """A piece of the body, and whether it is the last."""
        body = b"".join(self._pieces) if len(self._pieces) != 1 else self._pieces[0]
        self._pieces.clear()
        self._ended = self.exchange.complete
        return body, self._ended


class _PassedInfer(_Passed):
    """An infer request, whose body is kept here until it is decoded.

    Attributes:
        target: Model and version.
        head: Values of its headers.
        body: The body, if it has been taken from the exchange.
        request: The request, once it is decoded.
        wanted: Outputs to send as binary.
    """

    __slots__ = ("_change", "_decode", "_left", "body", "head", "request", "target", "wanted")

    wanted: BinaryOutputs

    def __init__(
        self,
        number: int,
        port: int,
        exchange: HttpExchange,
        target: tuple[str, str],
        head: InferHead,
        decode: Callable[[_PassedInfer], None],
        change: Callable[[_Passed], None],
    ) -> None:
        _Passed.__init__(self, number, port, exchange)
        self.target = target
        self.head = head
        self.body: memoryview | None = None
        self.request: InferenceRequest | None = None
        self._decode = decode
        self._change = change
        self._left: memoryview | None = None  # of a body that goes as it came

    def ask(self) -> None:
        """Has the client send the body, which is decoded then."""
        if not self._asked:
            self._asked = True
            self.exchange.read_body(sys.maxsize, partial(self._decode, self))

    @property
    def raw(self) -> bool:
        """True if the body goes as it came."""
        return self._left is not None

    def send_raw(self, body: memoryview) -> None:
        """Has the body go as it came."""
        self._left = body
        self._change(self)

    def note_read(self, count: int) -> None:
        """Notes that the core has read so much of the body."""
        self._unread -= count
        if self._left and self._unread <= _MOST_UNREAD_BYTES // 2:
            self._change(self)

    def _take(self) -> tuple[bytes, bool]:
        left = self._left
        if left is None:
            return b"", False
        room = _MOST_UNREAD_BYTES - self._unread
        piece, self._left = bytes(left[:room]), left[room:]
        self._unread += len(piece)
        self._ended = not self._left
        return piece, self._ended


class HttpFront:
    """HTTP in a front.

    Args:
        stream: The messages.
        connections: Source of connections.
        on_over: Called when the core is gone, or its messages can't be read.
    """

    def __init__(
        self, stream: MessageStream, connections: ConnectionReceiver, on_over: Callable[[], None]
    ) -> None:
        self._stream = stream
        self._connections = connections
        self._on_over = on_over
        self._thread = HttpLoop()
        self._thread.start()
        self._loop = self._thread.loop
        self._sender = RecordSender(stream, self._loop.call_soon, self._fail)
        self._numbers = itertools.count()
        self._ports: dict[int, ConnectionSet] = {}
        self._decoders: dict[int, tuple[RequestDecoder, int]] = {}  # with the limit of bytes
        self._encode = ResponseEncoder()
        self._pool = FairPool("conch-front-parse")
        self._requests = RequestSender(stream, self._send_raw)
        self._responses = ResponseReader()
        self._heads: dict[tuple[object, ...], int] = {}
        self._head_bytes = 0
        self._received: Counter[int] = Counter()
        self._closing: set[int] = set()
        self._passed: dict[int, _Passed] = {}
        self._changed: dict[int, _Passed] = {}
        self._flushing = False  # at the end of this round
        self._tasks: set[asyncio.Task[object]] = set()
        self._handle: dict[Record, Callable[[HttpRecord], None]] = {
            Record.LISTEN: self._listen,
            Record.CLOSE: self._close,
            Record.ASK: lambda record: self._passed[record.number].ask(),
            Record.RESPOND: self._respond,
            Record.BEGIN: self._begin,
            Record.WRITE: self._write,
            Record.END: lambda record: self._forget(record.number).exchange.end(),
            Record.ABORT: lambda record: self._forget(record.number).exchange.abort(),
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
                received = self._stream.receive(wait=False)
                if received.kind is Kind.RESPONSES:
                    self._answer_decoded(received)
                    continue
                if received.kind is Kind.MODEL:
                    self._responses.add_model(received)
                    continue
                for record in decode_records(received):
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
        if settings.infer_bytes is not None:
            self._decoders[record.number] = RequestDecoder(settings.infer_bytes), settings.infer_bytes
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
        for packet, descriptor in self._connections.receive():
            number = decode_port(packet)
            self._received[number] += 1
            accepted = None if descriptor is None else socket.socket(fileno=descriptor)
            port = self._ports.get(number)
            if accepted is None or port is None or number in self._closing:
                # This process has no descriptors left, or the port is being closed.
                if accepted is not None:
                    accepted.close()
                self._count(number)
                continue
            try:
                peer = client_address(accepted.getpeername())
            except OSError:  # the client disconnected
                accepted.close()
                self._count(number)
            else:
                port.serve(accepted, peer)
        if self._connections.ended:
            self._loop.remove_reader(self._connections)

    def _close(self, record: HttpRecord) -> None:
        port = self._ports.get(record.number)
        if port is not None and record.number not in self._closing:
            self._closing.add(record.number)
            self._run(port.close(record.amount / 1000))

    def _forget(self, number: int) -> _Passed:
        self._changed.pop(number, None)
        return self._passed.pop(number)

    def _respond(self, record: HttpRecord) -> None:
        status, headers = decode_json(record.text)
        exchange = self._forget(record.number).exchange
        exchange.respond(status, headers_from_json(headers), bytes(record.body), record.flag)

    def _answer_decoded(self, received: ReceivedMessage) -> None:
        for number, model, response in self._responses.read(received):
            if number not in self._passed:
                continue  # its client is gone
            passed = self._forget(number)
            assert isinstance(passed, _PassedInfer), "others get records"
            request, exchange = passed.request, passed.exchange
            assert request is not None, "it was sent to the core"
            request.model = model
            answer = self._encode.answer(request, response, passed.wanted, passed.head.encoding)
            if isinstance(answer, Reply):
                exchange.respond(*answer)
            elif not self._on_pool(exchange, self._encode_long, exchange, answer):
                exchange.respond(*failure(UnavailableError(_NO_THREAD)))

    def _encode_long(self, exchange: HttpExchange, work: Callable[[], Reply]) -> None:
        try:
            reply = work()
        except ConchError as error:
            reply = failure(error)
        except Exception:  # boundary: the top of the pool's work
            log.exception("a response could not be encoded")
            reply = failure(InternalError("the request or its response could not be handled"))
        self._loop.call_soon_threadsafe(partial(exchange.respond, *reply))

    def _on_pool(self, exchange: HttpExchange, work: Callable[..., None], *arguments: object) -> bool:
        """Runs slow work of an exchange on the pool; False if no thread can be started."""
        try:
            self._pool.submit_for(exchange.client, lambda: exchange.lost, work, *arguments)
        except RuntimeError:
            return False
        return True

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
        exchange.on_disconnect = partial(self._gone, number)
        found = _infer_target(exchange, self._decoders[port][1]) if port in self._decoders else None
        if found is not None:
            decode, change = self._decode_asked, self._change
            passed: _Passed = _PassedInfer(number, port, exchange, *found, decode, change)
        else:
            passed = _Passed(number, port, exchange)
            if exchange.size:
                passed.add(bytes(exchange.take_body()))
            exchange.sink = partial(self._add, passed)
            exchange.most = -1  # so that a body in one piece is for the sink, too
            exchange.then = partial(self._change, passed)
        self._passed[number] = passed
        self._change(passed)

    def _add(self, passed: _Passed, piece: bytes) -> None:
        passed.add(piece)
        self._change(passed)

    def _change(self, passed: _Passed) -> None:
        self._changed[passed.number] = passed
        self._flush_soon()

    def _flush_soon(self) -> None:
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Sends what has come in the round."""
        self._flushing = False
        changed, self._changed = self._changed, {}
        for passed in changed.values():
            if not passed.fresh:
                record = passed.rest()
                if record is not None:
                    self._sender.add(record)
            elif not isinstance(passed, _PassedInfer) or not self._decode_short(passed):
                self._sender.add(passed.opening(self._head(passed)))
        self._send()

    def _send(self) -> None:
        self._sender.flush()  # the heads first
        try:
            self._requests.flush()
        except ChannelClosedError:
            self._on_over()

    def _head(self, passed: _Passed) -> int:
        """The number of an exchange's head, which the core has or gets with the round."""
        exchange = passed.exchange
        port, client, names = passed.port, exchange.client, exchange.certificate_names
        target = f"{exchange.path}?{exchange.query}" if exchange.query else exchange.path
        facts = exchange.method, target, exchange.version, exchange.length, exchange.keep_alive
        key = port, client, names, facts, tuple(exchange.headers)
        number = self._heads.get(key)
        if number is None:
            if len(self._heads) >= MOST_HEADS or self._head_bytes >= MOST_HEADS_BYTES:
                self._send()  # with the numbers of before
                self._heads.clear()
                self._head_bytes = 0
            number = self._heads[key] = len(self._heads)
            text = encode_json(Head(port, client, names, *facts, headers_to_json(exchange.headers)))
            self._head_bytes += len(text)
            self._sender.add(HttpRecord(Record.HEAD, number, text=text))
        return number

    def _gone(self, number: int) -> None:
        passed = self._passed.pop(number, None)
        self._changed.pop(number, None)
        if passed is not None and not passed.fresh:
            self._send()  # its request may wait there
            self._sender.add(HttpRecord(Record.GONE, number))

    # --- infer requests ------------------------------------------------------------------------------------

    def _decode_short(self, passed: _PassedInfer) -> bool:
        """Decodes a short body that has come with its head; False: the head goes to the core first."""
        exchange = passed.exchange
        if passed.raw or not exchange.complete or not passed.head.is_short(exchange.size):
            return False
        body = passed.body = exchange.take_body()
        try:
            request = self._decode(passed, body, True)
        except SlowTextError:
            return False
        if request is None:
            passed.send_raw(body)
            return False
        self._queue(passed, request, body, self._head(passed))
        return True

    def _decode_asked(self, passed: _PassedInfer) -> None:
        """Decodes a body that the core has asked for, and that has come."""
        exchange = passed.exchange
        if passed.body is None and passed.head.is_short(exchange.size):
            passed.body = exchange.take_body()
            try:
                self._decoded(passed, passed.body, self._decode(passed, passed.body, True))
                return
            except SlowTextError:
                pass
        body = exchange.take_body() if passed.body is None else passed.body
        if not self._on_pool(exchange, self._decode_long, passed, body):
            self._decoded(passed, body, None)

    def _decode_long(self, passed: _PassedInfer, body: memoryview) -> None:
        request = self._decode(passed, body, False)
        self._loop.call_soon_threadsafe(self._decoded, passed, body, request)

    def _decode(self, passed: _PassedInfer, body: memoryview, quick: bool) -> InferenceRequest | None:
        """Decodes a request; None: it goes as it came, and the core decodes it or finds the error.

        Raises:
            SlowTextError: Its JSON would take long, with `quick`.
        """
        decode, most_bytes = self._decoders[passed.port]
        head, length = passed.head, passed.exchange.length
        try:
            plain = unpacked_body(body, head, length, most_bytes, lambda size: None)
            most_used = QUICK_BODY if quick else None
            request, wanted = decode(passed.target, plain, head.json_size, _ignore, monotonic_ns(), most_used)
        except SlowTextError:
            raise
        except Exception:  # boundary: what a client has sent; the core's answer has the error
            return None
        if _binary(wanted, request) is None or not self._requests.travels(request):
            request.discard()
            return None
        request.batch_size = passed.exchange.size
        passed.wanted = wanted
        return request

    def _decoded(self, passed: _PassedInfer, body: memoryview, request: InferenceRequest | None) -> None:
        """Sends a request that the core has asked for."""
        if self._passed.get(passed.number) is not passed:
            return  # its client is gone
        if request is None:
            passed.send_raw(body)
        else:
            self._queue(passed, request, body, OPENED)
            self._flush_soon()

    def _queue(self, passed: _PassedInfer, request: InferenceRequest, body: memoryview, head: int) -> None:
        passed.fresh = False
        passed.request, passed.body = request, None
        flags = BINARY_OUTPUTS if _binary(passed.wanted, request) else 0
        self._requests.add(request, head, passed.number, passed, (body, head), flags)

    def _send_raw(self, number: int, passed: _PassedInfer, message: tuple[memoryview, int]) -> None:
        """Sends a request as it came, which can't be packed."""
        if self._passed.get(number) is passed:
            body, head = message
            passed.request = None
            passed.fresh = head != OPENED
            passed.send_raw(body)

    def _count(self, port: int) -> None:
        self._loop.call_soon(self._report_count, port)

    def _report_count(self, port: int) -> None:
        served = self._ports.get(port)
        ended = self._received[port] - (0 if served is None else len(served))
        self._sender.add(HttpRecord(Record.CONNS, port, amount=ended))

    def _tidy(self) -> None:
        self._stream.tidy()
        self._loop.call_later(_TIDY_S, self._tidy)


def _infer_target(exchange: HttpExchange, most_bytes: int) -> tuple[tuple[str, str], InferHead] | None:
    """Model and version of an infer request, and what its headers say; None if the core decodes it.

    The core also refuses what its headers rule out, and bodies that may become too large as they come.
    """
    length = exchange.length
    if exchange.method != INFER.http_method or not length or length > _MOST_DECODED_BYTES:
        return None
    found = _INFER_PATH.fullmatch(exchange.path)
    if found is None:
        return None
    try:
        head = read_head(exchange.fields, length, most_bytes)
    except ConchError:
        return None
    if head.json_size == 0 or (head.packed and length > most_bytes):  # of a raw request only the model says
        return None
    return (unquote(found["model"]), found["version"] or ""), head


def _binary(wanted: BinaryOutputs, request: InferenceRequest) -> bool | None:
    """True if all outputs are to be sent as binary; None if some are."""
    if not wanted.named:
        return wanted.binary
    return True if len(wanted.named) == len(request.requested or ()) else None


def _ignore(request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
    """The responder of a request that the core makes again."""
