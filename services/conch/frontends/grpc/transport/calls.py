"""Unary calls and bidirectional streams on conch's own transport.

Threads and locks: the loop's thread receives and sends; handlers answer from any thread, which puts the
answer into the call and has the loop send it. A stream has a lock for what writers and the loop share.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Protocol

from conch.access.principals import Grant
from conch.core.reader import Reader
from conch.core.tensor import Buffer
from conch.frontends.grpc.open_calls import MOST_UNREAD_BYTES, OpenCalls
from conch.frontends.grpc.rpc_calls import Metadata, UnaryMethod
from conch.frontends.grpc.transport.messages import (
    PREFIX,
    PREFIX_BYTES,
    CompressedMessage,
    MessageError,
    MessageReader,
    Received,
    compress,
)
from conch.frontends.grpc.transport.metadata import (
    HEAD,
    OK_TRAILERS,
    Pairs,
    RequestHead,
    error_head,
    head_with,
    trailers,
)
from conch.ipc.loop import IoLoop

_OK = 0
_CANCELLED = 1
_INTERNAL = 13
_UNIMPLEMENTED = 12
_HANDLER_FAILED = "the server failed to handle the call; its log has the cause"
_LEAST_PATIENCE_NS = 10_000_000
_MESSAGES_AT_ONCE = 2
_NO_BUFFERS: tuple[Buffer, ...] = ()


class CallConnection(Protocol):
    """Connection of a call, as the call uses it; methods are for the loop's thread.

    Attributes:
        peer: The client's address.
        certificate_names: Names in the client's certificate.
        loop: The loop.
        open_calls: The calls of the port that are not answered yet.
        most_message_bytes: Limit of a message.
    """

    peer: str
    certificate_names: tuple[str, ...]
    loop: IoLoop
    open_calls: OpenCalls
    most_message_bytes: int

    def answer(self, call: UnaryCall, head: Pairs, message: Sequence[Buffer], end: Pairs) -> None:
        """Sends the answer of a unary call: with a message, or an error in its headers."""

    def begin_answer(self, call: StreamCall, head: Pairs) -> None:
        """Sends the headers of a stream."""

    def send_message(self, call: StreamCall, message: Sequence[Buffer]) -> None:
        """Sends a message of a stream."""

    def end_answer(self, call: StreamCall, end: Pairs) -> None:
        """Ends a stream: with trailers, or before its headers with an error in these."""

    def decompress(
        self, call: OpenCall, message: CompressedMessage, done: Callable[[Buffer | MessageError], None]
    ) -> None:
        """Decompresses on another thread, and calls `done` on the loop's."""

    def handed(self, call: OpenCall, size: int) -> None:
        """Stops counting a message, which its handler counts."""

    def guarded(self, call: OpenCall, work: Callable[[], object]) -> None:
        """Does work of a call; if its handler raises, the call alone fails."""

    def give_back(self, call: StreamCall) -> None:
        """Gives withheld bytes back to the client's window; no message waits any more."""

    def deliver_later(self, call: StreamCall) -> None:
        """Has a stream deliver more of its messages in the connection's next turn."""

    def expire(self, call: OpenCall) -> None:
        """Ends a call whose deadline is over."""


