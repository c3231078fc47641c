"""The gRPC port on grpcio's asyncio server: conch's handlers behind generic ones, start and stop.

Owns: the thread of the event loop, the server and its open calls. Threads and locks: calls are received and
answered on the loop's thread, `start` and `stop` block on one of the caller. Models run on threads of their
own: a batch on the loop's thread would keep all connections waiting.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from functools import wraps
from typing import Any, NamedTuple
from urllib.parse import unquote

import grpc
import grpc.aio

from conch.core.clock import Clock
from conch.core.errors import InternalError, ResourceExhaustedError, UnsupportedError, status_details
from conch.core.process_setup import GRPC_SHARES, most_descriptors
from conch.core.servable import InlineClaim
from conch.frontends.grpc.grpc_options import GrpcOptions
from conch.frontends.grpc.open_calls import OpenCalls
from conch.frontends.grpc.rpc_calls import Admit, StreamMethod, UnaryMethod
from conch.frontends.grpc.tls_options import TlsOptions
from conch_grpcio import metadata_limit
from conch_grpcio.asyncio_calls import HANDLER_FAILED, CallEnd, CallHead, RefusalError, StreamCall, UnaryCall

log = logging.getLogger(__name__)

_STATUS_CODES = {code.value[0]: code for code in grpc.StatusCode}
_HANDSHAKE_MS = 10_000
_MIN_WAIT_S = 0.5
_CERTIFICATE_NAMES = (("x509_common_name", "cn"), ("peer_dns", "dns"), ("peer_uri", "uri"))
_NO_DEADLINE_S = 1e11  # grpcio gives calls without a deadline 2**63 seconds

Handle = Callable[[Any, Any], Coroutine[Any, Any, None]]
"""A handler of a call as grpcio has it: with the call's messages and its context."""


class _Bound(NamedTuple):
    """A server that listens, and the loop that it runs on until `stopped` is set."""

    port: int
    server: Any
    loop: asyncio.AbstractEventLoop
    stopped: asyncio.Event

    def run(self, work: Coroutine[Any, Any, None], timeout_s: float | None = None) -> None:
        """Runs a coroutine on the loop; TimeoutError if it takes longer."""
        asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout_s)


