"""grpcio's C core, driven directly: the only module that touches grpcio's private layer.

`grpc.server` is written on the same layer (``grpc._cython.cygrpc``) but hands every call through a thread
pool and several objects. Here completion-queue events call their handler on the polling thread, handlers
take and give bytes, and a unary answer is one batch of operations started by whichever thread has it.

Handlers return at once; a model that has got requests is led later, see `conch.frontends.grpc.pollers`.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# With its event-engine listener the C core reads sockets on threads of its own and wakes the poller for
# each event. Without it the polling thread reads: about 60 µs less latency and a third less CPU for a
# small request. The C core reads the variable once, so this has no effect where grpc is in use already.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_listener")

import grpc
from grpc._cython import cygrpc

from conch.core.clock import Clock, monotonic_ns
from conch.frontends.grpc.pollers import Pollers

log = logging.getLogger(__name__)

TESTED_GRPCIO = ((1, 81), (1, 86))
"""Versions of grpcio the contract tests have run with: from the first up to, not including, the second."""

_OUTSTANDING_CALLS = 64
_LEAST_JOIN_S = 0.2
_TICK_S = 0.01
_IDLE_TICK_S = 0.05
_TICKS_BEFORE_WATCHING = 5
_NEEDED = (
    "BatchOperationEvent",
    "CompletionQueue",
    "CompletionType",
    "ReceiveCloseOnServerOperation",
    "ReceiveMessageOperation",
    "SendInitialMetadataOperation",
    "SendMessageOperation",
    "SendStatusFromServerOperation",
    "Server",
)

Metadata = Sequence[tuple[str, str | bytes]]
ChannelArguments = Sequence[tuple[str, int | str]]

_OK = 0
_UNIMPLEMENTED = 12
# Without metadata or details these two hold nothing of a call, so all calls share them.
_SEND_NO_METADATA = cygrpc.SendInitialMetadataOperation(None, 0)
_SEND_OK = cygrpc.SendStatusFromServerOperation(None, _OK, b"", 0)


class IncompatibleGrpcError(RuntimeError):
    """The installed grpcio does not have the private layer this front end needs."""


def check_grpcio() -> None:
    """Checks that the installed grpcio fits.

    Raises:
        IncompatibleGrpcError: It does not; the text says which versions do.
    """
    version = tuple(int(part) for part in grpc.__version__.split(".")[:2])
    first, last = TESTED_GRPCIO
    missing = [name for name in _NEEDED if not hasattr(cygrpc, name)]
    if not first <= version < last or missing:
        because = f" (it lacks {', '.join(missing)})" if missing else ""
        raise IncompatibleGrpcError(
            f"grpcio {grpc.__version__} does not fit conch's gRPC front end{because}; install "
            f"'grpcio>={first[0]}.{first[1]},<{last[0]}.{last[1]}'"
        )


class UnaryCall:
    """One unary call: gets one message, is answered once."""

    __slots__ = ("_call", "_on_cancel", "_server", "handler", "metadata", "waited")

    def __init__(self, event: Any, handler: UnaryHandler, server: Server) -> None:
        self._call = event.call
        self._server = server
        self._on_cancel: Callable[[], None] | None = None
        self.waited = False
        self.handler = handler
        self.metadata: Metadata = event.invocation_metadata
        self._call.start_server_batch((cygrpc.ReceiveMessageOperation(0),), self._on_message)

    def _on_message(self, event: Any) -> None:
        message = event.batch_operations[0].message()
        if message is not None:  # else the client went away before it had sent one
            self.handler(self, message)

    def watch(self, on_cancel: Callable[[], None]) -> None:
        """Calls back, once, if the client goes away before the answer has been sent.

        To be called before anything can answer the call. Early notice costs a completion-queue event of
        its own, so it is asked for only when the call has waited for one to two ticks of the server's
        `Watcher`; most are answered long before.
        """
        self._on_cancel = on_cancel
        self._server.watcher.add(self)

    def start_watching(self) -> None:
        """Asks the C core to say when the call ends."""
        self._call.start_server_batch((cygrpc.ReceiveCloseOnServerOperation(0),), self._on_close)

    def _on_close(self, event: Any) -> None:
        on_cancel, self._on_cancel = self._on_cancel, None
        if on_cancel is not None and event.batch_operations[0].cancelled():
            on_cancel()

    def reply(self, message: bytes) -> None:
        """Sends the answer with status OK; from any thread."""
        self._finish((_SEND_NO_METADATA, cygrpc.SendMessageOperation(message, 0), _SEND_OK))

    def reply_compressed(self, message: bytes, algorithm: str) -> None:
        """Sends the answer with status OK, compressed with a gRPC algorithm such as ``gzip``."""
        metadata = (("grpc-internal-encoding-request", algorithm),)
        self._finish(
            (
                cygrpc.SendInitialMetadataOperation(metadata, 0),
                cygrpc.SendMessageOperation(message, 0),
                _SEND_OK,
            )
        )

    def abort(self, status: int, details: str) -> None:
        """Ends the call with an error status; from any thread."""
        self._finish(_error_operations(status, details))

    def _finish(self, operations: tuple[Any, ...]) -> None:
        # The C core cancels a call, at some cost, whose close nobody receives; it must be asked for
        # once, here or by the watcher, and taking the call out of its set decides by whom.
        if self._on_cancel is None or self._server.watcher.claim(self):
            self._on_cancel = None
            operations = (*operations, cygrpc.ReceiveCloseOnServerOperation(0))
        self._call.start_server_batch(operations, _ignore)


class StreamCall:
    """One bidirectional call: reads one message at a time, writes one at a time, in order.

    `on_message` is called with each message, and once with None when the client has half-closed. It calls
    `read_next` when the next message may come in, which may then be handled by another thread. When the
    server stops, `on_drain` is called with the status to close with once nothing is in flight.
    """

    __slots__ = (
        "_call",
        "_closing",
        "_finished",
        "_lock",
        "_on_cancel",
        "_outbox",
        "_server",
        "_writing",
        "metadata",
        "on_drain",
        "on_message",
    )

    def __init__(self, event: Any, server: Server) -> None:
        self._call = event.call
        self._server = server
        self._lock = threading.Lock()
        self._outbox: deque[bytes] = deque()
        self._writing = True
        self._closing: tuple[int, str] | None = None
        self._finished = False
        self._on_cancel: Callable[[], None] | None = None
        self.metadata: Metadata = event.invocation_metadata
        self.on_message: Callable[[bytes | None], None] = _ignore
        self.on_drain: Callable[[int, str], None] = self.close

    def start(self, on_message: Callable[[bytes | None], None], on_cancel: Callable[[], None]) -> None:
        """Sends the headers and begins to read.

        Args:
            on_message: Takes each message, then None at half-close.
            on_cancel: Called once if the client goes away before the stream was closed.
        """
        self.on_message = on_message
        self._on_cancel = on_cancel
        self._server.add_stream(self)
        self._call.start_server_batch((cygrpc.ReceiveCloseOnServerOperation(0),), self._on_close)
        self._call.start_server_batch((_SEND_NO_METADATA,), self._on_written)
        self.read_next()

    def read_next(self) -> None:
        """Lets the next message come in."""
        self._call.start_server_batch((cygrpc.ReceiveMessageOperation(0),), self._on_read)

    def _on_read(self, event: Any) -> None:
        self.on_message(event.batch_operations[0].message())

    def _on_close(self, event: Any) -> None:
        self._server.remove_stream(self)
        cancelled = event.batch_operations[0].cancelled()
        with self._lock:
            self._finished = True
            self._outbox.clear()
            on_cancel, self._on_cancel = self._on_cancel, None
        if cancelled and on_cancel is not None:
            on_cancel()

    def write(self, message: bytes) -> None:
        """Sends a message after those written before it; from any thread."""
        with self._lock:
            if self._finished or self._closing is not None:
                return
            if self._writing:
                self._outbox.append(message)
                return
            self._writing = True
        self._start_write(message)

    def close(self, status: int = _OK, details: str = "") -> None:
        """Ends the stream once everything written before has been sent; from any thread."""
        with self._lock:
            if self._finished or self._closing is not None:
                return
            self._closing = (status, details)
            if self._writing:
                return
        self._start_close()

    def refuse(self, status: int, details: str) -> None:
        """Ends a stream that has not been started."""
        _abort(self._call, status, details)

    def drain(self, status: int, details: str) -> None:
        """Takes no more messages; see `on_drain`."""
        self.on_drain(status, details)

    def _start_write(self, message: bytes) -> None:
        self._call.start_server_batch((cygrpc.SendMessageOperation(message, 0),), self._on_written)

    def _on_written(self, event: Any) -> None:
        with self._lock:
            if self._outbox:
                message = self._outbox.popleft()
            else:
                self._writing = False
                if self._closing is None or self._finished:
                    return
                message = None
        if message is not None:
            self._start_write(message)
        else:
            self._start_close()

    def _start_close(self) -> None:
        assert self._closing is not None
        status, details = self._closing
        operation = cygrpc.SendStatusFromServerOperation(None, status, details.encode(), 0)
        self._call.start_server_batch((operation,), _ignore)


class Watcher:
    """Begins to watch the calls that have waited for a while, and keeps an eye on the pollers.

    Args:
        on_tick: Called every tick.
    """

    def __init__(self, on_tick: Callable[[], None]) -> None:
        self._on_tick = on_tick
        self._waiting: set[UnaryCall] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="conch-grpc-watch", daemon=True)

    def start(self) -> None:
        """Starts the thread that looks."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread."""
        self._stop.set()
        self._thread.join()

    def add(self, call: UnaryCall) -> None:
        """Adds a call; atomic, without a lock."""
        self._waiting.add(call)

    def claim(self, call: UnaryCall) -> bool:
        """Takes a call out; True for exactly one caller, atomically and without a lock."""
        try:
            self._waiting.remove(call)
        except KeyError:
            return False
        return True

    def _run(self) -> None:
        ticks = 0
        while not self._stop.wait(_TICK_S if self._waiting else _IDLE_TICK_S):
            self._on_tick()
            ticks += 1
            if ticks % _TICKS_BEFORE_WATCHING == 0:
                for call in list(self._waiting):
                    if not call.waited:
                        call.waited = True
                    elif self.claim(call):
                        call.start_watching()


