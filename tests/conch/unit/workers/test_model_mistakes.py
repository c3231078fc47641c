"""Wrong types, questions that make no sense and models that are gone: told to the model that asked."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.support.worker_models import ONE, said, spec_of
from tests.support.workers import NoCalls, request_of, worker

from conch.backends.python.api import pb_utils
from conch.core.errors import NotFoundError
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.tensor import Tensor

pytestmark = pytest.mark.process

MISTAKES = [
    "pb_utils.InferenceRequest('', 0, [], ['OUT'], 5)",
    "pb_utils.InferenceRequest('', 0, [], ['OUT'], None)",
    "pb_utils.InferenceRequest('', 0, [], None, 'b')",
    "pb_utils.InferenceRequest('', 0, [], 'OUT', 'b')",
    "pb_utils.InferenceRequest('', 0, [], [1], 'b')",
    "pb_utils.InferenceRequest('', 0, None, ['OUT'], 'b')",
    "pb_utils.InferenceRequest('b', ['OUT'], [])",
    "pb_utils.InferenceRequest()",
    "pb_utils.InferenceRequest(5, 0, [], ['OUT'], 'b')",
    "pb_utils.InferenceRequest('', 0, [], ['OUT'], 'b', model_version=[1])",
    "pb_utils.InferenceRequest('', 0, [], ['OUT'], 'b', flags='1')",
    "pb_utils.InferenceRequest('', 0, [], ['OUT'], 'b', priority=1.5)",
    "pb_utils.InferenceRequest('', 0, [], ['OUT'], 'b', priority='high')",
    "pb_utils.InferenceRequest('', 0, [], ['OUT'], 'b').set_flags(1.5)",
    "pb_utils.InferenceResponse([1])",
    "pb_utils.InferenceResponse(7)",
    "pb_utils.InferenceResponse(None)",
    "pb_utils.InferenceResponse(pb_utils.Tensor('A', np.ones(1)))",
    "pb_utils.InferenceResponse([], 'text')",
    "pb_utils.InferenceResponse(error=ValueError('no'))",
    "pb_utils.Tensor('A', None)",
    "pb_utils.Tensor('A', object())",
    "pb_utils.Tensor(5, np.ones(1))",
    "pb_utils.Tensor(None, np.ones(1))",
    "pb_utils.Tensor.from_dlpack(5, np.ones(1))",
    "pb_utils.TritonError(ValueError('what'))",
    "pb_utils.TritonError(5)",
    "pb_utils.TritonError('what', 'INTERNAL')",
    "pb_utils.TritonError('what', 99)",
    "pb_utils.TritonError('what', -1)",
    "pb_utils.MetricFamily(5, '')",
    "pb_utils.MetricFamily('a_family', None)",
    "pb_utils.MetricFamily('a_family', '', 2).Metric(buckets=['x'])",
    "(family := pb_utils.MetricFamily('a_family', '', 1)).Metric().set('x')",
]


class Echo(NoCalls):
    """A server with a model that answers with its first input."""

    def __init__(self) -> None:
        self.requests: list[InferenceRequest] = []

    def find(self, request: InferenceRequest) -> Any:
        return SimpleNamespace(spec=SimpleNamespace(name="b", version=1, decoupled=False))

    def submit(
        self, request: InferenceRequest, may_claim: bool = False, model: Any = None, parent: Any = None
    ) -> None:
        self.requests.append(request)
        request.respond(InferenceResponse([Tensor.from_array("OUT", ONE)]), True)


def test_wrong_types_are_told_to_the_model(tmp_path: Path) -> None:
    model = f"""
    def execute(self, requests):
        told = []
        for mistake in {MISTAKES!r}:
            try:
                made = eval(mistake)
                told.append("made")
                made.exec()
                told[-1] = "run"
            except Exception as error:
                told.append(type(error).__name__ + ": " + str(error))
        return [says(told) for _ in requests]
"""
    with worker(spec_of(tmp_path, model), Echo()) as running:
        for _ in range(2):
            told = said(running)
            assert [text.split(":")[0] for text in told] == ["TypeError"] * len(MISTAKES)
            assert "requested_output_names" in told[3] and "priority" in told[11]
        assert running.process.poll() is None


@pytest.mark.parametrize("mistake", MISTAKES)
def test_wrong_types_are_told_to_models_in_process_too(mistake: str) -> None:
    with pytest.raises(TypeError, match=r"must be|Expected a list of 'Tensor' objects"):
        eval(mistake, {"pb_utils": pb_utils, "np": np})


def test_types_that_are_taken_for_others(tmp_path: Path) -> None:
    """As pybind takes them: what is no int but can stand for one, and bytes."""
    model = """
    def execute(self, requests):
        one = np.int64(1)
        pb_utils.InferenceRequest(
            b"id", True, (pb_utils.Tensor(b"IN", np.ones(1)),), (b"OUT",), b"b",
            model_version=one, flags=one, timeout=True, priority=one).exec()
        family = pb_utils.MetricFamily(b"of_a_test", b"what it is", pb_utils.MetricFamily.HISTOGRAM)
        family.Metric({}, np.array([1, 2], np.float32)).observe(np.float32(1))
        return [answer() for _ in requests]
