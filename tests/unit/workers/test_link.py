"""A server's link to real worker processes, with batches that go there and come back."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from tests.support.core import WAIT_S, Answers
from tests.support.servers import eventually
from tests.support.workers import (
    NoCalls,
    Running,
    batch_of,
    model_spec,
    request_of,
    worker,
)

from conch.core.clock import monotonic_ns
from conch.core.custom_metrics import FAMILIES
from conch.core.errors import (
    ConchError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
    UnsupportedError,
)
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.scheduler.sequence.controls import FillerRequest
from conch.core.spec import ModelSpec, SequenceBatching, StateSpec, TensorSpec
from conch.core.tensor import Tensor
from conch.workers.devices import ServerDevices
from conch.workers.exchange import Incoming, ReturnedTensor
from conch.workers.wire import WireError

SOURCE = """
import json, os, sys, threading, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([self.one(request)]) for request in requests]

    def one(self, request):
        return pb_utils.Tensor("OUT", pb_utils.get_input_tensor_by_name(request, "IN").as_numpy())
"""


def source_of(body: str, class_body: str = "") -> str:
    """A model whose `execute` is the given lines."""
    lines = "\n".join(f"        {line}" for line in body.strip("\n").splitlines())
    return SOURCE.split("class TritonPythonModel", maxsplit=1)[0] + (
        f"class TritonPythonModel:\n    def execute(self, requests):\n{lines}\n{class_body}\n"
    )


def spec_of(directory: Path, source: str = SOURCE, dims: tuple[int, ...] = (-1,), **more: Any) -> ModelSpec:
    more.setdefault("inputs", (TensorSpec("IN", "FP32", dims),))
    more.setdefault("outputs", (TensorSpec("OUT", "FP32", dims),))
    return model_spec(directory, source, **more)


def floats(count: int = 4) -> Any:
    return np.arange(count, dtype=np.float32)


@pytest.mark.parametrize("count", [0, 4, 8 * 1024, 8 * 1024 + 1, 1_000_000])
def test_tensors_of_all_sizes_go_there_and_come_back(tmp_path: Path, count: int) -> None:
    with worker(spec_of(tmp_path)) as running:
        for _ in range(3):
            assert (running.infer(IN=floats(count))["OUT"] == floats(count)).all()
        exchange = running.link._exchange
        # Its inputs are its outputs: they stay in the block that they came in.
        assert 0 <= exchange.pool.count - (4 * count > 32 * 1024) <= 1
        assert exchange.mappings.count == 0


def test_many_requests_in_one_batch(tmp_path: Path) -> None:
    with worker(spec_of(tmp_path)) as running:
        requests = [request_of(IN=floats(number))[0] for number in range(1, 1500)]
        responses = running.run(*requests)
        for number, response in enumerate(responses, 1):
            assert response is not None
            assert (response.outputs[0].numpy() == floats(number)).all()


def test_everything_about_a_request_is_there(tmp_path: Path) -> None:
    body = """
return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([json.dumps([
    r.request_id(), r.correlation_id(), r.flags(), r.timeout(), r.parameters(), r.requested_output_names(),
    r.is_cancelled()])], np.object_))], parameters={"b": True, "i": 1, "s": "é"}) for r in requests]
"""
    with worker(spec_of(tmp_path, source_of(body))) as running:
        plain, _ = request_of(IN=floats())
        full, _ = request_of("é\ud800", IN=floats())
        full.correlation_id = "seq"
        full.sequence_start = full.sequence_end = True
        full.timeout_us = 7
        full.parameters = {"a": True, "b": 1, "c": 1.5, "d": "x"}
        full.requested = ("OUT", "OTHER")
        full.deadline_ns = monotonic_ns() + 10**12
        late, _ = request_of(IN=floats())
        late.deadline_ns = monotonic_ns() - 1
        late.correlation_id = 2**64 - 1
        gone, _ = request_of(IN=floats())
        gone.cancelled = True
        responses = running.run(plain, full, late, gone)
    import json

    texts = [json.loads(response.outputs[0].numpy()[0]) for response in responses if response is not None]
    assert texts[0] == ["", 0, 0, 0, "{}", ["OUT"], False]
    assert texts[1] == [
        *("é\ud800", "seq", 3, 7, '{"a":true,"b":1,"c":1.5,"d":"x"}', ["OUT", "OTHER"], False),
    ]
    assert texts[2][1] == 2**64 - 1
    assert (texts[2][6], texts[3][6]) == (True, True)
    assert responses[0] is not None
    assert responses[0].parameters == {"b": True, "i": 1, "s": "é"}


def test_a_filler_is_one_and_is_not_answered(tmp_path: Path) -> None:
    body = """
