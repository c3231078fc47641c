"""Requests that outlast their batch: answered by senders, run again, cancelled while they run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.conch.unit.workers.models import floats, source_of, spec_of
from tests.support.servers import eventually
from tests.support.workers import SlowClient, batch_of, request_of, worker

from conch.core.errors import InvalidArgumentError
from conch.core.scheduling.sequence.table import LiveSequence
from conch.core.spec import SequenceBatching, StateSpec, TensorSpec
from conch.core.tensor import Tensor

pytestmark = pytest.mark.process

STREAM = """
for request in requests:
    count = int(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()[0])
    size = int(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()[1])
    sender = request.get_response_sender()
    def stream(sender=sender, count=count, size=size):
        for number in range(count):
            array = np.full(size, number, np.float32)
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)]))
            self.sent = number + 1
            array[:] = -1
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
    threading.Thread(target=stream).start()
"""


@pytest.mark.parametrize(("count", "size"), [(0, 1), (1000, 4), (30, 200_000)])
def test_streams_come_in_order_and_whole(tmp_path: Path, count: int, size: int) -> None:
    with worker(spec_of(tmp_path, source_of(STREAM), decoupled=True)) as running:
        pairs = [request_of(IN=np.array([count, size], np.float32)) for _ in range(2)]
        running.run(*[request for request, _ in pairs])
        for _, answers in pairs:
            assert answers.wait(1)
            responses = [response for _, response, _ in answers.calls if response is not None]
            for number, response in enumerate(responses):
                assert response.error is None
                array = response.outputs[0].numpy()
                assert array.shape == (size,) and (array == number).all()
            assert len(responses) == count
        assert running.link.table.open == {}


@pytest.mark.parametrize("size", [4, 200_000])
def test_a_slow_client_holds_its_own_stream_and_nothing_else(tmp_path: Path, size: int) -> None:
    with worker(spec_of(tmp_path, source_of(STREAM), decoupled=True)) as running:
        slow = SlowClient()
        array = np.array([10_000 if size == 4 else 200, size], np.float32)
        running.run(slow.request(IN=array))
        # The window holds whole small responses, or large ones until it is used up.
        most = 96 if size == 4 else 4
        eventually(lambda: len(slow.calls) == most, "a window of responses")
        quick, answers = request_of(IN=np.array([500, 4], np.float32))
        running.run(quick)
        assert answers.wait(1)
        assert len(slow.calls) == most
        if size == 200_000:
            assert running.link.stream.mappings.count <= 8
        slow.read()
        assert slow.wait(1)
        assert len(slow.calls) == int(array[0]) + 1


def test_a_generator_that_waits_for_a_slow_client_lets_others_go_on(tmp_path: Path) -> None:
    source = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    async def execute(self, requests):
        for number in range(1000):
            array = np.full(4, number, np.float32)
            yield [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)]) for _ in requests]
"""
    with worker(spec_of(tmp_path, source, decoupled=True)) as running:
        slow = SlowClient()
        running.run(slow.request(IN=floats()))
        eventually(lambda: len(slow.calls) == 96, "a window of responses")
        quick = [request_of(IN=floats()) for _ in range(31)]
        for request, _ in quick:
            running.run(request)
        for _, answers in quick:
            assert answers.wait(1) and len(answers.calls) == 1001
        assert len(slow.calls) == 96
        slow.read()
        assert slow.wait(1) and len(slow.calls) == 1001


def test_a_sender_answers_after_execute_has_returned(tmp_path: Path) -> None:
    body = """
senders = [request.get_response_sender() for request in requests]
def later():
    for sender in senders:
        sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.ones((1, 4), np.float32))]))
threading.Timer(0.05, later).start()
return [None] * len(requests)
"""
    outputs = (TensorSpec("OUT", "FP32", (2, 2), reshape=(4,), labels=("a", "b", "c", "d")),)
    spec = spec_of(tmp_path, source_of(body), max_batch_size=2, outputs=outputs)
    with worker(spec) as running:
        plain, answers = request_of(IN=floats())
        classified, classes = request_of(IN=floats())
        classified.classes = {"OUT": 1}
        classified.requested = ("OUT",)
        assert running.run(plain, classified) == [None, None]
        assert answers.wait(1) and classes.wait(1)
        # Shaped for clients once, on this side.
        assert answers.calls[0][1] is not None
        assert answers.calls[0][1].outputs[0].shape == (1, 2, 2)
        assert classes.calls[0][1] is not None and classes.calls[0][1].error is None
        assert classes.calls[0][1].outputs[0].datatype == "BYTES"
        assert running.link.table.open == {}


