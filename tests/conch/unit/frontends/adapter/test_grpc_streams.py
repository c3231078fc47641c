"""Streams on grpcio: how long a writer waits where more is written than read."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.waiting import PATIENCE_S

from conch.frontends.grpc.adapter.grpcio_calls import StreamCall
from conch.frontends.grpc.open_calls import OpenCalls

BLOCK = bytes(16 << 20)
OVER = 6
"""So many blocks are over the bound."""


class FakeCall:
    """Stands in for the C core's call: operations end when the test says so."""

    def __init__(self) -> None:
        self.tags: list[Callable[[Any], None]] = []

    def start_server_batch(self, operations: Any, tag: Callable[[Any], None]) -> None:
        self.tags.append(tag)


class Stream:
    """A stream that is over its bound, and the thread that waits for its reader."""

    def __init__(self) -> None:
        self.fake = FakeCall()
        event = SimpleNamespace(call=self.fake, call_details=None, invocation_metadata=())
        self.call = StreamCall(event, OpenCalls())
        self.call.start(lambda message: None, lambda: None)
        self.closed, self.written, _ = self.fake.tags
        self.written(None)
        for _ in range(OVER):
            self.call.write(BLOCK)

    def waiting(self) -> threading.Thread:
        thread = threading.Thread(target=self.call.wait_until_writable)
        thread.start()
        thread.join(0.01)
        assert thread.is_alive(), "it does not wait"
        return thread

    def read(self) -> None:
        """The client takes one message."""
        self.fake.tags[-1](None)


def ended(thread: threading.Thread) -> bool:
    thread.join(PATIENCE_S)
    return not thread.is_alive()


def test_until_the_client_has_read() -> None:
    stream = Stream()
    thread = stream.waiting()
    stream.read()
    thread.join(0.05)
    assert thread.is_alive(), "80 MB are still too much"
    stream.read()
    assert ended(thread)
    stream.call.wait_until_writable()


@pytest.mark.parametrize("cancelled", [False, True])
def test_until_the_client_is_gone(cancelled: bool) -> None:
    stream = Stream()
    thread = stream.waiting()
    operation = SimpleNamespace(cancelled=lambda: cancelled)
    stream.closed(SimpleNamespace(batch_operations=[operation]))
    assert ended(thread)
    stream.call.wait_until_writable()
    stream.call.write(BLOCK)  # goes nowhere


def test_until_the_stream_is_closed() -> None:
    stream = Stream()
    thread = stream.waiting()
    stream.call.close()
    assert ended(thread)


def test_several_threads() -> None:
    stream = Stream()
    threads = [stream.waiting() for _ in range(3)]
    for _ in range(2):
        stream.read()
    assert all(ended(thread) for thread in threads)
