"""The handlers of all RPCs of one server, without a transport.

Owns: the pool of decoding.
Threads and locks: handlers run on the transport's threads and return at once; a pool decodes long messages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from conch.access.access_guard import Access, AccessGuard, PortRules
from conch.core.clock import Clock, monotonic_ns
from conch.core.errors import ConchError
from conch.core.request_log import Caller
from conch.core.servable import InlineClaim
from conch.core.tensor import Buffer
from conch.door import operation_table as table
from conch.door.door import Door
from conch.door.thread_pool import ThreadPool
from conch.frontends.grpc.guarded_rpcs import charge_unary, guard_streams, guard_unary, preparation
from conch.frontends.grpc.health_watch import HealthWatch
from conch.frontends.grpc.infer_rpc import InferHandler
from conch.frontends.grpc.operation_rpcs import operation_handlers
from conch.frontends.grpc.reflection import reflection_handlers
from conch.frontends.grpc.request_decoder import MakeDecoder, RequestDecoder
from conch.frontends.grpc.response_encoder import ResponseEncoder
from conch.frontends.grpc.rpc_calls import StreamMethod, UnaryRpc
from conch.frontends.grpc.stream_infer_rpc import StreamInferHandler
from conch.frontends.header_forwarding import HeaderForwarder
from conch.frontends.load_reports import LoadReports

_DECODE_THREADS = 2


@dataclass(frozen=True, slots=True)
class MethodOptions:
    """Settings of the handlers.

    Attributes:
        compression: gRPC algorithm for inference responses, or None.
        header_forward_pattern: RE2 pattern of call metadata that become request parameters; empty for none.
        rules: Rules of the port beside an access policy.
    """

    compression: str | None = None
    header_forward_pattern: str = ""
    rules: PortRules = field(default_factory=PortRules)


class GrpcMethods:
    """The handlers of one server.

    Args:
        door: The core.
        queue_inline: Takes claims of models that a handler's thread may run after the call.
        clock: Monotonic time in nanoseconds.
        reports: Adds load reports to the trailing metadata of inference calls, or None.
        access: The access policy; None for none.
        make_decoder: Makes the decoders of inference requests.
        encoder: Encodes inference responses; None for a new one.

    Attributes:
        unary: Handlers of unary methods, by full name such as ``/package.Service/Method``; for calls that
            `admissions` lets in.
        streams: Handlers of bidirectional methods.
        admissions: Checks of unary calls, by method; of the transport, before it receives the message.
    """

    def __init__(
        self,
        door: Door,
        options: MethodOptions,
        queue_inline: Callable[[InlineClaim], None],
        clock: Clock = monotonic_ns,
        reports: LoadReports | None = None,
        access: Access | None = None,
        make_decoder: MakeDecoder = RequestDecoder,
        encoder: ResponseEncoder | None = None,
    ) -> None:
        guard = AccessGuard(access, "grpc", options.rules)
        self._decoding = ThreadPool(_DECODE_THREADS, "conch-grpc-decode")
        pattern = options.header_forward_pattern
        forward = HeaderForwarder(pattern) if pattern else None
        unary = operation_handlers(door, guard)
        shared = door, queue_inline, encoder or ResponseEncoder(), clock, self._decoding
        outgoing = options.compression, reports
        self._infer = InferHandler(
            *shared, preparation(forward, guard, stream=False), *outgoing, make_decoder
        )
        unary[table.INFER.grpc_method] = self._infer
        self._streams = StreamInferHandler(*shared, preparation(forward, guard, stream=True), *outgoing)
        streams: dict[str, StreamMethod] = {
            table.STREAM_INFER.grpc_method: self._streams,
            table.HEALTH_WATCH.grpc_method: HealthWatch(door),
        }
        streams |= reflection_handlers(list(table.SERVICES))

        def refused(error: ConchError, call: Caller) -> None:
            self._infer.admission.refuse(None, error, call, 0, clock())

        self.unary = charge_unary(unary, guard)
        self.admissions = guard_unary(unary, guard, refused)
        self.streams = guard_streams(streams, guard, refused)

    def handle(self, method: str, call: UnaryRpc, message: Buffer) -> None:
        """Checks and handles a unary call, for transports that have received its message before."""
        admit = self.admissions.get(method)
        if admit is None or admit(call):
            self.unary[method](call, message)

    def refuse_requests(self) -> None:
        """Refuses all further unary inference requests as unavailable."""
        self._infer.admission.close()

    @property
    def refused(self) -> int:
        """Number of requests that came after `refuse_requests`."""
        return self._infer.admission.refused

    @property
    def streamed(self) -> int:
        """Number of requests on streams so far."""
        return self._streams.received

    def close(self, timeout_s: float) -> bool:
        """Ends the pool; returns whether its work has ended in time."""
        return self._decoding.close(timeout_s)
