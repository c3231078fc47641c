"""Unary calls and bidirectional streams on the C core.

Owns: the set of open calls; the watcher thread, which has cancellations of calls that wait reported.
Threads and locks: events come on polling threads, answers from any thread. Unary calls take no lock until the
server stops; each stream has one.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

from conch.access.principals import Grant
from conch.core.errors import status_details
from conch.core.request import Reader
from conch.core.tensor import Buffer
from conch.frontends.grpc.adapter.batch_operations import (
    OK,
    RECEIVE_CLOSE,
    SEND_NO_METADATA,
    SEND_OK,
    UNIMPLEMENTED,
    abort,
    error_operations,
    ignore,
    send_metadata,
)
from conch.frontends.grpc.adapter.library import cygrpc
from conch.frontends.grpc.open_calls import OpenCalls
from conch.frontends.grpc.rpc_calls import Metadata

_TICK_S = 0.01
_IDLE_TICK_S = 0.02
_QUIET_TICK_S = 0.1
_TICKS_BEFORE_QUIET = 50
_TICKS_BEFORE_WATCHING = 5
_CERTIFICATE_NAMES = ((b"x509_common_name", "cn"), (b"peer_dns", "dns"), (b"peer_uri", "uri"))
_NO_DEADLINE_S = 1e11  # calls without a deadline have one far beyond this, in the year 5138


class Call:
    """Metadata, client and deadline of a call, from the event that it came with.

    Attributes:
        read_ns: 0, as in `Caller`: messages are received as a whole.
        path: Empty, as in `Caller`.
    """

    __slots__ = ("_access", "_event")

    _access: Grant
    _event: Any
    read_ns = 0
    path = ""

    @property
    def caller(self) -> Call:
        """Itself, as the context of a request."""
        return self

    @property
    def metadata(self) -> Metadata:
        """The client's metadata."""
        metadata: Metadata = self._event.invocation_metadata
        return metadata

    @property
    def client(self) -> str:
        """Address of the client, such as ``ipv4:127.0.0.1:50000``."""
        return unquote(self._event.call.peer().decode(errors="replace"))

    @property
    def access(self) -> Grant | None:
        """Grant of the access policy to the client; None without a policy."""
        return getattr(self, "_access", None)  # unset without a policy, which then costs nothing

    @access.setter
    def access(self, grant: Grant) -> None:
        self._access = grant

    @property
    def certificate_names(self) -> tuple[str, ...]:
        """Names in the client's certificate, such as ``cn:web``; none without one."""
        found = cygrpc.auth_context(self._event.call)
        return tuple(
            f"{kind}:{name.decode(errors='replace')}"
            for key, kind in _CERTIFICATE_NAMES
            for name in found.get(key, ())
        )

    def header(self, name: str) -> str:
        """The first value of a text key of the metadata; empty without it."""
        for key, value in self.metadata:
            if key == name and isinstance(value, str):
                return value
        return ""

    def header_values(self, name: str) -> list[str]:
        """All values of a text key of the metadata."""
        return [value for key, value in self.metadata if key == name and isinstance(value, str)]

    def add_response_metadata(self, name: str, value: str) -> None:
        """Drops the entry: the requests of a stream share its trailing metadata."""

    def deadline_ns(self, now_ns: int) -> int | None:
        """Returns the client's deadline on the monotonic clock, whose time is `now_ns`; None without one.

        The C core has it on the wall clock, which may be set at any time, so it is converted at once.
        """
        deadline: float = self._event.call_details.deadline
        if deadline > _NO_DEADLINE_S:
            return None
        return now_ns + int(deadline * 1e9) - time.time_ns()


class Watcher:
    """Has the C core report the cancellation of calls that wait for long; calls `on_tick` every tick.

    After a second in which no tick has seen a call, ticks are rarer, as each wakes the process.
    """

    def __init__(self, open_calls: OpenCalls, on_tick: Callable[[], None]) -> None:
        self._calls = open_calls.unary
        self._on_tick = on_tick
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="conch-grpc-watch", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        ticks = without_calls = 0
        wait_s = _IDLE_TICK_S
        while not self._stop.wait(wait_s):
            self._on_tick()
            ticks += 1
            without_calls = 0 if self._calls else without_calls + 1
            idle_s = _QUIET_TICK_S if without_calls > _TICKS_BEFORE_QUIET else _IDLE_TICK_S
            wait_s = _TICK_S if self._calls else idle_s
            if ticks % _TICKS_BEFORE_WATCHING == 0:
                for call in list(self._calls):
                    if not call.watched:  # checked here, as thousands may be open
                        call.look()


