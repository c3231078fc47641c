"""Calls whose connections are a front's, as the core's handlers see them.

Threads and locks: the loop's thread receives and sends; handlers answer from any thread. A stream has a lock
for what writers and the loop share.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from conch.access.principals import Grant
from conch.core.reader import Reader
from conch.core.tensor import Buffer, Tensor
from conch.frontends.grpc.open_calls import OpenCalls
from conch.frontends.grpc.rpc_calls import Metadata
from conch.fronts.front_messages import Answer, CallerFacts
from conch.ipc.loop import IoLoop
from conch.ipc.tensors import Payload

_INTERNAL = 13
_HANDLER_FAILED = "the server failed to handle the call; its log has the cause"


class CallLink(Protocol):
    """The link to the front of a call, as the call needs it; methods are of the loop's thread.

    Attributes:
        loop: The loop.
        open_calls: The calls of the port that are not answered yet.
    """

    loop: IoLoop
    open_calls: OpenCalls

    def pack(self, outputs: Sequence[Tensor]) -> Payload:
        """Packs the outputs of one response, to be answered with or discarded; from any thread."""

    def discard(self, message: Any) -> None:
        """Frees what an answer holds that is not sent; from any thread."""

    def answer(self, call: RemoteUnary, message: Any) -> None:
        """Sends the answer of a unary call: a message, or the response to a decoded request."""

    def end(self, call: RemoteCall, answer: Answer) -> None:
        """Ends a call."""

    def begin(self, call: RemoteStream, compression: str | None) -> None:
        """Has the front send the headers of a stream, and read its first message; from any thread."""

    def read_next(self, call: RemoteStream) -> None:
        """Has the front read the next message of a stream; from any thread."""

    def write(self, call: RemoteStream, message: Buffer) -> None:
        """Sends a message of a stream; from any thread."""


class RemoteCall:
    """Metadata, client and deadline of a call.

    Attributes:
        read_ns: 0, as in `Caller`: messages are received as a whole.
        path: Empty, as in `Caller`.
        number: Its number at its front.
        link: The link to its front.
        ended: True once nothing more is sent: answered, cancelled, or its front is lost.
    """

    __slots__ = ("_access", "_deadline_ns", "_facts", "ended", "link", "number")

    _access: Grant
    read_ns = 0
    path = ""

    def __init__(self, link: CallLink, number: int, facts: CallerFacts, deadline_ns: int | None) -> None:
        self.link = link
        self.number = number
        self._facts = facts
        self._deadline_ns = deadline_ns
        self.ended = False

    @property
    def metadata(self) -> Metadata:
        """The client's metadata."""
        return self._facts.metadata

    @property
    def client(self) -> str:
        """Address of the client, such as ``ipv4:127.0.0.1:50000``."""
        return self._facts.client

    @property
    def certificate_names(self) -> tuple[str, ...]:
        """Names in the client's certificate, such as ``cn:web``; none without one."""
        return self._facts.certificate_names

    @property
    def access(self) -> Grant | None:
        """Grant of the access policy to the client; None without a policy."""
        return getattr(self, "_access", None)

    @access.setter
    def access(self, grant: Grant) -> None:
        self._access = grant

    def header(self, name: str) -> str:
        """The first value of a text key of the metadata; empty without it."""
        return next(iter(self.header_values(name)), "")

    def header_values(self, name: str) -> list[str]:
        """All values of a text key of the metadata."""
        return [value for key, value in self._facts.metadata if key == name and isinstance(value, str)]

    def deadline_ns(self, now_ns: int) -> int | None:
        """Returns the client's deadline on the monotonic clock; None without one."""
        return self._deadline_ns


class RemoteUnary(RemoteCall):
    """One unary call.

    Attributes:
        decoded: True if its front has decoded its request, and encodes the response.
    """

    __slots__ = ("_answer", "_answered", "_on_cancel", "_subject", "_trailing", "decoded")

    _trailing: Metadata

    def __init__(self, link: CallLink, number: int, facts: CallerFacts, deadline_ns: int | None) -> None:
        RemoteCall.__init__(self, link, number, facts, deadline_ns)
        self.decoded = False
        self._on_cancel: Callable[[Any], None] | None = None
        self._subject: Any = None
        self._answered = False
        self._answer: Any = None

    @property
    def caller(self) -> RemoteUnary:
        """Itself, as the context of a request."""
        return self

    # On the loop's thread.

    def cancelled(self) -> None:
        """Ends the call: its client or its front is gone, or its deadline is over."""
        self.ended = True
        on_cancel = self._on_cancel
        if on_cancel is not None:  # else `watch`, on another thread, may just be setting the subject
            subject, self._on_cancel, self._subject = self._subject, None, None
            if not self._answered:
                on_cancel(subject)

    def fail(self) -> None:
        """Ends the call after an error of its handler, unless it is answered."""
        if not self.ended:
            self.abort(_INTERNAL, _HANDLER_FAILED)

    def _send(self) -> None:
        answer, self._answer = self._answer, None
        if self.ended:
            self.link.discard(answer)
            return
        self.ended = True
        self._on_cancel = self._subject = None
        if type(answer) is Answer:
            self.link.end(self, answer)
        else:
            self.link.answer(self, answer)

    @property
    def answered(self) -> bool:
        """True if it has an answer, sent or not."""
        return self._answered

    # On any thread.

    def watch(self, on_cancel: Callable[[Any], None], subject: Any) -> None:
        """Calls `on_cancel(subject)` once if the client cancels before the answer is sent."""
        self._subject = subject
        self._on_cancel = on_cancel
        if self.ended:
            self.link.loop.call_soon(self.cancelled)

    def add_response_metadata(self, name: str, value: str) -> None:
        """Adds an entry to the trailing metadata of `reply_with` and `abort`."""
        self._trailing = (*self._with_added(None), (name, value))

    def _with_added(self, trailing: Metadata | None) -> Metadata:
        return (*(trailing or ()), *getattr(self, "_trailing", ()))

    def reply(self, message: Any) -> None:
        """Answers with status OK and a message, or the `UnencodedResponse` to a decoded request."""
        self._finish(message)

    def reply_with(self, message: Any, compression: str | None, trailing: Metadata | None) -> None:
        """Answers with status OK, a gRPC compression such as ``gzip``, and trailing metadata."""
        encoded = message
        if not isinstance(message, bytes):
            encoded = message.encode()
            self.link.discard(message)
        self._finish(Answer(0, "", self._with_added(trailing), compression, encoded))

    def abort(self, status: int, details: str, trailing: Metadata | None = None) -> None:
        """Ends the call with an error status and trailing metadata."""
        self._finish(Answer(status, details, self._with_added(trailing), None, None))

    def _finish(self, answer: Any) -> None:
        if self._answered:
            self.link.discard(answer)
            return
        self._answered = True
        self._answer = answer
        link = self.link
        link.open_calls.discard(self)
        link.loop.call_soon(self._send)


