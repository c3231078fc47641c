"""Unary calls: their close is asked for exactly once, and the waiting side is notified of a cancel."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.waiting import PATIENCE_S

from conch.frontends.grpc.adapter.grpc_server import Server
from conch.frontends.grpc.adapter.grpcio_calls import UnaryCall, Watcher
from conch.frontends.grpc.adapter.library import cygrpc
from conch.frontends.grpc.open_calls import OpenCalls

CLOSE = cygrpc.ReceiveCloseOnServerOperation


class FakeCall:
    """Stands in for the C core's call: operations end when the test says so."""

    def __init__(self) -> None:
        self.batches: list[tuple[tuple[Any, ...], Callable[[Any], None]]] = []

    def start_server_batch(self, operations: tuple[Any, ...], tag: Callable[[Any], None]) -> None:
        self.batches.append((operations, tag))

    @property
    def closes(self) -> int:
        return sum(isinstance(one, CLOSE) for operations, _ in self.batches for one in operations)


class Subject:
    """Object that is notified of a cancel."""


class Rig:
    """One call whose message has come in."""

    def __init__(self, message: bytes | None = b"message") -> None:
        self.fake = FakeCall()
        self.open = OpenCalls()
        self.taken: list[bytes] = []
        self.cancelled: list[Any] = []
        event = SimpleNamespace(call=self.fake, invocation_metadata=(("key", "value"),))
        self.call = UnaryCall(event, lambda call, message: self.taken.append(bytes(message)), self.open)
        assert not self.open.wait_until_none(0)
        ((_, tag),) = self.fake.batches
        tag(SimpleNamespace(batch_operations=[SimpleNamespace(message=lambda: message)]))
        self.fake.batches.clear()

    def watch(self) -> weakref.ref[Subject]:
        subject = Subject()
        self.call.watch(self.cancelled.append, subject)
        return weakref.ref(subject)

    def close(self, cancelled: bool) -> None:
        """Has the C core say that the call has ended."""
        tag = self.fake.batches[0][1]
        tag(SimpleNamespace(batch_operations=[SimpleNamespace(cancelled=lambda: cancelled)]))


def test_a_message_reaches_its_handler() -> None:
    rig = Rig()
    assert rig.taken == [b"message"]
    assert rig.call.metadata == (("key", "value"),)
    assert rig.fake.batches == []


def test_a_call_without_a_message_is_refused() -> None:
    rig = Rig(None)
    assert rig.taken == []
    assert rig.open.wait_until_none(0)


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize(
    "answer",
    [
        lambda call: call.reply(b"answer"),
        lambda call: call.reply_with(b"answer", "gzip", None),
        lambda call: call.abort(3, "no", (("key", "value"),)),
    ],
)
def test_an_answer_asks_for_the_close_as_well(watched: bool, answer: Callable[[UnaryCall], None]) -> None:
    rig = Rig()
    subject = rig.watch() if watched else None
    rig.call.look()
    answer(rig.call)
    ((operations, _),) = rig.fake.batches
    assert isinstance(operations[-1], CLOSE)
    assert rig.open.wait_until_none(0)
    for _ in range(3):
        rig.call.look()
    assert rig.fake.closes == 1
    gc.collect()
    assert subject is None or subject() is None


def test_a_call_that_nobody_watches_is_not_looked_at() -> None:
    rig = Rig()
    for _ in range(3):
        rig.call.look()
    assert rig.fake.batches == []


@pytest.mark.parametrize("cancelled", [False, True])
def test_the_close_of_a_call_that_waits_is_asked_for_early(cancelled: bool) -> None:
    rig = Rig()
    subject = rig.watch()
    rig.call.look()
    assert rig.fake.closes == 0
    for _ in range(3):
        rig.call.look()
    assert rig.fake.closes == 1
    if cancelled:
        rig.close(True)
        assert [type(one) for one in rig.cancelled] == [Subject]
        rig.cancelled.clear()
    rig.call.reply(b"answer")
    if not cancelled:
        rig.close(False)
    assert rig.fake.closes == 1
    assert rig.cancelled == []
    assert rig.open.wait_until_none(0)
    gc.collect()
    assert subject() is None


def test_of_an_answer_and_a_look_at_once_one_asks_for_the_close() -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(300):
            rig = Rig()
            rig.watch()
            rig.call.look()
            together = threading.Barrier(2)

            def look(rig: Rig = rig, together: threading.Barrier = together) -> None:
                together.wait(PATIENCE_S)
                rig.call.look()

            thread = threading.Thread(target=look)
            thread.start()
            together.wait(PATIENCE_S)
            rig.call.reply(b"answer")
            thread.join(PATIENCE_S)
            assert rig.fake.closes == 1
            assert len(rig.fake.batches) in (1, 2)
    finally:
        sys.setswitchinterval(interval)


def test_the_watcher_looks_at_the_calls_that_are_open() -> None:
    rig = Rig()
    rig.watch()
    ticks = threading.Semaphore(0)
    watcher = Watcher(rig.open, ticks.release)
    watcher.start()
    try:
        while rig.fake.closes == 0:
            assert ticks.acquire(timeout=PATIENCE_S)
    finally:
        watcher.stop()
    rig.call.reply(b"answer")
    assert rig.fake.closes == 1


def test_the_watcher_leaves_watched_calls_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands may be waiting."""
    rig = Rig()
    rig.watch()
    while not rig.call.watched:
        rig.call.look()
    looks: list[UnaryCall] = []
    monkeypatch.setattr(UnaryCall, "look", looks.append)
    ticks = threading.Semaphore(0)
    watcher = Watcher(rig.open, ticks.release)
    watcher.start()
    try:
        for _ in range(12):
            assert ticks.acquire(timeout=PATIENCE_S)
    finally:
        watcher.stop()
    assert looks == []
    rig.call.reply(b"answer")


def test_whoever_waits_for_calls_sees_the_last_one_end() -> None:
    rig = Rig()
    seen: list[bool] = []
    waiting = threading.Thread(target=lambda: seen.append(rig.open.wait_until_none(PATIENCE_S)))
    waiting.start()
    rig.call.reply(b"answer")
    waiting.join(PATIENCE_S)
    assert seen == [True]


@pytest.fixture(scope="module")
def core_in_use() -> None:
    """The C core has been used before: it keeps some file descriptors from its first server on."""
    server = Server()
    server.start()
    assert server.stop(0)


@pytest.mark.usefixtures("core_in_use")
def test_a_server_that_nobody_has_any_more_is_gone_at_once() -> None:
    """The server's resources must not wait for the garbage collector, which may never come."""
    gc.collect()
    gc.disable()
    try:
        server = Server()
        server.add_port("127.0.0.1:0")
        server.start()
        assert server.stop(0)
        held = weakref.ref(server)
        del server
        assert held() is None
    finally:
        gc.enable()
