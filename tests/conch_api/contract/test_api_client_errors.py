"""`conch.Client` and `conch.AsyncClient`: what they raise, and what they know of a model that changes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.support.servers import WAIT_S

import conch

X, Y = conch.Tensor("X"), conch.Tensor("Y")
PLAIN = conch.ModelConfig(batching=False)
STREAMS = conch.ModelConfig(batching=False, decoupled=True)


@pytest.fixture(scope="module")
def server() -> Iterator[conch.Server]:
    with conch.Server(grpc_port=0, http_port=0, metrics_port=None, grpc_address="127.0.0.1") as server:
        yield server


def ask(kind: str, url: str | None, model: str, value: Any, **options: Any) -> Any:
    """Asks a model once, by one of the ways there are; all responses of a stream."""
    assert url is not None
    if not kind.startswith("async "):
        with conch.Client(url, model, **options) as client:
            return client.infer_batch(value) if kind == "infer" else list(client.stream_batch(value))

    async def run() -> Any:
        async with conch.AsyncClient(url, model, **options) as client:
            if kind == "async infer":
                return await client.infer_batch(value)
            return [response async for response in client.stream_batch(value)]

    return asyncio.run(run())


def protocol(server: conch.Server, name: str) -> str | None:
    return server.grpc_url if name == "grpc" else server.http_url


@pytest.mark.parametrize(
    ("kind", "over"),
    [
        ("infer", "grpc"),
        ("infer", "http"),
        ("async infer", "grpc"),
        ("async infer", "http"),
        ("stream", "grpc"),
        ("async stream", "grpc"),
    ],
)
def test_what_takes_too_long_is_a_deadline_that_passed(server: conch.Server, kind: str, over: str) -> None:
    go = threading.Event()

    def blocked(requests: list[conch.Request]) -> list[Any]:
        go.wait(WAIT_S)
        return [request["X"] for request in requests]

    def stream(requests: list[conch.Request]) -> Iterator[list[Any]]:
        yield blocked(requests)

    streams = kind.endswith("stream")
    server.bind("blocked", stream if streams else blocked, [X], [Y], STREAMS if streams else PLAIN)
    try:
        with pytest.raises(conch.DeadlineExceededError):
            ask(kind, protocol(server, over), "blocked", [1.0], timeout_s=0.3)
    finally:
        go.set()
        server.unbind("blocked")


@pytest.mark.parametrize("kind", ["infer", "async infer", "stream", "async stream"])
def test_errors_are_those_that_the_server_has_raised(server: conch.Server, kind: str) -> None:
    def refuses(requests: list[conch.Request]) -> Any:
        raise conch.InvalidArgumentError("not like this")

    def stream(requests: list[conch.Request]) -> Iterator[list[Any]]:
        yield [request["X"] for request in requests]
        refuses(requests)

    streams = kind.endswith("stream")
    server.bind("refuses", stream if streams else refuses, [X], [Y], STREAMS if streams else PLAIN)
    with pytest.raises(conch.InvalidArgumentError, match="not like this"):
        ask(kind, server.grpc_url, "refuses", [1.0])
    server.unbind("refuses")


@pytest.mark.parametrize("kind", ["infer", "async infer"])
@pytest.mark.parametrize("over", ["grpc", "http"])
@pytest.mark.parametrize("value", [np.zeros(1), [[1.0], [1.0, 2.0]], ["1.5"]])
def test_an_input_of_another_type_is_the_caller_s_fault(
    server: conch.Server, kind: str, over: str, value: Any
) -> None:
    server.bind("plain", lambda requests: [request["X"] for request in requests], [X], [Y], PLAIN)
    with pytest.raises(conch.InvalidArgumentError, match="input 'X'"):
        ask(kind, protocol(server, over), "plain", value)
    server.unbind("plain")


def test_a_model_that_is_bound_again_has_other_inputs(server: conch.Server) -> None:
    def second(requests: list[conch.Request]) -> list[Any]:
        return [request["Z"] * 2 for request in requests]

    async def run() -> None:
        assert server.grpc_url is not None
        server.bind("again", lambda requests: [request["X"] for request in requests], [X], [Y], PLAIN)
        with conch.Client(server.grpc_url, "again") as client:
            async with conch.AsyncClient(server.grpc_url, "again") as other:
                assert client.infer_batch(X=[1.0])["Y"].tolist() == [1.0]
                assert (await other.infer_batch(X=[1.0]))["Y"].tolist() == [1.0]
                server.bind("again", second, [conch.Tensor("Z")], [Y], PLAIN)
                assert client.infer_batch(Z=[1.0])["Y"].tolist() == [2.0]
                assert (await other.infer_batch(Z=[1.0]))["Y"].tolist() == [2.0]
                with pytest.raises(conch.InvalidArgumentError, match="has no input 'X'; it has Z"):
                    client.infer_batch(X=[1.0])

    asyncio.run(run())
    server.unbind("again")
