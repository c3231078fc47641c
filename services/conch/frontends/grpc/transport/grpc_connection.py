"""One client's connection: reads its socket, turns HTTP/2's events to calls, and sends answers.

Theory of operation. `on_ready` reads what has come, a few times at most, so that clients take turns; the
sans-IO connection turns it to events, which open calls or feed them. As few bytes may be many frames or
messages, a turn ends after `_TURN_NS` or some of them; the port's `Turns` have the next one, after the events
of other sockets, and this one is not read while frames wait. Answers of calls go into the sans-IO connection,
which frames them as flow control allows; at the end of the loop's round `flush` sends what there is, in one
call if possible. A long message is received into its own buffer.

Life of a connection:

    ============  ==============================================  ======================================
    state         ends with                                       what is done
    ============  ==============================================  ======================================
    HANDSHAKE     TLS's handshake; `_SETUP_NS`                    its steps run on a pool, see `wire`
    OPEN          a connection error, the end, `drain`            calls
    DRAINING      the last call's end; the grace                  the first GOAWAY allows all streams, so
                                                                  that no call under way is lost; the
                                                                  second, two round trips later, names the
                                                                  last
    LEAVING       the client's end; `_LINGER_NS`                  nothing: Envoy drops answers that it has
                                                                  not passed on when their connection ends
    LINGERING     the client's end; `_LINGER_NS`                  what it sends is dropped, as a close with
                                                                  unread bytes would reset the connection
                                                                  before the client has read the last answer
    CLOSED
    ============  ==============================================  ======================================

What a client can hold: messages that are being received have `_CROWDED_BYTES` on one connection. Beyond
that only the oldest one's stream has its window enlarged, so that one always ends; the others have what their
windows were, and beyond `MOST_PARTIAL_BYTES` are refused. The connection's window is enlarged all the same:
the client, not the server, divides it among streams, and may leave nothing for the oldest. `ReceivedBytes`
does the same for all connections together. Of answers of unary calls that clients do not read, a port holds
`MOST_ANSWER_BYTES`: then new calls of clients that have answers to read are refused, as not processed, and
from twice as much on their answers are dropped. Streams wait for their readers. Headers and resets have no
window: where the socket takes no more and `_MOST_HEAD_BYTES` of them wait, nothing is received until it does.

What has to move: `PortOptions.least_rate` or, of less, something, in one of five checks. Else a stream whose
data waits for a window is reset; a connection whose socket is full is closed; and a call whose message comes
so slowly, though windows are open, ends.

Threads and locks: the loop's thread.
"""

from __future__ import annotations

import logging
import random
import socket
import ssl
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from enum import Enum, auto
from functools import partial
from select import EPOLLIN, EPOLLOUT

from conch.core.tensor import Buffer
from conch.door.operation_table import HEALTH_CHECK, SERVER_LIVE, SERVER_READY
from conch.frontends.connections.byte_stream import unsent_part
from conch.frontends.connections.places import Place, find_place
from conch.frontends.connections.wire import Wire, open_wire
from conch.frontends.grpc.http2.connection import Http2Connection, too_slow
from conch.frontends.grpc.http2.events import (
    ConnectionClosed,
    DataReceived,
    Event,
    GoAwayReceived,
    HeadersReceived,
    PingAcknowledged,
    PingReceived,
    StreamRefused,
    StreamReset,
    TrailersReceived,
    WindowOpened,
)
from conch.frontends.grpc.http2.frames import MOST_STREAM_ID, ErrorCode
from conch.frontends.grpc.http2.hpack import HeaderList
from conch.frontends.grpc.transport.calls import OpenCall, StreamCall, UnaryCall
from conch.frontends.grpc.transport.keep_alive import KeepAlive
from conch.frontends.grpc.transport.messages import CompressedMessage, MessageError
from conch.frontends.grpc.transport.metadata import (
    HEAD,
    Pairs,
    RefusedRequestError,
    RequestHead,
    error_head,
    trailers,
)
from conch.frontends.grpc.transport.port_state import PortState
from conch.ipc.loop import IoLoop, Timer

log = logging.getLogger(__name__)