def test_states_of_what_a_sender_sends_go_to_the_sequence(tmp_path: Path) -> None:
    body = """
for request in requests:
    state = pb_utils.Tensor("S_OUT", np.ones(1, np.float32))
    tensors = [pb_utils.Tensor("OUT", np.ones(4, np.float32)), state]
    request.get_response_sender().send(pb_utils.InferenceResponse(tensors))
return [None] * len(requests)
"""
    states = (StateSpec("S_IN", "S_OUT", "FP32", (1,), (1,)),)
    spec = spec_of(tmp_path, source_of(body), sequence=SequenceBatching(states=states))
    with worker(spec) as running:
        request, answers = request_of(IN=floats())

        sequence = request.sequence = LiveSequence(1, {}, {})
        assert running.run(request) == [None]
        assert answers.wait(1)
        assert answers.calls[0][1] is not None
        assert [tensor.name for tensor in answers.calls[0][1].outputs] == ["OUT"]
        assert sequence.states["S_IN"].numpy().tolist() == [1]


def test_an_error_that_a_sender_sends_counts_as_a_failure(tmp_path: Path) -> None:
    body = """
for request in requests:
    error = pb_utils.TritonError("no", pb_utils.TritonError.INVALID_ARG)
    request.get_response_sender().send(pb_utils.InferenceResponse([], error=error))
return [None] * len(requests)
"""
    with worker(spec_of(tmp_path, source_of(body))) as running:
        request, answers = request_of(IN=floats())
        running.run(request)
        assert answers.calls[0][1] is not None
        assert type(answers.calls[0][1].error) is InvalidArgumentError
        assert request.failed


def test_requests_run_again_with_what_the_model_kept(tmp_path: Path) -> None:
    body = """
responses = []
for request in requests:
    value = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()[0]
    if value:
        request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
        self.senders = getattr(self, "senders", []) + [request.get_response_sender()]
        assert all(sender is self.senders[0] for sender in self.senders)
        responses.append(None)
    else:
        responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.ones(1, np.float32))]))
return responses
"""
    spec = spec_of(tmp_path, source_of(body), sequence=SequenceBatching("OLDEST", iterative=True))
    with worker(spec) as running:
        request, answers = request_of(IN=np.ones(1, np.float32))
        for _ in range(3):
            assert running.run(request) == [None]
            assert request.rescheduled
            request.rescheduled = False
        request.inputs = {"IN": Tensor.from_array("IN", np.zeros(1, np.float32))}
        assert running.run(request) == [None]  # sent by its sender
        assert answers.wait(1)
        assert running.link.table.open == {}

        # One that never runs again is forgotten, here and there.
        other, _ = request_of(IN=np.zeros(1, np.float32))
        forgotten, _ = request_of(IN=np.ones(1, np.float32))
    with worker(spec) as running:
        running.run(forgotten)
        forgotten.fail(InvalidArgumentError("it can't"))
        running.run(other)
        assert running.link.table.open == {}
        assert running.link.table.rescheduled == set()


def test_a_request_is_seen_to_be_cancelled_while_the_model_executes(tmp_path: Path) -> None:
    body = """
while not requests[0].is_cancelled():
    time.sleep(0.001)
return [pb_utils.InferenceResponse([], error=pb_utils.TritonError("seen", pb_utils.TritonError.CANCELLED))]
"""
    with worker(spec_of(tmp_path, source_of(body))) as running:
        for early in (True, False):
            request, _ = request_of(IN=floats())
            begun = running.start(batch_of(request))
            if not early:
                eventually(lambda: bool(running.link.in_flight()), "a batch that runs")
            request.cancelled = True
            request.notify_cancelled()
            (response,) = begun.result()
            assert response is not None and response.error is not None
            assert response.error.message == "seen"