def _ignore_message(message: Buffer | None) -> None:
    """The `on_message` of a stream that has ended."""


def _ignore_drain(status: int, details: str) -> None:
    """The `on_drain` of a stream that has ended."""


class RemoteStream(RemoteCall, Reader):
    """One bidirectional call; see `StreamCall` for the order of its events.

    Flow control: the front reports how much of what was written its client has read, or is about to. Models
    wait while more than `MOST_UNREAD_BYTES` are unread.
    Guarded by the lock: `_backlog`, `_closed`.
    """

    __slots__ = (
        "__weakref__",
        "_backlog",
        "_closed",
        "_lock",
        "_on_cancel",
        "_on_message",
        "on_drain",
    )

    def __init__(self, link: CallLink, number: int, facts: CallerFacts, deadline_ns: int | None) -> None:
        RemoteCall.__init__(self, link, number, facts, deadline_ns)
        self._lock = threading.Lock()
        self._backlog = link.open_calls.new_backlog()
        self._closed = False
        self._on_message: Callable[[Buffer | None], None] = _ignore_message
        self._on_cancel: Callable[[], None] | None = None
        self.on_drain: Callable[[int, str], None] = self.close

    @property
    def caller(self) -> RemoteStream:
        """Itself, as the context of a request."""
        return self

    def add_response_metadata(self, name: str, value: str) -> None:
        """Drops the entry: the requests of a stream share its trailing metadata."""

    # On the loop's thread.

    def receive(self, message: Buffer | None) -> None:
        """Takes a message, or the half-close."""
        self._on_message(message)

    def note_read(self, count: int) -> None:
        """Notes that the client has read so many bytes."""
        with self._lock:
            self._backlog.resize(max(self._backlog.size - count, 0))
            read = self._backlog.take_ready()
        for work in read:
            work()

    def cancelled(self) -> None:
        """Ends the stream: its client or its front is gone, or its deadline is over."""
        on_cancel = self._on_cancel
        self._finish()
        if on_cancel is not None:
            on_cancel()

    def fail(self) -> None:
        """Ends the stream after an error of its handler."""
        self.close(_INTERNAL, _HANDLER_FAILED)

    def _finish(self) -> None:
        """Frees what it has, and breaks reference cycles."""
        with self._lock:
            self.ended = self._closed = True
            self._backlog.resize(0)
            read = self._backlog.close()
        for work in read:
            work()
        self._on_cancel = None
        self._on_message, self.on_drain = _ignore_message, _ignore_drain
        self.link.open_calls.discard_stream(self)

    def _end(self, answer: Answer) -> None:
        if not self.ended:
            self._finish()
            self.link.end(self, answer)

    # On any thread.

    def start(
        self,
        on_message: Callable[[Buffer | None], None],
        on_cancel: Callable[[], None],
        compression: str | None = None,
    ) -> None:
        """Sends the headers and starts to read; see `StreamCall`."""
        self._on_message = on_message
        self._on_cancel = on_cancel
        self.link.open_calls.add_stream(self)
        self.link.begin(self, compression)

    def read_next(self) -> None:
        """Has the next message delivered."""
        self.link.read_next(self)

    def write(self, message: Buffer) -> None:
        """Sends a message after those written before it."""
        with self._lock:
            if self._closed:
                return
            self._backlog.resize(self._backlog.size + len(message))
            self.link.write(self, message)

    @property
    def backpressure(self) -> bool:
        """True if its client has too much to read."""
        return self._backlog.backpressure

    def when_writable(self, work: Callable[[], object]) -> None:
        """See `Reader.when_writable`."""
        with self._lock:
            waits = self._backlog.defer_until_writable(work)
        if not waits:
            work()

    def close(self, status: int = 0, details: str = "", trailing: Metadata | None = None) -> None:
        """Ends the stream after all written messages."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            read = self._backlog.close()
        for work in read:
            work()
        answer = Answer(status, details, tuple(trailing or ()), None, None)
        self.link.loop.call_soon(partial(self._end, answer))

    def refuse(self, status: int, details: str, trailing: Metadata | None = None) -> None:
        """Ends a stream that was not started, with trailing metadata."""
        self.close(status, details, trailing)


OpenCall = RemoteUnary | RemoteStream
"""A call of either kind."""