assert [len(requests), [r.get_response_sender() is not None for r in requests]] == [2, [True, True]]
return [None if n == 1 else pb_utils.InferenceResponse([self.one(r)]) for n, r in enumerate(requests)]
"""
    spec = spec_of(
        tmp_path, source_of(body, SOURCE[SOURCE.index("    def one") :]), sequence=SequenceBatching()
    )
    with worker(spec) as running:
        request, answers = request_of(IN=floats())
        batch = batch_of(request, FillerRequest(request, dict(request.inputs)))
        batch.fillers = 1
        # The first has a sender, so what is returned for it is sent by that.
        assert running.begin(batch).result() == [None, None]
        assert answers.wait(1)
        assert running.link._table.open == {}


def test_times_and_copies_come_back(tmp_path: Path) -> None:
    with worker(spec_of(tmp_path)) as running:
        request, _ = request_of(IN=floats(100_000))
        batch = batch_of(request)
        before = monotonic_ns()
        running.begin(batch).result()
        assert before <= batch.compute_input_end_ns <= batch.compute_output_start_ns <= monotonic_ns()
        # One copy there; what comes back is the input.
        assert 400_000 <= batch.bytes_copied <= 400_200
    new = source_of(
        "return [pb_utils.InferenceResponse([pb_utils.Tensor('OUT', self.two(requests[0]))])]"
    ) + (
        "    def two(self, request):\n"
        "        return 2 * pb_utils.get_input_tensor_by_name(request, 'IN').as_numpy()\n"
    )
    with worker(spec_of(tmp_path, new)) as running:
        batch = batch_of(request_of(IN=floats(100_000))[0])
        running.begin(batch).result()
        assert 800_000 <= batch.bytes_copied <= 800_200  # one copy there, and one back


def test_a_response_that_waits_is_not_changed_by_a_model_that_keeps_its_inputs(tmp_path: Path) -> None:
    body = """
array = pb_utils.get_input_tensor_by_name(requests[0], "IN").as_numpy()
self.kept = getattr(self, "kept", [])
self.kept.append(array)
for one in self.kept:
    one += 1
return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)])]
"""
    with worker(spec_of(tmp_path, source_of(body))) as running:
        responses: list[Any] = []
        for _ in range(2):
            request, _ = request_of(IN=floats(100_000))
            request.responses_wait = True
            responses += running.run(request)
        assert all((one.outputs[0].numpy() == floats(100_000) + 1).all() for one in responses if one)
        assert None not in responses


@pytest.mark.parametrize("decoupled", [False, True])
def test_an_input_that_a_sender_sends_is_what_it_was_then(tmp_path: Path, decoupled: bool) -> None:
    body = """
for request in requests:
    tensor = request.inputs()[0]
    request.get_response_sender().send(pb_utils.InferenceResponse([tensor]))
    tensor.as_numpy()[:] = 666
    if self.decoupled:
        request.get_response_sender().send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
    source = source_of(body, f"    decoupled = {decoupled}")
    spec = spec_of(tmp_path, source, outputs=(TensorSpec("IN", "FP32", (-1,)),), decoupled=decoupled)
    with worker(spec) as running:
        request, answers = request_of(IN=floats(100_000))
        request.responses_wait = True
        running.run(request)
        assert answers.wait(1)
    (_, response, _), *_ = answers.calls
    assert response is not None and (response.outputs[0].numpy() == floats(100_000)).all()


def test_a_response_that_can_not_be_copied_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(self: Tensor, name: str) -> Tensor:
        raise MemoryError("no memory")

    with worker(spec_of(tmp_path)) as running:
        waits, _ = request_of(IN=floats(100_000))
        waits.responses_wait = True
        monkeypatch.setattr(ReturnedTensor, "detached", no_memory)
        failed, answered = running.run(waits, request_of(IN=floats(50_000))[0])
        assert failed is not None and failed.error is not None and "no memory" in failed.error.message
        assert answered is not None and (answered.outputs[0].numpy() == floats(50_000)).all()
        assert not running.link.lost


