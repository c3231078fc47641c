"""What a worker says of a batch: the same, whether it is found to be plain or gone through with care."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.workers.models import spec_of

from conch.core.errors import InternalError
from conch.core.request import InferenceResponse
from conch.core.scheduling.scheduler import Batch
from conch.core.tensor import Tensor
from conch.workers.connection.message_stream import MessageStream
from conch.workers.connection.packet_channel import PacketChannel
from conch.workers.host.host_reader import HostReader
from conch.workers.host.hosted_requests import HostedRequest
from conch.workers.host.response_writer import ResponseWriter
from conch.workers.protocol import tensor_layouts
from conch.workers.protocol.message_records import DoneRecord, ResponseRecord
from conch.workers.protocol.tensor_layouts import Layouts
from conch.workers.protocol.wire import Reader

Change = Callable[[list[HostedRequest], list[InferenceResponse | None]], None]
Said = tuple[bool, list[tuple[ResponseRecord, list[tensor_layouts.TensorLayout]]], bytes, list[int]]


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[ResponseWriter]:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = PacketChannel(here)
    with here, there:
        reading = HostReader(lambda: None, channel.ready)
        yield ResponseWriter(spec_of(tmp_path), MessageStream(channel, in_worker=True), reading)


def response(*names: str, rows: int = 1, **more: Any) -> InferenceResponse:
    outputs = [
        Tensor.from_array(name, np.arange(2 * rows, dtype=np.float32).reshape(rows, 2)) for name in names
    ]
    return InferenceResponse(outputs, **more)


def said(writer: ResponseWriter, change: Change | None) -> Said:
    """Whether all are alike, what is said of each request, the bytes, and which requests are still known."""
    requests = []
    for number in (1, 2, 3):
        request = HostedRequest("m", "1", {}, writer.requests.responder, 0)
        request.number = number
        writer.requests.keep(request)
        requests.append(request)
    responses: list[InferenceResponse | None] = [response("OUT") for _ in requests]
    if change is not None:
        change(requests, responses)
    fields, payload = writer.fields(Batch(list(requests), 3), responses)
    assert payload is not None
    reader, layouts = Reader(memoryview(fields)), Layouts()
    done = DoneRecord.decode(reader)
    assert (done.length, done.error) == (3, 0)
    told = []
    if done.homogeneous:
        inline, _, _ = tensor_layouts.decode_tensors(layouts, reader)
        told = [(ResponseRecord(True), [layout for layout, _, _ in inline])] * 3
    else:
        for _ in range(3):
            record = ResponseRecord.decode(reader)
            inline = tensor_layouts.decode_tensors(layouts, reader)[0] if record.has_tensors else ()
            told.append((record, [layout for layout, _, _ in inline]))
    reader.end()
    left = [number for number in (1, 2, 3) if writer.requests.get(number) is not None]
    return done.homogeneous, told, b"".join(map(bytes, payload.data)), left


def with_response(made: InferenceResponse | None) -> Change:
    def change(requests: list[HostedRequest], responses: list[InferenceResponse | None]) -> None:
        responses[1] = made

    return change


def refused(requests: list[HostedRequest], responses: list[InferenceResponse | None]) -> None:
    """The model has answered with an error by a sender."""
    requests[1].completed = requests[1].failed = True
    responses[1] = None


def again(requests: list[HostedRequest], responses: list[InferenceResponse | None]) -> None:
    requests[1].rescheduled = True
    responses[1] = None


def failed_before(requests: list[HostedRequest], responses: list[InferenceResponse | None]) -> None:
    requests[1].completed = requests[1].failed = True


@pytest.mark.parametrize(
    ("change", "alike", "left"),
    [
        (None, True, []),
        (with_response(response("OUT", rows=2)), False, []),
        (with_response(response()), False, []),
        (with_response(response("OUT", "MORE")), False, []),
        (with_response(response("OUT", parameters={"a": 1})), False, []),
        (with_response(response("OUT", parameters={})), True, []),
        (with_response(response(error=InternalError("no"))), False, []),
        (with_response(None), False, [2]),
        (refused, False, []),
        (again, False, [2]),
        (failed_before, False, []),
    ],
)
def test_a_batch_is_told_as_it_is(
    writer: ResponseWriter,
    monkeypatch: pytest.MonkeyPatch,
    change: Change | None,
    alike: bool,
    left: list[int],
) -> None:
    quick = said(writer, change)
    assert (quick[0], quick[3]) == (alike, left)
    writer.requests.remove_all([request for number in left if (request := writer.requests.get(number))])
    monkeypatch.setattr(ResponseWriter, "_only_tensors", lambda *arguments: None)
    careful = said(writer, change)
    assert repr(quick[1:]) == repr(careful[1:])
    record = quick[1][1][0]
    if change in (refused, failed_before):
        assert record.failed
    assert record.rescheduled is (change is again)
