"""Sequences in backends: controls, states, fillers, and requests that run again."""

from __future__ import annotations

import dataclasses
import gc
import threading
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.support.backend_harness import Harness, rows
from tests.support.summing import STATE, SUMMING, send, spec

from conch.backends.arrays import ArrayBackend, ArrayFunction, ArrayInstance
from conch.backends.python.api import response_sender
from conch.backends.python.api.pb_errors import TritonModelException
from conch.backends.python.api.pb_request import ReceivedRequest
from conch.backends.python.api.pb_response import Converter
from conch.backends.python.api.response_sender import SenderContext
from conch.core.errors import ConchError
from conch.core.execution.executor import Executor
from conch.core.execution.placement import Placement
from conch.core.execution.shaping import Shaper
from conch.core.model_statistics import ModelStatistics
from conch.core.model_version import Model
from conch.core.scheduling.scheduler import Batch
from conch.core.scheduling.sequence.controls import FillerRequest
from conch.core.spec import ControlTensor, ModelSpec, SequenceBatching, WarmupInput, WarmupSample
from conch.core.tensor import Array
from conch.workers.python_backend import PythonBackend

ITERATIVE = SequenceBatching("OLDEST", iterative=True, max_candidates=4)


def python(harness: Harness, source: str, sequence: SequenceBatching, **changes: Any) -> Model:
    harness.directory("m", {"1/model.py": source})
    return harness.load(PythonBackend(), spec(harness, sequence, **changes))


class Function:
    """Adds the input to the state; keeps what it is called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[dict[str, Array], tuple[str, ...]]] = []

    def __call__(self, inputs: dict[str, Array], outputs: tuple[str, ...]) -> Mapping[str, Array]:
        self.calls.append((inputs, outputs))
        after = inputs["BEFORE"] + inputs["IN"]
        return {"OUT": after, "AFTER": after}


class Backend(ArrayBackend):
    default_model_file = "model"

    def __init__(self) -> None:
        self.function = Function()

    def open(self, spec: ModelSpec, placement: Placement) -> ArrayFunction:
        return self.function


@pytest.fixture(params=["in_process", pytest.param("worker", marks=pytest.mark.slow)])
def placement(request: pytest.FixtureRequest) -> str:
    """Models behave the same in both places."""
    return str(request.param)


def test_array_functions_get_controls_and_states(harness: Harness) -> None:
    backend = Backend()
    model = harness.load(backend, spec(harness, SUMMING))
    assert send(harness, model, 1, 5, "S").array("OUT").tolist() == [[1]]
    assert send(harness, model, 2, 5, "E").array("OUT").tolist() == [[3]]
    inputs, outputs = backend.function.calls[1]
    assert {name: array.tolist() for name, array in inputs.items()} == {
        "IN": [[2]], "S": [[0]], "E": [[1]], "R": [[True]], "C": [[5]], "BEFORE": [[1]],
    }  # fmt: skip
    assert outputs == ("OUT", "AFTER")


@pytest.mark.parametrize("requested", [("OUT",), ()])
def test_states_are_asked_for_whatever_clients_want(harness: Harness, requested: tuple[str, ...]) -> None:
    backend = Backend()
    model = harness.load(backend, spec(harness, SUMMING))
    for number, flags in ((1, "S"), (2, "")):
        answer = harness.infer(
            model,
            {"IN": rows(number, width=1)},
            correlation_id=3,
            sequence_start="S" in flags,
            requested=requested,
        )
        assert [tensor.name for tensor in answer.one.outputs] == list(requested)
    assert backend.function.calls[-1][1] == tuple(
        name for name in ("OUT", "AFTER") if name in (*requested, "AFTER")
    )
    assert send(harness, model, 4, 3, "E").array("OUT").tolist() == [[7]]


def test_every_request_gets_its_own_row_beside_fillers(harness: Harness) -> None:
    settings = spec(harness, SUMMING)
    pairs = [
        harness.request(
            {"IN": rows(number, width=1), "BEFORE": rows(10 * number, width=1)},
            requested=("OUT",) if number == 2 else None,
        )
        for number in (1, 2)
    ]
    (first, one), (second, two) = pairs
    filler = FillerRequest(first, {name: tensor for name, tensor in first.inputs.items()})
    batch = Batch([filler, first, filler, second], 4)
    batch.fillers = 2
    Executor(settings, ModelStatistics(), lambda: 1).run(ArrayInstance(settings, Function()), batch)
    assert (one.array("OUT").tolist(), two.array("OUT").tolist()) == ([[11]], [[22]])
    responses = ArrayInstance(settings, Function()).execute(batch)
    states = [
        tensor.numpy().tolist() for each in responses for tensor in each.outputs if tensor.name == "AFTER"
    ]
    assert [states[1], states[3]] == [[[11]], [[22]]], "also where a client did not ask for it"


HISTORY = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            value = sum(pb_utils.get_input_tensor_by_name(request, n).as_numpy() for n in ("IN", "BEFORE"))
            tensors = [pb_utils.Tensor("OUT", value), pb_utils.Tensor("AFTER", value)]
            responses.append(pb_utils.InferenceResponse(tensors))
        {end}
"""