@pytest.mark.parametrize("odd", ["", "shape", "datatype", "cancelled", "requested"])
def test_batches_whose_requests_are_alike_but_for_one(tmp_path: Path, odd: str) -> None:
    body = """
return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([repr([
    r.request_id(), r.requested_output_names(), r.is_cancelled(), [t.as_numpy().tolist() for t in r.inputs()]
    ])], np.object_))]) for r in requests]
"""
    requests = []
    for number in range(4):
        array = np.array([[number], [7]], np.int32)
        request, _ = request_of(f"é{number}" if number % 2 else "", IN=floats(1) + number, MORE=array)
        request.requested = ("OUT",)
        requests.append(request)
    one = requests[2]
    if odd == "shape":
        one.inputs["IN"] = Tensor.from_array("IN", floats(2))
    elif odd == "datatype":
        one.inputs["MORE"] = Tensor.from_array("MORE", np.array([b"x", b"yy"], np.object_))
    elif odd == "cancelled":
        one.cancelled = True
    elif odd == "requested":
        one.requested = None
    with worker(spec_of(tmp_path, source_of(body))) as running:
        responses = running.run(*requests)
    for response, request in zip(responses, requests, strict=True):
        assert response is not None
        values = [tensor.numpy().tolist() for tensor in request.inputs.values()]
        seen = [request.id, ["OUT"], request.cancelled, values]
        assert response.outputs[0].numpy()[0].decode() == repr(seen)


def test_a_model_that_keeps_an_input_keeps_its_memory_and_no_other(tmp_path: Path) -> None:
    body = """
array = pb_utils.get_input_tensor_by_name(requests[0], "IN").as_numpy()
if not hasattr(self, "kept"):
    self.kept = array[:2]
return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", self.kept)])]
"""
    with worker(spec_of(tmp_path, source_of(body))) as running:
        assert running.infer(IN=floats(100_000) + 5)["OUT"].tolist() == [5, 6]
        for number in range(5):
            assert running.infer(IN=floats(100_000) + number)["OUT"].tolist() == [5, 6]
        assert running.link._exchange.pool.lent == 1
        assert running.link._exchange.pool.count == 2


@pytest.mark.parametrize(
    ("raised", "kind", "text"),
    [
        ('pb_utils.TritonError("no é", pb_utils.TritonError.NOT_FOUND)', NotFoundError, "no é"),
        ('pb_utils.TritonError("no", pb_utils.TritonError.UNSUPPORTED)', UnsupportedError, "no"),
        ('pb_utils.TritonError("no")', InternalError, "no"),
    ],
)
def test_errors_of_requests_keep_their_code(
    tmp_path: Path, raised: str, kind: type[ConchError], text: str
) -> None:
    body = f"""
return [pb_utils.InferenceResponse([], error={raised}), pb_utils.InferenceResponse([self.one(requests[1])])]
"""
    source = source_of(body, SOURCE[SOURCE.index("    def one") :])
    with worker(spec_of(tmp_path, source)) as running:
        failed, fine = running.run(request_of(IN=floats())[0], request_of(IN=floats())[0])
    assert failed is not None and type(failed.error) is kind and failed.error.message == text
    assert fine is not None and fine.error is None


@pytest.mark.parametrize("error", ["ValueError('bad é')", "SystemExit(3)", "KeyboardInterrupt()"])
def test_what_execute_raises_fails_the_batch_with_the_models_frames(tmp_path: Path, error: str) -> None:
    with worker(spec_of(tmp_path, source_of(f"raise {error}"))) as running:
        for _ in range(2):  # and the worker goes on
            with pytest.raises(InternalError, match=r"model\.py\(\d+\): execute") as raised:
                running.run(request_of(IN=floats())[0])
            assert error.partition("(")[0] in raised.value.message
        assert running.link._table.open == {}


def test_a_load_that_fails_says_why(tmp_path: Path) -> None:
    source = source_of("return []", "    def initialize(self, args):\n        raise ValueError('not so')")
    with pytest.raises(InternalError, match="ValueError: not so"), worker(spec_of(tmp_path, source)):
        pass
    os.remove(tmp_path / "m" / "1" / "model.py")
    spec = dataclasses.replace(spec_of(tmp_path, source), model_file="other.py")
    with pytest.raises(UnavailableError, match="Python model file not found"), worker(spec):
        pass


def test_finalize_is_called_before_the_worker_ends(tmp_path: Path) -> None:
    file = tmp_path / "finalized"
    source = SOURCE + f"    def finalize(self):\n        open({str(file)!r}, 'w').close()\n"
    with worker(spec_of(tmp_path, source)) as running:
        running.infer(IN=floats())
        assert running.link.close(WAIT_S)
        assert file.exists()
        assert running.process.wait(WAIT_S) == 0
    assert running.lost == []


