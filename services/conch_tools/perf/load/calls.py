"""Requests in flight, and the receivers of their ends."""

from __future__ import annotations

from typing import Protocol

from conch_tools.perf.load.ready_requests import ReadyRequest
from conch_tools.perf.measure.records import KeptResponse


class LoadCall:
    """One request that is sent, or about to be.

    Attributes:
        request: The request.
        due_ns: Time at which it was due, monotonic.
        sent_ns: Time at which it was sent, monotonic.
        responses: Number of responses so far.
        first_ns: Time of the first response of a stream; 0 otherwise.
        last_ns: Time of the last response; 0 before.
        slot: Number of the slot of a closed loop, or of the sequence; -1 for none.
        kept: The responses, if they are kept.
    """

    __slots__ = ("due_ns", "first_ns", "kept", "last_ns", "request", "responses", "sent_ns", "slot")

    def __init__(self, request: ReadyRequest, due_ns: int, slot: int = -1, keeps: bool = False) -> None:
        self.request = request
        self.due_ns = due_ns
        self.slot = slot
        self.kept: list[KeptResponse] | None = [] if keeps else None
        self.sent_ns = self.first_ns = self.last_ns = self.responses = 0


class Ended(Protocol):
    """Receiver of ends and of responses."""

    def call_ended(self, call: LoadCall, error: str, now_ns: int) -> None:
        """A call has its last response, or an error: empty for success."""

    def explained(self, error: str, text: str) -> None:
        """Takes the server's text of an error: of the first one on a connection."""

    def responded(self, call: LoadCall, now_ns: int) -> None:
        """A response of a stream has come; the call has the time of the one before."""


class Client(Protocol):
    """A connection.

    Attributes:
        in_flight: Calls without an end.
        lost: True if the connection can't be used any more.
    """

    in_flight: int
    lost: bool

    @property
    def full_at(self) -> int:
        """Streams that the server allows at the same time, if there are as many now; else 0."""

    def takes(self, slot: int) -> bool:
        """True if a call of a slot may be sent now."""

    @property
    def wants_write(self) -> bool:
        """True if the socket took only a part of the output."""

    def fileno(self) -> int:
        """The socket's descriptor."""

    def send(self, call: LoadCall, now_ns: int) -> None:
        """Queues a call; `flush` sends it."""

    def flush(self, now_ns: int) -> None:
        """Sends what is queued, as far as the socket takes it."""

    def read(self, now_ns: int) -> None:
        """Reads what has come."""

    def close(self) -> None:
        """Closes the socket; calls without an end are forgotten."""
