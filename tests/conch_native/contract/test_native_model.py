"""Models of compiled backends, as a worker runs them, without a worker."""

from __future__ import annotations

import ctypes
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.core import make_spec
from tests.support.native_backends import NativeBackends, native_backends
from tests.support.servers import eventually
from tests.support.waiting import PATIENCE_S
from tests.support.workers import request_of

from conch.core.custom_metrics import CustomFamilies
from conch.core.errors import InvalidArgumentError, ResourceExhaustedError
from conch.core.execution.placement import Placement
from conch.core.request import InferenceRequest, InferenceResponse, SpanRecord
from conch.core.scheduling.scheduler import Batch
from conch.core.spec import SequenceBatching, StateSpec, TensorSpec
from conch.core.tensor import Tensor
from conch.ipc.channel import Kind, PacketChannel
from conch.ipc.codec import decode_responses, encode_requests
from conch.ipc.spec_json import Library
from conch.ipc.tensors import MessageStream, ReceivedTensor
from conch.workers.host import native_model
from conch.workers.host.host_reader import HostReader
from conch.workers.host.hosted_requests import HostedRequest
from conch.workers.host.native_library import Buffer, ExecuteBuffers, HostLibrary
from conch.workers.host.native_model import NativeModel
from conch.workers.host.native_words import (
    Released,
    Response,
    address_of,
    pack_layout,
    pack_words,
    read_events,
)
from conch.workers.host.response_writer import JoinedResponses, ResponseWriter

__all__ = ["native_backends"]

pytestmark = pytest.mark.process

PROBED = TensorSpec("OUT", "UINT8", (-1,)), TensorSpec("BATCH", "INT32", (1,))


class Traced:
    """A watch that keeps the spans of the model."""

    trace_context = '{"traceparent":"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}'

    def __init__(self) -> None:
        self.spans: list[SpanRecord] = []

    def add_span(self, span: SpanRecord) -> None:
        self.spans.append(span)