def test_a_worker_that_does_not_finalize_in_time(tmp_path: Path) -> None:
    source = SOURCE + "    def finalize(self):\n        time.sleep(100)\n"
    with worker(spec_of(tmp_path, source)) as running:
        assert not running.link.close(0.1)
        assert running.process.wait(WAIT_S) == 3  # its socket is closed
    assert running.lost == []


# --- senders -----------------------------------------------------------------------------------------------

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
        assert running.link._table.open == {}


class Slow(Answers):
    """A client that does not read until it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()

    def __call__(self, request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
        super().__call__(request, response, final)
        assert self.go_on.wait(WAIT_S)


@pytest.mark.parametrize("size", [4, 200_000])
def test_a_slow_client_holds_its_own_stream_and_nothing_else(tmp_path: Path, size: int) -> None:
    with worker(spec_of(tmp_path, source_of(STREAM), decoupled=True)) as running:
        slow = Slow()
        array = np.array([10_000 if size == 4 else 200, size], np.float32)
        inputs = {"IN": Tensor.from_array("IN", array)}
        running.run(InferenceRequest("m", "", inputs, slow, monotonic_ns()))
        eventually(lambda: len(slow.calls) == 1, "a first response")
        quick, answers = request_of(IN=np.array([500, 4], np.float32))
        running.run(quick)
        assert answers.wait(1)
        (entry,) = running.link._table.open.values()
        waiting = len(entry._queue)
        # The window holds: whole small responses, or large ones until it is used up.
        assert waiting <= 96
        if size == 200_000:
            assert running.link._exchange.mappings.count <= 8
        slow.go_on.set()
        assert slow.wait(1)
        assert len(slow.calls) == int(array[0]) + 1


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
        assert running.link._table.open == {}


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

        sequence = SimpleNamespace(states={})
        request.sequence = sequence  # type: ignore[assignment]
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
        assert running.link._table.open == {}

        # One that never runs again is forgotten, here and there.
        other, _ = request_of(IN=np.zeros(1, np.float32))
        forgotten, _ = request_of(IN=np.ones(1, np.float32))
    with worker(spec) as running:
        running.run(forgotten)
        forgotten.fail(InvalidArgumentError("it can't"))
        running.run(other)
        assert running.link._table.open == {}
        assert running.link._table.again == set()


def test_a_request_is_seen_to_be_cancelled_while_the_model_executes(tmp_path: Path) -> None:
    body = """
while not requests[0].is_cancelled():
    time.sleep(0.001)
return [pb_utils.InferenceResponse([], error=pb_utils.TritonError("seen", pb_utils.TritonError.CANCELLED))]
"""
    with worker(spec_of(tmp_path, source_of(body))) as running:
        for early in (True, False):
            request, _ = request_of(IN=floats())
            begun = running.begin(batch_of(request))
            if not early:
                eventually(lambda: bool(running.link.in_flight()), "a batch that runs")
            request.cancelled = True
            request.tell_cancelled()
            (response,) = begun.result()
            assert response is not None and response.error is not None
            assert response.error.message == "seen"


# --- what the model says and asks --------------------------------------------------------------------------


def test_logs_appear_with_their_level_and_place(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    body = """
pb_utils.Logger.log_warn("careful é")
pb_utils.Logger.log_verbose("chatty")
import logging
logging.getLogger("mine").error("own %d", 1)
logging.getLogger("conch.workers.link.made.up").error("made up")
logging.getLogger("conch.python_model.another").error("made up")
try:
    1 / 0
except ZeroDivisionError:
    logging.exception("root")
return [pb_utils.InferenceResponse([]) for _ in requests]
"""
    with worker(spec_of(tmp_path, source_of(body))) as running:
        with caplog.at_level(logging.INFO):
            running.run(request_of(IN=floats())[0])
        with caplog.at_level(logging.DEBUG, "conch.python_model"):
            running.run(request_of(IN=floats())[0])
    found = [(record.name, record.levelname, record.getMessage()) for record in caplog.records]
    assert ("conch.python_model.m", "WARNING", "careful é") in found
    assert ("conch.python_model.m", "ERROR", "own 1") in found
    assert [name for name, _, text in found if text == "made up"][:2] == [
        "conch.workers.link",
        "conch.python_model.m",
    ]
    (first, _) = [record for record in caplog.records if record.getMessage().startswith("root\n")]
    assert "ZeroDivisionError" in first.getMessage()
    assert first.pathname == str(tmp_path / "m" / "1" / "model.py")
    assert first.lineno > 5 and first.funcName == "execute"
    assert sum(text == "chatty" for _, _, text in found) == 1


def test_metrics_are_the_servers_and_go_with_the_worker(tmp_path: Path) -> None:
    body = """
