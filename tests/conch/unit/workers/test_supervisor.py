"""Instances whose workers hang, die and are started again."""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
import re
import signal
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.core import Answers
from tests.support.servers import WAIT_S, eventually
from tests.support.waiting import given_time
from tests.support.workers import PLACEMENT, Begun, NoCalls, batch_of, model_spec, request_of

from conch.backends.python.python_settings import Settings
from conch.core.clock import monotonic_ns
from conch.core.errors import ConchError, DeadlineExceededError, UnavailableError
from conch.core.execution.warmup import Warmup
from conch.core.request import InferenceRequest
from conch.core.spec import DynamicBatching, ModelSpec, TensorSpec, WarmupInput, WarmupSample
from conch.ipc import blocks
from conch.workers.environment import server_environment
from conch.workers.supervision import supervisor
from conch.workers.supervision.process_monitor import ProcessMonitor
from conch.workers.supervision.watchdog import Watchdog
from conch.workers.supervision.worker_group import WorkerGroup
from conch.workers.supervision.worker_instance import WorkerInstance

pytestmark = pytest.mark.process

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
RETURNS = """
    def execute(self, requests):
        for request in requests:
            request.get_response_sender().send(response(), FINAL)
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
    arguments: tuple[Any, ...] = (server_environment(), NoCalls(), ProcessMonitor(), WorkerGroup())
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
    instance.start(begun.batch, begun.done)
    begun.result()
    return request, answers


BLOCKS = """
    async def execute(self, requests):
        order = requests[0].request_id()
        if order:
            time.sleep(float(order))
        return [response() for _ in requests]
"""


@pytest.mark.parametrize(
    ("source", "decoupled", "limit", "several"),
    [
        (STREAM, True, "", True),
        (STREAM, True, "8", False),
        (COROUTINE, False, "", False),
        (RETURNS, True, "", False),
        (RETURNS + "    answers_later = True\n", True, "", True),
    ],
    ids=["coroutine", "limited", "waits", "blocks", "says so"],
)
def test_a_worker_that_only_starts_requests_gets_several_batches(
    tmp_path: Path, source: str, decoupled: bool, limit: str, several: bool
) -> None:
    limits = {"CONCH_MAX_INFLIGHT": limit} if limit else {}
    with _instance(_spec(tmp_path, source, decoupled, **limits)) as instance:
        assert (instance.most_batches > 1) is several


def test_a_worker_whose_model_batches_gets_one_batch_at_a_time(tmp_path: Path) -> None:
    spec = dataclasses.replace(_spec(tmp_path, STREAM, True), max_batch_size=4, batching=DynamicBatching())
    with _instance(spec) as instance:
        assert instance.most_batches == 1


def _pid(instance: WorkerInstance) -> int | None:
    status = instance.worker()
    return status.pid if status.state == "serving" else None


def _watchdog(instance: WorkerInstance) -> Watchdog:
    assert instance.limit is not None
    return instance.limit.watchdog


def _error(answers: Answers) -> BaseException | None:
    assert answers.wait(1, WAIT_S)
    response = answers.calls[-1][1]
    return None if response is None else response.error


def test_a_worker_whose_loop_does_not_answer_is_replaced(tmp_path: Path) -> None:
    limits = {"CONCH_MAX_INFLIGHT": "8", "CONCH_HANG_SECONDS": "0.5"}
    with _instance(_spec(tmp_path, BLOCKS, False, **limits)) as instance:
        pid = _pid(instance)
        error = _error(_ask(instance, "1000")[1])
        assert type(error) is UnavailableError
        assert "its loop did not answer for the 0.5 s that 'CONCH_HANG_SECONDS' allows" in error.message
        assert _error(_ask(instance)[1]) is None
        assert pid != _pid(instance)


@pytest.mark.parametrize(
    "more",
    [{"CONCH_HANG_SECONDS": "0.1", "CONCH_MAX_EXECUTION_SECONDS": "600"}, {}],
    ids=["limit", "default"],
)
def test_a_silent_loop_is_left_alone(
    tmp_path: Path, more: dict[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Within the limit of executions, and without a setting, which has it reported."""
    monkeypatch.setattr(supervisor, "REPORTED_S", 0.1)
    with _instance(_spec(tmp_path, BLOCKS, False, CONCH_MAX_INFLIGHT="8", **more)) as instance:
        pid = _pid(instance)
        assert _error(_ask(instance, "2")[1]) is None
        assert pid == _pid(instance)
    reports = [each for each in caplog.records if "has not answered for 0.1 s" in each.getMessage()]
    assert bool(reports) is not bool(more)


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
        watchdog, pid = _watchdog(instance), _pid(instance)
        assert pid is not None
        lost = _ask(instance, "hang")[1]
        assert watchdog.watched == 1
        for _ in range(3):
            _ask(instance)
        eventually(lambda: watchdog.watched == 1, "those that ended are not watched")
        os.kill(pid, signal.SIGKILL)
        assert type(_error(lost)) is UnavailableError
        eventually(lambda: not watchdog.watched, "what was lost is not watched")