class GrpcioServer:
    """The server of a port; see `RpcServer`.

    Args:
        options: Options of the port.
        clock: Monotonic time in nanoseconds.
    """

    def __init__(self, options: GrpcOptions, clock: Clock) -> None:
        self._options = options
        self._clock = clock
        self._open_calls = OpenCalls()
        self._handlers: dict[str, Handle] = {}
        self._thread: threading.Thread | None = None
        self._bound: _Bound | None = None
        self._ended = True

    @property
    def client_counts(self) -> None:
        """None: grpcio does not tell."""

    def queue_inline(self, claim: InlineClaim) -> None:
        """Leaves the model to its own threads."""
        claim.release()

    def serve(
        self,
        unary: Mapping[str, UnaryMethod],
        streams: Mapping[str, StreamMethod],
        admissions: Mapping[str, Admit],
    ) -> None:
        """Sets the handlers of methods; see `RpcServer.serve`."""
        for name, method in unary.items():
            self._handlers[name] = self._unary(method, admissions.get(name))
        for name, stream in streams.items():
            self._handlers[name] = self._stream(stream)

    def add_port(self, address: str, tls: TlsOptions | None = None) -> int:
        """Listens on an address; returns the port.

        Raises:
            OSError: The address or the certificates can't be used.
        """
        bound: Future[_Bound] = Future()
        serving = self._serve(address, tls, bound)
        self._thread = threading.Thread(
            target=asyncio.run, args=(serving,), name="conch-grpc-aio", daemon=True
        )
        self._thread.start()
        self._bound = bound.result()
        return self._bound.port

    def start(self) -> None:
        """Starts to accept calls."""
        assert self._bound is not None, "it has a port"
        self._bound.run(self._bound.server.start())

    def stop(self, grace_s: float) -> bool:
        """Refuses new calls, waits for those in flight, cancels the rest.

        Returns:
            True if everything has ended. If not, calls that clients saw cancelled are still being answered.
        """
        bound, self._bound = self._bound, None
        if bound is None or self._thread is None:
            return self._ended
        end = time.monotonic() + grace_s
        self._ended = False
        try:
            bound.run(bound.server.stop(grace_s), grace_s + _MIN_WAIT_S)
        except TimeoutError:
            pass  # the loop goes on with what is left
        else:
            left = max(end - time.monotonic(), _MIN_WAIT_S)
            self._ended = self._open_calls.wait_until_none(left)
            bound.loop.call_soon_threadsafe(bound.stopped.set)
            del bound  # the server goes before its loop
            self._thread.join()
        if not self._ended:
            log.warning("calls are still being worked on %.1f s after the server was stopped", grace_s)
        return self._ended

    def drain_streams(self, status: int, details: str, timeout_s: float) -> bool:
        """Closes streams with a status when they have nothing in flight; see `OpenCalls`."""
        return self._open_calls.drain_streams(status, details, timeout_s)

    async def _serve(self, address: str, tls: TlsOptions | None, bound: Future[_Bound]) -> None:
        """Has a server as long as the loop runs."""
        server = grpc.aio.server(options=_channel_arguments(self._options))
        try:
            if tls is None:
                port = server.add_insecure_port(address)
            else:
                port = server.add_secure_port(address, _credentials(tls))
        except (RuntimeError, ValueError):
            hint = "" if tls is None else "; the key and certificate may not fit"
            bound.set_exception(OSError(f"address {address} can't be listened on{hint}"))
            return
        most_bytes = self._options.limits.metadata_bytes
        server.add_generic_rpc_handlers([_Methods(self._handlers, most_bytes, port)])
        stopped = asyncio.Event()
        bound.set_result(_Bound(port, server, asyncio.get_running_loop(), stopped))
        del server, bound
        await stopped.wait()

    def _head(self, context: Any) -> CallHead:
        return call_head(context, self._clock(), self._options.mutual)

    def _unary(self, method: UnaryMethod, admit: Admit | None) -> Handle:
        @_until_disconnected
        async def handle(messages: Any, context: Any) -> None:
            call = UnaryCall(self._head(context), self._open_calls)
            if admit is None or _guarded(call.abort, admit, call):
                message = await context.read()
                if message is grpc.aio.EOF:
                    call.abort(
                        UnsupportedError.grpc_status,
                        "the method takes exactly one request message, none was sent",
                    )
                else:
                    self._open_calls.unary.add(call)
                    _guarded(call.abort, method, call, message)
                    del message
            try:
                answer = await call.answer()
            except RefusalError as refusal:
                _end(context, refusal.end)
                return
            if answer.compression is not None:
                await context.send_initial_metadata(_compressed(answer.compression))
            _end(context, CallEnd(0, "", answer.trailing))
            await context.write(answer.message)

        return handle

    def _stream(self, method: StreamMethod) -> Handle:
        @_until_disconnected
        async def handle(messages: Any, context: Any) -> None:
            async def receive() -> bytes | None:
                message = await context.read()
                return None if message is grpc.aio.EOF else bytes(message)

            call = StreamCall(self._head(context), self._open_calls, receive)
            _guarded(call.close, method, call)
            try:
                if call.started:
                    await context.send_initial_metadata(_compressed(call.compression))
                async for message in call.responses():
                    await context.write(message)
                _end(context, CallEnd(0, "", call.trailing))
            except RefusalError as refusal:
                _end(context, refusal.end)
            finally:
                call.finish()

        return handle


def call_head(context: Any, now_ns: int, certificates: bool) -> CallHead:
    """Facts of a call from grpcio's context of it.

    Args:
        context: A `grpc.aio.ServicerContext`.
        now_ns: The monotonic time.
        certificates: True if clients have certificates.
    """
    left_s: float | None = context.time_remaining()
    deadline_ns = None
    if left_s is not None and left_s < _NO_DEADLINE_S:
        deadline_ns = now_ns + int(left_s * 1e9)
    found = context.auth_context() if certificates else {}
    names = tuple(
        f"{kind}:{name.decode(errors='replace')}"
        for key, kind in _CERTIFICATE_NAMES
        for name in found.get(key, ())
    )
    return CallHead(unquote(context.peer()), context.invocation_metadata(), deadline_ns, names)