if not hasattr(self, "family"):
    self.family = pb_utils.MetricFamily("w6_total", "Things", pb_utils.MetricFamily.COUNTER)
    self.metric = self.family.Metric({"a": "b"})
    self.histogram = pb_utils.MetricFamily("w6_seconds", "Times", pb_utils.MetricFamily.HISTOGRAM)
    self.times = self.histogram.Metric({}, [1.0, 2.0])
self.metric.increment(2)
self.times.observe(1.5)
texts = [str(self.metric.value())]
for what in (lambda: self.metric.set(1), lambda: self.metric.increment(-1), self.times.value,
             lambda: pb_utils.MetricFamily("w6_total", "x", 1), lambda: pb_utils.MetricFamily("nv_x", "x")):
    try:
        what()
    except pb_utils.TritonModelException as error:
        texts.append(str(error))
return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array(texts, np.object_))])]
"""
    here = FAMILIES.family("w6_total", "counter", "Things")
    mine = here.metric({"a": "b"})
    mine.increment(10)
    with worker(spec_of(tmp_path, source_of(body))) as running:
        running.infer(IN=floats())
        texts = [text.decode() for text in running.infer(IN=floats())["OUT"]]
        assert texts[0] == "14.0" and mine.value == 14
        assert len(texts) == 6
        assert "does not support Set" in texts[1] and "non-negative" in texts[2]
        assert "does not support Value" in texts[3]
        assert "is there already, as counter" in texts[4] and "'nv_x' can't be" in texts[5]
        (family,) = [family for family in FAMILIES.snapshot() if family.name == "w6_seconds"]
        assert family.metrics[0].value.cumulative() == [0, 2, 2]  # type: ignore[union-attr]
    assert [family.name for family in FAMILIES.snapshot() if family.name.startswith("w6_")] == ["w6_total"]


class Server(NoCalls):
    """A server with one other model, which adds one and answers twice."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.cancelled: list[InferenceRequest] = []
        self.requests: list[InferenceRequest] = []

    def find(self, request: InferenceRequest) -> Any:
        if request.model_name != "other":
            raise NotFoundError("no such model")
        return type(
            "Found", (), {"spec": type("Spec", (), {"name": "other", "version": 3, "decoupled": True})}
        )

    def submit(self, request: InferenceRequest, may_lead: bool = False, model: Any = None) -> None:
        assert may_lead
        self.requests.append(request)
        if request.model_name != "other":
            raise NotFoundError("no such model")
        for final in (False, True):
            output = Tensor.from_array("OUT", request.inputs["IN"].numpy() + 1)
            request.respond(InferenceResponse([output], None, {"final": final}), final)

    def cancel(self, request: InferenceRequest) -> None:
        self.cancelled.append(request)

    def model_ready(self, name: str, version: str) -> bool:
        return name == "other"

    def load(self, name: str, parameters: Any) -> None:
        self.asked.append((name, dict(parameters)))

    def unload(self, name: str, unload_dependents: bool) -> None:
        raise UnavailableError("not now")


CALLER = """
import gc
from conch.core.request import InferenceRequest
from conch.core.tensor import Tensor
calls = next(item for item in gc.get_objects() if type(item).__name__ == "WorkerCalls")
"""


@pytest.mark.parametrize("given", ["tensor", "pb_utils.Tensor('IN', tensor.as_numpy())"])
def test_what_a_call_was_given_stays_as_it_was(tmp_path: Path, given: str) -> None:
    body = f"""
tensor = requests[0].inputs()[0]
answers = pb_utils.InferenceRequest("other", ["OUT"], [{given}]).exec(decoupled=True)
tensor.as_numpy()[:] = 666
return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([len(list(answers))], np.float32))])]
"""
    server = Server()
    with worker(spec_of(tmp_path, source_of(body)), server) as running:
        assert running.infer(IN=floats(100_000))["OUT"].tolist() == [2]
        (request,) = server.requests
        assert (request.inputs["IN"].numpy() == floats(100_000)).all()