class TransportCall:
    """Metadata, client and deadline of a call, and the message that is being received.

    Attributes:
        read_ns: 0, as in `Caller`: messages are received as a whole.
        path: Empty, as in `Caller`.
        connection: Its connection.
        stream_id: Its HTTP/2 stream.
        deadline_at_ns: Monotonic time of the client's deadline; None without one.
        half_closed: True once the client has sent its last message.
        ended: True once nothing more is sent: answered, cancelled, or its connection is lost.
        withheld: Received bytes that flow control has not given back to the client.
        counted: Received bytes that the port counts, see `ReceivedBytes`.
    """

    __slots__ = ("_access", "_head", "_reader", "connection", "counted", "deadline_at_ns", "ended",
                 "half_closed", "stream_id", "withheld")  # fmt: skip

    _access: Grant
    read_ns: ClassVar[int] = 0
    path: ClassVar[str] = ""

    def __init__(self, connection: CallConnection, stream_id: int, head: RequestHead, now_ns: int) -> None:
        self.connection = connection
        self.stream_id = stream_id
        self._head = head
        self._reader: MessageReader | None = None
        self.deadline_at_ns = None if head.timeout_ns is None else now_ns + head.timeout_ns
        self.half_closed = False
        self.ended = False
        self.withheld = self.counted = 0

    @property
    def caller(self) -> TransportCall:
        """Itself, as the context of a request."""
        return self

    @property
    def metadata(self) -> Metadata:
        """The client's metadata."""
        return self._head.metadata

    @property
    def client(self) -> str:
        """Address of the client, such as ``ipv4:127.0.0.1:50000``."""
        return self.connection.peer

    @property
    def access(self) -> Grant | None:
        """The client's grant by the access policy; None without a policy."""
        return getattr(self, "_access", None)  # unset without a policy, which then costs nothing

    @access.setter
    def access(self, grant: Grant) -> None:
        self._access = grant

    @property
    def certificate_names(self) -> tuple[str, ...]:
        """Names in the client's certificate, such as ``cn:web``; none without one."""
        return self.connection.certificate_names

    def header(self, name: str) -> str:
        """The first value of a text key of the metadata; empty without it."""
        for key, value in self._head.metadata:
            if key == name and isinstance(value, str):
                return value
        return ""

    def header_values(self, name: str) -> list[str]:
        """All values of a text key of the metadata."""
        return [value for key, value in self._head.metadata if key == name and isinstance(value, str)]

    def deadline_ns(self, now_ns: int) -> int | None:
        """Returns the client's deadline on the monotonic clock; None without one."""
        return self.deadline_at_ns

    def add_response_metadata(self, name: str, value: str) -> None:
        """Drops the entry: the requests of a stream share its trailing metadata."""

    def is_late(self, now_ns: int) -> bool:
        """True if half of the client's timeout is over; False for very short ones, which may be an attack."""
        timeout_ns = self._head.timeout_ns or 0
        deadline_ns = self.deadline_at_ns or 0
        return timeout_ns >= _LEAST_PATIENCE_NS and now_ns >= deadline_ns - timeout_ns // 2

    def accepted(self, compression: str | None) -> str | None:
        """The compression, if the client takes it."""
        return compression if compression in self._head.accepts else None

    def new_reader(self) -> MessageReader:
        """Makes the reader of the client's messages."""
        self._reader = MessageReader(self.connection.most_message_bytes, self._head.encoding)
        return self._reader

    # On the loop's thread.

    @property
    def begun(self) -> bool:
        """True if the response's headers were sent apart from its end."""
        return False

    @property
    def full(self) -> bool:
        """True if a message waits for its reader, so that further data is not passed on."""
        return False

    @property
    def wanted(self) -> bool:
        """True if the next message goes to its handler at once."""
        return True

    @property
    def partial(self) -> int:
        """Bytes of the message that is being received."""
        return 0 if self._reader is None else self._reader.partial_bytes

    def receive_buffer(self) -> memoryview | None:
        """Memory for the next bytes of a long message, see `MessageReader.receive_buffer`."""
        return None if self._reader is None else self._reader.receive_buffer()


