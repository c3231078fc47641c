"""A worker reads requests that are alike as it reads those that are not."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.core import make_spec

from conch.core.request import InferenceRequest
from conch.core.scheduling.scheduler import Batch
from conch.core.tensor import ELEMENT_SIZES, NUMPY_DTYPES, Tensor
from conch.workers.connection.message_stream import MessageStream
from conch.workers.connection.packet_channel import PacketChannel
from conch.workers.host.hosted_requests import HostedRequest, HostedRequests
from conch.workers.protocol import message_records
from conch.workers.protocol.message_records import BatchRecord
from conch.workers.protocol.tensor_layouts import Layouts
from conch.workers.protocol.wire import Kind, WireError, encode_json

Key = list[tuple[str, str, tuple[int, ...]]]
KEYS = st.lists(
    st.tuples(
        st.sampled_from(["A", "B", "C"]),
        st.sampled_from([*ELEMENT_SIZES]),
        st.lists(st.integers(0, 3), max_size=3).map(tuple) | st.just((1,) * 70) | st.just((0, 2**62)),
    ),
    max_size=3,
    unique_by=lambda entry: entry[0],
)


@pytest.fixture(scope="module")
def sides() -> Iterator[tuple[MessageStream, MessageStream]]:
    """The server's side and the worker's, in one process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    both = (
        MessageStream(PacketChannel(ours, blocking=False), False),
        MessageStream(PacketChannel(theirs), True),
    )
    yield both
    for side in both:
        side.channel.close()
        side.close()


def _requests() -> HostedRequests:
    return HostedRequests(make_spec(name="m"), lambda *answer: None)


def _made(key: Key, ids: Sequence[str]) -> list[InferenceRequest]:
    """Requests whose tensors all have other bytes."""
    requests = []
    layouts = Layouts()
    for number, request_id in enumerate(ids):
        inputs = {}
        for place, (name, datatype, shape) in enumerate(key):
            nbytes = layouts.decode(encode_json([[name, datatype, shape]])).tensors[0].nbytes
            inputs[name] = Tensor(name, datatype, shape, bytes([(number + place) % 2] * nbytes))
        request = InferenceRequest("m", "", inputs, lambda *answer: None, 5 + number, request_id, ("OUT",))
        request.queued_ns, request.batch_size = 6 + number, 7 + number
        request.deadline_ns = number or None
        requests.append(request)
    return requests


def _sent(
    sides: tuple[MessageStream, MessageStream],
    requests: Sequence[InferenceRequest],
    alike: bool,
    known: HostedRequests,
) -> Batch:
    """The batch as the worker reads it."""
    server, worker = sides
    payload = server.pack([list(request.inputs.values()) for request in requests])
    numbers = range(10, 10 + len(requests))
    begin = BatchRecord(len(requests), 33, 1, 44, alike).encode()
    if alike:
        rows = message_records.encode_homogeneous(requests, numbers)
        assert rows is not None and payload.homogeneous is not None
        fields = begin + rows + payload.homogeneous
    else:
        fields = begin
        for request, number, tensors in zip(requests, numbers, payload.lists, strict=True):
            fields += message_records.encode_request(request, number, 0) + tensors
    server.send(Kind.EXECUTE, 1, fields, payload)
    return known.batch(worker.receive())


def _said(request: InferenceRequest) -> dict[str, object]:
    """All that is said of a request."""
    names = {name for kind in type(request).__mro__ for name in getattr(kind, "__slots__", ())}
    values = {
        name: getattr(request, name) for name in names - {"inputs", "_responder"} if hasattr(request, name)
    }
    return values | {
        "inputs": [
            (name, tensor.name, tensor.datatype, tensor.shape, tensor.nbytes, bytes(tensor.data))
            for name, tensor in request.inputs.items()
        ]
    }


@given(key=KEYS, ids=st.lists(st.sampled_from(["", "a", "ü" * 9]), min_size=1, max_size=4))
def test_requests_that_are_alike_are_what_they_would_be_by_themselves(
    sides: tuple[MessageStream, MessageStream], key: Key, ids: list[str]
) -> None:
    requests = _made(key, ids)
    for _ in range(2):  # the second time out of what is remembered
        known, others = _requests(), _requests()
        alike, single = _sent(sides, requests, True, known), _sent(sides, requests, False, others)
        assert [_said(each) for each in alike.requests] == [_said(each) for each in single.requests]
        for batch in (alike, single):
            assert (batch.size, batch.instance, batch.compute_start_ns, batch.fillers) == (33, 1, 44, 0)
        for number, request in enumerate(alike.requests, 10):
            assert known.get(number) is request
            assert isinstance(request, HostedRequest) and type(request) is type(others.get(number))


def test_inputs_of_requests_that_are_alike_may_be_written_to(
    sides: tuple[MessageStream, MessageStream],
) -> None:
    key = [("A", "FP32", (1, 3)), ("B", "INT64", ()), ("C", "UINT8", (5,))]
    batch = _sent(sides, _made(key, [""] * 3), True, _requests())
    before = [_said(request)["inputs"] for request in batch.requests]
    for tensor in batch.requests[1].inputs.values():
        assert tensor.writable
        array = tensor.numpy()
        assert (array.dtype, array.shape) == (NUMPY_DTYPES[tensor.datatype], tensor.shape)
        array[...] = 9
        assert (np.frombuffer(tensor.data, array.dtype) == 9).all()
    after = [_said(request)["inputs"] for request in batch.requests]
    assert (after[0], after[2]) == (before[0], before[2])  # each has memory of its own


def test_requests_that_are_alike_must_have_all_their_bytes(
    sides: tuple[MessageStream, MessageStream],
) -> None:
    server, worker = sides
    requests = _made([("A", "FP32", (3,))], ["", ""])
    payload = server.pack([list(request.inputs.values()) for request in requests[:1]])
    rows = message_records.encode_homogeneous(requests, [1, 2])
    assert rows is not None and payload.homogeneous is not None
    server.send(
        Kind.EXECUTE, 1, BatchRecord(2, 2, -1, 0, True).encode() + rows + payload.homogeneous, payload
    )
    known = _requests()
    with pytest.raises(WireError, match="tensors end at 32, but there are 16 bytes"):
        known.batch(worker.receive())
    assert known.get(1) is None