class UnaryCall(Call):
    """One unary call: receives one message, is answered once.

    Args:
        event: The event with the call.
        handler: Handles the call and its message.
        open_calls: Holds the call while operations may be started on it.
        admit: True if the call may go on, see `rpc_calls.Admit`; None if all may.

    Attributes:
        watched: True once the C core reports the call's end before it is answered.
    """

    __slots__ = ("_close_due", "_handler", "_on_cancel", "_open", "_subject", "_trailing", "_waited",
                 "watched")  # fmt: skip

    _trailing: Metadata

    def __init__(
        self,
        event: Any,
        handler: Callable[[UnaryCall, Buffer], None],
        open_calls: OpenCalls,
        admit: Callable[[UnaryCall], bool] | None = None,
    ) -> None:
        self._event = event
        self._open = open_calls
        self._handler = handler
        self._on_cancel: Callable[[Any], None] | None = None
        self._waited = False
        self.watched = False
        self._close_due = True  # deleted by the thread that receives the close
        open_calls.unary.add(self)
        if admit is None or admit(self):
            event.call.start_server_batch((cygrpc.ReceiveMessageOperation(0),), self._on_message)

    def _on_message(self, event: Any) -> None:
        message = event.batch_operations[0].message()
        if message is None:  # the client closed without one, or went away
            self.abort(UNIMPLEMENTED, "the method takes exactly one request message, none was sent")
        else:
            self._handler(self, message)

    def watch(self, on_cancel: Callable[[Any], None], subject: Any) -> None:
        """Calls `on_cancel(subject)` once if the client cancels before the answer is sent.

        Call it before the call can be answered. Early notice costs a completion-queue event, so `Watcher`
        requests it only after the call has waited for a while.
        """
        self._subject = subject
        self._on_cancel = on_cancel

    def look(self) -> None:
        """Receives the close if the call has an `on_cancel` and had one at an earlier look."""
        if self._on_cancel is None:
            return
        if not self._waited:
            self._waited = True
        elif self._takes_close():
            self.watched = True
            self._event.call.start_server_batch((cygrpc.ReceiveCloseOnServerOperation(0),), self._on_close)

    def _takes_close(self) -> bool:
        """Returns True to exactly one caller, which then receives the close; atomic, without a lock.

        The C core cancels, at some cost, a call whose close is not received. If it is received twice, the
        C core refuses the whole batch, and grpcio never frees a refused one.
        """
        try:
            del self._close_due
        except AttributeError:
            return False
        return True

    def _on_close(self, event: Any) -> None:
        subject, self._subject = self._subject, None
        if self._on_cancel is not None and event.batch_operations[0].cancelled():
            self._on_cancel(subject)

    def add_response_metadata(self, name: str, value: str) -> None:
        """Adds an entry to the trailing metadata of `reply_with` and `abort`."""
        self._trailing = (*self._with_added(None), (name, value))

    def _with_added(self, trailing: Metadata | None) -> Metadata:
        # Unset without an entry, which then costs `reply` nothing.
        return (*(trailing or ()), *getattr(self, "_trailing", ()))

    def reply(self, message: bytes) -> None:
        """Sends the answer with status OK and nothing else; from any thread."""
        self._finish(SEND_NO_METADATA, cygrpc.SendMessageOperation(message, 0), SEND_OK)

    def reply_with(self, message: bytes, compression: str | None, trailing: Metadata | None) -> None:
        """Sends the answer with status OK, a gRPC compression such as ``gzip``, and trailing metadata."""
        trailing = self._with_added(trailing)
        status = cygrpc.SendStatusFromServerOperation(trailing, OK, b"", 0) if trailing else SEND_OK
        self._finish(send_metadata(compression), cygrpc.SendMessageOperation(message, 0), status)

    def abort(self, status: int, details: str, trailing: Metadata | None = None) -> None:
        """Ends the call with an error status and trailing metadata; from any thread."""
        self._finish(*error_operations(status, details, self._with_added(trailing)))

    def _finish(self, *operations: Any) -> None:
        if self._takes_close():
            self._on_cancel = self._subject = None
            operations += (RECEIVE_CLOSE,)
        self._event.call.start_server_batch(operations, ignore)
        self._open.discard(self)


def _ignore_drain(status: int, details: str) -> None:
    """The `on_drain` of a stream that has ended."""