class UnaryCall(TransportCall):
    """One unary call: receives one message, is answered once."""

    __slots__ = ("_answer", "_answered", "_handler", "_on_cancel", "_subject", "_taken", "_trailing")

    _trailing: Metadata

    def __init__(
        self, connection: CallConnection, stream_id: int, head: RequestHead, now_ns: int, handler: UnaryMethod
    ) -> None:
        TransportCall.__init__(self, connection, stream_id, head, now_ns)
        self._handler = handler
        self._on_cancel: Callable[[Any], None] | None = None
        self._subject: Any = None
        self._taken = False  # the message has been handed to the handler
        self._answered = False
        self._answer: tuple[Pairs, tuple[Buffer, ...], Pairs] | None = None

    # On the loop's thread.

    def receive(self, data: bytes, start: int, end: int) -> None:
        """Takes a piece of data; hands the message over once it is complete.

        The usual short message, uncompressed and in one frame, is taken without a reader.
        """
        if self._reader is None:
            size = end - start - PREFIX_BYTES
            if (
                0 <= size <= self.connection.most_message_bytes
                and data[start : start + PREFIX_BYTES] == size.to_bytes(PREFIX_BYTES, "big")
                and not self._taken
            ):
                self._take(data[start + PREFIX_BYTES : end])
                return
            if self._taken:
                return
            self.new_reader()
        reader = self._reader
        assert reader is not None
        _, message = reader.feed(data, start, end)
        if message is not None:
            self._take(message)
        elif reader.failure is not None:
            self.refuse_message(reader.failure)

    def received(self, count: int) -> None:
        """Notes that so many bytes have been received into `room`."""
        assert self._reader is not None
        message = self._reader.received(count)
        if message is not None:
            self._take(message)

    def half_close(self) -> None:
        """Notes the end of what the client sends."""
        self.half_closed = True
        if self._taken or self.ended:
            return
        self._taken = True
        if self._reader is None or self._reader.empty:
            self._abort_unread(_UNIMPLEMENTED, "the method takes exactly one request message, none was sent")
        else:
            self._abort_unread(_INTERNAL, "the request message ends too early")

    def _abort_unread(self, status: int, details: str) -> None:
        """Ends a call without a message; calls the `on_cancel` that a check before it has set."""
        on_cancel, subject = self._on_cancel, self._subject
        self.abort(status, details)
        if on_cancel is not None:
            on_cancel(subject)

    def _take(self, message: Received) -> None:
        self._taken = True
        self._reader = None
        if isinstance(message, CompressedMessage):
            self.connection.decompress(self, message, self._decompressed)
        else:
            if self.counted:
                self.connection.handed(self, _size(message))
            self._handler(self, message)

    def _decompressed(self, message: Buffer | MessageError) -> None:
        if isinstance(message, MessageError):
            self.refuse_message(message)
        elif self.ended:
            self.connection.open_calls.discard(self)
        else:
            self._handler(self, message)

    def refuse_message(self, error: MessageError) -> None:
        """Ends the call, whose message can't be taken."""
        self._taken = True
        self._reader = None
        self._abort_unread(error.status, str(error))

    def cancelled(self) -> None:
        """Ends the call: its client cancelled it or disconnected, or its deadline is over."""
        self.ended = True
        self._reader = None
        if not self._taken:
            self._taken = True
            self.connection.open_calls.discard(self)
        on_cancel = self._on_cancel
        if on_cancel is not None:  # else `watch`, on another thread, may just be setting the subject
            subject, self._on_cancel, self._subject = self._subject, None, None
            if not self._answered:
                on_cancel(subject)

    def fail(self) -> None:
        """Ends the call after an error of its handler, unless it is answered."""
        if not self.ended:  # else `on_cancel` has raised, and the request is still being worked on
            self.abort(_INTERNAL, _HANDLER_FAILED)

    def _send(self) -> None:
        answer, self._answer = self._answer, None
        if not self.ended and answer is not None:
            self.ended = True
            self._on_cancel = self._subject = None
            self.connection.answer(self, *answer)

    # On any thread.

    def watch(self, on_cancel: Callable[[Any], None], subject: Any) -> None:
        """Calls `on_cancel(subject)` once if the client cancels before the answer is sent."""
        self._subject = subject
        self._on_cancel = on_cancel
        if self.ended:
            self.connection.loop.call_soon(self.cancelled)

    def add_response_metadata(self, name: str, value: str) -> None:
        """Adds an entry to the trailing metadata of `reply_with` and `abort`."""
        self._trailing = (*self._with_added(None), (name, value))

    def _with_added(self, trailing: Metadata | None) -> Metadata:
        # Unset without an entry, which then costs `reply` nothing.
        return (*(trailing or ()), *getattr(self, "_trailing", ()))

    def reply(self, message: Buffer) -> None:
        """Sends the answer with status OK and nothing else."""
        self._finish(HEAD, message, OK_TRAILERS)

    def reply_with(self, message: Buffer, compression: str | None, trailing: Metadata | None) -> None:
        """Sends the answer with status OK, a gRPC compression such as ``gzip``, and trailing metadata."""
        chosen = self.accepted(compression)
        head = head_with(compression)
        if chosen is None:
            head = HEAD
        self._finish(head, message, trailers(_OK, "", self._with_added(trailing)), chosen)

    def abort(self, status: int, details: str, trailing: Metadata | None = None) -> None:
        """Ends the call with an error status and trailing metadata."""
        self._finish(error_head(status, details, self._with_added(trailing)), None, ())

    def _finish(
        self, head: Pairs, message: Buffer | None, end: Pairs, compression: str | None = None
    ) -> None:
        if self._answered:
            return
        self._answered = self._taken = True
        # Compressed here, as the loop's thread has other calls to serve.
        self._answer = (head, _NO_BUFFERS if message is None else framed(message, compression), end)
        connection = self.connection
        connection.open_calls.discard(self)
        connection.loop.call_soon(self._send)


