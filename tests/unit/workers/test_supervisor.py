"""Instances whose workers hang, die and are started again."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.core import Answers
from tests.support.servers import WAIT_S, eventually
from tests.support.workers import PLACEMENT, Begun, NoCalls, batch_of, model_spec, request_of

from conch.backends.python.settings import Settings
from conch.core.errors import DeadlineExceededError, UnavailableError
from conch.core.request import InferenceRequest
from conch.core.spec import ModelSpec, TensorSpec
from conch.workers import blocks, supervisor
from conch.workers.environments import server_environment
from conch.workers.monitor import Monitor
from conch.workers.supervisor import WorkerInstance
from conch.workers.team import Team

ORDERS = """
import asyncio, os, threading, time
import numpy as np
import triton_python_backend_utils as pb_utils

def response():
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([os.getpid()], np.int32))])

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

async def obey(order):
    if order == "hang":
        await asyncio.sleep(1000)
    if order == "die":
        os._exit(9)

class TritonPythonModel:
"""
COROUTINE = """
    async def execute(self, requests):
        await obey(requests[0].request_id())
        return [response() for _ in requests]
"""
DECOUPLED = """
    async def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            sender.send(response())
            await obey(request.request_id())
            sender.send(flags=FINAL)
"""
STREAM = """
    async def execute(self, requests):
        yield [response() for _ in requests]
        await obey(requests[0].request_id())
"""
KEPT = """
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            sender.send(response())
            threading.Thread(target=self.end, args=(sender, request.request_id()), daemon=True).start()

    def end(self, sender, order):
        if order == "hang":
            time.sleep(1000)
        sender.send(flags=FINAL)
"""


def _spec(directory: Path, source: str, decoupled: bool, **parameters: str) -> ModelSpec:
    spec = model_spec(
        directory,
        ORDERS + source,
        inputs=(TensorSpec("IN", "FP32", (-1,)),),
        outputs=(TensorSpec("OUT", "INT32", (1,)),),
        decoupled=decoupled,
    )
    return dataclasses.replace(spec, parameters=parameters)


@contextmanager
def _instance(spec: ModelSpec) -> Iterator[WorkerInstance]:
    arguments: tuple[Any, ...] = (server_environment(), NoCalls(), Monitor(), Team())
    instance = WorkerInstance.open(spec, PLACEMENT, Settings.of(spec), *arguments)
    try:
        yield instance
    finally:
        instance.close()


def _ask(instance: WorkerInstance, order: str = "") -> tuple[InferenceRequest, Answers]:
    """Begins a request, and waits until another one can be begun."""
    eventually(lambda: instance.available(lambda: None), "a worker serves")
    request, answers = request_of(order, IN=np.ones(1, np.float32))
    begun = Begun(batch_of(request))
    instance.begin(begun.batch, begun.done)
    begun.result()
    return request, answers


def _pid(instance: WorkerInstance) -> int | None:
    status = instance.worker()
    return status.pid if status.state == "serving" else None


def _error(answers: Answers) -> BaseException | None:
    assert answers.wait(1, WAIT_S)
    response = answers.calls[-1][1]
    return None if response is None else response.error


@pytest.mark.parametrize(
    ("source", "decoupled"),
    [(COROUTINE, False), (DECOUPLED, True), (STREAM, True)],
    ids=["plain", "senders", "stream"],
)
def test_a_coroutine_that_hangs_is_noticed_though_others_may_run(
    tmp_path: Path, source: str, decoupled: bool
) -> None:
    limits = {"CONCH_MAX_INFLIGHT": "8", "CONCH_MAX_EXECUTION_SECONDS": "0.5"}
    with _instance(_spec(tmp_path, source, decoupled, **limits)) as instance:
        pid = _pid(instance)
        _, answers = _ask(instance, "hang")
        error = _error(answers)
        assert type(error) is DeadlineExceededError
        assert "lasted longer than the 0.5 s that 'CONCH_MAX_EXECUTION_SECONDS' allows" in error.message
        _ask(instance)
        assert pid != _pid(instance)


@pytest.mark.parametrize(("source", "decoupled"), [(COROUTINE, False), (DECOUPLED, True)])
def test_a_coroutine_that_has_ended_in_any_way_is_watched_no_longer(
    tmp_path: Path, source: str, decoupled: bool
) -> None:
    limits = {"CONCH_MAX_INFLIGHT": "8", "CONCH_MAX_EXECUTION_SECONDS": "600"}
    with _instance(_spec(tmp_path, source, decoupled, **limits)) as instance:
        hangs, pid = instance._hangs, _pid(instance)
        assert hangs is not None and pid is not None
        lost = _ask(instance, "hang")[1]
        assert len(hangs._starts) == 1
        for _ in range(3):
            _ask(instance)
        eventually(lambda: len(hangs._starts) == 1, "those that ended are not watched")
        os.kill(pid, signal.SIGKILL)
        assert type(_error(lost)) is UnavailableError
        eventually(lambda: not hangs._starts, "what was lost is not watched")


def test_a_sender_that_is_kept_is_no_execution(tmp_path: Path) -> None:
    limits = {"CONCH_MAX_EXECUTION_SECONDS": "600"}
    with _instance(_spec(tmp_path, KEPT, True, **limits)) as instance:
        _ask(instance, "hang")
        assert instance._hangs is not None
        assert not instance._hangs._starts


@pytest.mark.parametrize(
    ("source", "decoupled"), [(COROUTINE, False), (KEPT, True)], ids=["coroutine", "sender"]
)
def test_the_crash_report_names_requests_that_outlive_their_batch(
    tmp_path: Path, source: str, decoupled: bool, caplog: pytest.LogCaptureFixture
) -> None:
    limits = {} if decoupled else {"CONCH_MAX_INFLIGHT": "8"}
    with (
        _instance(_spec(tmp_path, source, decoupled, **limits)) as instance,
        caplog.at_level(logging.ERROR),
    ):
        _ask(instance)
        _, answers = _ask(instance, "hang")
        pid = _pid(instance)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert type(_error(answers)) is UnavailableError
        _ask(instance)
    (report,) = [text for text in caplog.messages if f"(pid {pid}) died" in text]
    assert "\nrequests in flight: 1, with the ids 'hang'\nexecuting for: " in report


def test_memory_that_is_idle_is_given_back_with_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "IDLE_NS", 10_000_000)
    monkeypatch.setattr(blocks, "IDLE_NS", 0)
    with _instance(_spec(tmp_path, COROUTINE, False)) as instance:
        request, _ = request_of("", IN=np.ones(100_000, np.float32))
        begun = Begun(batch_of(request))
        assert instance._link is not None
        pool = instance._link._exchange.pool
        instance.begin(begun.batch, begun.done)
        assert pool.count == 1
        begun.result()
        eventually(lambda: not pool.count, "it is given back")
