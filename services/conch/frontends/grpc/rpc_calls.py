"""The calls that handlers answer, whatever transport they came with.

conch's own transport has such calls, front processes have, and `conch_grpcio` has those on asyncio.
Threads and locks: handlers get a call on its transport's thread and may answer from any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from conch.access.principals import Grant
from conch.core.reader import Reader
from conch.core.request_log import Caller
from conch.core.servable import InlineClaim
from conch.core.tensor import Buffer
from conch.frontends.grpc.tls_options import TlsOptions

Metadata = Sequence[tuple[str, str | bytes]]


class RpcCall(Caller, Protocol):
    """Metadata, client and deadline of a call, and what an access policy grants its client."""

    @property
    def caller(self) -> Caller:
        """Itself, as the context of a request; see `InferenceRequest.context`."""

    @property
    def access(self) -> Grant | None:
        """The client's grant by the access policy; None without a policy."""

    @access.setter
    def access(self, grant: Grant) -> None: ...

    @property
    def certificate_names(self) -> tuple[str, ...]:
        """Names in the client's certificate, such as ``cn:web``; none without one."""

    @property
    def metadata(self) -> Metadata:
        """The client's metadata."""

    def header_values(self, name: str) -> list[str]:
        """All values of a text key of the metadata."""

    def deadline_ns(self, now_ns: int) -> int | None:
        """Returns the client's deadline on the monotonic clock, whose time is `now_ns`; None without one."""


class UnaryRpc(RpcCall, Protocol):
    """A call with one message, which is answered once, by `reply` or `abort`."""

    def watch(self, on_cancel: Callable[[Any], None], subject: Any) -> None:
        """Calls `on_cancel(subject)` once if the client cancels before the answer is sent."""

    def reply(self, message: bytes) -> None:
        """Answers with status OK."""

    def reply_with(self, message: bytes, compression: str | None, trailing: Metadata | None) -> None:
        """Answers with status OK and trailing metadata; the transport may compress with a gRPC algorithm."""

    def abort(self, status: int, details: str, trailing: Metadata | None = None) -> None:
        """Answers with an error status and trailing metadata."""


class StreamRpc(RpcCall, Reader, Protocol):
    """A bidirectional call; `StreamCall` describes the order of its events and its flow control.

    Attributes:
        on_drain: Called with a status when the server stops; closes the call once nothing is in flight.
    """

    on_drain: Callable[[int, str], None]

    def start(
        self,
        on_message: Callable[[Buffer | None], None],
        on_cancel: Callable[[], None],
        compression: str | None = None,
    ) -> None:
        """Starts to read; `on_message` gets each message, then None at half-close."""

    def read_next(self) -> None:
        """Reads the next message."""

    def write(self, message: bytes) -> None:
        """Sends a message after those written before it."""

    def close(self, status: int = 0, details: str = "", trailing: Metadata | None = None) -> None:
        """Ends the call after all written messages."""

    def refuse(self, status: int, details: str, trailing: Metadata | None = None) -> None:
        """Ends a call that was not started, with trailing metadata."""


UnaryMethod = Callable[[UnaryRpc, Buffer], None]
"""Handles a unary call and its message."""

Admit = Callable[[UnaryRpc], bool]
"""Returns True if a unary call may go on, else refuses it; called before its message is received."""

StreamMethod = Callable[[StreamRpc], None]
"""Handles a stream."""


class ClientCounts(NamedTuple):
    """Connections and calls that ended because of a port's clients, and unhandled bytes.

    Attributes:
        closed: Number of connections that were closed because of their clients, by reason.
        ended: Number of calls that were ended because of their clients, by reason.
        received_bytes: Bytes of requests that are held until they are answered.
    """

    closed: Mapping[str, int]
    ended: Mapping[str, int]
    received_bytes: int


class RpcServer(Protocol):
    """A transport: the server of one port; see the entry-point group `grpc_front_end.TRANSPORTS`."""

    @property
    def client_counts(self) -> ClientCounts | None:
        """Counters of the port's clients; None if it has none."""

    def queue_inline(self, claim: InlineClaim) -> None:
        """Takes a claim of a model that the thread of a handler may run after the call."""

    def serve(
        self,
        unary: Mapping[str, UnaryMethod],
        streams: Mapping[str, StreamMethod],
        admissions: Mapping[str, Admit],
    ) -> None:
        """Sets the handlers of methods, by full name such as ``/package.Service/Method``; before the start.

        Args:
            unary: Handlers of unary methods.
            streams: Handlers of bidirectional methods.
            admissions: Checks of unary methods; a call that one refuses has no message received.
        """

    def add_port(self, address: str, tls: TlsOptions | None = None) -> int:
        """Listens on an address, such as ``0.0.0.0:8001`` or ``unix:/run/conch.sock``; returns the port.

        Raises:
            OSError: The address or the certificates can't be used.
        """

    def start(self) -> None:
        """Starts to accept calls."""

    def stop(self, grace_s: float) -> bool:
        """Refuses new calls, waits for those in flight, cancels the rest; True if all have ended in time."""

    def drain_streams(self, status: int, details: str, timeout_s: float) -> bool:
        """Closes streams with a status when they have nothing in flight; True if there were any."""