"""
    server = Echo()
    with worker(spec_of(tmp_path, model), server) as running:
        running.infer(IN=ONE)
    (request,) = server.requests
    assert (request.model_name, request.requested, list(request.inputs)) == ("b", ("OUT",), ["IN"])
    assert (request.id, request.correlation_id, request.model_version) == ("id", 1, "1")
    assert (request.sequence_start, request.timeout_us, request.priority) == (True, 1, 1)
    assert type(request.correlation_id) is int and type(request.timeout_us) is int


def test_questions_that_make_no_sense_are_answered_with_an_error(tmp_path: Path) -> None:
    model = """
    def execute(self, requests):
        from conch.workers.host.worker_loop import Host
        server, told = next(each for each in gc.get_objects() if type(each) is Host), []
        for question in ({"query": "find", "name": 5}, {"query": "family", "name": 5},
                         {"query": "metric", "labels": 5}, {"query": "value", "number": "x"}):
            try:
                server.query(question.pop("query"), **question)
                told.append("answered")
            except Exception as error:
                told.append(str(error))
        return [says(told) for _ in requests]
"""
    with worker(spec_of(tmp_path, model)) as running:
        assert said(running) == [
            "'name' of a query is not a text",
            "a family of metrics has a name and a description",
            "labels are names and texts",
            "a metric and its family have numbers",
        ]


@pytest.mark.parametrize(
    ("making", "text"),
    [
        (
            "family.Metric({'a': str(len(held))})",
            "Error when creating Metric: an instance of a model may hold 5 metrics at a time: use fewer "
            "values of labels",
        ),
        (
            "pb_utils.MetricFamily(f'of_a_test_{len(held)}', '')",
            "Error when creating MetricFamily: an instance of a model may hold 6 metric families at a time",
        ),
    ],
)
def test_too_many_metrics_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, making: str, text: str
) -> None:
    monkeypatch.setattr("conch.workers.connection.worker_metrics.MOST_METRICS", 5)
    monkeypatch.setattr("conch.workers.connection.worker_metrics.MOST_FAMILIES", 6)
    model = f"""
    def execute(self, requests):
        family, held = pb_utils.MetricFamily("of_another_test", ""), []
        try:
            while len(held) < 10:
                held.append({making})
        except pb_utils.TritonModelException as error:
            return [says([len(held), str(error)]) for _ in requests]
"""
    with worker(spec_of(tmp_path, model)) as running:
        for _ in range(2):
            assert said(running) == [5, text]


def test_a_model_that_has_gone_since_it_was_called(tmp_path: Path) -> None:
    """The text is that of a model that was never there."""

    class Going(Echo):
        gone = False

        def find(self, request: InferenceRequest) -> Any:
            if self.gone:
                raise NotFoundError(f"Request for unknown model: '{request.model_name}' is not found")
            return super().find(request)

    model = """
    def execute(self, requests):
        request = pb_utils.InferenceRequest("", 0, [], ["OUT"], "b")
        response = request.exec()
        return [pb_utils.InferenceResponse([], error=response.error()) if response.has_error() else answer()]
"""
    server = Going()
    with worker(spec_of(tmp_path, model), server) as running:
        running.infer(IN=ONE)
        server.gone = True
        for _ in range(2):
            (response,) = running.run(request_of(IN=ONE)[0])
            assert response is not None and response.error is not None
            assert response.error.message == (
                "Model b - Error when running inference: Request for unknown model: 'b' is not found"
            )


def test_an_array_that_is_resized_when_it_is_in_a_tensor_is_a_matter_of_its_request(tmp_path: Path) -> None:
    """Data that follows in the message is not taken for its bytes, nor they for those of another request."""
    model = """
    def execute(self, requests):
        responses = []
        for request in requests:
            array = request.inputs()[0].as_numpy().copy()
            tensor = pb_utils.Tensor("OUT", array)
            if request.request_id():
                array.resize(int(request.request_id()), refcheck=False)
            responses.append(pb_utils.InferenceResponse([tensor]))
        return responses
"""
    with worker(spec_of(tmp_path, model)) as running:
        for size in (1, 6, 600_000):
            requests = [
                request_of(request_id, IN=np.full(2, number, np.float32))[0]
                for number, request_id in enumerate(("", str(size), "", ""))
            ]
            first, resized, *others = running.run(*requests)
            assert resized is not None and resized.error is not None
            assert resized.error.message == (
                f"output 'OUT' of model 'm' can't be sent: it has {4 * size} bytes, but 8 by its shape [2]"
            )
            for number, response in zip((0, 2, 3), (first, *others), strict=True):
                assert response is not None and response.error is None
                assert (response.outputs[0].numpy() == number).all()