def test_the_model_calls_the_server(tmp_path: Path) -> None:
    body = (
        CALLER
        + """
array = pb_utils.get_input_tensor_by_name(requests[0], "IN").as_numpy()
got = []
def respond(request, response, final):
    got.append((response.outputs[0].numpy().sum() if response.outputs else str(response.error), final))
texts = []
for name in ("other", "missing"):
    inputs = {"IN": Tensor.from_array("IN", array)}
    request = InferenceRequest(name, "", inputs, respond, 0, "id", None, {"a": 1})
    try:
        texts.append(calls.find(request).spec.decoupled)
    except Exception as error:
        texts.append(type(error).__name__)
    calls.submit(request)
    calls.wait(lambda: got and got[-1][1])
    texts.append([(float(a) if not isinstance(a, str) else a, b) for a, b in got])
    got.clear()
texts.append(calls.model_ready("other", ""))
calls.load("other", {"config": "{}", "file:1/model.py": b"\\0\\xff", "n": 1, "b": True})
try:
    calls.unload("other", True)
except Exception as error:
    texts.append([type(error).__name__, str(error)])
return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([json.dumps(texts)], np.object_))])]
"""
    )
    server = Server()
    import json

    with worker(spec_of(tmp_path, source_of(body)), server) as running:
        for size in (4, 100_000):
            outputs = running.infer(IN=np.ones(size, np.float32))["OUT"]
            assert json.loads(outputs[0]) == [
                True,
                [[2.0 * size, False], [2.0 * size, True]],
                "NotFoundError",
                [
                    [
                        "Model missing - Error when running inference: Failed for execute the inference "
                        "request. Model 'missing' is not ready.",
                        True,
                    ]
                ],
                True,
                ["UnavailableError", "not now"],
            ]
    assert server.asked == [("other", {"config": "{}", "file:1/model.py": b"\0\xff", "n": 1, "b": True})] * 2
    assert (server.requests[0].id, server.requests[0].parameters) == ("id", {"a": 1})


def test_a_model_is_looked_up_once_and_again_when_it_has_changed(tmp_path: Path) -> None:
    body = """
array = pb_utils.get_input_tensor_by_name(requests[0], "IN").as_numpy()
request = pb_utils.InferenceRequest("other", ["OUT"], [pb_utils.Tensor("IN", array)])
response = request.exec()
if response.has_error():
    return [pb_utils.InferenceResponse([], error=response.error())]
return [pb_utils.InferenceResponse(response.output_tensors())]
"""

    class Changing(Server):
        decoupled = False
        found = 0

        def find(self, request: InferenceRequest) -> Any:
            self.found += 1
            found = super().find(request)
            found.spec.decoupled = self.decoupled
            return found

        def submit(self, request: InferenceRequest, may_lead: bool = False, model: Any = None) -> None:
            output = Tensor.from_array("OUT", request.inputs["IN"].numpy() + 1)
            request.respond(InferenceResponse([output]), True)

    server = Changing()
    with worker(spec_of(tmp_path, source_of(body)), server) as running:
        for size in (4, 100_000):  # the large answer is in a block, and returned as it came
            for _ in range(2):
                assert (running.infer(IN=floats(size))["OUT"] == floats(size) + 1).all()
        assert server.found == 5  # once before the first call, and once with each
        server.decoupled = True
        texts = []
        for _ in range(2):
            (response,) = running.run(request_of(IN=floats())[0])
            assert response is not None and response.error is not None
            texts.append(response.error.message)
    assert "has become decoupled since it was called before; send the request again" in texts[0]
    assert "Please use 'decoupled=True' argument" in texts[1]


def test_calls_that_are_open_when_the_worker_ends_are_cancelled(tmp_path: Path) -> None:
    body = (
        CALLER
        + """
request = InferenceRequest("other", "", {}, lambda *args: None, 0)
calls.submit(request)
calls.submit(InferenceRequest("other", "", {}, lambda *args: None, 0))
calls.cancel(request)
os.kill(os.getpid(), 9)
"""
    )

    class Never(Server):
        def submit(self, request: InferenceRequest, may_lead: bool = False, model: Any = None) -> None:
            self.requests.append(request)

    server = Never()
    with worker(spec_of(tmp_path, source_of(body)), server) as running:
        with pytest.raises(UnavailableError):
            running.run(request_of(IN=floats())[0])
        running.wait_lost()
    assert len(server.requests) == 2
    assert server.cancelled[0] is server.requests[0]
    assert server.requests[1] in server.cancelled


@pytest.mark.parametrize("ready", ["True", "False", "1/0", "5"])
def test_readiness_is_asked_also_while_the_model_executes(tmp_path: Path, ready: str) -> None:
    class_body = f"    def is_ready(self):\n        return {ready}\n"
    body = """
while not requests[0].is_cancelled():
    time.sleep(0.001)
return [pb_utils.InferenceResponse([])]
"""
    with worker(spec_of(tmp_path, source_of(body, class_body))) as running:
        readiness = running.link.readiness
        assert readiness is not None
        request, _ = request_of(IN=floats())
        begun = running.begin(batch_of(request))
        for _ in range(2):
            readiness.start()
            assert readiness.result() is (ready == "True")
        request.cancelled = True
        request.tell_cancelled()
        begun.result()
    readiness.start()
    assert not readiness.result()