def test_a_sender_that_is_kept_is_no_execution(tmp_path: Path) -> None:
    limits = {"CONCH_MAX_EXECUTION_SECONDS": "600"}
    with _instance(_spec(tmp_path, KEPT, True, **limits)) as instance:
        _ask(instance, "hang")
        assert not _watchdog(instance).watched


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
        link = instance.supervisor.link
        assert link is not None
        pool = link.stream.pool
        instance.start(begun.batch, begun.done)
        assert pool.count == 1
        begun.result()
        eventually(lambda: not pool.count, "it is given back")


def test_a_lost_connection_is_kept_by_nothing(tmp_path: Path) -> None:
    """A model that crashes again and again would fill the memory."""
    with _instance(_spec(tmp_path, COROUTINE, False)) as instance:
        assert instance.supervisor.link is not None
        lost = weakref.ref(instance.supervisor.link)
        before = _pid(instance)
        assert before is not None
        os.kill(before, signal.SIGKILL)
        eventually(lambda: _pid(instance) not in (None, before), "another one serves")
        eventually(lambda: gc.collect() >= 0 and lost() is None, "it is freed", WAIT_S / 3)


COUNTED = """
    ran = 0

    async def execute(self, requests):
        {hurdle}
        type(self).ran += len(requests)
        ran = np.array([self.ran], np.int32)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", ran)]) for _ in requests]
"""
SAMPLE = WarmupSample("w", (WarmupInput("IN", "FP32", (4,)),), count=3)


def _output(instance: WorkerInstance) -> int:
    eventually(lambda: instance.available(lambda: None), "a worker serves")
    begun = Begun(batch_of(request_of("", IN=np.ones(1, np.float32))[0]))
    instance.start(begun.batch, begun.done)
    (response,) = begun.result()
    assert response is not None
    return int(response.outputs[0].numpy()[0])


@contextmanager
def _warmed(tmp_path: Path, hurdle: str, **parameters: str) -> Iterator[WorkerInstance]:
    spec = _spec(tmp_path, COUNTED.format(hurdle=hurdle), False, **parameters)
    warm_up = Warmup(spec, [SAMPLE], monotonic_ns)
    with _instance(spec) as instance:
        warm_up.run(instance, "m_0_0")
        instance.set_warm_up(lambda started: warm_up.run(started, "m_0_0"))
        assert _output(instance) == 4
        yield instance


def _kill(instance: WorkerInstance) -> None:
    pid = _pid(instance)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: instance.worker().restarts >= 1, "its death is noticed")


@pytest.mark.parametrize("parameters", [{}, {"CONCH_MAX_EXECUTION_SECONDS": "60"}])
def test_a_worker_is_warmed_up_again_before_it_serves(tmp_path: Path, parameters: dict[str, str]) -> None:
    with _warmed(tmp_path, "", **parameters) as instance:
        _kill(instance)
        assert _output(instance) == 4
        assert _output(instance) == 5


@pytest.mark.parametrize(
    ("hurdle", "says"),
    [
        ("raise ValueError('no luck')", "failed to run warmup sample 'w': .*no luck"),
        ("os._exit(7)", "failed to run warmup sample 'w': .*exited with status 7"),
    ],
)
def test_a_worker_that_can_not_be_warmed_up_does_not_serve(tmp_path: Path, hurdle: str, says: str) -> None:
    flag = tmp_path / "flag"
    with _warmed(tmp_path, f"if os.path.exists({str(flag)!r}): {hurdle}") as instance:
        flag.touch()
        _kill(instance)
        eventually(lambda: re.search(says, instance.worker().reason), "it is said why")
        flag.unlink()
        assert _output(instance) == 4


def test_a_worker_whose_warm_up_hangs_does_not_serve(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    hurdle = f"if os.path.exists({str(flag)!r}): time.sleep(1000)"

    def serve(limit_s: float) -> bool:
        (directory := tmp_path / str(limit_s)).mkdir()
        limits = {"CONCH_MAX_EXECUTION_SECONDS": str(limit_s)}
        # Errors are those of a machine on which the model takes that long without the hurdle too.
        with suppress(ConchError), _warmed(directory, hurdle, **limits) as instance:
            flag.touch()
            _kill(instance)
            says = "failed to run warmup sample 'w': .*lasted longer than the "
            eventually(lambda: re.search(says, instance.worker().reason), "it is said why")
            flag.unlink()
            assert _output(instance) == 4
            return True
        return False

    given_time(serve, 0.5)


def test_closing_ends_a_warm_up(tmp_path: Path) -> None:
    flag, up = tmp_path / "flag", tmp_path / "up"
    hurdle = f"open({str(up)!r}, 'w'); time.sleep(1000)"
    with _warmed(tmp_path, f"if os.path.exists({str(flag)!r}): {hurdle}") as instance:
        flag.touch()
        _kill(instance)
        eventually(up.exists, "it is warmed up")