UnaryHandler = Callable[[UnaryCall, bytes], None]
StreamHandler = Callable[[StreamCall], None]


def _ignore(event: Any) -> None:
    """The tag of operations whose end nobody waits for."""


def _error_operations(status: int, details: str) -> tuple[Any, ...]:
    return (_SEND_NO_METADATA, cygrpc.SendStatusFromServerOperation(None, status, details.encode(), 0))


def _abort(call: Any, status: int, details: str) -> None:
    """Ends a call of which nothing has been read or sent."""
    operations = (*_error_operations(status, details), cygrpc.ReceiveCloseOnServerOperation(0))
    call.start_server_batch(operations, _ignore)


@dataclass(frozen=True, slots=True)
class TlsOptions:
    """PEM contents for a TLS port.

    Attributes:
        private_key: The server's key.
        certificate: The server's certificate chain.
        client_root: Root certificates for clients; None does not ask clients for a certificate.
    """

    private_key: bytes = field(repr=False)
    certificate: bytes
    client_root: bytes | None = None


class Server:
    """A gRPC server on the C core.

    Args:
        unary: Handler of each unary method, by full name such as ``/package.Service/Method``.
        streams: Handler of each bidirectional method.
        arguments: Channel arguments.
        pollers: Polling threads; see `Pollers`.
        clock: Monotonic time in nanoseconds.
    """

    def __init__(
        self,
        unary: Mapping[str, UnaryHandler],
        streams: Mapping[str, StreamHandler],
        arguments: ChannelArguments = (),
        pollers: int = 2,
        clock: Clock = monotonic_ns,
    ) -> None:
        check_grpcio()
        self._unary = {name.encode(): handler for name, handler in unary.items()}
        self._streams = {name.encode(): handler for name, handler in streams.items()}
        self._queue = cygrpc.CompletionQueue()
        self._server = cygrpc.Server(
            tuple(
                (key.encode(), value.encode() if isinstance(value, str) else value)
                for key, value in arguments
            ),
            False,
        )
        self._server.register_completion_queue(self._queue)
        self._stopped = threading.Event()
        self._stopping = False
        self._live_streams: set[StreamCall] = set()
        timeout = cygrpc.CompletionType.queue_timeout
        self._pollers = Pollers(
            self._queue.poll, lambda event: bool(event.completion_type == timeout), pollers, clock
        )
        self.promise = self._pollers.promise
        self.watcher = Watcher(self._pollers.tick)

    def add_port(self, address: str, tls: TlsOptions | None = None) -> int:
        """Listens on an address, such as ``0.0.0.0:8001`` or ``unix:/run/conch.sock``.

        Returns:
            The port in use (of interest where 0 was asked for).

        Raises:
            OSError: The address can't be had.
        """
        credentials = None
        if tls is not None:
            credentials = grpc.ssl_server_credentials(
                [(tls.private_key, tls.certificate)], tls.client_root, tls.client_root is not None
            )._credentials
        try:
            port = self._server.add_http2_port(address.encode(), credentials)
        except RuntimeError:
            port = 0
        if port == 0:
            raise OSError(f"address {address} can't be listened on")
        return int(port)

    def start(self) -> None:
        """Begins to accept calls."""
        self._server.start()
        for _ in range(_OUTSTANDING_CALLS):
            self._server.request_call(self._queue, self._queue, self._on_call)
        self._pollers.start()
        self.watcher.start()

    def stop(self, grace_s: float) -> None:
        """Accepts no more calls, waits for those in flight, cancels what is left, ends the threads.

        A thread that even then runs a batch ends when the batch does.

        Args:
            grace_s: Seconds that calls in flight may take.
        """
        if self._stopping:
            return
        self._stopping = True
        end = time.monotonic() + grace_s
        self._server.shutdown(self._queue, self._on_stopped)
        if not self._stopped.wait(grace_s):
            self._server.cancel_all_calls()
            self._stopped.wait()
        self._queue.shutdown()
        self._pollers.join(max(end - time.monotonic(), _LEAST_JOIN_S))
        self.watcher.stop()

    def end_streams(self, end: Callable[[StreamCall], None]) -> None:
        """Calls `end` with each open stream, so that idle ones do not hold up a stop."""
        for stream in list(self._live_streams):
            end(stream)

    def add_stream(self, stream: StreamCall) -> None:
        """Remembers an open stream."""
        self._live_streams.add(stream)

    def remove_stream(self, stream: StreamCall) -> None:
        """Forgets a stream that has ended."""
        self._live_streams.discard(stream)

    def _on_call(self, event: Any) -> None:
        if not event.success:
            return  # the server is stopping
        if not self._stopping:
            try:
                self._server.request_call(self._queue, self._queue, self._on_call)
            except ValueError:
                if not self._stopping:
                    raise
        method = event.call_details.method
        handler = self._unary.get(method)
        if handler is not None:
            UnaryCall(event, handler, self)
            return
        stream_handler = self._streams.get(method)
        if stream_handler is not None:
            stream_handler(StreamCall(event, self))
            return
        _abort(event.call, _UNIMPLEMENTED, f"Method not found: {method.decode(errors='replace')}")

    def _on_stopped(self, event: Any) -> None:
        self._stopped.set()
