"""Pings of a quiet connection, and clients that ping too often.

Source: gRPC's "Keepalive User Guide"; `grpc_options.KeepAlive` has the settings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from conch.core.clock import Clock

_ALIVE_PING = b"conch-ka"
_IDLE_CLIENT_LEAST_NS = 7_200_000_000_000  # between a client's pings while it has no calls


@dataclass(frozen=True, slots=True)
class KeepAliveTimes:
    """Times in nanoseconds.

    Attributes:
        every_ns: Time without anything received after which the server pings.
        timeout_ns: Time to wait for the answer.
        without_calls: True to ping connections without calls, and to allow clients to.
        client_least_ns: Least time between a client's pings while nothing is sent to it.
        client_strikes: Pings that may come sooner.
    """

    every_ns: int = 7_200_000_000_000
    timeout_ns: int = 20_000_000_000
    without_calls: bool = False
    client_least_ns: int = 300_000_000_000
    client_strikes: int = 2


class Pinged(Protocol):
    """The connection.

    Attributes:
        answers: Incremented when response bytes are written or become writable; clients may ping then.
    """

    answers: int

    @property
    def has_calls(self) -> bool:
        """True if calls are open."""

    def after(self, name: str, delay_ns: int, work: Callable[[], None]) -> None:
        """Schedules work."""

    def ping(self, payload: bytes) -> None:
        """Sends a ping."""

    def give_up(self, reason: str) -> None:
        """Closes the connection."""

    def enhance_your_calm(self, text: str) -> None:
        """Tells the client that it asks too much, and closes the connection."""


class KeepAlive:
    """The pings of one connection.

    Attributes:
        heard: Set to True where anything is received.
    """

    def __init__(self, connection: Pinged, times: KeepAliveTimes, clock: Clock) -> None:
        self._connection = connection
        self._times = times
        self._clock = clock
        self.heard = False
        self._strikes = 0
        self._pinged_ns = 0
        self._answers = -1  # sent before the client's last ping

    def start(self) -> None:
        """Schedules the first look."""
        self._connection.after("alive", self._times.every_ns, self._look)

    def _look(self) -> None:
        connection, times = self._connection, self._times
        quiet, self.heard = not self.heard, False
        if quiet and (times.without_calls or connection.has_calls):
            connection.ping(_ALIVE_PING)
            connection.after("alive", times.timeout_ns, self._check)
        else:
            connection.after("alive", times.every_ns, self._look)

    def _check(self) -> None:
        if self.heard:
            self.heard = False
            self._connection.after("alive", self._times.every_ns, self._look)
        else:
            self._connection.give_up("keep_alive")

    def pinged(self) -> None:
        """Counts a client's ping: a strike if it comes too soon and nothing was sent since the last."""
        connection, times, now_ns = self._connection, self._times, self._clock()
        if connection.answers != self._answers:
            self._strikes = 0
        else:
            active = connection.has_calls or times.without_calls
            least_ns = times.client_least_ns if active else _IDLE_CLIENT_LEAST_NS
            if now_ns - self._pinged_ns < least_ns:
                self._strikes += 1
                if self._strikes > times.client_strikes:
                    connection.enhance_your_calm("too_many_pings")
        self._pinged_ns, self._answers = now_ns, connection.answers
