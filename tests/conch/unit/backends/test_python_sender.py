"""Response senders: decoupled models, and the others, from any thread."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from tests.support.backend_harness import Harness, one_batch, rows, tensor_specs

from conch.core.model_version import Model
from conch.core.spec import TensorSpec
from conch.workers.python_backend import PythonBackend

START = """
import asyncio, threading, time
import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

def reply(value):
    return pb_utils.InferenceResponse([pb_utils.Tensor("B", np.full((1, 2), value, np.float32))])

def text_of(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except pb_utils.TritonModelException as error:
        return str(error)
    return "nothing raised"

class TritonPythonModel:
"""


def load(harness: Harness, body: str, decoupled: bool = True, **changes: Any) -> Model:
    harness.directory("m", {"1/model.py": START + body})
    spec = harness.spec(
        **{
            "inputs": tensor_specs(A=("FP32", (2,))),
            "outputs": tensor_specs(B=("FP32", (2,))),
            "decoupled": decoupled,
            **changes,
        }
    )
    return harness.load(PythonBackend(), spec)


COUNT = """
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            count = int(request.inputs()[0].as_numpy()[0, 0])
            for value in range(count):
                sender.send(reply(value))
            sender.send(flags=FINAL)
"""

THREADS = """
    def initialize(self, args):
        self.threads = []

    def execute(self, requests):
        for request in requests:
            self.threads.append(threading.Thread(target=self.work, args=(request,)))
            self.threads[-1].start()

    def work(self, request):
        sender = request.get_response_sender()
        count = int(request.inputs()[0].as_numpy()[0, 0])
        for value in range(count):
            sender.send(reply(value), FINAL if value == count - 1 else 0)
        if not count:
            sender.send(flags=FINAL)

    def finalize(self):
        for thread in self.threads:
            thread.join()
"""

ASYNC = """
    async def execute(self, requests):
        await asyncio.gather(*[self.work(request) for request in requests])

    async def work(self, request):
        sender = request.get_response_sender()
        for value in range(int(request.inputs()[0].as_numpy()[0, 0])):
            await asyncio.sleep(0)
            sender.send(reply(value))
        sender.send(flags=FINAL)
"""


@pytest.fixture(params=["in_process", "worker"])
def placement(request: pytest.FixtureRequest) -> str:
    """Models behave the same in both places."""
    return str(request.param)


@pytest.mark.parametrize("body", [COUNT, THREADS, ASYNC])
def test_any_number_of_responses(harness: Harness, body: str) -> None:
    model = load(harness, body)
    answers = [harness.infer(model, {"A": rows(count)}) for count in (0, 1, 3)]
    values = [[response.outputs[0].numpy()[0, 0] for response in answer.wait()] for answer in answers]
    assert values == [[], [0], [0, 1, 2]]


def test_outputs_are_pruned_and_reshaped_as_elsewhere(harness: Harness) -> None:
    body = """
    def execute(self, requests):
        sender = requests[0].get_response_sender()
        extra = pb_utils.Tensor("C", np.zeros((1, 2), np.float32))
        sender.send(pb_utils.InferenceResponse(reply(1).output_tensors() + [extra]), FINAL)
    """
    outputs = (TensorSpec("B", "FP32", (2, 1), reshape=(2,)), TensorSpec("C", "FP32", (2,)))
    model = load(harness, body, outputs=outputs)
    (tensor,) = harness.infer(model, {"A": rows(1)}, requested=("B",)).one.outputs
    assert (tensor.name, tensor.shape) == ("B", (1, 2, 1))


def test_decoupled_execute_returns_none(harness: Harness) -> None:
    body = """
    def execute(self, requests):
        requests[0].get_response_sender().send(reply(1))
        return []
    """
    responses = harness.infer(load(harness, body), {"A": rows(1)}).wait()
    assert responses[0].error is None
    assert responses[1].error is not None and responses[1].error.message == (
        "Failed to process the request(s) for model 'm_0_0', message: Python model 'm_0_0' is using the "
        "decoupled mode and the execute function must return None."
    )


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_exception_ends_what_was_not_ended(harness: Harness, kind: str) -> None:
    body = f"""
    {kind} execute(self, requests):
        self.senders = [request.get_response_sender() for request in requests]
        self.senders[0].send(reply(1), FINAL)
        raise ValueError("halfway")
    """
    model = load(harness, body, batching=one_batch(2))
    first, second = harness.batch(model, [{"A": rows(1)}, {"A": rows(2)}])
    assert first.array("B").tolist() == [[1, 1]]
    assert "message: ValueError: halfway\n\nAt:\n" in second.error


def test_request_that_is_forgotten_is_answered(harness: Harness) -> None:
    model = load(harness, "    def execute(self, requests):\n        pass\n")
    assert harness.infer(model, {"A": rows(1)}).error == (
        "model 'm_0_0' dropped the response sender of a request without sending the final flag"
    )
    harness.close()
    one = load(
        harness, "    def execute(self, requests):\n        requests[0].get_response_sender()\n", False
    )
    assert "dropped the response sender" in harness.infer(one, {"A": rows(1)}).error


def test_what_a_decoupled_model_may_not_send(harness: Harness) -> None:
    body = """
    def execute(self, requests):
        sender = requests[0].get_response_sender()
        texts = [
            text_of(sender.send, reply(1), 2),
            text_of(sender.send),
            text_of(sender.send, "x"),
        ]
        assert requests[0].get_response_sender() is sender
        sender.send(pb_utils.InferenceResponse([], parameters={"texts": "|".join(texts)}))
        sender.send(flags=FINAL)
        self.late = text_of(sender.send, reply(2)) + "|" + text_of(sender.send, flags=FINAL)

    def finalize(self):
        pb_utils.Logger.log_warn(self.late)
    """
    parameters = harness.infer(load(harness, body), {"A": rows(1)}).one.parameters
    assert parameters is not None
    assert str(parameters["texts"]).split("|") == [
        "Unable to send response. Unsupported flag provided.",
        "Inference Response object must be provided when the response flags is set to zero.",
        "Expected an 'InferenceResponse' object, found type '<class 'str'>'.",
    ]


def test_sender_that_is_closed(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    body = """
    def execute(self, requests):
        sender = requests[0].get_response_sender()
        sender.send(flags=FINAL)
        pb_utils.Logger.log_warn(text_of(sender.send, reply(2)))
    """
    model = load(harness, body)
    assert harness.infer(model, {"A": rows(1)}).wait() == []
    harness.close()
    assert "Unable to send response. Response sender has been closed." in caplog.text


def test_senders_of_models_that_are_not_decoupled(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    body = """
    def execute(self, requests):
        first, second, third = requests
        sender = first.get_response_sender()
        pb_utils.Logger.log_warn(text_of(sender.send, flags=FINAL))
        sender.send(reply(1))
        pb_utils.Logger.log_warn(text_of(sender.send, reply(1)))
        sender.send(flags=FINAL)
        self.thread = threading.Timer(0.02, second.get_response_sender().send, (reply(2), FINAL))
        self.thread.start()
        return [None, None, reply(3)]

    def finalize(self):
        self.thread.join()
    """
    model = load(harness, body, decoupled=False, batching=one_batch(3))
    answers = harness.batch(model, [{"A": rows(n)} for n in range(3)])
    assert [answer.array("B")[0, 0] for answer in answers] == [1, 2, 3]
    assert "Non-decoupled model cannot send complete final before sending a response." in caplog.text
    assert "Non-decoupled model cannot send more than one response." in caplog.text


def test_none_for_all_and_a_response_besides_a_sender(harness: Harness) -> None:
    body = """
    def execute(self, requests):
        senders = [request.get_response_sender() for request in requests]
        if len(requests) == 2:
            return [reply(7), reply(8)]
        senders[0].send(reply(9), FINAL)
    """
    model = load(harness, body, decoupled=False, batching=one_batch(2))
    answers = harness.batch(model, [{"A": rows(1)}, {"A": rows(1)}])
    assert [answer.array("B")[0, 0] for answer in answers] == [7, 8]
    assert harness.infer(model, {"A": rows(1, 1)}).array("B")[0, 0] == 9


def test_threads_that_share_a_sender_send_everything_once(harness: Harness) -> None:
    body = """
    def execute(self, requests):
        sender = requests[0].get_response_sender()
        threads = [threading.Thread(target=self.work, args=(sender,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sender.send(flags=FINAL)

    def work(self, sender):
        for value in range(25):
            sender.send(reply(value))
    """
    assert len(harness.infer(load(harness, body), {"A": rows(1)}).wait()) == 100


def test_cancelled_requests_can_be_seen(harness: Harness) -> None:
    body = """
    def execute(self, requests):
        sender = requests[0].get_response_sender()
        while not sender.is_cancelled():
            time.sleep(0.001)
        assert requests[0].is_cancelled()
        sender.send(pb_utils.InferenceResponse(
            error=pb_utils.TritonError("gone", pb_utils.TritonError.CANCELLED)), FINAL)
    """
    model = load(harness, body)
    answer = harness.infer(model, {"A": rows(1)})
    assert answer.request is not None
    threading.Timer(0.01, model.cancel, (answer.request,)).start()
    response = answer.one
    assert response.error is not None and response.error.code == "CANCELLED"


def test_arrays_of_a_response_are_the_models(harness: Harness) -> None:
    model = load(harness, COUNT)
    (response,) = harness.infer(model, {"A": rows(1)}).wait()
    assert response.outputs[0].numpy().dtype == np.float32