class StreamCall(Call, Reader):
    """One bidirectional call: reads one message at a time, writes one at a time, in order.

    `on_message` is called with each message, and once with None at half-close. It calls `read_next` to
    allow the next message, which another thread may handle. When the server stops, `on_drain` is called
    with the status to close with once nothing is in flight.

    Flow control: no message is read while more than `MOST_UNREAD_BYTES` are unsent, or fewer if all streams
    together have too many. What is written is taken in any case: the call is the `Reader` of its requests.

    State, guarded by the lock; the fields are independent:

    - `_writing`: headers or a message are being sent; further messages wait in `_outbox`.
    - `_paused`: `read_next` was called while the client was behind; the read starts once it has caught up.
    - `_closing`: the status that follows `_outbox`; set by `close`, after which `write` drops messages.
    - `_finished`: the call has ended for the C core; no operation starts after that.

    Args:
        event: The event with the call.
        open_calls: Holds the call while operations may be started on it.
    """

    __slots__ = (
        "_backlog",
        "_call",
        "_closing",
        "_finished",
        "_lock",
        "_on_cancel",
        "_open",
        "_outbox",
        "_paused",
        "_writing",
        "on_drain",
        "on_message",
    )

    def __init__(self, event: Any, open_calls: OpenCalls) -> None:
        self._event = event
        self._call = event.call
        self._open = open_calls
        self._lock = threading.Lock()
        self._backlog = open_calls.new_backlog()
        self._outbox: deque[bytes] = deque()
        self._paused = False
        self._writing = True  # until the headers, which `start` sends, are out
        self._closing: tuple[int, str, Metadata | None] | None = None
        self._finished = False
        self._on_cancel: Callable[[], None] | None = None
        self.on_message: Callable[[Buffer | None], None] = ignore
        self.on_drain: Callable[[int, str], None] = self.close

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
        self._open.add_stream(self)
        self._call.start_server_batch((cygrpc.ReceiveCloseOnServerOperation(0),), self._on_close)
        self._call.start_server_batch((send_metadata(compression),), self._on_written)
        self.read_next()

    def read_next(self) -> None:
        """Reads the next message, at once or when enough has been sent."""
        with self._lock:
            if self._finished:
                return
            if self._backlog.backpressure:
                self._paused = True
            else:
                self._call.start_server_batch((cygrpc.ReceiveMessageOperation(0),), self._on_read)

    def _on_read(self, event: Any) -> None:
        self.on_message(event.batch_operations[0].message())

    def _on_close(self, event: Any) -> None:
        cancelled = event.batch_operations[0].cancelled()
        with self._lock:
            # No operation is started from here on: the completion queue may be shut down.
            self._finished = True
            self._backlog.resize(self._backlog.size - sum(map(len, self._outbox)))
            self._outbox.clear()
            on_cancel, self._on_cancel = self._on_cancel, None
            read = self._backlog.close()
        for work in read:
            work()
        # Breaks reference cycles.
        self.on_message, self.on_drain = ignore, _ignore_drain
        self._open.discard_stream(self)
        if cancelled and on_cancel is not None:
            on_cancel()

    def write(self, message: bytes) -> None:
        """Sends a message after those written before it; from any thread."""
        with self._lock:
            if self._finished or self._closing is not None:
                return
            self._backlog.resize(self._backlog.size + len(message))
            if self._writing:
                self._outbox.append(message)
            else:
                self._start_write(message)

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

    def close(self, status: int = OK, details: str = "", trailing: Metadata | None = None) -> None:
        """Ends the stream after all written messages; from any thread."""
        with self._lock:
            if self._finished or self._closing is not None:
                return
            self._closing = (status, details, trailing)
            read = self._backlog.close()
            if not self._writing:
                self._start_close()
        for work in read:
            work()

    def refuse(self, status: int, details: str, trailing: Metadata | None = None) -> None:
        """Ends a stream that was not started, with trailing metadata."""
        abort(self._call, status, details, trailing)

    def _start_write(self, message: bytes) -> None:
        self._writing = True
        self._call.start_server_batch(
            (cygrpc.SendMessageOperation(message, 0),), lambda event: self._on_written(event, len(message))
        )

    def _on_written(self, event: Any, size: int = 0) -> None:
        with self._lock:
            self._backlog.resize(self._backlog.size - size)
            if self._finished:
                return
            read = self._backlog.take_ready()
            self._go_on()
        for work in read:
            work()

    def _go_on(self) -> None:
        """Starts what a completed write allows; the caller has the lock."""
        if self._outbox:
            self._start_write(self._outbox.popleft())
        else:
            self._writing = False
            if self._closing is not None:
                self._start_close()
                return
        if self._paused and not self._backlog.backpressure:
            self._paused = False
            self._call.start_server_batch((cygrpc.ReceiveMessageOperation(0),), self._on_read)

    def _start_close(self) -> None:
        assert self._closing is not None, "called by close, or after it"
        status, details, trailing = self._closing
        operation = cygrpc.SendStatusFromServerOperation(trailing, status, status_details(details), 0)
        self._call.start_server_batch((operation,), ignore)