@pytest.mark.parametrize(
    "end", ["return responses", "for q, r in zip(requests, responses): q.get_response_sender().send(r, 1)"]
)
def test_python_models_have_states(harness: Harness, end: str) -> None:
    model = python(harness, HISTORY.format(end=end), SequenceBatching("OLDEST", states=(STATE,)))
    assert send(harness, model, 1, 7, "S").array("OUT").tolist() == [[1]]
    only = harness.infer(model, {"IN": rows(2, width=1)}, correlation_id=7, requested=("OUT",))
    last = send(harness, model, 3, 7, "E")
    for answer, expected in ((only, 3), (last, 6)):
        assert answer.array("OUT").tolist() == [[expected]]
        assert [tensor.name for tensor in answer.one.outputs] == ["OUT"]


COUNTING = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.left = {}
        self.senders = {}

    KIND execute(self, requests):
        responses = []
        for request in requests:
            key = request.correlation_id()
            if request.flags() & 1:
                self.left[key] = int(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy().item())
            self.left[key] -= 1
            left = np.full((1, 1), self.left[key], np.float32)
            response = pb_utils.InferenceResponse([pb_utils.Tensor("OUT", left)])
            if self.left[key]:
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            END
"""
LIST = "responses.append(None if self.left[key] else response)\n        return responses"
SENDING = "request.get_response_sender().send(response, 0 if self.left[key] else 1)"
KEPT = """self.senders.setdefault(key, request.get_response_sender())
            assert request.get_response_sender() is self.senders[key]
            self.senders[key].send(response, 0 if self.left[key] else 1)"""


def counting(end: str, kind: str = "def") -> str:
    return COUNTING.replace("KIND", kind).replace("END", end)


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_python_requests_run_again(harness: Harness, kind: str) -> None:
    model = python(harness, counting(LIST, kind), ITERATIVE)
    answers = [send(harness, model, number) for number in (3, 1, 2)]
    assert [answer.array("OUT").item() for answer in answers] == [0, 0, 0]
    counted = model.statistics.snapshot()
    assert (counted.inference_count, counted.success.count, counted.fail.count) == (3, 3, 0)


@pytest.mark.parametrize("end", [SENDING, KEPT])
def test_senders_live_as_long_as_their_request(harness: Harness, end: str) -> None:
    model = python(harness, counting(end), ITERATIVE, decoupled=True)
    answers = [send(harness, model, number) for number in (4, 1, 2)]
    for answer, number in zip(answers, (4, 1, 2), strict=True):
        numbers = [response.outputs[0].numpy().item() for response in answer.wait()]
        assert numbers == list(range(number))[::-1]


@pytest.fixture
def dropped(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Calls for which senders that are dropped would start threads."""
    begun: list[Any] = []

    class Thread:
        def __init__(self, target: Any, args: Any, name: str) -> None:
            begun.append((target, args, name))

        def start(self) -> None:
            pass

    monkeypatch.setattr(response_sender, "threading", SimpleNamespace(Thread=Thread, Lock=threading.Lock))
    return begun


def test_a_sender_that_was_refused_another_run_is_silent(harness: Harness, dropped: list[Any]) -> None:
    model = python(harness, counting(SENDING), SequenceBatching("OLDEST"), decoupled=True)
    answer = send(harness, model, 2, 5, "SE")
    *_, last = answer.wait()
    assert last.error is not None
    assert "RELEASE_RESCHEDULE, while the model is not configured" in last.error.message
    del answer, last
    harness.close()
    gc.collect()
    assert not dropped


def test_coroutines_of_decoupled_models_can_not_reschedule(harness: Harness) -> None:
    model = python(harness, counting(SENDING, "async def"), ITERATIVE, decoupled=True)
    text = "The release flags of a request cannot be set when it has been released"
    assert text in send(harness, model, 2).error
    # However soon the coroutine begins.
    context = SenderContext(Converter(model.spec), Shaper(model.spec), True, "m", (), reschedules=False)
    request, _ = harness.request({})
    with pytest.raises(TritonModelException, match=text):
        ReceivedRequest(request, Batch([request], 1), context).set_release_flags(2)