def test_a_model_without_a_check_has_no_readiness(tmp_path: Path) -> None:
    with worker(spec_of(tmp_path)) as running:
        assert running.link.readiness is None


# --- the end -----------------------------------------------------------------------------------------------

ENDS = {
    "exits": "os._exit(7)",
    "is killed": "os.kill(os.getpid(), 9)",
    "crashes": "import ctypes; ctypes.string_at(0)",
    "closes its socket": (
        "for fd in os.listdir('/proc/self/fd'):\n"
        "    try:\n"
        "        if 'socket' in os.readlink(f'/proc/self/fd/{fd}'):\n"
        "            os.close(int(fd))\n"
        "    except OSError:\n"
        "        pass\n"
        "time.sleep(0.1)"
    ),
    "writes garbage": (
        "import socket\n"
        "for fd in os.listdir('/proc/self/fd'):\n"
        "    try:\n"
        "        if 'socket' in os.readlink(f'/proc/self/fd/{fd}'):\n"
        "            socket.socket(fileno=os.dup(int(fd))).send(b'garbage' * 100)\n"
        "    except OSError:\n"
        "        pass\n"
        "time.sleep(100)"
    ),
}


@pytest.mark.parametrize("how", ENDS)
def test_when_a_worker_ends_only_what_it_had_fails(tmp_path: Path, how: str) -> None:
    with worker(spec_of(tmp_path, source_of(ENDS[how])), NoCalls()) as running:
        requests = [request_of(f"id{number}", IN=floats(100_000))[0] for number in range(2)]
        with pytest.raises(UnavailableError) as raised:
            running.run(*requests)
        assert raised.value.message.startswith(
            "Failed to process the request(s) for model instance 'm_0_0', message: Stub process 'm_0_0' is "
            "not healthy."
        )
        reason = running.wait_lost()
        assert ("can't be understood" in reason) == (how == "writes garbage")
        assert [each.request_ids for each in running.link.in_flight()] == [("id0", "id1")]
        with pytest.raises(UnavailableError):  # at once
            running.run(request_of(IN=floats())[0])


def test_requests_that_are_open_when_a_worker_ends_are_answered(tmp_path: Path) -> None:
    body = """
self.senders = [request.get_response_sender() for request in requests]
self.senders[0].send(pb_utils.InferenceResponse([]))
"""
    for decoupled in (True, False):
        source = source_of(body + "\nreturn None")
        with worker(spec_of(tmp_path, source, decoupled=decoupled)) as running:
            first, answered = request_of(IN=floats())
            second, answers = request_of(IN=floats())
            running.run(first, second)
            running.process.kill()
            assert answers.wait(1)
            assert answers.calls[-1][1] is not None
            assert type(answers.calls[-1][1].error) is UnavailableError
            assert answered.wait(1)
            running.wait_lost()
            assert len(answered.calls) == 1 + decoupled


def test_a_worker_that_ends_while_it_loads(tmp_path: Path) -> None:
    source = source_of("return []", "    def initialize(self, args):\n        os._exit(3)")
    with pytest.raises(UnavailableError, match="is not healthy"), worker(spec_of(tmp_path, source)):
        pass


def test_a_worker_whose_server_is_gone_ends_although_its_model_hangs(tmp_path: Path) -> None:
    with worker(spec_of(tmp_path, source_of("time.sleep(1000)"))) as running:
        begun = running.begin(batch_of(request_of(IN=floats())[0]))
        running.link._channel.shut()
        assert running.process.wait(WAIT_S) == 3
        with pytest.raises(UnavailableError):
            begun.result()


def test_a_stopped_worker_holds_up_nobody(tmp_path: Path) -> None:
    with worker(spec_of(tmp_path, source_of("return []"))) as running:
        os.kill(running.process.pid, signal.SIGSTOP)
        try:
            request, _ = request_of(IN=floats(20_000))
            begun = running.begin(batch_of(request))
            for _ in range(5000):  # more than the socket takes
                running.link._sender.tell(*(_cancel_of(running, request)))
            running.link.lose("it hangs")
            with pytest.raises(UnavailableError, match="it hangs"):
                begun.result()
            assert running.wait_lost() == "it hangs"
        finally:
            os.kill(running.process.pid, signal.SIGCONT)


