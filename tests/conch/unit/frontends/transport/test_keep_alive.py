"""Pings of a quiet connection, and of clients that ping too often."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from conch.frontends.grpc.transport.keep_alive import KeepAlive, KeepAliveTimes

TIMES = KeepAliveTimes(every_ns=1000, timeout_ns=100, client_least_ns=50, client_strikes=2)


class Connection:
    """Stands in for the connection; its timers run when the test says so."""

    def __init__(self, times: KeepAliveTimes = TIMES) -> None:
        self.answers = 0
        self.has_calls = True
        self.now_ns = 0
        self.timers: dict[str, tuple[int, Callable[[], None]]] = {}
        self.pings = 0
        self.ended = ""
        self.keep = KeepAlive(self, times, lambda: self.now_ns)
        self.keep.start()

    def after(self, name: str, delay_ns: int, work: Callable[[], None]) -> None:
        self.timers[name] = self.now_ns + delay_ns, work

    def ping(self, payload: bytes) -> None:
        self.pings += 1

    def give_up(self, reason: str) -> None:
        self.ended = reason

    def enhance_your_calm(self, text: str) -> None:
        self.ended = text

    def tick(self) -> int:
        """Runs the next timer; returns how long it took to come."""
        before = self.now_ns
        self.now_ns, work = self.timers.pop("alive")
        work()
        return self.now_ns - before


def test_a_client_that_answers_stays() -> None:
    connection = Connection()
    assert connection.tick() == 1000
    assert connection.pings == 1
    connection.keep.heard = True
    assert connection.tick() == 100
    assert connection.tick() == 1000
    assert connection.pings == 2
    assert not connection.ended


def test_a_client_that_does_not_answer_is_disconnected() -> None:
    connection = Connection()
    connection.tick()
    connection.tick()
    assert connection.ended == "keep_alive"


def test_a_connection_is_pinged_once_it_is_quiet() -> None:
    connection = Connection()
    connection.keep.heard = True
    connection.tick()
    assert connection.pings == 0
    connection.tick()
    assert connection.pings == 1


@pytest.mark.parametrize("without_calls", [False, True])
def test_connections_without_calls(without_calls: bool) -> None:
    connection = Connection(KeepAliveTimes(every_ns=1000, without_calls=without_calls))
    connection.has_calls = False
    connection.tick()
    assert connection.pings == without_calls


def test_a_client_that_pings_too_often() -> None:
    connection = Connection()
    for _ in range(3):  # the first one is free, two strikes are allowed
        connection.keep.pinged()
    assert not connection.ended
    connection.now_ns += 60
    connection.keep.pinged()  # late enough
    connection.answers += 1
    for _ in range(3):
        connection.keep.pinged()
    assert not connection.ended, "an answer lets it ping anew"
    connection.keep.pinged()
    assert "too_many_pings" in connection.ended