def test_a_rescheduled_request_has_no_response(harness: Harness) -> None:
    end = "responses.append(response)\n        return responses"
    model = python(harness, counting(end), ITERATIVE)
    assert (
        "Expected a None object in the execute function return list for reschduled request, found type "
        "'<class 'conch.backends.python.api.pb_response.InferenceResponse'>'."
        in send(harness, model, 2).error
    )
    assert send(harness, model, 1).array("OUT").item() == 0


LAZY = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            if not request.correlation_id():
                assert (request.flags(), request.request_id()) == (0, "")
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
                responses.append(None)
                continue
            value = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", value)]))
        return responses
"""


@pytest.mark.parametrize("answer", ["None", "pb_utils.InferenceResponse([])"])
def test_fillers_may_be_answered_with_anything(harness: Harness, answer: str) -> None:
    model = python(
        harness, LAZY.replace("responses.append(None)", f"responses.append({answer})"), SequenceBatching()
    )
    for number, sequence, flags in ((1, 1, "S"), (2, 2, "S"), (3, 2, "E"), (4, 1, "E")):
        assert send(harness, model, number, sequence, flags).array("OUT").item() == number


def test_a_decoupled_model_may_forget_fillers(harness: Harness, dropped: list[Any]) -> None:
    source = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            if request.correlation_id():
                value = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
                response = pb_utils.InferenceResponse([pb_utils.Tensor("OUT", value)])
                request.get_response_sender().send(response, 1)
"""
    model = python(harness, source, SequenceBatching(), decoupled=True)
    for number, sequence, flags in ((1, 1, "S"), (2, 2, "S"), (3, 2, "E"), (4, 1, "E")):
        assert send(harness, model, number, sequence, flags).array("OUT").item() == number
    harness.close()
    gc.collect()
    assert not dropped


ZERO = WarmupSample("w", (WarmupInput("IN", "FP32", (1,)),), batch_size=2, count=2)


def test_warm_up_makes_sequences_of_its_requests(harness: Harness) -> None:
    backend = Backend()
    harness.load(backend, spec(harness, SUMMING), (ZERO,))
    assert len(backend.function.calls) == 2
    for inputs, outputs in backend.function.calls:
        assert {name: array.tolist() for name, array in inputs.items()} == {
            "IN": [[0], [0]], "S": [[1], [1]], "E": [[1], [1]], "R": [[True], [True]], "C": [[1], [2]],
            "BEFORE": [[0], [0]],
        }  # fmt: skip
        assert outputs == ("OUT", "AFTER")


def test_a_sample_may_say_what_the_server_would(harness: Harness) -> None:
    backend = Backend()
    given = (
        *ZERO.inputs,
        WarmupInput("BEFORE", "FP32", (1,), "FILE", np.float32(8).tobytes()),
        WarmupInput("S", "INT32", (1,)),
    )
    harness.load(backend, spec(harness, SUMMING), (dataclasses.replace(ZERO, inputs=given),))
    inputs, _ = backend.function.calls[0]
    assert (inputs["BEFORE"].tolist(), inputs["S"].tolist()) == ([[8], [8]], [[0], [0]])
    wrong = dataclasses.replace(ZERO, inputs=(*ZERO.inputs, WarmupInput("S", "FP32", (1,))))
    with pytest.raises(ConchError) as raised:
        harness.load(backend, spec(harness, SUMMING), (wrong,))
    assert raised.value.message == (
        "warmup sample 'w': input 'S' is FP32 with shape [1,1], but the model configuration specifies INT32 "
        "with shape [1,1]"
    )


def test_warm_up_runs_requests_until_they_are_done(harness: Harness) -> None:
    harness.directory("m", {"1/model.py": counting(LIST)})
    three = WarmupInput("IN", "FP32", (1,), "FILE", np.float32(3).tobytes())
    sample = dataclasses.replace(ZERO, inputs=(three,))
    model = harness.load(PythonBackend(), spec(harness, ITERATIVE), (sample,))
    assert send(harness, model, 2).array("OUT").item() == 0


def test_strings_identify_the_sequences_of_a_warm_up(harness: Harness) -> None:
    backend = Backend()
    controls = (ControlTensor("C", "CORRID", "BYTES"),)
    harness.load(backend, spec(harness, dataclasses.replace(SUMMING, controls=controls)), (ZERO,))
    assert backend.function.calls[0][0]["C"].tolist() == [[b"1"], [b"2"]]
