"""The gRPC front end: port, start and stop.

Owns: the transport's server and the handlers of its methods.
Threads and locks: the transport's threads and pools; `start` and `stop` run on the main thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from conch.access.access_guard import Access, PortRules
from conch.core.add_ons import load_add_on
from conch.core.admission import HeldBytes
from conch.core.clock import Clock, monotonic_ns
from conch.core.errors import UnavailableError
from conch.door.door import Door
from conch.frontends.grpc.grpc_methods import GrpcMethods, MethodOptions
from conch.frontends.grpc.grpc_options import OWN, GrpcOptions
from conch.frontends.grpc.request_decoder import MakeDecoder, RequestDecoder
from conch.frontends.grpc.response_encoder import ResponseEncoder
from conch.frontends.grpc.rpc_calls import ClientCounts, RpcServer
from conch.frontends.grpc.stream_infer_rpc import SHUTTING_DOWN
from conch.frontends.load_reports import LoadReports

TRANSPORTS = "conch.grpc_transports"
"""The entry-point group; an entry is a function from `GrpcOptions` and a clock to an `RpcServer`."""

_QUIET_S = 0.1
_MAX_WAIT_FOR_CALLS_S = 0.5
_MAX_WAIT_FOR_STREAMS_S = 2.0


@dataclass(frozen=True, slots=True)
class Transport:
    """Server of a port, and the codecs of its messages.

    Attributes:
        server: Accepts connections and carries calls.
        make_decoder: Makes a decoder of inference requests.
        encoder: Encodes inference responses.
    """

    server: RpcServer
    make_decoder: MakeDecoder = RequestDecoder
    encoder: ResponseEncoder = field(default_factory=ResponseEncoder)


class GrpcFrontEnd:
    """Serves the protocol on one port.

    Args:
        door: The core.
        clock: Monotonic time in nanoseconds.
        reports: The load reports; None for none.
        access: The access policy; None for none.
        transport: Server and codecs of the port; None for those that the options name.
    """

    def __init__(
        self,
        door: Door,
        options: GrpcOptions,
        clock: Clock = monotonic_ns,
        reports: LoadReports | None = None,
        access: Access | None = None,
        transport: Transport | None = None,
    ) -> None:
        self._options = options
        if transport is None:
            transport = Transport(_server(options, clock, door.held))
        self._server = transport.server
        self._methods = GrpcMethods(
            door,
            method_options(options),
            self._server.queue_inline,
            clock,
            reports if options.load_reports else None,
            access,
            transport.make_decoder,
            transport.encoder,
        )
        self._server.serve(self._methods.unary, self._methods.streams, self._methods.admissions)

    def start(self) -> int:
        """Listens and starts to serve; returns the port.

        Raises:
            UnavailableError: The address or the certificates can't be used, or the server can't start.
        """
        options = self._options
        try:
            port = self._server.add_port(options.target, options.tls)
            self._server.start()
        except OSError as error:
            raise UnavailableError(str(error)) from None
        return port

    @property
    def client_counts(self) -> ClientCounts | None:
        """See `RpcServer.client_counts`."""
        return self._server.client_counts

    def stop(self, grace_s: float) -> bool:
        """Refuses new calls, lets those in flight finish within the grace, and closes.

        Returns:
            True if everything has ended in time.
        """
        end = time.monotonic() + grace_s
        self._methods.refuse_requests()
        self._wait_for_quiet(grace_s)
        self._drain_streams(min(max(end - time.monotonic(), 0.0), _MAX_WAIT_FOR_STREAMS_S))
        ended = self._server.stop(max(end - time.monotonic(), 0.0))
        # Work may hang with its storage for longer than its client has waited.
        return self._methods.close(max(end - time.monotonic(), 0.0)) and ended

    def _drain_streams(self, timeout_s: float) -> None:
        """Closes all streams, and leaves their clients time to read the end.

        grpcio closes a connection at its last call's end. A client that still sends then finds the
        connection reset, and loses what it has not read.
        """
        if self._server.drain_streams(UnavailableError.grpc_status, SHUTTING_DOWN, timeout_s):
            threading.Event().wait(_QUIET_S)

    def _wait_for_quiet(self, timeout_s: float) -> None:
        """Waits until no new calls are refused and no new stream messages arrive, with a limit for each.

        grpcio cancels calls that arrive after it closes, and clients do not retry those elsewhere. So
        calls on their way are first refused as unavailable, and messages sent on streams are still read.
        """
        never = threading.Event()
        begin = time.monotonic()
        before: tuple[int, int] | None = None
        while (waited := time.monotonic() - begin) < min(timeout_s, _MAX_WAIT_FOR_STREAMS_S):
            refused = self._methods.refused if waited < _MAX_WAIT_FOR_CALLS_S else 0
            now = refused, self._methods.streamed
            if now == before:
                return
            before = now
            never.wait(_QUIET_S)


def _server(options: GrpcOptions, clock: Clock, held: HeldBytes) -> RpcServer:
    """Makes the server of the chosen transport; no other one is imported."""
    if options.transport == OWN:
        from conch.frontends.grpc.transport.transport_server import own_server

        return own_server(options, clock, held)
    make: Callable[[GrpcOptions, Clock], RpcServer] = load_add_on(TRANSPORTS, options.transport)
    return make(options, clock)


def method_options(options: GrpcOptions) -> MethodOptions:
    """Converts the options to those of the handlers."""
    rules = PortRules(
        options.restrictions,
        "This protocol is restricted, expecting header '{key}'",
        options.allow_model_upload or options.mutual,
    )
    return MethodOptions(options.compression, options.header_forward_pattern, rules)
