"""ModelStreamInfer: the status of a stream's end."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from conch.frontends.grpc.stream_infer_rpc import InferStream


class Handler:
    """Takes the requests of a stream, and responds when the test says so."""

    reports = None

    def __init__(self) -> None:
        self.closed: list[int] = []
        call: Any = SimpleNamespace(
            write=lambda message: None, close=lambda status, *more: self.closed.append(status)
        )
        self.stream = InferStream(call, self, False)  # type: ignore[arg-type]
        self.slots: list[Any] = []

    def submit(self, call: Any, slot: Any, message: bytes) -> None:
        self.slots.append(slot)

    def respond(self) -> None:
        """Sends the last response of the earliest request."""
        self.stream.send(self.slots.pop(0), b"", True)


OK, UNAVAILABLE = 0, 14


@pytest.mark.parametrize(
    ("events", "status"),
    [
        ("request respond end", OK),
        ("request respond stop", UNAVAILABLE),
        ("request stop respond", UNAVAILABLE),
        ("request end stop respond", OK),
        ("request stop end respond", OK),
        ("request request stop respond end respond", OK),
        ("request stop request respond", UNAVAILABLE),
        ("end stop", OK),
        ("stop end", UNAVAILABLE),
    ],
)
def test_a_stream_that_its_client_has_ended_ends_with_ok_also_while_the_server_stops(
    events: str, status: int
) -> None:
    handler = Handler()
    stream = handler.stream
    act: dict[str, Callable[[], None]] = {
        "request": lambda: stream.on_message(b""),
        "respond": handler.respond,
        "end": lambda: stream.on_message(None),
        "stop": lambda: stream.on_drain(UNAVAILABLE, "stopping"),
    }
    for event in events.split():
        act[event]()
    assert handler.closed[0] == status  # later ones change nothing
