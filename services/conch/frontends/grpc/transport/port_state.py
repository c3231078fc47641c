"""State that the connections of one port share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from conch.core.admission import HeldBytes, Hold
from conch.core.clock import Clock
from conch.core.compiled import mypyc_attr
from conch.core.errors import ConchError, ResourceExhaustedError, UnavailableError
from conch.core.tensor import Buffer
from conch.frontends.connections.places import Seated
from conch.frontends.connections.turns import Turns
from conch.frontends.fair_pool import FairPool
from conch.frontends.grpc.http2.limits import Http2Limits, LocalSettings, Reason
from conch.frontends.grpc.open_calls import MOST_UNREAD_BYTES, OpenCalls
from conch.frontends.grpc.rpc_calls import Admit, StreamMethod, UnaryMethod
from conch.frontends.grpc.transport.deadlines import Deadlines
from conch.frontends.grpc.transport.keep_alive import KeepAliveTimes
from conch.frontends.grpc.transport.messages import CompressedMessage, MessageError
from conch.frontends.grpc.transport.received_bytes import ReceivedBytes
from conch.ipc.loop import IoLoop

# Beside those of HTTP/2.
_REASONS = ("connections", "crowded", "keep_alive", "setup", "stuck")
_CALL_REASONS = (
    "crowded",
    "partial_messages",
    "received_bytes",
    "resets",
    "slow_reader",
    "slow_sender",
    "unread_answers",
)

_SHORT_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True)
class PortOptions:
    """Limits of one port.

    Attributes:
        most_message_bytes: Limit of a client's message.
        settings: HTTP/2 settings that clients get.
        limits: Limits of a client's frames.
        keep_alive: Pings.
        age_ns: Age at which clients are asked to leave a connection, give or take a tenth; 0 for never.
        age_grace_ns: Time of calls after that; 0 for no limit.
        most_connections: Limit of connections; a further one takes the place of one without calls.
        most_received_bytes: Limit of the bytes that are held, unless the port shares a count with others.
        least_rate: Bytes a second that a client has to send of a message, or to read of its answers.
    """

    most_message_bytes: int = 2**31 - 1
    settings: LocalSettings = field(default_factory=LocalSettings)
    limits: Http2Limits = field(default_factory=Http2Limits)
    keep_alive: KeepAliveTimes = field(default_factory=KeepAliveTimes)
    age_ns: int = 0
    age_grace_ns: int = 0
    most_connections: int = 1000
    most_received_bytes: int = 1 << 30
    least_rate: int = 1024


class PortConnection(Seated, Protocol):
    """A connection, as the port ends it."""

    def drain(self) -> None:
        """Asks the client to leave; closes the connection after the last call."""

    def close(self) -> None:
        """Closes the connection; cancels its calls."""


@mypyc_attr(allow_interpreted_subclasses=True)
class PortState:
    """State that the connections of one port share; changed on the loop's thread once the port serves.

    Attributes:
        loop: The loop of their sockets.
        clock: Monotonic time in nanoseconds.
        options: The limits.
        unary, streams, admissions: Handlers by method, see `Server.serve`.
        open_calls: The calls that are not answered yet.
        connections: The connections.
        leaving: Number of those that make room for others.
        deadlines: The deadlines of calls.
        turns: Turns of connections that send much in few bytes.
        decompressing: Threads that decompress messages.
        closed: Number of connections that were closed because of their clients, by reason.
        ended: Number of calls that were ended because of their clients, by reason.
        received: Received bytes of messages that no handler has yet.
        unread_bytes: Bytes of unary calls' answers that wait for their clients.
    """

    loop: IoLoop
    deadlines: Deadlines
    turns: Turns

    def __init__(
        self,
        options: PortOptions,
        clock: Clock,
        most_unread_bytes: int = MOST_UNREAD_BYTES,
        held: HeldBytes | None = None,
    ) -> None:
        self.clock = clock
        self.options = options
        self.unary: dict[str, UnaryMethod] = {}
        self.streams: dict[str, StreamMethod] = {}
        self.admissions: dict[str, Admit] = {}
        self.open_calls = OpenCalls(most_unread_bytes)
        self.connections: set[PortConnection] = set()
        # All keys from the start, as other threads read it.
        self.decompressing = FairPool("conch-grpc-inflate")
        self.closed: Counter[str] = Counter(dict.fromkeys((*Reason, *_REASONS), 0))
        self.ended: Counter[str] = Counter(dict.fromkeys(_CALL_REASONS, 0))
        self.received = ReceivedBytes(held or HeldBytes(options.most_received_bytes))
        self.unread_bytes = 0
        self.leaving = 0
        self._on_empty: Callable[[], None] | None = None

    def use(self, loop: IoLoop) -> None:
        """Sets the loop, at the start."""
        self.loop = loop
        self.deadlines = Deadlines(loop)
        self.turns = Turns(loop.call_soon, self.clock)

    def decompress(
        self,
        message: CompressedMessage,
        client: str,
        gone: Callable[[], bool],
        done: Callable[[Future[Buffer]], None],
    ) -> None:
        """Decompresses a message, in turns with other clients; calls `done` on the loop's thread.

        Plain bytes count as they come, so that a message that becomes too large is refused then.
        """
        size, hold = len(message.data), Hold(self.received.held)

        def end(ended: Future[Buffer]) -> None:
            self.received.add(-size)
            hold.release()
            done(ended)

        self.received.add(size)
        ended: Future[Buffer] = Future()
        try:
            # Short ones, of 16 MB plain at most, do not wait for long ones of the same host.
            client = client if size > _SHORT_BYTES else f"short {client}"
            ended = self.decompressing.submit_for(client, gone, message.plain, hold.grow)
        except RuntimeError:  # the port is closed
            ended.cancel()
        ended.add_done_callback(lambda ended: self.loop.call_soon(partial(end, ended)))

    def decompressed(self, ended: Future[Buffer]) -> Buffer | MessageError:
        """The message, or the error that its client gets."""
        try:
            return ended.result()
        except CancelledError:
            return MessageError(UnavailableError.grpc_status, "the server is stopping")
        except (MessageError, ConchError) as error:
            error.__traceback__ = None  # it has the message, and with the future is a reference cycle
            if isinstance(error, ResourceExhaustedError):
                return self.refusal(error)
            if isinstance(error, ConchError):  # the client is gone
                return MessageError(error.grpc_status, error.message)
            return error

    def refusal(self, error: ResourceExhaustedError) -> MessageError:
        """The error of a call that is refused for what the server holds; counts it."""
        self.ended["received_bytes"] += 1
        return MessageError(error.grpc_status, error.message)

    def remove(self, connection: PortConnection) -> None:
        """Removes a connection that is closed."""
        self.connections.discard(connection)
        self.leaving -= connection.leaving
        if not self.connections and self._on_empty is not None:
            self._on_empty()

    def drain(self, on_empty: Callable[[], None]) -> None:
        """Asks all clients to leave; `on_empty` is called once there are no connections."""
        self._on_empty = on_empty
        if not self.connections:
            on_empty()
        for connection in list(self.connections):
            connection.drain()