class Answered:
    """The answers to one request, for which the server has granted some units."""

    def __init__(self, number: int, array: Any, datatype: str, granted: int) -> None:
        tensor = ReceivedTensor("IN", datatype, array.shape, None, array)
        self.responses: list[InferenceResponse] = []
        self.ended = threading.Event()
        self.request = HostedRequest("m", "1", {"IN": tensor}, self._respond, 0)
        self.request.number, self.request.area = number, None
        self.request.granted, self.request.spent = granted, 0
        self.request.gone, self.request.waiting = False, None

    def grant(self, units: int) -> None:
        self.request.granted += units
        self.request.granted_more()

    def has_more(self, count: int) -> bool:
        return len(self.responses) > count or self.ended.is_set()

    def _respond(self, request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
        assert not self.ended.is_set()
        self.request.spent += 1
        if response is not None:
            self.responses.append(response)
        if final:
            self.request.gone = True
            self.ended.set()

    @property
    def values(self) -> list[int]:
        return [int(response.outputs[0].numpy().flat[0]) for response in self.responses]


@contextmanager
def opened(
    backends: NativeBackends,
    name: str,
    *outputs: TensorSpec,
    decoupled: bool = False,
    sequence: SequenceBatching | None = None,
) -> Iterator[NativeModel]:
    spec = replace(
        make_spec(decoupled=decoupled, sequence=sequence), outputs=outputs, config={"input": [{"name": "IN"}]}
    )
    library = Library(name, backends.build(name), {}, backends.host)
    calls: Any = None  # these backends make none
    model = NativeModel(spec, library, calls, CustomFamilies(), lambda text: None)
    model.open([Placement("m_0", "CPU")])
    yield model
    model.close()


def responses_of(model: NativeModel, *answered: Answered) -> list[InferenceResponse]:
    outcome = model.instances[0].execute(Batch([each.request for each in answered], len(answered), 0))
    assert isinstance(outcome, list)
    return outcome


@pytest.fixture
def stream(native_backends: NativeBackends, tmp_path: Path) -> Iterator[NativeModel]:
    with opened(native_backends, "stream", TensorSpec("OUT", "INT32", (1,)), decoupled=True) as model:
        yield model


def test_responses_wait_for_their_own_client_only(
    stream: NativeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 100
    monkeypatch.setattr(native_model, "MOST_WAITING", 4 * count)  # bytes of all responses to one of them
    for first in (1, 3):
        slow, fast = (
            Answered(number, np.array([count], np.int32), "INT32", 10) for number in (first, first + 1)
        )
        fast.request.granted = 1000
        for answered in (slow, fast):
            assert stream.instances[0].execute(Batch([answered.request], 1, 0)) is None
        assert fast.ended.wait(PATIENCE_S)
        assert fast.values == list(range(count))
        eventually(lambda slow=slow: len(slow.responses) == 10, "the first are sent")  # type: ignore[misc]
        while not slow.ended.is_set():
            sent = len(slow.responses)
            slow.grant(7)
            eventually(partial(slow.has_more, sent), "more are sent")
        assert slow.values == list(range(count))


def test_responses_of_a_request_that_runs_again_stay_in_order(native_backends: NativeBackends) -> None:
    state = StateSpec("LEFT_IN", "LEFT_OUT", "INT64", (1,), (1,))
    sequence = SequenceBatching(states=(state,), iterative=True)
    out = TensorSpec("OUT", "INT64", (1,))
    with opened(native_backends, "steps", out, decoupled=True, sequence=sequence) as model:
        answered = Answered(1, np.array([[5]]), "INT64", 1)
        request = answered.request
        request.sequence_start = True
        runs = 1
        while (outcome := model.instances[0].execute(Batch([request], 1, 0))) is not None:
            states = outcome[0]
            assert isinstance(states, InferenceResponse)
            (left,) = states.outputs
            assert (left.name, request.rescheduled) == ("LEFT_OUT", True)
            request.inputs["LEFT_IN"] = Tensor("LEFT_IN", "INT64", (1, 1), bytes(left.data))
            request.rescheduled = request.sequence_start = False
            runs += 1
        assert runs == 6
        while not answered.ended.is_set():
            sent = len(answered.responses)
            answered.grant(1)
            eventually(partial(answered.has_more, sent), "the next one is sent")
        assert answered.values == [5, 4, 3, 2, 1, 0]


def test_a_client_that_never_reads_ends_with_an_error(
    stream: NativeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_model, "MOST_WAITING", 400)
    answered = Answered(1, np.array([1000], np.int32), "INT32", 5)
    stream.instances[0].execute(Batch([answered.request], 1, 0))
    assert answered.ended.wait(PATIENCE_S)
    *some, last = answered.responses
    assert [int(response.outputs[0].numpy()[0]) for response in some] == list(range(5))
    assert isinstance(last.error, ResourceExhaustedError)


def test_memory_of_outputs_is_freed_with_their_last_view(native_backends: NativeBackends) -> None:
    with opened(native_backends, "probe", *PROBED) as model:
        array = np.full((1, 1 << 20), 7, np.uint8)
        sizes = []
        for number in range(1, 301):
            answered = Answered(number, array, "UINT8", 1)
            (response,) = responses_of(model, answered)
            assert response.outputs[0].data[-1] == 7
            if number in (100, 300):
                sizes.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096)
        assert sizes[1] - sizes[0] < 50 << 20


@pytest.mark.parametrize(
    ("joined", "arrays"),
    [
        (True, [np.arange(16, dtype=np.float32)[None]] * 3),
        (True, [np.full((1, 3), number, np.uint8) for number in range(5)]),
        (True, [np.zeros((1, 0), np.float32)] * 2),
        (True, [np.ones((1, 128))] * 2),
        (False, [np.ones((1, 129))] * 2),  # not small
        (False, [np.ones((1, size), np.int64) for size in (2, 3)]),
        (False, [np.array([[b"a", b"bc"]], np.object_)] * 2),
        (False, [np.ones((1, 1024), np.uint8)] * 40),  # too large for one message
    ],
)
def test_joined_responses_are_those_that_are_handled_one_by_one(
    joined: bool, arrays: list[Any], native_backends: NativeBackends
) -> None:
    output = TensorSpec("OUT", Tensor.from_array("", arrays[0]).datatype, (-1,))
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with opened(native_backends, "copy", output) as model:
        server, worker = (
            MessageStream(PacketChannel(end), side) for end, side in zip(ends, (False, True), strict=True)
        )
        writer = ResponseWriter(model.spec, worker, HostReader(lambda: None, worker.channel.ready), True)

        def outcome(number: int, requested: tuple[str, ...] | None) -> tuple[bool, list[Any]]:
            """Joined or not, and the outputs of a batch's responses as the server reads them."""
            requests = [request_of(IN=array)[0] for array in arrays]
            requests[0].requested = requested
            fields, texts = encode_requests(requests, len(requests), 0)
            payload = server.pack([request.inputs.values() for request in requests])
            server.send(Kind.EXECUTE, number, fields, payload, texts)
            batch = writer.requests.batch(number, worker.receive())
            outcome = model.instances[0].execute(batch)
            writer.send_done(number, *writer.encode(number, batch, outcome))
            responses = decode_responses(server.receive(), len(requests)).responses
            outputs = [each.outputs for each in responses if each is not None and each.error is None]
            return isinstance(outcome, JoinedResponses), [
                (tensor.name, tensor.numpy().tolist()) for (tensor,) in outputs
            ]

        expected = [("OUT", array.tolist()) for array in arrays]
        assert outcome(1, None) == (joined, expected)
        # A request that names its outputs, unlike the others, keeps the responses apart.
        assert outcome(2, ("OUT",)) == (False, expected)
        for side in (server, worker):
            side.channel.close()
            side.close()


def test_layouts_that_are_dropped_stay_until_their_batch_has_run(native_backends: NativeBackends) -> None:
    with opened(native_backends, "copy", TensorSpec("OUT", "UINT8", (-1,))) as model:
        for first in range(1, 1500, 7):  # all shapes differ, and their table is emptied within batches
            arrays = [np.full((1, first + index), index, np.uint8) for index in range(7)]
            answered = [Answered(first + index, array, "UINT8", 1) for index, array in enumerate(arrays)]
            outputs = [response.outputs[0].numpy() for response in responses_of(model, *answered)]
            assert [each.tolist() for each in outputs] == [each.tolist() for each in arrays]


def test_a_failed_batch_leaves_the_model_as_it_was(native_backends: NativeBackends) -> None:
    with opened(native_backends, "probe", *PROBED) as model:
        (instance,) = model.instances
        for number in range(1, 200, 2):
            failing = Answered(number, np.frombuffer(b"E", np.uint8)[None], "UINT8", 1)
            with pytest.raises(InvalidArgumentError, match="the input has an E"):
                instance.execute(Batch([failing.request], 1, 0))
            fine = Answered(number + 1, np.frombuffer(b"fine", np.uint8)[None], "UINT8", 1)
            (response,) = responses_of(model, fine)
            assert response.outputs[0].numpy().tobytes() == b"fine"


def test_a_cancelled_request_ends_early(stream: NativeModel) -> None:
    answered = Answered(1, np.array([10_000_000], np.int32), "INT32", 1 << 40)
    stream.instances[0].execute(Batch([answered.request], 1, 0))
    eventually(partial(answered.has_more, 0), "the first response is there")
    answered.request.cancelled = True
    answered.request.notify_cancelled()
    assert answered.ended.wait(PATIENCE_S)
    assert answered.values == list(range(len(answered.responses)))
    assert len(answered.responses) < 10_000_000


def test_an_activity_is_a_span_before_the_response(native_backends: NativeBackends) -> None:
    with opened(native_backends, "probe", *PROBED) as model:
        for number in range(1, 50):
            answered = Answered(number, np.frombuffer(b"T", np.uint8)[None], "UINT8", 1)
            watch: Any = Traced()
            answered.request.watch = watch
            assert model.instances[0].execute(Batch([answered.request], 1, 0))
            ((name, _, parent, start, end, *_),) = watch.spans
            assert (name, parent, start, end) == ("probed", 0xB7AD6B7169203331, 17, 17)


@pytest.mark.parametrize("decoupled", [False, True])
def test_a_response_may_be_larger_than_the_buffers(native_backends: NativeBackends, decoupled: bool) -> None:
    with opened(native_backends, "heavy", TensorSpec("OUT", "UINT8", (-1,)), decoupled=decoupled) as model:
        nbytes = 20 << 20
        answered = Answered(1, np.array([nbytes, 0]), "INT64", 1)
        if decoupled:
            model.instances[0].execute(Batch([answered.request], 1, 0))
            assert answered.ended.wait(PATIENCE_S)
        (response,) = answered.responses if decoupled else responses_of(model, answered)
        assert response.parameters == {"text": "x" * nbytes}


def test_a_backend_waits_while_much_is_undelivered(native_backends: NativeBackends) -> None:
    # Without `NativeModel`, which would deliver.
    host, library = HostLibrary(native_backends.host), native_backends.build("heavy")
    sent = ctypes.c_long.in_dll(ctypes.CDLL(str(library)), "heavy_sent")
    most, count = 65, 400
    host.open(library, "heavy", "{}")
    host.open_model("m", 1, Path("/"), "{}", False, True, False, lambda config: None)
    host.set_outputs(["OUT"], 0)
    host.open_instance(0, "m_0", 1, 0, False, "{}", [])
    one = Buffer(64)
    assert host.wait(one, 0) == 0
    inputs = np.array([1 << 20, count])
    layout = host.new_layout(pack_layout((("IN", "INT64", (2,)),), ("OUT",)))
    words = pack_words((1, layout, 0, 0, 0, 0, 0, 0, address_of(inputs), inputs.nbytes))
    host.execute(0, 1, words, ExecuteBuffers())
    eventually(lambda: sent.value >= most - 5, "the queue is full")
    taken, released, ended = 0, False, False
    while not (released and ended):
        assert sent.value - taken <= most
        for event in read_events(one.data, host.wait(one, round(1000 * PATIENCE_S))):
            released |= isinstance(event, Released)
            if isinstance(event, Response):
                ended = event.final
                taken += event.result != 0
                if event.result:
                    host.free_result(event.result)
    assert (taken, sent.value) == (count, count)
    host.close()