_READ_BYTES = 64 * 1024
_LONG_READ_BYTES = 256 * 1024  # while a long message is being received
_READS = 4
_TURN_NS = 500_000
_CROWDED_BYTES = 64 << 20
MOST_PARTIAL_BYTES = 512 << 20
MOST_ANSWER_BYTES = 512 << 20
_SETUP_NS = 10_000_000_000
_LINGER_NS = 1_000_000_000
_AGED_NS = 30_000_000_000  # a busy client may need long, and nothing waits for it
_RESERVED_NS = 5_000_000_000
_HEALTH = frozenset(each.grpc_method for each in (HEALTH_CHECK, SERVER_LIVE, SERVER_READY))
_MOST_HEAD_BYTES = 1 << 20
# What moves nothing for four of these checks, a minute or a little more, is stuck.
CHECK_NS = 15_000_000_000
_STUCK_CHECKS = 4
_DRAIN_PING = b"conch-go"
_LAST_DRAIN_PING = b"conch-g2"
_CROWDED = (
    "the port has as many connections as it may (--grpc-max-connections), and all have calls: only health "
    "checks are answered"
)
_UNREAD = "the port holds as many bytes of unread answers as it may: read those of the calls before"
_SENDS_TOO_SLOWLY = "the request's message was sent at less than --grpc-min-client-rate"
_DEADLINE_EXCEEDED = 4
_RESOURCE_EXHAUSTED = 8
_UNIMPLEMENTED = 12
_UNAVAILABLE = 14


def serve_connection(
    port: PortState, accepted: socket.socket, tls: ssl.SSLContext | None, peer: str
) -> GrpcConnection | None:
    """Serves a client; None if the port has as many connections as it may, and all have calls.

    Raises:
        OSError: The client disconnected.
    """
    place = find_place(port.connections, port.leaving, port.options.most_connections)
    if place is Place.NONE:
        port.closed["connections"] += 1
        accepted.close()
        return None
    wire = open_wire(accepted, tls, http2=True)
    connection = GrpcConnection(port, wire, peer, place is Place.RESERVED)
    connection.start()
    return connection


class State(Enum):
    """See the module."""

    HANDSHAKE = auto()
    OPEN = auto()
    DRAINING = auto()
    LEAVING = auto()
    LINGERING = auto()
    CLOSED = auto()


