"""The end of a stream comes after the responses before it, wherever the model runs and however it ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.core import Answers
from tests.support.waiting import given_time
from tests.support.workers import model_spec, request_of, worker

from conch.core.clock import monotonic_ns
from conch.core.errors import (
    ConchError,
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    UnavailableError,
)
from conch.core.execution.response_tracker import ResponseTracker
from conch.core.model_statistics import ModelStatistics
from conch.core.responder_layers import ResponderLayer
from conch.core.spec import SequenceBatching
from conch_testing.model_repository import Placement, Repository

pytestmark = pytest.mark.process

CONFIG = """
backend: "python"
max_batch_size: 0
model_transaction_policy { decoupled: true }
input [ { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] } ]
"""
LIMIT = 'parameters [ {{ key: "CONCH_MAX_EXECUTION_SECONDS" value {{ string_value: "{}" }} }} ]'
ALL = [0, 1, 2, 3, 4]
MODEL = """
import os, signal, time
import numpy as np
import triton_python_backend_utils as pb_utils

def response(value):
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([value], np.float32))])

def end(how):
    if how == "raise":
        raise ValueError("boom")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "hang":
        time.sleep(100)
"""
PLAIN = """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for value in range(5):
                sender.send(response(value))
            end(request.request_id())
            sender.send(flags=1)
"""
GENERATOR = """
class TritonPythonModel:
    def execute(self, requests):
        for value in range(5):
            yield [response(value) for _ in requests]
        end(requests[0].request_id())
"""

AGAIN = """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for value in range(5):
                sender.send(response(value))
            request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
"""


class Client(Answers):
    """A client that keeps what it gets."""

    def got(self) -> tuple[list[float], ConchError | None]:
        """All values, and the error after them."""
        assert self.wait(1)
        values: list[float] = []
        error: ConchError | None = None
        for _, response, _ in self.calls:
            if response is None:
                continue
            assert error is None, "a response after the error"
            error = response.error
            if error is None:
                values.append(response.outputs[0].numpy().item())
        return values, error


@contextmanager
def model(directory: Path, source: str, placement: Placement, more: str = "") -> Iterator[Any]:
    version = directory / "m" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(MODEL + source)
    (version.parent / "config.pbtxt").write_text(CONFIG + more)
    with closing(Repository(placement)) as repository:
        yield repository.load(version.parent)


def submit(served: Any, how: str) -> Client:
    client = Client()
    request, _ = request_of(how, IN=np.ones(1, np.float32))
    request.wrap_responder(lambda responder: client, ResponderLayer.CACHE)
    served.submit(request)
    return client


@pytest.mark.parametrize("placement", ["in_process", "worker"])
@pytest.mark.parametrize("source", [PLAIN, GENERATOR], ids=["plain", "generator"])
def test_an_error_of_execute_comes_after_the_responses(
    tmp_path: Path, source: str, placement: Placement
) -> None:
    with model(tmp_path, source, placement) as served:
        for _ in range(10):
            values, error = submit(served, "raise").got()
            assert values == ALL
            assert type(error) is InternalError
            assert "boom" in error.message


def test_a_request_that_must_not_run_again_is_told_so_after_the_responses(tmp_path: Path) -> None:
    with model(tmp_path, AGAIN, "worker") as served:
        values, error = submit(served, "").got()
        assert values == ALL
        assert type(error) is InvalidArgumentError
        # Nothing is left of it that the next one could trip over.
        assert submit(served, "").got()[0] == ALL


@pytest.mark.parametrize("lost", [False, True])
def test_a_request_that_ends_while_it_waits_to_run_again_gets_its_responses_before(
    tmp_path: Path, lost: bool
) -> None:
    sequence = SequenceBatching("OLDEST", iterative=True)
    with worker(model_spec(tmp_path, MODEL + AGAIN, decoupled=True, sequence=sequence)) as running:
        client = Client()
        request, _ = request_of(IN=np.ones(1, np.float32))
        request.wrap_responder(lambda responder: client, ResponderLayer.CACHE)
        running.run(request)
        assert request.rescheduled
        if lost:
            running.link.lose("it is lost")
        late = UnavailableError("too late")
        ResponseTracker(ModelStatistics(), monotonic_ns, True).fail(request, late)
        values, error = client.got()
        assert values == ALL
        assert error is not None and (error is late) is not lost


@pytest.mark.parametrize("source", [PLAIN, GENERATOR], ids=["plain", "generator"])
@pytest.mark.parametrize(("how", "kind"), [("raise", InternalError), ("kill", UnavailableError)])
def test_the_end_of_a_worker_comes_after_its_responses(
    tmp_path: Path, source: str, how: str, kind: type[ConchError]
) -> None:
    with model(tmp_path, source, "worker") as served:
        first = submit(served, how)
        # It runs after the other one has ended, where it must, in the worker's successor.
        assert submit(served, "").got() == (ALL, None)
        values, error = first.got()
        # What a quick row holds back for half a millisecond is lost with a process that is killed.
        assert values == (ALL if how == "raise" else ALL[: max(len(values), 1)])
        assert type(error) is kind
        # Those who have got their answers are not counted among those that are open.
        assert submit(served, "raise").got()[0] == ALL


@pytest.mark.parametrize("source", [PLAIN, GENERATOR], ids=["plain", "generator"])
def test_the_end_of_a_worker_that_hangs_comes_after_its_responses(tmp_path: Path, source: str) -> None:
    def end(limit_s: float) -> bool:
        with model(tmp_path / str(limit_s), source, "worker", LIMIT.format(limit_s)) as served:
            clients = [submit(served, how) for how in ("hang", "")]
            (values, error), others = (client.got() for client in clients)
            later, _ = submit(served, "raise").got()
        assert type(error) is DeadlineExceededError
        # Else the limit has also ended what does not hang.
        return values == later == ALL and others == (ALL, None)

    given_time(end, 1.0)