def framed(message: Buffer, compression: str | None) -> tuple[Buffer, ...]:
    """A message with its prefix."""
    if compression is None:
        return PREFIX.pack(0, _size(message)), message
    compressed = compress(message, compression)
    return PREFIX.pack(1, len(compressed)), compressed


def _size(buffer: Buffer) -> int:
    return buffer.nbytes if type(buffer) is memoryview else len(buffer)


class _Data:
    """Received data whose messages are not taken apart yet; `start` is where the next one begins."""

    __slots__ = ("rest", "start")

    def __init__(self, rest: bytes) -> None:
        self.rest = rest
        self.start = 0


def _ignore_message(message: Buffer | None) -> None:
    """The `on_message` of a stream that has ended."""


def _ignore_drain(status: int, details: str) -> None:
    """The `on_drain` of a stream that has ended."""


class StreamCall(TransportCall, Reader):
    """One bidirectional call: delivers one message at a time, sends messages in the order of `write`.

    `on_message` is called with each message, and once with None at half-close. It calls `read_next` to
    allow the next message, which another thread may handle. When the server stops, `on_drain` is called
    with the status to close with once nothing is in flight.

    Flow control: no message is delivered while more than `MOST_UNREAD_BYTES` are unsent, or fewer if all
    streams together have too many; what the client sends meanwhile is withheld from its window. What is
    written is taken in any case: the call is the `Reader` of its requests.

    Fields of the loop's thread: `_inbox` (messages that wait for `read_next`; behind them data that is not
    taken apart yet, as few bytes may be many messages), `_wanted` (`read_next` was called), `_delivering`.
    Guarded by the lock: `_outbox`, `_backlog`, `_closing` (the trailers that follow the outbox; after them
    `write` drops messages), `_send_queued`.
    """

    __slots__ = (
        "__weakref__",
        "_backlog",
        "_closing",
        "_compression",
        "_delivering",
        "_inbox",
        "_lock",
        "_on_cancel",
        "_outbox",
        "_send_queued",
        "_started",
        "_wanted",
        "on_drain",
        "on_message",
    )

    def __init__(self, connection: CallConnection, stream_id: int, head: RequestHead, now_ns: int) -> None:
        TransportCall.__init__(self, connection, stream_id, head, now_ns)
        self.new_reader()
        self._inbox: deque[Received | _Data | None] = deque()
        self._wanted = self._delivering = self._started = False
        self._lock = threading.Lock()
        self._backlog = connection.open_calls.new_backlog()
        self._outbox: deque[tuple[Buffer, ...]] = deque()
        self._send_queued = False
        self._closing: Pairs | None = None
        self._compression: str | None = None
        self._on_cancel: Callable[[], None] | None = None
        self.on_message: Callable[[Buffer | None], None] = _ignore_message
        self.on_drain: Callable[[int, str], None] = self.close

    # On the loop's thread.

    @property
    def full(self) -> bool:
        """True if a message waits for `read_next`."""
        return bool(self._inbox)

    @property
    def wanted(self) -> bool:
        """True if `read_next` waits for a message."""
        return self._wanted and not self._inbox

    @property
    def begun(self) -> bool:
        """True if the headers have been sent."""
        return self._started

    def receive_buffer(self) -> memoryview | None:
        """See `TransportCall`."""
        if self._inbox and type(self._inbox[-1]) is _Data:
            return None
        return TransportCall.receive_buffer(self)

    def receive(self, data: bytes, start: int, end: int) -> None:
        """Takes a piece of data."""
        reader, inbox = self._reader, self._inbox
        if reader is None:
            return  # it has ended
        if not (inbox and type(inbox[-1]) is _Data):
            while start < end and len(inbox) < _MESSAGES_AT_ONCE and reader.failure is None:
                start, message = reader.feed(data, start, end)
                if message is not None:
                    inbox.append(message)
        if start < end and reader.failure is None:
            inbox.append(_Data(data[start:end]))
        self.deliver()
        if reader.failure is not None:
            self.close(reader.failure.status, str(reader.failure))

    def refuse_message(self, error: MessageError) -> None:
        """Ends the stream, whose next message can't be taken; drops those that wait."""
        self._reader = None
        self._inbox.clear()
        self.close(error.status, str(error))

    def received(self, count: int) -> None:
        """Notes that so many bytes have been received into `room`."""
        assert self._reader is not None
        message = self._reader.received(count)
        if message is not None:
            self._inbox.append(message)
            self.deliver()

    def half_close(self) -> None:
        """Notes the end of what the client sends."""
        self.half_closed = True
        self._inbox.append(None)
        self.deliver()

    def deliver(self) -> None:
        """Delivers some of the messages that wait."""
        if self._delivering:
            return  # the loop below goes on
        self._delivering = True
        left = _MESSAGES_AT_ONCE
        try:
            exceeds = self._backlog.exceeds
            while self._wanted and self._inbox and not self.ended and not exceeds(MOST_UNREAD_BYTES):
                if not left:
                    self.connection.deliver_later(self)
                    break
                left -= 1
                message = self._inbox.popleft()
                if isinstance(message, _Data):
                    message = self._take_apart(message)
                    if message is None:
                        continue
                elif message is None and self._reader is not None and not self._reader.empty:
                    self.close(_INTERNAL, "the last message ends too early")
                self._wanted = False
                if isinstance(message, CompressedMessage):
                    self.connection.decompress(self, message, self._decompressed)
                else:
                    if self.counted and message is not None:
                        self.connection.handed(self, _size(message))
                    self.on_message(message)
        finally:
            self._delivering = False
        if self.withheld and not self._inbox:
            self.connection.give_back(self)

    def _take_apart(self, data: _Data) -> Received | None:
        """Takes the first message off data; None if it is not complete."""
        reader = self._reader
        if reader is None:
            return None
        data.start, message = reader.feed(data.rest, data.start, len(data.rest))
        if reader.failure is not None:
            self.close(reader.failure.status, str(reader.failure))
        elif data.start < len(data.rest):
            self._inbox.appendleft(data)
        return message

    def _decompressed(self, message: Buffer | MessageError) -> None:
        if isinstance(message, MessageError):
            self.close(message.status, str(message))
        elif not self.ended:
            self.on_message(message)

    def _request_message(self) -> None:
        self._wanted = True
        self.deliver()

    def cancelled(self) -> None:
        """Ends the stream: its client cancelled it or disconnected, or its deadline is over."""
        on_cancel = self._on_cancel
        self.finish()
        if on_cancel is not None:
            on_cancel()

    def fail(self) -> None:
        """Ends the stream after an error of its handler."""
        self.close(_INTERNAL, _HANDLER_FAILED)

    def finish(self) -> None:
        """Ends the stream; frees what it has, and breaks reference cycles."""
        with self._lock:
            self.ended = True
            self._outbox.clear()
            self._backlog.resize(0)
            read = self._backlog.close()
        for work in read:
            work()
        self._inbox.clear()
        self._reader = None
        self._on_cancel = None
        self.on_message, self.on_drain = _ignore_message, _ignore_drain
        self.connection.open_calls.discard_stream(self)

    def _send(self) -> None:
        """Hands what was written to the connection."""
        if self.ended:
            return
        connection = self.connection
        if not self._started and self._on_cancel is not None:
            self._started = True
            connection.begin_answer(self, head_with(self._compression))
        with self._lock:
            self._send_queued = False
            messages, self._outbox = self._outbox, deque()
            closing = self._closing
        for message in messages:
            connection.send_message(self, message)
        if closing is not None:
            self._inbox.clear()
            connection.end_answer(self, closing if self._started else (*HEAD, *closing))

    def sent(self, left: int) -> None:
        """Notes that of all that the loop has taken, `left` bytes are not sent yet."""
        with self._lock:
            self._backlog.resize(left + sum(_size(part) for parts in self._outbox for part in parts))
            read = self._backlog.take_ready()
        for work in read:
            work()
        if self._wanted and self._inbox:
            self.connection.deliver_later(self)

    # On any thread.

    def start(
        self,
        on_message: Callable[[Buffer | None], None],
        on_cancel: Callable[[], None],
        compression: str | None = None,
    ) -> None:
        """Sends the headers and starts to read.

        Args:
            on_message: Handles each message, then None at half-close.
            on_cancel: Called once if the client cancels before the stream is closed.
            compression: gRPC's compression algorithm of messages, such as ``gzip``, or None.
        """
        self.on_message = on_message
        self._on_cancel = on_cancel
        self._compression = self.accepted(compression)
        self.connection.open_calls.add_stream(self)
        self._queue_send()
        self.read_next()

    def read_next(self) -> None:
        """Delivers the next message, at once or when enough has been sent."""
        loop = self.connection.loop
        if loop.on_thread:
            self._request_message()
        else:
            loop.call_soon(partial(self.connection.guarded, self, self._request_message))

    def write(self, message: Buffer) -> None:
        """Sends a message after those written before it."""
        parts = framed(message, self._compression)
        with self._lock:
            if self.ended or self._closing is not None:
                return
            self._backlog.resize(self._backlog.size + _size(message) + PREFIX_BYTES)
            self._outbox.append(parts)
        self._queue_send()

    def _queue_send(self) -> None:
        with self._lock:
            queued, self._send_queued = self._send_queued, True
        if not queued:
            self.connection.loop.call_soon(self._send)

    @property
    def backpressure(self) -> bool:
        """True if the client has too many bytes to read."""
        return self._backlog.backpressure

    def when_writable(self, work: Callable[[], object]) -> None:
        """See `Reader.when_writable`."""
        with self._lock:
            waits = self._backlog.defer_until_writable(work)
        if not waits:
            work()

    def close(self, status: int = _OK, details: str = "", trailing: Metadata | None = None) -> None:
        """Ends the stream after all written messages."""
        with self._lock:
            if self.ended or self._closing is not None:
                return
            self._closing = trailers(status, details, trailing)
            read = self._backlog.close()
        for work in read:
            work()
        self._queue_send()

    def refuse(self, status: int, details: str, trailing: Metadata | None = None) -> None:
        """Ends a stream that was not started, with trailing metadata."""
        self.close(status, details, trailing)


OpenCall = UnaryCall | StreamCall
"""A call of either kind."""
