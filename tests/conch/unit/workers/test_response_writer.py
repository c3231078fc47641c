"""The server reads the responses of a batch as the worker writes them."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conch.unit.workers.models import spec_of
from tests.support.workers import request_of

from conch.core.errors import ConchError, InternalError
from conch.core.request import InferenceResponse
from conch.core.tensor import Tensor
from conch.ipc.channel import Kind, PacketChannel, WireError
from conch.ipc.codec import (
    FAILED,
    FILLER,
    PRESENT,
    RESCHEDULED,
    decode_responses,
    encode_requests,
    number_of,
)
from conch.ipc.tensors import MessageStream, Payload
from conch.workers.host.host_reader import HostReader
from conch.workers.host.hosted_requests import HostedRequest
from conch.workers.host.response_writer import ResponseWriter

Change = Callable[[list[HostedRequest], list[InferenceResponse | None]], None]
BATCH = 5


class Sides:
    """A worker's writer, and the server's stream."""

    def __init__(self, tmp_path: Path, decoupled: bool = False) -> None:
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.server = MessageStream(PacketChannel(ends[0]), False)
        self.worker = MessageStream(PacketChannel(ends[1]), True)
        reader = HostReader(lambda: None, self.worker.channel.ready)
        self.writer = ResponseWriter(spec_of(tmp_path, decoupled=decoupled), self.worker, reader)

    def close(self) -> None:
        self.writer.close()
        for side in (self.server, self.worker):
            side.channel.close()
            side.close()


@pytest.fixture
def sides(tmp_path: Path) -> Iterator[Sides]:
    made = Sides(tmp_path)
    yield made
    made.close()


def response(*names: str, rows: int = 1, **more: Any) -> InferenceResponse:
    outputs = [
        Tensor.from_array(name, np.arange(2 * rows, dtype=np.float32).reshape(rows, 2)) for name in names
    ]
    return InferenceResponse(outputs, **more)


def told(made: InferenceResponse | None) -> object:
    """Contents of a response."""
    if made is None:
        return None
    error = None if made.error is None else (type(made.error), made.error.message)
    outputs = [(each.name, each.datatype, each.shape, bytes(each.data)) for each in made.outputs]
    return outputs, error, dict(made.parameters or {})


def nothing(requests: list[HostedRequest], responses: list[InferenceResponse | None]) -> None:
    """All are plain."""


def with_response(made: InferenceResponse | None) -> Change:
    def change(requests: list[HostedRequest], responses: list[InferenceResponse | None]) -> None:
        responses[1] = made

    return change


def refused(requests: list[HostedRequest], responses: list[InferenceResponse | None]) -> None:
    """The model has answered with an error by a sender."""
    requests[1].completed = requests[1].failed = requests[1].gone = True
    responses[1] = None


def again(requests: list[HostedRequest], responses: list[InferenceResponse | None]) -> None:
    requests[1].rescheduled = True
    responses[1] = None


def failed_before(requests: list[HostedRequest], responses: list[InferenceResponse | None]) -> None:
    requests[1].completed = requests[1].failed = True


@pytest.mark.parametrize(
    ("change", "flags", "left"),
    [
        (nothing, None, []),
        (with_response(response("OUT", rows=2)), None, []),
        (with_response(response()), None, []),
        (with_response(response("OUT", "MORE")), None, []),
        (with_response(response("OUT", parameters={"a": 1})), PRESENT, []),
        (with_response(response("OUT", parameters={})), None, []),
        (with_response(response(error=InternalError("no"))), PRESENT | 2, []),
        (with_response(None), 0, [1]),
        (refused, FAILED, []),
        (again, RESCHEDULED, [1]),
        (failed_before, PRESENT | FAILED, []),
    ],
)
def test_a_batch_is_told_as_it_is(sides: Sides, change: Change, flags: int | None, left: list[int]) -> None:
    requests = [request_of(f"r{index}", IN=np.zeros(2, np.float32))[0] for index in range(3)]
    for index, each in enumerate(requests):
        each.batch_size = index + 1
        each.parameters = {"a": index} if index == 2 else None
    payload = sides.server.pack([list(each.inputs.values()) for each in requests])
    fields, texts = encode_requests(requests, 6)
    sides.server.send(Kind.EXECUTE, BATCH, fields, payload, texts)
    batch = sides.writer.requests.batch(BATCH, sides.worker.receive())
    hosted = [each for each in batch.requests if isinstance(each, HostedRequest)]
    assert [each.number for each in hosted] == [number_of(BATCH, index) for index in range(3)]
    assert [(each.id, each.batch_size, each.parameters) for each in hosted] == [
        (each.id, each.batch_size, each.parameters) for each in requests
    ]
    responses: list[InferenceResponse | None] = [response("OUT") for _ in requests]
    change(hosted, responses)
    batch.compute_input_end_ns, batch.compute_output_start_ns = 7, 8
    sides.writer.send_done(BATCH, *sides.writer.encode(BATCH, batch, responses))
    read = decode_responses(sides.server.receive(), 3)
    assert (read.error, read.times[:2]) == (None, (7, 8))
    assert [told(each) for each in read.responses] == [told(each) for each in responses]
    assert (None if read.flags is None else read.flags[1]) == flags
    kept = [index for index in range(3) if sides.writer.requests.get(number_of(BATCH, index)) is not None]
    assert kept == left


@pytest.mark.parametrize("outcome", [InternalError("no"), ValueError("no"), [None] * 5])
def test_a_batch_that_fails_has_one_error(sides: Sides, outcome: Any) -> None:
    fields, texts = encode_requests([request_of()[0]])
    sides.server.send(Kind.EXECUTE, BATCH, fields, sides.server.pack([[]]), texts)
    batch = sides.writer.requests.batch(BATCH, sides.worker.receive())
    sides.writer.send_done(BATCH, *sides.writer.encode(BATCH, batch, outcome))
    read = decode_responses(sides.server.receive(), 1)
    assert isinstance(read.error, ConchError) and read.responses == []
    assert sides.writer.requests.get(number_of(BATCH, 0)) is None


def test_what_does_not_fit_is_refused(sides: Sides) -> None:
    one = request_of()[0]
    for (fields, texts), tensors, why in (
        (encode_requests([one], flags=FILLER), Payload(), "too early"),
        (encode_requests([one], numbers=[77]), sides.server.pack([[]]), "runs again, but has not run"),
        (encode_requests([one] * 2), sides.server.pack([[]]), "1 lists of tensors are described, not 2"),
    ):
        sides.server.send(Kind.EXECUTE, BATCH, fields, tensors, texts)
        with pytest.raises(WireError, match=why):
            sides.writer.requests.batch(BATCH, sides.worker.receive())
    sides.worker.send(Kind.DONE, BATCH, b"")
    with pytest.raises(WireError, match="too early"):
        decode_responses(sides.server.receive(), 1)