def _cancel_of(running: Running, request: InferenceRequest) -> tuple[Any, int]:
    from conch.workers.wire import Kind

    return Kind.CANCEL, 10**9


def test_a_worker_of_another_version(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[2])\n"
        "from conch.workers import wire; wire.VERSION = 99\n"
        "from conch.workers.host.loop import serve; serve(int(sys.argv[1]))"
    )
    running = Running(spec_of(tmp_path), NoCalls(), code)
    try:
        with pytest.raises(UnavailableError, match="the worker speaks version 99 of the protocol"):
            running.load()
    finally:
        running.end()


def test_losing_and_closing_twice_and_before_anything(tmp_path: Path) -> None:
    running = Running(spec_of(tmp_path), NoCalls())
    try:
        running.link.lose("no need")
        running.link.lose("really")
        with pytest.raises(UnavailableError, match="no need"):
            running.load()
        running.link.close(0)
    finally:
        running.end()


def test_async_models_run_as_they_do_in_process(tmp_path: Path) -> None:
    source = SOURCE.replace("    def execute", "    async def execute")
    with worker(spec_of(tmp_path, source)) as running:
        assert running.infer(IN=floats())["OUT"].tolist() == [0, 1, 2, 3]


def test_a_deadline_that_no_clock_will_reach_is_none(tmp_path: Path) -> None:
    """As clients send it that want to say "never"."""
    body = """
cancelled = [np.float32([request.is_cancelled()]) for request in requests]
return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)]) for array in cancelled]
"""
    with worker(spec_of(tmp_path, source_of(body))) as running:
        far, _ = request_of(IN=floats())
        far.deadline_ns = monotonic_ns() + 2562048 * 3600 * 10**9
        other, _ = request_of(IN=floats())
        for response in running.run(far, other):
            assert response is not None
            assert response.error is None
            assert response.outputs[0].numpy().tolist() == [0]


@pytest.mark.parametrize("dim", [2**60, 2**61 - 1])
def test_an_empty_tensor_may_have_any_dimensions_that_an_array_may_have(tmp_path: Path, dim: int) -> None:
    with worker(spec_of(tmp_path, dims=(-1, -1))) as running:
        request, _ = request_of(IN=floats())
        request.inputs["IN"] = Tensor("IN", "FP32", (0, dim), b"")
        (response,) = running.run(request)
        assert response is not None
        assert response.error is None, response.error
        assert response.outputs[0].shape == (0, dim)


def test_a_tensor_that_the_worker_would_not_take_fails_its_batch_only(tmp_path: Path) -> None:
    with worker(spec_of(tmp_path, dims=(-1, -1))) as running:
        request, _ = request_of(IN=floats())
        request.inputs["IN"] = Tensor("IN", "FP32", (0, 2**63), b"")
        with pytest.raises(InternalError, match=r"tensor 'IN' can't be sent: FP32 of shape \[0, 9223372036"):
            running.run(request)
        assert (running.infer(IN=floats().reshape(1, 4))["OUT"] == floats()).all()
        assert running.process.poll() is None


def test_what_is_begun_while_it_is_found_out_how_a_worker_ended_is_told_so_too(tmp_path: Path) -> None:
    asked, known = threading.Event(), threading.Event()

    def explain(reason: str) -> UnavailableError:
        asked.set()
        assert known.wait(WAIT_S)
        return UnavailableError("it was killed")

    with worker(spec_of(tmp_path)) as running:
        running.link._explain = explain
        os.kill(running.process.pid, signal.SIGKILL)
        assert asked.wait(WAIT_S)
        begun = running.begin(batch_of(request_of(IN=floats())[0]))
        assert begun.outcomes == []
        known.set()
        with pytest.raises(UnavailableError, match="it was killed"):
            begun.result()
        with pytest.raises(UnavailableError, match="it was killed"):  # and so is what comes later
            running.infer(IN=floats())


def test_a_worker_gets_a_batch_without_tensors_on_gpus_once(tmp_path: Path) -> None:
    with worker(spec_of(tmp_path, source_of("threading.Event().wait()"))) as running:
        begun = running.begin(batch_of(request_of(IN=floats())[0]))
        sender, nothing = running.link._sender, cast(Incoming, None)
        (number,) = running.link._table.batches
        sender._devices = cast(ServerDevices, SimpleNamespace(lends=True))
        sender.unreachable(number, nothing)
        assert not sender._devices.lends
        with pytest.raises(WireError, match="could be out of reach"):
            sender.unreachable(number, nothing)
        os.kill(running.process.pid, signal.SIGKILL)
        with pytest.raises(UnavailableError):
            begun.result()
