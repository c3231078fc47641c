"""A gRPC server on the C core: ports, accepting calls, start and stop.

Owns: completion queue, pollers, watcher and open calls.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from conch.core.clock import Clock, monotonic_ns
from conch.core.servable import InlineClaim
from conch.core.tensor import Buffer
from conch.frontends.grpc.adapter.batch_operations import (
    RESOURCE_EXHAUSTED,
    UNIMPLEMENTED,
    abort,
    metadata_bytes,
)
from conch.frontends.grpc.adapter.grpcio_calls import StreamCall, UnaryCall, Watcher
from conch.frontends.grpc.adapter.library import check_grpcio, cygrpc, grpc
from conch.frontends.grpc.adapter.pollers import Pollers
from conch.frontends.grpc.open_calls import OpenCalls
from conch.frontends.grpc.tls_options import TlsOptions

log = logging.getLogger(__name__)

ChannelArguments = Sequence[tuple[str, int | str]]
UnaryHandler = Callable[[UnaryCall, Buffer], None]
StreamHandler = Callable[[StreamCall], None]

_OUTSTANDING_CALLS = 64
_MIN_WAIT_S = 0.5
# Of metadata: without references to the connection's table these are as long as what was sent.
_FEW_ENTRIES = 16
_DESCRIPTORS = Path("/proc/self/fd")


def _credentials(tls: TlsOptions) -> Any:
    try:
        return grpc.ssl_server_credentials(
            [(tls.private_key, tls.certificate)], tls.client_root, tls.client_root is not None
        )._credentials
    except (ValueError, RuntimeError) as error:
        raise OSError(f"the TLS key or certificate can't be used: {error}") from None


class Server:
    """A gRPC server on the C core.

    Args:
        arguments: Channel arguments.
        pollers: Number of polling threads.
        clock: Monotonic time in nanoseconds.
        max_metadata_bytes: Limit of a call's metadata; the C core checks it only for clients that have
            acknowledged its settings.

    Attributes:
        pollers: The polling threads.
        watcher: Ticks, and has cancellations reported.
    """

    def __init__(
        self,
        arguments: ChannelArguments = (),
        pollers: int = 2,
        clock: Clock = monotonic_ns,
        max_metadata_bytes: int = 16 * 1024,
    ) -> None:
        check_grpcio()
        self._max_metadata_bytes = max_metadata_bytes
        self._unary: dict[bytes, UnaryHandler] = {}
        self._streams: dict[bytes, StreamHandler] = {}
        self._admissions: dict[bytes, Callable[[UnaryCall], bool]] = {}
        self._queue = cygrpc.CompletionQueue()
        self._server = cygrpc.Server(
            tuple(
                (key.encode(), value.encode() if isinstance(value, str) else value)
                for key, value in arguments
            ),
            False,
        )
        self._server.register_completion_queue(self._queue)
        self._ports: set[int] = set()
        self._stopped = threading.Event()
        self._stopping = False
        self._ended = False
        self._calls = OpenCalls()
        self.pollers = Pollers(self._queue, cygrpc.CompletionType.queue_timeout, pollers, clock)
        self.watcher = Watcher(self._calls, self.pollers.tick)
        # Not a method of self, which would be a reference cycle.
        self._accept_call = partial(self._server.request_call, self._queue, self._queue)

    def queue_inline(self, claim: InlineClaim) -> None:
        """Takes a claim of a model that a polling thread may run after its events."""
        self.pollers.queue_inline(claim)

    def serve(
        self,
        unary: Mapping[str, UnaryHandler],
        streams: Mapping[str, StreamHandler],
        admissions: Mapping[str, Callable[[UnaryCall], bool]],
    ) -> None:
        """Sets the handlers of methods, by full name such as ``/package.Service/Method``; before the start.

        Args:
            unary: Handlers of unary methods.
            streams: Handlers of bidirectional methods.
            admissions: Checks of unary methods; a call that one refuses has no message received.
        """
        self._unary = {name.encode(): handler for name, handler in unary.items()}
        self._streams = {name.encode(): handler for name, handler in streams.items()}
        self._admissions = {name.encode(): admit for name, admit in admissions.items()}

    def add_port(self, address: str, tls: TlsOptions | None = None) -> int:
        """Listens on an address, such as ``0.0.0.0:8001`` or ``unix:/run/conch.sock``.

        Returns:
            The port in use, of interest for port 0.

        Raises:
            OSError: The address or the certificates can't be used.
        """
        credentials = None if tls is None else _credentials(tls)
        try:
            port = self._server.add_http2_port(address.encode(), credentials)
        except RuntimeError:
            port = 0
        if port == 0:
            raise OSError(
                f"address {address} can't be listened on"
                + ("; the key and certificate may not fit" if tls else "")
            )
        self._ports.add(int(port))
        return int(port)

    def start(self) -> None:
        """Starts to accept calls."""
        self._server.start()
        for _ in range(_OUTSTANDING_CALLS):
            self._accept_call(self._on_call)
        self.pollers.start()
        self.watcher.start()

    def stop(self, grace_s: float) -> bool:
        """Refuses new calls, waits for those in flight, cancels the rest, ends the threads.

        Returns:
            True if everything has ended. If not, calls that clients saw cancelled are still being answered;
            threads and queue stay for these answers.
        """
        if self._stopping:
            return self._ended
        self._stopping = True
        end = time.monotonic() + grace_s
        self._server.shutdown(self._queue, self._on_stopped)
        if not self._stopped.wait(grace_s):
            self._server.cancel_all_calls()
        left = max(end - time.monotonic(), _MIN_WAIT_S)
        if not (self._stopped.wait(left) and self._calls.wait_until_none(left)):
            log.warning("calls are still being worked on %.1f s after the server was stopped", grace_s)
            return False
        self.watcher.stop()
        self._queue.shutdown()
        self._ended = self.pollers.join(left)
        return self._ended

    @property
    def client_counts(self) -> None:
        """None: the C core does not tell."""

    def drain_streams(self, status: int, details: str, timeout_s: float) -> bool:
        """Closes streams with a status when they have nothing in flight, before a stop; see `OpenCalls`."""
        return self._calls.drain_streams(status, details, timeout_s)

    def _on_call(self, event: Any) -> None:
        if not event.success:
            return  # the server is stopping
        if not self._stopping:
            try:
                self._accept_call(self._on_call)
            except ValueError:
                if not self._stopping:
                    raise
        metadata = event.invocation_metadata
        if len(metadata) > _FEW_ENTRIES and metadata_bytes(metadata) > self._max_metadata_bytes:
            self._refuse_metadata(event.call)
            return
        method = event.call_details.method
        handler = self._unary.get(method)
        if handler is not None:
            UnaryCall(event, handler, self._calls, self._admissions.get(method))
            return
        stream_handler = self._streams.get(method)
        if stream_handler is not None:
            stream_handler(StreamCall(event, self._calls))
            return
        abort(event.call, UNIMPLEMENTED, f"Method not found: {method.decode(errors='replace')}")

    def _refuse_metadata(self, call: Any) -> None:
        """Ends a call whose metadata exceeds the limit, and disconnects the client.

        HTTP/2 compression lets a few bytes stand for much metadata, which could occupy the polling threads.
        """
        text = f"received metadata size exceeds the limit of {self._max_metadata_bytes} bytes"
        abort(call, RESOURCE_EXHAUSTED, text)
        peer = unquote(call.peer().decode(errors="replace"))
        if _disconnect(peer, frozenset(self._ports)):
            log.warning("%s was disconnected: %s", peer, text)

    def _on_stopped(self, event: Any) -> None:
        self._stopped.set()


def _disconnect(peer: str, ports: frozenset[int]) -> bool:
    """Shuts down a client's connection; the C core then drops its calls. Returns whether it was connected.

    The C core hides its connections, so all descriptors of the process are scanned: for harmful clients only.

    Args:
        peer: The client, as in `Call.client`; clients on Unix sockets have no address and stay connected.
        ports: Ports that the server listens on.
    """
    kind, _, address = peer.partition(":")
    host, _, port = address.rpartition(":")
    if kind not in ("ipv4", "ipv6") or not _DESCRIPTORS.is_dir():
        return False
    wanted = host.strip("[]"), int(port)
    for name in os.listdir(_DESCRIPTORS):
        with suppress(OSError):
            if not os.readlink(_DESCRIPTORS / name).startswith("socket:"):
                continue
            with closing(socket.socket(fileno=os.dup(int(name)))) as connection:
                if connection.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                there = connection.getpeername()
                mapped = there[0].removeprefix("::ffff:")  # of IPv4 on a socket for both
                if (mapped, there[1]) == wanted and connection.getsockname()[1] in ports:
                    connection.shutdown(socket.SHUT_RDWR)
                    return True
    return False
