"""conch's own gRPC server: listening sockets, accepting connections, start and stop.

Owns: the listening sockets and the state of the port. Threads and locks: `start` and `stop` block, on a
thread of the server's own; all else runs on the loop's.
"""

from __future__ import annotations

import logging
import socket
import ssl
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial

from conch.core.admission import HeldBytes
from conch.core.clock import Clock, monotonic_ns
from conch.core.process_setup import GRPC_SHARES, most_descriptors
from conch.core.servable import InlineClaim
from conch.frontends.connections.listener import Listener, tcp_sockets, unix_socket
from conch.frontends.connections.wire import tls_context
from conch.frontends.grpc.grpc_options import GrpcOptions
from conch.frontends.grpc.http2.frames import LEAST_FRAME_SIZE, MOST_FRAME_SIZE
from conch.frontends.grpc.http2.limits import Http2Limits, LocalSettings
from conch.frontends.grpc.rpc_calls import Admit, ClientCounts, StreamMethod, UnaryMethod
from conch.frontends.grpc.tls_options import TlsOptions
from conch.frontends.grpc.transport.grpc_connection import serve_connection
from conch.frontends.grpc.transport.keep_alive import KeepAliveTimes
from conch.frontends.grpc.transport.port_state import PortOptions, PortState
from conch.ipc.loop import IO_LOOP, IoLoop, SharedLoop

log = logging.getLogger(__name__)

_MIN_WAIT_S = 0.5
_MS = 1_000_000
_CONTINUATIONS = 8
_HEADER_BLOCK_BYTES = 64 * 1024
_ANY_HOSTS = ("", "0.0.0.0", "[::]")


def own_server(options: GrpcOptions, clock: Clock, held: HeldBytes | None = None) -> TransportServer:
    """Makes the server of a port."""
    return TransportServer(port_options(options), clock=clock, reuse_port=options.reuse_port, held=held)


def port_options(options: GrpcOptions) -> PortOptions:
    """The limits of a port."""
    keep, limits = options.keep_alive, options.limits
    times = KeepAliveTimes(
        keep.time_ms * _MS,
        keep.timeout_ms * _MS,
        keep.permit_without_calls,
        keep.min_recv_ping_interval_without_data_ms * _MS,
        keep.max_ping_strikes,
    )
    return PortOptions(
        options.max_message_bytes,
        LocalSettings(
            max_concurrent_streams=limits.streams,
            max_header_list_bytes=limits.metadata_bytes,
            max_frame_size=MOST_FRAME_SIZE,
        ),
        Http2Limits(
            continuations=_CONTINUATIONS + limits.metadata_bytes // LEAST_FRAME_SIZE,
            header_block_bytes=max(_HEADER_BLOCK_BYTES, 2 * limits.metadata_bytes),
        ),
        times,
        age_ns=options.max_connection_age_ms * _MS,
        age_grace_ns=options.max_connection_age_grace_ms * _MS,
        most_connections=limits.connections or most_descriptors(GRPC_SHARES),
        least_rate=limits.client_rate,
    )


