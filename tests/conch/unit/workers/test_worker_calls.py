"""Calls of models to their server over the link: logs, metrics, calls, readiness."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conch.unit.workers.models import CalledServer, floats, source_of, spec_of
from tests.support.workers import batch_of, request_of, worker

from conch.core.custom_metrics import FAMILIES
from conch.core.errors import UnavailableError
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.tensor import Tensor
from conch.observability.metrics.server_metrics import CustomMetrics

pytestmark = pytest.mark.process


def test_logs_appear_with_their_level_and_place(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    body = """
pb_utils.Logger.log_warn("careful é")
pb_utils.Logger.log_verbose("chatty")
import logging
import os
logging.getLogger("mine").error("own %d", 1)
logging.getLogger("conch.workers.connection.worker_connection.made.up").error("made up")
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
        "conch.workers.connection.worker_connection",
        "conch.python_model.m",
    ]
    (first, _) = [record for record in caplog.records if record.getMessage() == "root" and record.exc_text]
    assert "ZeroDivisionError" in str(first.exc_text)
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
    self.bare = pb_utils.MetricFamily("w6_bare", "Times", pb_utils.MetricFamily.HISTOGRAM)
    self.all = self.bare.Metric({}, [])
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


def test_a_scrape_shows_what_a_worker_has_counted_before(tmp_path: Path) -> None:
    rounds, told, asked = 200, tmp_path / "told", tmp_path / "asked"
    for path in (told, asked):
        os.mkfifo(path)
    body = f"""
family = pb_utils.MetricFamily("w6_steps", "Steps", pb_utils.MetricFamily.GAUGE)
steps = family.Metric({{}})
with open({str(told)!r}, "w") as told, open({str(asked)!r}) as asked:
    for step in range({rounds}):
        steps.set(step)
        print(step, file=told, flush=True)
        asked.readline()
return [pb_utils.InferenceResponse([]) for _ in requests]
"""
    scrape = CustomMetrics()
    with worker(spec_of(tmp_path, source_of(body))) as running:
        begun = running.start(batch_of(request_of(IN=floats())[0]))
        with told.open() as counted, asked.open("w") as go_on:
            for line in counted:
                (samples,) = [each for family, each in scrape() if family.name == "w6_steps"]
                assert samples == [f"w6_steps {line.strip()}\n"]
                print(file=go_on, flush=True)
        begun.result()
        assert int(line) == rounds - 1


CALLER = """
import gc
from conch.core.request import InferenceRequest
from conch.core.tensor import Tensor
from conch.observability.metrics.server_metrics import CustomMetrics
calls = next(item for item in gc.get_objects() if type(item).__name__ == "ServerClient")
"""


@pytest.mark.parametrize("given", ["tensor", "pb_utils.Tensor('IN', tensor.as_numpy())"])
def test_what_a_call_was_given_stays_as_it_was(tmp_path: Path, given: str) -> None:
    body = f"""
tensor = requests[0].inputs()[0]
answers = pb_utils.InferenceRequest("", 0, [{given}], ["OUT"], "other").exec(decoupled=True)
tensor.as_numpy()[:] = 666
return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([len(list(answers))], np.float32))])]
"""
    server = CalledServer()
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
    server = CalledServer()
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
request = pb_utils.InferenceRequest("", 0, [pb_utils.Tensor("IN", array)], ["OUT"], "other")
response = request.exec()
if response.has_error():
    return [pb_utils.InferenceResponse([], error=response.error())]
return [pb_utils.InferenceResponse(response.output_tensors())]
"""

    class Changing(CalledServer):
        decoupled = False
        found = 0

        def find(self, request: InferenceRequest) -> Any:
            self.found += 1
            found = super().find(request)
            found.spec.decoupled = self.decoupled
            return found

        def submit(
            self, request: InferenceRequest, may_claim: bool = False, model: Any = None, parent: Any = None
        ) -> None:
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

    class Never(CalledServer):
        def submit(
            self, request: InferenceRequest, may_claim: bool = False, model: Any = None, parent: Any = None
        ) -> None:
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
        begun = running.start(batch_of(request))
        for _ in range(2):
            readiness.start()
            assert readiness.result() is (ready == "True")
        request.cancelled = True
        request.notify_cancelled()
        begun.result()
    readiness.start()
    assert not readiness.result()


def test_a_model_without_a_check_has_no_readiness(tmp_path: Path) -> None:
    with worker(spec_of(tmp_path)) as running:
        assert running.link.readiness is None
