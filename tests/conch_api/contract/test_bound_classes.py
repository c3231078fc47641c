"""Classes and chat functions of a program as models."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from tests.support.leaks import local_server

import conch


@pytest.fixture
def server() -> Iterator[conch.Server]:
    server = conch.Server(grpc_port=None, http_port=None, metrics_port=None)
    with local_server(), server:
        yield server


def texts(server: conch.Server, model: str, text: str) -> list[str]:
    """The text of each response of a stream."""
    responses = server.stream(model, {"text_input": [text], "stream": [True]})
    return [response["text_output"][0].decode() for response in responses]


def test_functions_and_classes(server: conch.Server) -> None:
    @server.chat("words")
    def words(request: Any) -> Iterator[str]:
        yield from request.messages[-1]["content"].split()

    @server.model("reversed")
    class Reversed:
        async def complete(self, request: Any) -> str:
            return str(request.prompt[::-1])

    assert list(words(type("Request", (), {"messages": [{"content": "a b"}]}))) == ["a", "b"]
    assert texts(server, "words", "a b") == ["a", "b", ""]
    assert texts(server, "reversed", "a b") == ["b a", ""]
    assert {entry.name: entry.state for entry in server.models} == {"words": "READY", "reversed": "READY"}
    server.unbind("words")
    with pytest.raises(conch.NotFoundError):
        texts(server, "words", "a b")


def test_a_name_that_is_used_again(server: conch.Server) -> None:
    """The old function finishes its requests."""
    go_on = threading.Event()

    @server.chat("m")
    def old(request: Any) -> Iterator[str]:
        yield "old"
        go_on.wait()
        yield "too"

    running = server.stream("m", {"text_input": ["x"], "stream": [True]})
    assert next(running)["text_output"].tolist() == [b"old"]

    @server.chat("m")
    def new(request: Any) -> str:
        return "new"

    assert texts(server, "m", "x")[0] == "new"
    go_on.set()
    assert [response["text_output"].tolist() for response in running] == [[b"too"], [b""]]
    with pytest.raises(conch.InvalidArgumentError, match="does not implement `execute`"):
        server.model("m")(int)
    assert texts(server, "m", "x")[0] == "new"


def test_a_name_that_is_none() -> None:
    with pytest.raises(conch.InvalidArgumentError, match="can't be the name"):
        conch.Server().chat("a/b")
