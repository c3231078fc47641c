"""A front: ``python -m conch.fronts.front_process``, with six descriptors.

Three are for gRPC, and three for HTTP, see `front_http`: the sockets of messages and of connections, and the
eventfd that counts connections, see `connection_passing`.

It serves the connections that the core gives it with the gRPC transport, whose handlers here pass calls on.
Plain inference requests are decoded and leave in one message for each model and round of the loop; all other
calls travel as they came. So do requests that can't be decoded or packed: the core finds the error.

Owns: the transport's port, the calls that the core has not answered. Threads and locks: the loop's thread;
long messages are decoded on a pool; the main thread waits for the end.
"""

from __future__ import annotations

import itertools
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from conch.core.clock import Clock, monotonic_ns
from conch.core.errors import ConchError
from conch.core.recognition import Table
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.response_errors import unsendable
from conch.core.tensor import Buffer
from conch.door.operation_table import INFER
from conch.door.thread_pool import ThreadPool
from conch.frontends.connections.wire import tls_context
from conch.frontends.grpc.request_decoder import LONG_BYTES, RequestDecoder
from conch.frontends.grpc.response_encoder import ResponseEncoder
from conch.frontends.grpc.rpc_calls import Metadata, RpcCall, StreamRpc, UnaryRpc
from conch.frontends.grpc.transport.grpc_connection import serve_connection
from conch.frontends.grpc.transport.port_state import PortConnection, PortOptions, PortState
from conch.frontends.unread_bytes import LEAST_OF_ONE
from conch.fronts import front_messages as messages
from conch.fronts.connection_passing import ConnectionReceiver
from conch.fronts.front_http import HttpFront
from conch.fronts.front_messages import CALL_BITS, MOST_CALLERS, CallerFacts, FrontSettings
from conch.fronts.queued_requests import RequestSender, ResponseReader
from conch.ipc import codec
from conch.ipc.channel import ChannelClosedError, Kind, PacketChannel, WireError
from conch.ipc.loop import IO_LOOP
from conch.ipc.spec_json import record_from_json
from conch.ipc.tensors import MessageStream, ReceivedMessage
from conch.ipc.worker_log import log_to_server

log = logging.getLogger(__name__)

_READS = 8
_DECODE_THREADS = 1
_STATE_NS = 500_000_000
_TIDY_NS = 10_000_000_000
_READ_STEP = 1 << 20
"""A front reports a stream's answers as read after so many bytes."""
_CALL_MASK = (1 << CALL_BITS) - 1


class _Port(PortState):
    """A port that calls `on_removed` for each connection that has ended."""

    def __init__(self, options: PortOptions, clock: Clock, on_removed: Callable[[], None]) -> None:
        super().__init__(options, clock, LEAST_OF_ONE)  # so that the core counts the rest as unread
        self._on_removed = on_removed

    def remove(self, connection: PortConnection) -> None:
        """Removes a connection that is closed."""
        self._on_removed()
        super().remove(connection)


class _Stream:
    """A stream; `read` counts bytes that its client has read since the last READ."""

    __slots__ = ("call", "read", "started")

    def __init__(self, call: StreamRpc) -> None:
        self.call = call
        self.read = 0
        self.started = False