class GrpcConnection:
    """One connection.

    Args:
        port: State that all connections of the port share.
        wire: The socket.
        peer: The client's address, such as ``ipv4:127.0.0.1:50000``.
        reserved: True if the port has too many: health checks alone are answered, for a few seconds.

    Attributes:
        heard_at: Monotonic time at which something was received, in nanoseconds.
        leaving: True once it is ending, by `leave`.
        open_calls: The port's.
        loop: The port's.
        most_message_bytes: Limit of a message.
        certificate_names: Names in the client's certificate.
        answers: Number of answers and messages sent, and of times that more of them could be.
    """

    def __init__(self, port: PortState, wire: Wire, peer: str, reserved: bool = False) -> None:
        self.peer = peer
        self.loop: IoLoop = port.loop
        self.open_calls = port.open_calls
        self.most_message_bytes = port.options.most_message_bytes
        self.certificate_names: tuple[str, ...] = ()
        self._port = port
        self._wire = wire
        self._http2 = Http2Connection(settings=port.options.settings, limits=port.options.limits)
        self._state = State.HANDSHAKE
        self._calls: dict[int, OpenCall] = {}
        self._partial: dict[int, int] = {}  # bytes of messages being received, by stream, oldest first
        self._partial_bytes = 0
        self._partial_before: dict[int, tuple[int, int]] = {}  # the same at the last check; slow checks
        self._crowded: set[int] = set()  # streams whose windows are not enlarged
        self._writers: set[StreamCall] = set()  # wrote, or had a window opened, since the last flush
        self._blocked: list[Buffer] = []  # what the socket did not take
        self._sent = 0  # bytes that the socket took since the last check
        self._waits = 0  # checks in which it took too little
        self._timers: dict[str, Timer] = {}
        self._keep_alive = KeepAlive(self, port.options.keep_alive, port.clock)
        self._gone_away = False  # new calls are refused
        self._watching = False  # for progress
        self._queued = False  # for a turn, with what the last one has left
        self._streaming: set[int] = set()
        self._undelivered: dict[StreamCall, None] = {}  # streams with messages for the next turn
        self.answers = 0
        self.heard_at = port.clock()
        self.reserved = reserved
        self.leaving = False
        self._unread = 0  # bytes of answers that count in the port's
        self._leaving = False  # the client was asked to leave

    # --- life ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begins with the handshake."""
        self.loop.register(self._wire.fileno(), self)
        self._port.connections.add(self)
        self.after("setup", _SETUP_NS, self._check_setup)
        age_ns = self._port.options.age_ns
        if age_ns:
            self.after("age", int(age_ns * random.uniform(0.9, 1.1)), self._age)
        if self.reserved:
            self.after("age", _RESERVED_NS, self.leave)
        self._keep_alive.start()
        self.on_ready(EPOLLIN)

    def after(self, name: str, delay_ns: int, work: Callable[[], None]) -> None:
        """Schedules work of this connection; the name is that of its timer."""
        before = self._timers.get(name)
        if before is not None:
            before.cancel()
        self._timers[name] = self.loop.call_at(self._port.clock() + delay_ns, work)

    def _check_setup(self) -> None:
        if self._state is State.HANDSHAKE or not self._http2.established:
            self.give_up("setup")

    def _age(self) -> None:
        self._drain(_AGED_NS)
        if self._port.options.age_grace_ns:
            self.after("age", self._port.options.age_grace_ns, self.close)

    def drain(self) -> None:
        """Asks the client to leave; closes the connection after the last call."""
        self._drain(_LINGER_NS)

    def _drain(self, patience_ns: int) -> None:
        """Waits so long at most for the client to answer that it knows."""
        if self._state is State.HANDSHAKE:
            self.close()
        elif self._state is State.OPEN:
            self._state = State.DRAINING
            self._leaving = True
            self._http2.go_away(ErrorCode.NO_ERROR, MOST_STREAM_ID)
            self._http2.ping(_DRAIN_PING)
            self.loop.flush_later(self)
        if self._state is State.DRAINING and not self._gone_away:
            self.after("drain", patience_ns, self._go_away)

    def leave(self) -> None:
        """Ends it, without calls; its client has a moment to read why, until a second call."""
        if not self.leaving:
            self.leaving = True
            self._port.leaving += 1
            self._port.closed["crowded"] += 1
        if self._state is not State.OPEN or not self._http2.established:
            self.close()
            return
        self._state = State.DRAINING
        self._gone_away = True
        self._http2.go_away(ErrorCode.NO_ERROR)
        self.flush()

    def _go_away(self) -> None:
        """The second GOAWAY: calls on their way have come."""
        if self._state is State.DRAINING:
            self._http2.go_away(ErrorCode.NO_ERROR)
            self._gone_away = True
            self.loop.flush_later(self)

    def _await_close(self) -> None:
        """Lets the client, which may still work on answers, close the connection; ends it if not."""
        if not self._leaving or not self.answers:
            self._linger()
        elif self._state is not State.LEAVING:
            self._state = State.LEAVING
            self.after("drain", _LINGER_NS, self._linger)

    def _linger(self) -> None:
        """Ends sending, and waits for the client's end."""
        self._state = State.LINGERING
        self._http2.unparsed = None
        self._cancel_calls()
        try:
            self._wire.shut_down()
        except OSError:
            self.close()
            return
        self.after("drain", _LINGER_NS, self.close)

    def give_up(self, reason: str) -> None:
        """Closes the connection because of its client, and counts the reason."""
        self._port.closed[reason] += 1
        self.close()

    def close(self) -> None:
        """Closes the connection; cancels its calls."""
        if self._state is State.CLOSED:
            return
        self._state = State.CLOSED
        self._cancel_calls()
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self.loop.unregister(self._wire.fileno())
        self._wire.close()
        # What was to be sent must not wait for the collector of cycles.
        self._blocked = []
        self._http2.fail(ErrorCode.NO_ERROR, "")
        self._http2.take_output()
        self._count_unread()
        self._port.remove(self)

    @property
    def has_calls(self) -> bool:
        """True if calls are open."""
        return bool(self._calls)

    @property
    def idle(self) -> bool:
        """True if no calls are open."""
        return not self._calls

    @property
    def used(self) -> bool:
        """True once a call has come."""
        return self._http2.last_stream_id > 0

    def ping(self, payload: bytes) -> None:
        """Sends a ping."""
        self._http2.ping(payload)
        self.loop.flush_later(self)

    def enhance_your_calm(self, text: str) -> None:
        """Closes the connection with ENHANCE_YOUR_CALM, for too many pings."""
        if not self._http2.closed:
            self._port.closed["pings"] += 1
            self._http2.fail(ErrorCode.ENHANCE_YOUR_CALM, text)
            self._fail()

    def _cancel_calls(self) -> None:
        calls = list(self._calls.values())
        self._calls.clear()
        received = self._port.received
        for call in calls:
            if call.deadline_at_ns is not None:
                self._port.deadlines.discard(call)
            if call.counted:
                received.count(call, self, 0, False)
            self.guarded(call, call.cancelled)
        received.forget(self)
        self._writers.clear()
        self._streaming.clear()
        self._undelivered.clear()
        self._partial.clear()
        self._crowded.clear()
        self._partial_bytes = 0

    # --- reading -------------------------------------------------------------------------------------------

    def on_ready(self, events: int) -> None:
        """Handles the socket's events."""
        try:
            if self._state is State.HANDSHAKE and not self._shake_hands():
                return
            if events & EPOLLOUT and self._blocked:
                self._send_blocked()
            if events & ~EPOLLOUT:
                self._read()
        except OSError:  # the client disconnected
            self.close()

    def _shake_hands(self) -> bool:
        if not self._wire.handshake(self.loop, self):
            return False
        self._state = State.OPEN
        self.certificate_names = self._wire.certificate_names()
        self.loop.flush_later(self)
        return True

    def _read(self) -> None:
        wire, http2, clock = self._wire, self._http2, self._port.clock
        if self._http2.unparsed:
            return  # its turn comes
        size = _LONG_READ_BYTES if self._partial else _READ_BYTES
        for _ in range(_READS):
            if self._http2.unparsed or self._state is State.CLOSED or self._overloaded():
                break
            direct = http2.direct()
            if direct is None or not self._read_directly(*direct):
                try:
                    data = wire.recv(size)
                except BlockingIOError:
                    break
                if not data or self._state is State.LINGERING:
                    if not data:
                        self.close()
                    return
                self._keep_alive.heard = True
                self.heard_at = now_ns = clock()
                self._handle(http2.receive(data, now_ns))
                if http2.unparsed:
                    self._go_on_later()
                if len(data) < size and wire.reads_all:
                    break
        if self._state is State.CLOSED:
            return
        if self._blocked and self._overloaded():
            self.loop.modify(wire.fileno(), EPOLLOUT)
        elif wire.pending() and not http2.unparsed:
            # What TLS has decrypted must not be left there: the socket does not tell of it.
            self.loop.call_soon(self._read_pending)
        self.loop.flush_later(self)

    def _parse_on(self, since_ns: int) -> None:
        """Handles frames that wait, as long as the turn lasts."""
        http2 = self._http2
        while http2.unparsed:
            if self._overloaded() and self._blocked:
                return  # `_send_blocked` goes on
            now_ns = self._port.clock()
            if now_ns - since_ns > _TURN_NS or self._overloaded():
                self._go_on_later()
                return
            self._handle(http2.receive(b"", now_ns))

    def deliver_later(self, call: StreamCall) -> None:
        """Has a stream deliver more of its messages in the next turn."""
        self._undelivered[call] = None
        self._go_on_later()

    def _go_on_later(self) -> None:
        if not self._queued:
            self._queued = True
            self._port.turns.queue(self)

    def take_turn(self) -> None:
        """Goes on with what the last turn has left."""
        self._queued = False
        since_ns = self._port.clock()
        self._parse_on(since_ns)
        while self._undelivered:
            self._undelivered.pop(call := next(iter(self._undelivered)))
            self.guarded(call, call.deliver)
            if self._undelivered and self._port.clock() - since_ns > _TURN_NS:
                self._go_on_later()
                break
        if not self._http2.unparsed:
            self._read_pending()
        self.loop.flush_later(self)

    def _overloaded(self) -> bool:
        """True if too many unsent headers and resets are queued for the connection to be read."""
        return self._http2.output_head_bytes > _MOST_HEAD_BYTES

    def _read_pending(self) -> None:
        if self._state is not State.CLOSED and self._wire.pending():
            self.on_ready(EPOLLIN)

    def _read_directly(self, stream_id: int, left: int) -> bool:
        """Receives a part of a long message into its buffer; False if it has none, or nothing has come."""
        call = self._calls.get(stream_id)
        room = None if call is None else call.receive_buffer()
        if call is None or room is None:
            return False
        try:
            count = self._wire.recv_into(room[:left])
        except BlockingIOError:
            return False
        if not count:
            self.close()
            return True
        self._keep_alive.heard = True
        events = self._http2.received_directly(count)
        self.guarded(call, partial(call.received, count))
        self._account(call, count)
        self._handle(events)
        return True

    def _handle(self, events: list[Event]) -> None:
        calls, http2 = self._calls, self._http2
        for event in events:
            try:
                if isinstance(event, DataReceived):
                    call = calls.get(event.stream_id)
                    count = event.end - event.start
                    if call is None:
                        if count:
                            http2.consumed(event.stream_id, count)
                        continue
                    if count:
                        try:
                            call.receive(event.data, event.start, event.end)
                        finally:
                            self._account(call, count)
                    if event.end_stream and not (call.half_closed or call.ended):
                        call.half_close()
                elif isinstance(event, HeadersReceived):
                    self._open(event)
                elif not self._handle_rare(event):
                    return
            except Exception as error:  # boundary as in `guarded`, inline as each request comes here
                self._fail_call(calls.get(getattr(event, "stream_id", 0)), error)

    def guarded(self, call: OpenCall, work: Callable[[], object]) -> None:
        """Does work of a call, which may run its handler."""
        try:
            work()
        except Exception as error:  # boundary: a handler; the connection's other calls go on
            self._fail_call(call, error)

    def _fail_call(self, call: OpenCall | None, error: Exception) -> None:
        """Ends the call whose handler has raised, unless it was answered."""
        log.error("the handler of a gRPC call failed", exc_info=error)
        if call is not None:
            call.fail()

    def _handle_rare(self, event: Event) -> bool:
        """Handles an event that most requests do without; False if the connection has ended."""
        if isinstance(event, WindowOpened):
            self._note_sent(event)
        elif isinstance(event, StreamReset):
            self._reset(event.stream_id)
        elif isinstance(event, StreamRefused):
            self._port.ended["resets"] += 1
        elif isinstance(event, TrailersReceived):
            call = self._calls.get(event.stream_id)
            if call is not None:
                call.half_close()
        elif isinstance(event, PingReceived):
            self._keep_alive.pinged()
        elif isinstance(event, PingAcknowledged):
            if event.payload == _DRAIN_PING:
                # grpcio's clients acknowledge it before the calls that they begin in the same write.
                self.ping(_LAST_DRAIN_PING)
            elif event.payload == _LAST_DRAIN_PING:
                self._go_away()
        elif isinstance(event, GoAwayReceived):
            self._gone_away = True
            if self._state is State.OPEN:
                self._state = State.DRAINING
        elif isinstance(event, ConnectionClosed):
            self._port.closed[event.reason] += 1
            log.debug("%s was disconnected: %s", self.peer, event.text)
            self._fail()
            return False
        return True

    def _fail(self) -> None:
        """Sends what tells the client why, and ends the connection."""
        self._cancel_calls()
        self._gone_away = True
        self._leaving = False
        if self._state is State.OPEN:
            self._state = State.DRAINING
        self.loop.flush_later(self)

    def _account(self, call: OpenCall, count: int) -> None:
        """Gives received bytes back to the client's window, or withholds them."""
        stream_id = call.stream_id
        partial, full = call.partial, call.full
        if not (partial or full or call.counted or self._partial):
            self._http2.consumed(stream_id, count)  # nothing is held, as after most requests
            return
        received = self._port.received
        # Of a full stream everything counts until `give_back`.
        held = call.counted + count if full else partial
        if held or call.counted:
            received.count(call, self, held, partial > 0 and not full)
        if partial or stream_id in self._partial:
            self._partial_bytes += partial - self._partial.get(stream_id, 0)
            if partial:
                self._partial[stream_id] = partial
                self._watch_progress()
            else:
                del self._partial[stream_id]
                self.release_crowded()
        if held and received.refuses(call):
            self._http2.consumed(stream_id, count + call.withheld, grant=False)
            call.withheld = 0
            call.refuse_message(self._port.refusal(received.held.refusal()))
            self._discount(call)
            return
        in_turn = self._partial_bytes <= _CROWDED_BYTES or next(iter(self._partial)) == stream_id
        if full:
            call.withheld += count
        elif (in_turn and not (partial and received.crowded)) or received.is_oldest(call):
            self._http2.consumed(stream_id, count)
        elif partial and not in_turn and self._partial_bytes > MOST_PARTIAL_BYTES:
            self._port.ended["partial_messages"] += 1
            self._http2.reset(stream_id, ErrorCode.REFUSED_STREAM)
            self._reset(stream_id)
        else:
            self._crowded.add(stream_id)
            if received.crowded:
                received.wait(self)
            self._http2.consumed(stream_id, count, grant=False)

    def _discount(self, call: OpenCall) -> None:
        """Takes a call out of what is being received."""
        if call.counted:
            self._port.received.count(call, self, 0, False)
        if self._partial:
            self._partial_bytes -= self._partial.pop(call.stream_id, 0)
            self._crowded.discard(call.stream_id)
            self.release_crowded()

    def release_crowded(self) -> None:
        """Enlarges windows: all if there is room again, else that of the oldest message."""
        if not self._crowded:
            return
        received = self._port.received
        if received.crowded:
            received.wait(self)
            released = {received.oldest_stream_of(self)} & self._crowded
            self._crowded -= released
        elif self._partial_bytes <= _CROWDED_BYTES:
            released, self._crowded = self._crowded, set()
        else:
            released = {next(iter(self._partial))} & self._crowded
            self._crowded -= released
        for stream_id in released:
            self._http2.consumed(stream_id, 0)
        self.loop.flush_later(self)

    def decompress(
        self, call: OpenCall, message: CompressedMessage, done: Callable[[Buffer | MessageError], None]
    ) -> None:
        """Decompresses on another thread, and calls `done` on the loop's."""
        port, held = self._port, self._port.received.held
        if held.total - call.counted > held.most:
            done(port.refusal(held.refusal()))
            return

        def end(ended: Future[Buffer]) -> None:
            self.guarded(call, lambda: done(port.decompressed(ended)))

        port.decompress(message, self.peer, lambda: call.ended, end)

    def handed(self, call: OpenCall, size: int) -> None:
        """Stops counting a message, which its handler counts."""
        self._port.received.count(call, self, max(call.counted - size, 0), False)

    def give_back(self, call: OpenCall) -> None:
        """Gives withheld bytes back to the client's window; no message waits any more."""
        if call.counted:
            held = call.partial
            self._port.received.count(call, self, held, held > 0)
        count, call.withheld = call.withheld, 0
        self._http2.consumed(call.stream_id, count)
        self.loop.flush_later(self)

    # --- calls ---------------------------------------------------------------------------------------------

    def _open(self, event: HeadersReceived) -> None:
        headers = event.headers
        head = headers.note
        stream_id = event.stream_id
        if not isinstance(head, RequestHead):
            try:
                head = headers.note = self._read_head(headers)
            except RefusedRequestError as error:
                self._http2.send_headers(stream_id, error.answer, True)
                return
        port = self._port
        if self._gone_away or (self._unread and port.unread_bytes > MOST_ANSWER_BYTES):
            self._http2.reset(stream_id, ErrorCode.REFUSED_STREAM)
            return
        path = head.path
        if self.reserved and path not in _HEALTH:
            port.ended["crowded"] += 1
            self._http2.send_headers(stream_id, error_head(_UNAVAILABLE, _CROWDED, None), True)
            return
        now_ns = 0 if head.timeout_ns is None else port.clock()
        handler = port.unary.get(path)
        if handler is not None:
            unary = UnaryCall(self, stream_id, head, now_ns, handler)
            port.open_calls.unary.add(unary)
            self._add(unary)
            admit = port.admissions.get(path)
            if admit is not None:
                admit(unary)
        elif path in port.streams:
            stream = StreamCall(self, stream_id, head, now_ns)
            self._streaming.add(stream_id)
            self._add(stream)
            port.streams[path](stream)
        else:
            answer = error_head(_UNIMPLEMENTED, f"Method not found: {path}", None)
            self._http2.send_headers(stream_id, answer, True)
            return
        if event.end_stream:
            self._calls[stream_id].half_close()

    def _count_unread(self) -> None:
        """Counts the bytes of unary calls' answers that wait; streams have bounds of their own."""
        unread = self._http2.queued_bytes
        if unread and self._streaming:
            unread -= sum(map(self._http2.unsent, self._streaming))
        self._port.unread_bytes += unread - self._unread
        self._unread = unread

    def _add(self, call: OpenCall) -> None:
        self._calls[call.stream_id] = call
        if call.deadline_at_ns is not None:
            self._port.deadlines.add(call)

    def _read_head(self, headers: HeaderList) -> RequestHead:
        if headers.too_large:
            most = self._port.options.settings.max_header_list_bytes
            text = f"received metadata size exceeds the limit of {most} bytes"
            raise RefusedRequestError(error_head(_RESOURCE_EXHAUSTED, text, None))
        return RequestHead(headers.pairs)

    def _reset(self, stream_id: int) -> None:
        call = self._calls.get(stream_id)
        if call is None:
            return
        if call.deadline_at_ns is not None and call.is_late(self._port.clock()):
            self._http2.forgive_reset()  # of a client whose patience is over
        self._remove(call)
        self.guarded(call, call.cancelled)

    def _remove(self, call: OpenCall) -> None:
        stream_id = call.stream_id
        del self._calls[stream_id]
        if self._streaming:
            self._streaming.discard(stream_id)
        if call.deadline_at_ns is not None:
            self._port.deadlines.discard(call)
        if self._partial or call.counted:
            self._discount(call)

    def expire(self, call: OpenCall) -> None:
        """Ends a call whose deadline is over."""
        if call.ended or self._calls.get(call.stream_id) is not call:
            return
        self._remove(call)
        end = trailers(_DEADLINE_EXCEEDED, "Deadline Exceeded", None)
        if not self._http2.send_trailers_now(call.stream_id, end if call.begun else (*HEAD, *end)):
            self._http2.reset(call.stream_id, ErrorCode.CANCEL)
        self.loop.flush_later(self)
        self.guarded(call, call.cancelled)

    def answer(self, call: UnaryCall, head: Pairs, message: Sequence[Buffer], end: Pairs) -> None:
        """Sends the answer of a unary call: with a message, or an error in its headers."""
        http2, stream_id = self._http2, call.stream_id
        self._remove(call)
        self.answers += 1
        if message and self._unread and self._port.unread_bytes > 2 * MOST_ANSWER_BYTES:
            self._port.ended["unread_answers"] += 1
            message, head = (), error_head(_RESOURCE_EXHAUSTED, _UNREAD, None)
        if message:
            http2.send_headers(stream_id, head)
            http2.send_data(stream_id, message)
            http2.send_trailers(stream_id, end)
            if http2.queued_bytes:
                self._count_unread()
        else:
            self._http2.send_headers(stream_id, head, True)
        self.loop.flush_later(self)

    def begin_answer(self, call: StreamCall, head: Pairs) -> None:
        """Sends the headers of a stream."""
        self._http2.send_headers(call.stream_id, head)
        self.loop.flush_later(self)

    def send_message(self, call: StreamCall, message: Sequence[Buffer]) -> None:
        """Sends a message of a stream."""
        self.answers += 1
        self._http2.send_data(call.stream_id, message)
        self._writers.add(call)
        self.loop.flush_later(self)

    def end_answer(self, call: StreamCall, end: Pairs) -> None:
        """Ends a stream: with trailers, or before its headers with an error in these."""
        self._remove(call)
        self._writers.discard(call)
        if call.begun:
            self._http2.send_trailers(call.stream_id, end)
        else:
            self._http2.send_headers(call.stream_id, end, True)
        call.finish()
        self.loop.flush_later(self)

    # --- sending -------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Sends the pending output of HTTP/2, as far as the socket takes it."""
        if self._blocked or self._state in (State.HANDSHAKE, State.CLOSED, State.LINGERING):
            return
        try:
            while output := self._http2.take_output():
                if not self._send(output):
                    return
        except OSError:  # the client disconnected
            self.close()
            return
        self._has_sent()

    def _send_blocked(self) -> None:
        self.answers += 1
        output, self._blocked = self._blocked, []
        if self._send(output):
            self.loop.modify(self._wire.fileno(), EPOLLIN)
            self.loop.call_soon(self._read_pending)
            if self._http2.unparsed:
                self._go_on_later()
            self.loop.flush_later(self)

    def _send(self, output: list[Buffer]) -> bool:
        """Sends buffers; False if some are left in `_blocked`."""
        wire = self._wire
        while output:
            try:
                count = wire.send(output)
            except BlockingIOError:
                self._blocked = output
                self.loop.modify(wire.fileno(), EPOLLOUT if self._overloaded() else EPOLLIN | EPOLLOUT)
                self._watch_progress()
                return False
            self._sent += count
            output = unsent_part(output, count)
        return True

    def _has_sent(self) -> None:
        """Notes that the socket has taken all that flow control allows."""
        http2 = self._http2
        if self._unread:
            self._count_unread()
        for event in http2.take_events():
            if isinstance(event, WindowOpened):
                self._note_sent(event)
        if self._writers:
            writers, self._writers = self._writers, set()
            for call in writers:
                try:
                    call.sent(http2.unsent(call.stream_id))
                except Exception as error:  # boundary as in `guarded`
                    self._fail_call(call, error)
        if http2.queued_bytes:
            self._watch_progress()
        elif self._gone_away and not self._calls and not http2.open_streams:
            self._await_close()

    def _note_sent(self, event: WindowOpened) -> None:
        self.answers += 1
        call = self._calls.get(event.stream_id)
        if isinstance(call, StreamCall):
            self._writers.add(call)

    def _watch_progress(self) -> None:
        if not self._watching:
            self._watching = True
            self.after("progress", CHECK_NS, self._check_progress)

    def _check_progress(self) -> None:
        self._watching = False
        http2, ended = self._http2, self._port.ended
        least = max(self._port.options.least_rate * CHECK_NS // 1_000_000_000, 1)
        waiting = sum(map(len, self._blocked)) + http2.queued_bytes
        slow = bool(self._blocked) and too_slow(self._sent, waiting, least)
        self._waits, self._sent = self._waits + 1 if slow else 0, 0
        if self._waits > _STUCK_CHECKS:
            self.give_up("stuck")
            return
        for stream_id in http2.stuck_streams(_STUCK_CHECKS, least):
            ended["slow_reader"] += 1
            http2.reset(stream_id, ErrorCode.CANCEL)
            self._reset(stream_id)
        for call in self._slow_senders(least):
            ended["slow_sender"] += 1
            call.refuse_message(MessageError(_DEADLINE_EXCEEDED, _SENDS_TOO_SLOWLY))
            self._discount(call)
        self.loop.flush_later(self)
        if self._blocked or self._partial or http2.queued_bytes:
            self._watch_progress()

    def _slow_senders(self, least: int) -> list[OpenCall]:
        """Calls of which too little is received, check after check, though windows allow more.

        The messages of a connection share the least rate: a slow line may carry many.
        """
        before, self._partial_before = self._partial_before, {}
        least = max(least // max(len(self._partial), 1), 1)
        slow = []
        for stream_id, size in self._partial.items():
            size_before, waits = before.get(stream_id, (0, 0))
            # A smaller one is another message.
            if 0 <= size - size_before < least and self._takes(stream_id):
                waits += 1
            else:
                waits = 0
            self._partial_before[stream_id] = size, waits
            if waits > _STUCK_CHECKS:
                slow.append(self._calls[stream_id])
        return slow

    def _takes(self, stream_id: int) -> bool:
        return not self._overloaded() and self._http2.may_receive(stream_id)
