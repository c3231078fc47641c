"""Streams of a program's own requests: begun when they are read, ended when they can't be read any more."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tests.support.servers import WAIT_S

import conch
import conch_api.function_backend
from conch.core.admission import Admission
from conch.core.clock import monotonic_ns
from conch.core.request import InferenceRequest

X, Y = conch.Tensor("X"), conch.Tensor("Y")
NO_PORTS: dict[str, Any] = {"grpc_port": None, "http_port": None, "metrics_port": None}
STREAMS = conch.ModelConfig(batching=False, decoupled=True)
ONE = {"X": [1.0]}


class Endless:
    """A function that yields until its caller is gone."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def __call__(self, requests: list[conch.Request]) -> Iterator[list[Any]]:
        try:
            while True:
                yield [request["X"] for request in requests]
        finally:
            self.ended.set()


@pytest.fixture
def server() -> Iterator[conch.Server]:
    with conch.Server(**NO_PORTS) as server:
        yield server


def test_a_timeout_is_that_of_each_response(server: conch.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    hours = itertools.count()
    monkeypatch.setattr(
        conch_api.function_backend, "monotonic_ns", lambda: monotonic_ns() + next(hours) * 3_600_000_000_000
    )

    def ten(requests: list[conch.Request]) -> Iterator[list[Any]]:
        for number in range(10):
            yield [np.array([number], np.float32) for _ in requests]

    server.bind("ten", ten, [X], [Y], STREAMS)
    assert [int(result["Y"][0]) for result in server.stream("ten", ONE, timeout=WAIT_S)] == list(range(10))

    async def read(stream: AsyncIterator[conch.Result]) -> list[int]:
        return [int(result["Y"][0]) async for result in stream]

    assert asyncio.run(read(server.stream_async("ten", ONE, timeout=WAIT_S))) == list(range(10))


def test_a_stream_that_nobody_reads_is_not_begun(server: conch.Server) -> None:
    began: list[int] = []

    def many(requests: list[conch.Request]) -> Iterator[list[Any]]:
        began.append(len(requests))
        for number in range(40):
            yield [np.array([number], np.float32) for _ in requests]

    server.bind("many", many, [X], [Y], STREAMS)
    server.stream("many", ONE).close()
    assert began == []
    first, second = server.stream("many", ONE), server.stream("many", ONE)
    assert [len(list(second)), len(list(first))] == [40, 40]  # the model has one thread
    assert list(first) == []
    closed = server.stream("many", ONE)
    next(closed)
    closed.close()
    assert list(closed) == []


def test_a_stream_that_the_collector_finds_is_cancelled_on_another_thread(
    server: conch.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = Endless()
    server.bind("endless", endless, [X], [Y], STREAMS)
    cancelling: list[threading.Thread] = []
    cancel = Admission.cancel

    def noted(admission: Admission, request: InferenceRequest) -> None:
        cancelling.append(threading.current_thread())
        cancel(admission, request)

    monkeypatch.setattr(Admission, "cancel", noted)
    stream = server.stream("endless", ONE)
    next(stream)
    cycle: list[Any] = [stream]
    cycle.append(cycle)
    del stream, cycle
    gc.collect()
    assert endless.ended.wait(WAIT_S)
    (thread,) = cancelling
    assert thread is not threading.current_thread()  # which may be in the middle of anything
    thread.join(WAIT_S)


def test_a_stop_ends_streams_of_its_own_thread_at_once() -> None:
    endless = Endless()
    server = conch.Server(**NO_PORTS)
    server.bind("endless", endless, [X], [Y], STREAMS)
    server.start()
    stream = server.stream("endless", ONE)
    next(stream)
    assert server.stop()
    assert endless.ended.wait(WAIT_S)
    with pytest.raises(conch.UnavailableError, match="the server has been stopped"):
        list(stream)


def test_who_waits_at_the_end_is_told_of_it() -> None:
    running, go = threading.Semaphore(0), threading.Event()

    def blocked(requests: list[conch.Request]) -> list[Any]:
        running.release()
        go.wait(WAIT_S)
        return [request["X"] for request in requests]

    def silent(requests: list[conch.Request]) -> Iterator[list[Any]]:
        yield blocked(requests)

    server = conch.Server(exit_timeout_secs=0, **NO_PORTS)
    server.bind("blocked", [blocked] * 2, [X], [Y], conch.ModelConfig(batching=False))
    server.bind("silent", silent, [X], [Y], STREAMS)
    server.start()
    asks: dict[str, Callable[[], object]] = {
        "infer": lambda: server.infer("blocked", ONE),
        "stream": lambda: list(server.stream("silent", ONE)),
        "infer_async": lambda: asyncio.run(server.infer_async("blocked", ONE)),
    }
    told: dict[str, BaseException] = {}

    def ask(name: str) -> None:
        try:
            asks[name]()
        except conch.ConchError as error:
            told[name] = error

    threads = [threading.Thread(target=ask, args=(name,)) for name in asks]
    for thread in threads:
        thread.start()
    for _ in asks:
        assert running.acquire(timeout=WAIT_S)
    try:
        assert server.stop() is False
        for thread in threads:
            thread.join(WAIT_S)
    finally:
        go.set()
    assert {name: (type(error), str(error)) for name, error in told.items()} == dict.fromkeys(
        asks, (conch.UnavailableError, "the server has been stopped")
    )