class Front:
    """The front.

    Args:
        stream: The messages.
        connections: Source of connections.
    """

    def __init__(self, stream: MessageStream, connections: ConnectionReceiver) -> None:
        self.over = threading.Event()
        self._stream = stream
        self._connections = connections
        self._loop = IO_LOOP.hold()
        self._clock = monotonic_ns
        self._decode = RequestDecoder()
        self._encoder = ResponseEncoder()
        self._decoding = ThreadPool(_DECODE_THREADS, "conch-front-decode")
        self._numbers = itertools.count()
        self._admitted: dict[UnaryRpc, int] = {}  # calls that the core checks, until their messages come
        self._checked: frozenset[str] = frozenset()
        self._callers: dict[CallerFacts, int] = {}
        # The metadata is kept, so that no other has its identity.
        self._by_metadata: Table[tuple[str, int], tuple[int, Metadata]] = Table(MOST_CALLERS)
        self._new_callers: list[CallerFacts] = []
        self._requests = RequestSender(stream, self._send_raw)
        self._responses = ResponseReader()
        self._calls: dict[int, tuple[UnaryRpc, InferenceRequest | None]] = {}
        self._streams: dict[int, _Stream] = {}
        self._ended = 0
        self._draining = False
        self._tls: list[Any] = []
        self._port: _Port | None = None
        self._handle = {
            Kind.START: self._start,
            Kind.MODEL: self._responses.add_model,
            Kind.RESPONSES: self._answer_decoded,
            Kind.ANSWER: self._answer,
            Kind.BEGIN: self._begin,
            Kind.MESSAGE: self._message,
            Kind.READ: self._read_next,
            Kind.LEVEL: self._follow_level,
            Kind.DRAIN: self._drain,
        }
        self._loop.register(stream.channel.fileno(), self)

    # --- from the core -------------------------------------------------------------------------------------

    def on_ready(self, events: int) -> None:
        """Handles some of the messages that have come; ends the process if the core is gone."""
        try:
            for _ in range(_READS):
                received = self._stream.receive(wait=False)
                self._handle[received.kind](received)
        except BlockingIOError:
            pass
        except ChannelClosedError:
            self.over.set()
        except (KeyError, WireError):
            log.exception("a message of the core can't be read")
            self.over.set()

    def _start(self, received: ReceivedMessage) -> None:
        settings = record_from_json(FrontSettings, codec.decode_json(received.fields))
        log_to_server(partial(self._stream.send, Kind.LOG, 0), settings.log_level)
        self._tls = [
            None if tls is None else tls_context(tls.private_key, tls.certificate, tls.client_root)
            for tls in settings.tls
        ]
        port = self._port = _Port(settings.port, self._clock, self._connection_ended)
        port.use(self._loop)
        port.unary.update({method: partial(self._open, method) for method in settings.unary})
        port.unary[INFER.grpc_method] = self._infer
        self._checked = frozenset(settings.checked)
        port.admissions.update({method: partial(self._admit, method) for method in settings.checked})
        port.streams.update({method: partial(self._open_stream, method) for method in settings.streams})
        self._loop.register(self._connections.fileno(), _Acceptor(self))
        self._stream.send(Kind.HELLO, 0, codec.encode_hello(os.getpid()))
        self._report()
        self._tidy()

    def accept(self) -> None:
        """Serves the connections that have come."""
        port = self._port
        assert port is not None, "connections come after the start"
        for packet, descriptor in self._connections.receive():
            if descriptor is None:
                self._connection_ended()
                continue
            listener, peer = messages.decode_connection(packet)
            try:
                accepted = socket.socket(fileno=descriptor)
                connection = serve_connection(port, accepted, self._tls[listener], peer)
                if connection is None:
                    self._connection_ended()
                elif self._draining:
                    connection.drain()
            except OSError:  # the client is gone
                self._connection_ended()
        if self._connections.ended:
            self._loop.unregister(self._connections.fileno())

    def _answer_decoded(self, received: ReceivedMessage) -> None:
        for number, model, response in self._responses.read(received):
            call, request = self._calls.pop(number, (None, None))
            if call is None or request is None:
                continue  # it was cancelled
            if response.error is not None:
                call.abort(response.error.grpc_status, response.error.message)
                continue
            request.model = model
            try:
                call.reply(self._encoder.message(request, response))
            except ConchError as error:
                call.abort(error.grpc_status, error.message)
            except Exception as error:  # boundary: outputs that user code has made
                shown = unsendable(request.model_name, response, error)
                call.abort(shown.grpc_status, shown.message)

    def _answer(self, received: ReceivedMessage) -> None:
        number = received.subject
        status, details, trailing, compression, message = messages.decode_answer(received)
        stream = self._streams.pop(number, None)
        if stream is not None:
            end = stream.call.close if stream.started else stream.call.refuse
            end(status, details, trailing)
            return
        call, _ = self._calls.pop(number, (None, None))
        if call is None:
            return
        self._admitted.pop(call, None)
        if message is None:
            call.abort(status, details, trailing)
        elif trailing or compression:
            call.reply_with(message, compression, trailing)  # type: ignore[arg-type]
        else:
            call.reply(message)  # type: ignore[arg-type]  # the transport sends views too

    def _begin(self, received: ReceivedMessage) -> None:
        number = received.subject
        stream = self._streams.get(number)
        if stream is None:
            return
        call: Any = stream.call
        if call.ended:
            self._cancel_stream(number)
            return
        stream.started = True
        compression = bytes(received.fields).decode() or None
        call.start(partial(self._send_message, number), partial(self._cancel_stream, number), compression)

    def _message(self, received: ReceivedMessage) -> None:
        number = received.subject
        stream = self._streams.get(number)
        message = messages.decode_message(received)
        if stream is None or message is None:
            return
        stream.call.write(message)  # type: ignore[arg-type]  # the transport sends views too
        stream.call.when_writable(partial(self._note_read, number, len(message)))

    def _note_read(self, number: int, count: int) -> None:
        stream = self._streams.get(number)
        if stream is None:
            return
        stream.read += count
        if stream.read >= _READ_STEP:
            count, stream.read = stream.read, 0
            self._send(Kind.READ, number, messages.encode_count(count))

    def _read_next(self, received: ReceivedMessage) -> None:
        stream = self._streams.get(received.subject)
        if stream is not None:
            stream.call.read_next()

    def _follow_level(self, received: ReceivedMessage) -> None:
        logging.getLogger().setLevel(codec.decode_json(received.fields)["level"])

    def _drain(self, received: ReceivedMessage) -> None:
        port = self._port
        assert port is not None, "the end comes after the start"
        self._draining = True
        for connection in list(port.connections):
            connection.drain()

    # --- to the core ---------------------------------------------------------------------------------------

    def _admit(self, method: str, call: UnaryRpc) -> bool:
        """Has the core check a call; its message is received meanwhile, as far as the windows allow."""
        number = self._admitted[call] = next(self._numbers) & _CALL_MASK
        self._calls[number] = call, None
        self._send_open(number, Kind.ADMIT, method, call, None)
        call.watch(partial(self._cancel_admitted, call), number)
        return True

    def _cancel_admitted(self, call: UnaryRpc, number: int) -> None:
        self._admitted.pop(call, None)
        self._cancel(number)

    def _number(self, method: str, call: UnaryRpc) -> int | None:
        """The number of a call whose message has come; None if it has ended meanwhile."""
        if method not in self._checked:
            return next(self._numbers) & _CALL_MASK
        return self._admitted.pop(call, None)

    def _infer(self, call: UnaryRpc, message: Buffer, polling: bool = True) -> None:
        """Decodes a request, for the round's message; others go as they came."""
        if polling and len(message) >= LONG_BYTES and self._decode.is_long(message):
            self._decoding.submit(self._infer, call, message, False)
            return
        now_ns = self._clock()
        try:
            request = self._decode(message, _ignore, now_ns)
        except ConchError:
            request = None  # the core finds the error again
        if request is None or not self._requests.travels(request):
            work = partial(self._open, INFER.grpc_method, call, message)
        else:
            work = partial(self._queue, request, call, message)
        if polling:
            work()
        else:
            self._loop.call_soon(work)

    def _queue(self, request: InferenceRequest, call: UnaryRpc, message: Buffer) -> None:
        number = self._number(INFER.grpc_method, call)
        if number is None:
            return
        request.deadline_ns = call.deadline_ns(request.received_ns)
        request.batch_size = len(message)
        self._calls[number] = call, request
        if self._requests.add(request, self._caller(call), number, call, message):
            self._loop.flush_later(self)
        call.watch(self._cancel, number)

    def flush(self) -> None:
        """Sends the requests of the round."""
        if self._new_callers:
            self._send_callers()
        try:
            self._requests.flush()
        except ChannelClosedError:
            self.over.set()

    def _send_raw(self, number: int, call: UnaryRpc, message: Buffer) -> None:
        """Passes a request on as it came, which can't be packed."""
        if self._calls.get(number, (None, None))[0] is call:
            self._send_open(number, Kind.OPEN, INFER.grpc_method, call, message)

    def _open(self, method: str, call: UnaryRpc, message: Buffer) -> None:
        """Passes a call on as it came."""
        number = self._number(method, call)
        if number is None:
            return
        self._calls[number] = call, None
        self._send_open(number, Kind.OPEN, method, call, message)
        call.watch(self._cancel, number)

    def _open_stream(self, method: str, call: StreamRpc) -> None:
        number = next(self._numbers) & _CALL_MASK
        self._streams[number] = _Stream(call)
        self._send_open(number, Kind.OPEN, method, call, None)

    def _send_open(self, number: int, kind: Kind, method: str, call: RpcCall, message: Buffer | None) -> None:
        caller = self._caller(call)
        if self._new_callers:
            self._send_callers()
        fields = messages.encode_open(caller, call.deadline_ns(self._clock()), method, message)
        self._send(kind, number, fields, message)

    def _caller(self, call: RpcCall) -> int:
        """The number of a call's caller, found by its metadata: calls with the same head share the object."""
        metadata = call.metadata
        key = call.client, id(metadata)
        known = self._by_metadata.get(key)
        if known is not None:
            return known[0]
        facts = CallerFacts(call.client, call.certificate_names, metadata)
        number = self._callers.get(facts)
        if number is None:
            if len(self._callers) >= MOST_CALLERS:
                self.flush()  # with the numbers of before
                self._callers.clear()
                self._by_metadata.clear()
            number = self._callers[facts] = len(self._callers)
            self._new_callers.append(facts)
        self._by_metadata.keep(key, (number, metadata))
        return number

    def _send_callers(self) -> None:
        new, self._new_callers = self._new_callers, []
        self._send(Kind.CALLERS, len(self._callers) - len(new), messages.encode_callers(new))

    def _cancel(self, number: int) -> None:
        if self._calls.pop(number, None) is not None:
            self.flush()  # its request may wait there
            self._send(Kind.CANCEL, number)

    def _cancel_stream(self, number: int) -> None:
        if self._streams.pop(number, None) is not None:
            self._send(Kind.CANCEL, number)

    def _send_message(self, number: int, message: Buffer | None) -> None:
        self._send(Kind.MESSAGE, number, messages.encode_message(message), message)

    def _connection_ended(self) -> None:
        self._ended += 1
        self._loop.call_soon(self._send_state)

    def _send_state(self) -> None:
        port = self._port
        assert port is not None, "it has started"
        fields = {"closed": port.closed, "ended": port.ended, "received": port.received.held.total}
        self._send(Kind.STATE, self._ended, codec.encode_json(fields))

    def _report(self) -> None:
        """Sends STATE regularly."""
        self._send_state()
        self._loop.call_at(self._clock() + _STATE_NS, self._report)

    def _tidy(self) -> None:
        self._stream.tidy()
        self._loop.call_at(self._clock() + _TIDY_NS, self._tidy)

    def _send(self, kind: Kind, subject: int, fields: bytes = b"", message: Buffer | None = None) -> None:
        try:
            self._stream.send(kind, subject, fields, messages.carrying(message))
        except ChannelClosedError:
            self.over.set()


class _Acceptor:
    """The socket that connections come from."""

    def __init__(self, front: Front) -> None:
        self._front = front

    def on_ready(self, events: int) -> None:
        """Serves the connections that have come."""
        self._front.accept()


def _ignore(request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
    """The responder of a request that the core makes again."""


def _ends(packets: int, connections: int, taken: int) -> tuple[MessageStream, ConnectionReceiver]:
    channel = PacketChannel(socket.socket(fileno=packets), blocking=False)
    receiver = ConnectionReceiver(socket.socket(fileno=connections), taken)
    return MessageStream(channel, in_worker=False, trusted=True), receiver


def main(arguments: Sequence[str]) -> None:
    """Serves until the core ends, or ends it."""
    descriptors = list(map(int, arguments))
    # The core ends this process; service managers send signals to all processes of a service.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    front = Front(*_ends(*descriptors[:3]))
    HttpFront(*_ends(*descriptors[3:]), front.over.set)
    front.over.wait()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
