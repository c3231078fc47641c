"""Requests to a registry whose callers are cancelled."""

from __future__ import annotations

import asyncio
import socket
import threading
from http.client import HTTPConnection, HTTPResponse
from typing import cast

import pytest
from tests.support.servers import eventually
from tests.support.waiting import PATIENCE_S

from conch_mlflow.locations import parse_location
from conch_mlflow.registry_http import Body, RegistryHttp
from conch_mlflow.registry_store import RegistryStore
from conch_stores.credentials import CredentialReader


class SlowHttp(RegistryHttp):
    """Has a body, or the next block of it, only when the test lets it go."""

    def __init__(self, slow: str) -> None:
        super().__init__(parse_location("mlflow+http://127.0.0.1:1"), {}, None, PATIENCE_S)
        self._slow = slow
        self.reached, self.released = threading.Event(), threading.Event()
        self.closed: list[Body] = []

    def wait(self, step: str) -> None:
        if step == self._slow:
            self.reached.set()
            assert self.released.wait(PATIENCE_S)

    def body(self, target: str, start: int = 0, etag: str = "") -> Body:
        self.wait("open")
        http = self

        class SlowBody(Body):
            def read(self, size: int) -> bytes:
                http.wait("read")
                return super().read(size)

            def close(self) -> None:
                http.closed.append(self)
                super().close()

        ours, theirs = socket.socketpair()
        with theirs:
            theirs.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n123456789")
        connection = HTTPConnection("127.0.0.1")
        connection.sock = ours
        response = HTTPResponse(ours)
        response.begin()
        return SlowBody(self, connection, response)


@pytest.mark.parametrize("slow", ["open", "read"])
def test_a_body_is_closed_by_its_thread_if_its_reader_was_cancelled(slow: str) -> None:
    http = SlowHttp(slow)
    store = RegistryStore(http, {}, cast(CredentialReader, None), PATIENCE_S)

    async def read_and_leave() -> None:
        reading = asyncio.create_task(store.read("artifacts:model/model.onnx", 0, 9))
        await asyncio.to_thread(http.reached.wait, PATIENCE_S)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert not http.closed, "its thread reads it"

    asyncio.run(read_and_leave())
    http.released.set()  # the loop has ended
    eventually(lambda: http.closed, "the body is closed")
    asyncio.run(store.close())