class TransportServer:
    """A gRPC server on the I/O loop.

    Args:
        options: Limits.
        shared_loop: Has the loop of its sockets; held from start to stop.
        clock: Monotonic time in nanoseconds.
        reuse_port: True if other processes may listen on the same port.
        held: Counts the bytes of the server's requests; None for those of the options.
    """

    def __init__(
        self,
        options: PortOptions,
        shared_loop: SharedLoop = IO_LOOP,
        clock: Clock = monotonic_ns,
        reuse_port: bool = False,
        held: HeldBytes | None = None,
    ) -> None:
        self._port = PortState(options, clock, held=held)
        self._shared_loop = shared_loop
        self._loop: IoLoop | None = None
        self._reuse_port = reuse_port
        self._listeners: list[Listener] = []
        self._stopping = False
        self._ended = False

    @property
    def client_counts(self) -> ClientCounts:
        """See `RpcServer.client_counts`."""
        port = self._port
        return ClientCounts(port.closed, port.ended, port.received.held.total)

    def queue_inline(self, claim: InlineClaim) -> None:
        """Takes a claim of a model that the loop may run after the round's events."""
        assert self._loop is not None, "handlers run after the start"
        self._loop.queue_inline(claim)

    def serve(
        self,
        unary: Mapping[str, UnaryMethod],
        streams: Mapping[str, StreamMethod],
        admissions: Mapping[str, Admit],
    ) -> None:
        """See `RpcServer.serve`."""
        self._port.unary.update(unary)
        self._port.streams.update(streams)
        self._port.admissions.update(admissions)

    def add_port(self, address: str, tls: TlsOptions | None = None) -> int:
        """Listens on an address, such as ``0.0.0.0:8001`` or ``unix:/run/conch.sock``.

        Returns:
            The port in use, of interest for port 0; 1 for a Unix socket.

        Raises:
            OSError: The address or the certificates can't be used.
        """
        context = None if tls is None else tls_context(tls.private_key, tls.certificate, tls.client_root)
        try:
            bound = bound_sockets(address, self._reuse_port)
        except OSError as error:
            raise OSError(f"address {address} can't be listened on: {error.strerror or error}") from None

        take = partial(self._take, context)
        self._listeners += [Listener(each, take, "the gRPC port", self._port.clock) for each in bound]
        return bound_port(bound)

    def _take(self, tls: ssl.SSLContext | None, accepted: socket.socket, address: object) -> None:
        """Serves a connection, or closes it if there are too many."""
        serve_connection(self._port, accepted, tls, client_address(accepted, address))

    def start(self) -> None:
        """Starts to accept connections."""
        self._loop = self._shared_loop.hold()
        self._port.use(self._loop)
        for listener in self._listeners:
            self._loop.call_soon(partial(listener.listen, self._loop))

    def stop(self, grace_s: float) -> bool:
        """Refuses new calls, waits for those in flight, cancels the rest.

        Returns:
            True if everything has ended. If not, calls that clients saw cancelled are still being answered.
        """
        if self._stopping:
            return self._ended
        self._stopping = True
        loop = self._loop
        if loop is None:
            for listener in self._listeners:
                listener.close()
            return True
        end = time.monotonic() + grace_s
        empty = threading.Event()
        loop.call_soon(partial(self._drain, empty))
        if not empty.wait(grace_s):
            loop.call_soon(self._close_connections)
        left = max(end - time.monotonic(), _MIN_WAIT_S)
        self._ended = empty.wait(left) and self._port.open_calls.wait_until_none(left)
        decompressed = self._port.decompressing.close(max(end - time.monotonic(), 0.0))
        self._ended = self._ended and decompressed
        if not self._ended:
            log.warning("calls are still being worked on %.1f s after the server was stopped", grace_s)
        self._shared_loop.release()
        return self._ended

    def drain_streams(self, status: int, details: str, timeout_s: float) -> bool:
        """See `RpcServer.drain_streams`."""
        return self._port.open_calls.drain_streams(status, details, timeout_s)

    def _drain(self, empty: threading.Event) -> None:
        for listener in self._listeners:
            listener.close()
        self._port.drain(empty.set)

    def _close_connections(self) -> None:
        for connection in list(self._port.connections):
            connection.close()


def bound_port(bound: Sequence[socket.socket]) -> int:
    """The port of an address's sockets; 1 for a Unix socket."""
    name = bound[0].getsockname()
    return int(name[1]) if isinstance(name, tuple) else 1


def client_address(accepted: socket.socket, address: object) -> str:
    """The client's address as gRPC writes it."""
    if not isinstance(address, tuple):
        return "unix:"
    host, port = address[:2]
    mapped = host.removeprefix("::ffff:")
    if accepted.family == socket.AF_INET or (mapped != host and "." in mapped):
        return f"ipv4:{mapped}:{port}"
    return f"ipv6:[{host}]:{port}"


def bound_sockets(address: str, reuse_port: bool) -> list[socket.socket]:
    """Listening sockets of an address: one, or one for each address of a host name."""
    if address.startswith("unix:"):
        return [unix_socket(address.removeprefix("unix:"))]
    host, _, port = address.rpartition(":")
    if host in _ANY_HOSTS and socket.has_dualstack_ipv6():
        with suppress(OSError):
            return tcp_sockets("::", int(port), reuse_port)
    return tcp_sockets(host.strip("[]") or "0.0.0.0", int(port), reuse_port)