class _Methods(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Finds the handler of a call by its method, or one that refuses the call.

    To grpcio all requests are streams, of which it receives nothing before `read`: the message of a call that
    is refused is not received, and a call without a message is answered.
    """

    def __init__(self, handlers: Mapping[str, Handle], most_metadata_bytes: int, port: int) -> None:
        self._handlers = handlers
        self._most_metadata_bytes = most_metadata_bytes
        self._port = port

    def service(self, details: Any) -> Any:
        """Returns grpcio's handler of a call."""
        if metadata_limit.exceeds(details.invocation_metadata, self._most_metadata_bytes):
            handle: Handle = self._refuse_metadata
        else:
            handle = self._handlers.get(details.method) or _unknown(details.method)
        return grpc.stream_stream_rpc_method_handler(handle)

    async def _refuse_metadata(self, messages: Any, context: Any) -> None:
        text = f"received metadata size exceeds the limit of {self._most_metadata_bytes} bytes"
        _end(context, CallEnd(ResourceExhaustedError.grpc_status, text))
        client = unquote(context.peer())
        if metadata_limit.disconnect(client, self._port):
            log.warning("%s was disconnected: %s", client, text)


def _unknown(method: str) -> Handle:
    async def handle(messages: Any, context: Any) -> None:
        _end(context, CallEnd(UnsupportedError.grpc_status, f"Method not found: {method}"))

    return handle


def _until_disconnected(handle: Handle) -> Handle:
    """Ends a handler as cancelled once its client has disconnected; grpcio would log it as an error."""

    @wraps(handle)
    async def wrapped(messages: Any, context: Any) -> None:
        try:
            await handle(messages, context)
        except grpc.aio.InternalError:
            raise asyncio.CancelledError from None

    return wrapped


def _guarded(end: Callable[[int, str], None], method: Callable[..., Any], *arguments: object) -> Any:
    """Calls a handler or check, and returns its result; if it raises, the call alone fails."""
    try:
        return method(*arguments)
    except Exception:  # boundary: the client gets an answer, the log the cause
        log.exception("a call could not be handled")
        end(InternalError.grpc_status, HANDLER_FAILED)
        return None


def _end(context: Any, end: CallEnd) -> None:
    """Sets the status that grpcio sends when the handler returns.

    `abort` would keep each refused call until Python's garbage collection.
    """
    context.set_code(_STATUS_CODES[end.status])
    context.set_details(status_details(end.details).decode())
    context.set_trailing_metadata(end.trailing)


def _compressed(compression: str | None) -> tuple[tuple[str, str], ...]:
    """Metadata that asks grpcio for a compression of the messages; `set_compression` compresses no answer."""
    return () if compression is None else (("grpc-internal-encoding-request", compression),)


def _credentials(tls: TlsOptions) -> Any:
    pairs = [(tls.private_key, tls.certificate)]
    return grpc.ssl_server_credentials(pairs, tls.client_root, tls.client_root is not None)


def _channel_arguments(options: GrpcOptions) -> list[tuple[str, int]]:
    """The options of the port as arguments of gRPC's C core."""
    keep, limits = options.keep_alive, options.limits
    arguments = [
        ("grpc.so_reuseport", int(options.reuse_port)),
        ("grpc.max_receive_message_length", options.max_message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_allowed_incoming_connections", limits.connections or most_descriptors(GRPC_SHARES)),
        # Connections that never send HTTP/2's preface, or never finish TLS's handshake, leave their places.
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
        ("grpc.max_concurrent_streams", limits.streams),
        # From the first size on, the C core refuses calls at random.
        ("grpc.max_metadata_size", limits.metadata_bytes),
        ("grpc.absolute_max_metadata_size", limits.metadata_bytes),
        ("grpc.keepalive_time_ms", keep.time_ms),
        ("grpc.keepalive_timeout_ms", keep.timeout_ms),
        ("grpc.keepalive_permit_without_calls", int(keep.permit_without_calls)),
        ("grpc.http2.max_pings_without_data", keep.max_pings_without_data),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", keep.min_recv_ping_interval_without_data_ms),
        ("grpc.http2.max_ping_strikes", keep.max_ping_strikes),
    ]
    ages = {
        "grpc.max_connection_age_ms": options.max_connection_age_ms,
        "grpc.max_connection_age_grace_ms": options.max_connection_age_grace_ms,
    }
    return arguments + [(name, value) for name, value in ages.items() if value]
