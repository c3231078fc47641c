"""Requests that their model answers itself: how they are counted, and what waits for them."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tests.support.clocks import Clock
from tests.support.core import (
    WAIT_S,
    Answers,
    Execute,
    Instance,
    LoadedModel,
    echo,
    make_model,
    make_request,
    make_spec,
)
from tests.support.servers import eventually

from conch.core.errors import CancelledError, InternalError, UnavailableError
from conch.core.execution.executor import Executor
from conch.core.model_statistics import Duration, ModelStatistics, StatisticsSnapshot
from conch.core.model_version import Model
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.scheduling.scheduler import Batch
from conch.core.spec import DynamicBatching
from conch.core.statistics_snapshot import MOST_INDEXES, ResponseDurations
from conch.core.tensor import Tensor


def data(request: InferenceRequest) -> InferenceResponse:
    return InferenceResponse([Tensor.from_array("OUT", request.inputs["IN"].numpy())])


class Decoupled:
    """One execution of a decoupled model at a time, under a clock that the test moves."""

    def __init__(self) -> None:
        self.clock = Clock(1000)
        self.statistics = ModelStatistics()
        self.executor = Executor(make_spec(8, decoupled=True), self.statistics, self.clock)
        self.answers = Answers()

    def request(self) -> InferenceRequest:
        return make_request(self.answers, rows=1, received_ns=100, queued_ns=400)

    def run(self, *requests: InferenceRequest, execute: Execute = lambda batch: None) -> None:
        self.executor.run(Instance(execute), Batch(list(requests), len(requests)))

    @property
    def counted(self) -> StatisticsSnapshot:
        return self.statistics.snapshot()


def counts(row: ResponseDurations) -> dict[str, int]:
    names = ("compute_infer", "compute_output", "success", "fail", "empty_response", "cancel")
    return {name: count for name in names if (count := getattr(row, name).count)}


def test_responses_are_counted_by_their_index() -> None:
    model = Decoupled()
    for responses in (2, 1):
        request = model.request()
        model.run(request)
        for _ in range(responses):
            model.clock.now += 10
            request.respond(data(request), False)
        model.clock.now += 5
        request.respond(None, True)
    rows = model.counted.responses
    assert [counts(rows[index]) for index in range(len(rows))] == [
        {"compute_infer": 2, "compute_output": 2, "success": 2},
        {"compute_infer": 2, "compute_output": 1, "success": 1, "empty_response": 1},
        {"compute_infer": 1, "empty_response": 1},
    ]
    assert rows[0].compute_infer == rows[0].success == Duration(2, 20)
    assert rows[1].compute_infer == Duration(2, 15)
    assert rows[1].empty_response == rows[2].empty_response == Duration(1, 5)


def test_errors_and_cancelled_responses_are_counted_apart() -> None:
    model = Decoupled()
    request = model.request()
    model.run(request)
    request.respond(InferenceResponse([], UnavailableError("no")), False)
    request.cancelled = True
    request.respond(data(request), False)
    request.respond(None, True)
    rows = model.counted.responses
    assert [counts(rows[index]) for index in range(len(rows))] == [
        {"compute_infer": 1, "compute_output": 1, "fail": 1},
        {"compute_infer": 1, "compute_output": 1, "success": 1},  # in work when it was cancelled
        {"cancel": 1},
    ]
    for response in (None, InferenceResponse([], CancelledError("seen"))):
        (model := Decoupled()).run(request := model.request())
        request.cancelled = True
        request.respond(response, True)
        assert counts(model.counted.responses[0]) == {"cancel": 1}


def test_handing_a_response_over_is_its_output_time() -> None:
    model = Decoupled()

    def slow(request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
        model.clock.now += 30

    request = make_request(slow, rows=1, received_ns=100, queued_ns=400)
    model.run(request)
    model.clock.now += 10
    request.respond(data(request), False)
    model.clock.now += 10
    request.respond(data(request), True)
    rows = model.counted.responses
    assert rows[0].compute_infer == rows[1].compute_infer == Duration(1, 10)
    assert rows[0].compute_output == Duration(1, 30)
    assert rows[0].success == Duration(1, 40)
    counted = model.counted
    assert (counted.compute_infer.ns, counted.compute_output.ns) == (20, 30)
    assert counted.success.ns == 1_050 - 100
    assert counted.queue.ns == 1_000 - 400


def test_a_model_may_tell_when_it_makes_its_outputs() -> None:
    model = Decoupled()
    request = model.request()
    model.run(request)
    for kind in (data(request), InferenceResponse([], UnavailableError("no")), InferenceResponse([])):
        model.clock.now += 10
        request.output_start_ns = model.clock.now
        model.clock.now += 5
        request.respond(kind, False)
    model.clock.now += 1
    request.respond(data(request), True)
    success, fail, empty, last = model.counted.responses.values()
    assert (success.compute_infer, success.compute_output) == (Duration(1, 10), Duration(1, 5))
    assert success.success == fail.fail == Duration(1, 15)
    assert empty.empty_response == empty.compute_infer == Duration(1, 15)
    assert last.success == last.compute_infer == Duration(1, 1)


def test_a_request_whose_responder_fails_is_open_no_more() -> None:
    model = Decoupled()

    def fails(request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
        raise OSError("no")

    request = make_request(fails, rows=1, received_ns=100, queued_ns=400)
    model.run(request)
    assert model.executor.tracker.count == 1
    with pytest.raises(OSError, match="no"):
        request.respond(None, True)
    assert model.executor.tracker.count == 0


def test_indexes_are_bounded() -> None:
    model = Decoupled()
    request = model.request()
    model.run(request)
    for _ in range(MOST_INDEXES + 50):
        request.respond(data(request), False)
    rows = model.counted.responses
    assert len(rows) == MOST_INDEXES
    assert rows[MOST_INDEXES - 2].success.count == 1
    assert rows[MOST_INDEXES - 1].success.count == 51


def test_a_request_counts_when_it_is_done() -> None:
    model = Decoupled()
    good, bad, gone = (model.request() for _ in range(3))
    model.run(good, bad, gone)
    counted = model.counted
    assert counted.success.count == counted.fail.count == counted.inference_count == 0
    assert (counted.execution_count, list(counted.batches)) == (1, [3])
    good.respond(data(good), False)
    assert model.counted.success.count == 0
    good.respond(None, True)
    bad.respond(InferenceResponse([], UnavailableError("no")), False)
    bad.respond(data(bad), True)
    gone.cancelled = True
    gone.respond(data(gone), True)
    counted = model.counted
    assert (counted.success.count, counted.fail.count, counted.inference_count) == (1, 2, 1)
    assert counted.failed_in_model == 1
    assert counted.cancelled == {"queued": 0, "running": 1}
    assert counted.execution_count == 1
    assert model.executor.tracker.count == 0


def test_an_execution_is_counted_before_its_first_request_is_answered() -> None:
    model = Decoupled()
    seen: list[int] = []

    def answer(batch: Batch) -> None:
        model.clock.now += 7
        for request in batch.requests:
            request.respond(None, True)
        model.clock.now += 100

    request = make_request(lambda *_: seen.append(model.counted.execution_count), rows=1)
    model.run(request, execute=answer)
    assert seen == [1]
    assert model.counted.execution_count == 1
    assert model.counted.batches[1].compute_infer == Duration(1, 7)


@pytest.mark.parametrize("early", [False, True])
def test_an_execution_that_fails(early: bool) -> None:
    model = Decoupled()

    def fail(batch: Batch) -> None:
        if early:
            batch.requests[0].respond(None, True)
        raise UnavailableError("no")

    requests = [model.request() for _ in range(2)]
    model.run(*requests, execute=fail)
    assert [model.answers.finals_of(request) for request in requests] == [1, 1]
    counted = model.counted
    assert (counted.success.count, counted.fail.count) == (int(early), 2 - early)
    assert counted.execution_count == early
    assert model.executor.tracker.count == 0


def test_a_backend_that_returns_responses_may_serve_a_decoupled_model() -> None:
    model = Decoupled()
    model.run(model.request(), execute=echo)
    assert model.answers.finals == 1
    assert counts(model.counted.responses[0]) == {"compute_infer": 1, "compute_output": 1, "success": 1}
    model.run(model.request(), execute=lambda batch: [])
    assert model.counted.fail.count == 1
    response = model.answers.calls[-1][1]
    assert response is not None
    assert isinstance(response.error, InternalError)
    assert "returned 0 responses for 1 requests" in response.error.message


def test_a_request_that_runs_again_is_counted_once() -> None:
    model = Decoupled()
    request = model.request()
    model.run(request)
    request.respond(data(request), False)
    model.run(request)
    request.respond(None, True)
    counted = model.counted
    assert (counted.success.count, counted.execution_count) == (1, 2)
    assert [row.success.count for row in counted.responses.values()] == [1, 0]
    assert model.executor.tracker.count == 0


def test_a_request_that_goes_on_does_not_keep_the_others() -> None:
    model = Decoupled()
    short, long = model.request(), model.request()
    array = np.zeros((1, 16), np.float32)
    short.inputs = {"IN": Tensor.from_array("IN", array)}
    tensor = weakref.ref(array)
    del array
    assert tensor() is not None
    gc.disable()
    try:
        model.run(short, long)
        short.respond(None, True)
        model.answers.calls.clear()
        del short
        assert tensor() is None
    finally:
        gc.enable()
        long.respond(None, True)


def kept(requests: list[InferenceRequest]) -> Callable[[Batch], list[InferenceResponse | None]]:
    """A model that returns without having answered."""

    def execute(batch: Batch) -> list[InferenceResponse | None]:
        requests.extend(batch.requests)
        return [None] * len(batch.requests)

    return execute


@pytest.mark.parametrize("decoupled", [False, True])
def test_a_close_waits_for_answers_that_come_later(decoupled: bool) -> None:
    taken: list[InferenceRequest] = []
    loaded = LoadedModel(kept(taken))
    model = Model.create(make_spec(decoupled=decoupled), loaded)
    answers = Answers()
    for _ in range(2):
        model.submit(make_request(answers))
    eventually(lambda: len(taken) == 2, "both have begun")
    assert not model.close(0.05)
    assert loaded.closed == 0
    assert model.statistics.snapshot().running == 2
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(model.close, WAIT_S)
        taken[0].respond(data(taken[0]), True)
        assert not closing.done()
        taken[1].respond(data(taken[1]), True)
        assert closing.result(WAIT_S)
    assert loaded.closed == 1
    assert answers.finals == 2
    counted = model.statistics.snapshot()
    assert (counted.success.count, counted.inference_count, counted.running, counted.pending) == (2, 2, 0, 0)


def test_answers_that_race_with_the_end_of_their_batch() -> None:
    """Each is counted once, by the one or by the other."""
    rounds = 2_000
    statistics = ModelStatistics()
    executor = Executor(make_spec(8), statistics, lambda: 5)
    answers = Answers()
    with ThreadPoolExecutor(1) as pool:

        def execute(batch: Batch) -> list[InferenceResponse | None]:
            for request in batch.requests:
                pool.submit(request.respond, data(request), True)
            return [None] * len(batch.requests)

        instance = Instance(execute)
        for _ in range(rounds):
            executor.run(instance, Batch([make_request(answers, rows=1) for _ in range(2)], 2))
    counted = statistics.snapshot()
    assert answers.finals == counted.success.count == counted.inference_count == 2 * rounds
    assert (counted.execution_count, counted.fail.count, executor.tracker.count) == (rounds, 0, 0)


def test_an_error_that_comes_later_is_a_failure() -> None:
    taken: list[InferenceRequest] = []
    statistics = ModelStatistics()
    executor = Executor(make_spec(), statistics, lambda: 5)
    executor.run(Instance(kept(taken)), Batch([make_request()], 1))
    assert statistics.snapshot().success.count == 0
    taken[0].respond(InferenceResponse([], UnavailableError("no")), True)
    counted = statistics.snapshot()
    assert (counted.success.count, counted.fail.count, counted.failed_in_model) == (0, 1, 1)


def test_a_request_cancelled_while_it_runs_is_no_success() -> None:
    entered, go = threading.Event(), threading.Event()

    def wait(batch: Batch) -> list[InferenceResponse | None]:
        entered.set()
        assert go.wait(WAIT_S)
        return echo(batch)

    batching = DynamicBatching(max_queue_delay_ns=10**12, preferred_sizes=(3,))
    model = make_model(make_spec(4, batching=batching), wait)
    answers = Answers()
    requests = [make_request(answers, rows=1) for _ in range(3)]
    for request in requests:
        model.submit(request)
    assert entered.wait(WAIT_S)
    assert model.statistics.snapshot().running == 3
    assert not model.cancel(requests[1])
    go.set()
    assert answers.wait(3)
    assert model.close(WAIT_S)
    counted = model.statistics.snapshot()
    assert (counted.success.count, counted.fail.count, counted.inference_count) == (2, 1, 2)
    assert counted.cancelled == {"queued": 0, "running": 1}
    assert counted.failed_in_model == 0
    assert (counted.execution_count, list(counted.batches)) == (1, [3])
    assert counted.queue.count == counted.compute_infer.count == 2


def test_gauges_and_requests_cancelled_in_the_queue() -> None:
    entered, go = threading.Event(), threading.Event()

    def wait(batch: Batch) -> list[InferenceResponse | None]:
        entered.set()
        assert go.wait(WAIT_S)
        return echo(batch)

    model = make_model(make_spec(), wait)
    answers = Answers()
    requests = [make_request(answers) for _ in range(4)]
    model.submit(requests[0])
    assert entered.wait(WAIT_S)
    for request in requests[1:]:
        model.submit(request)
    counted = model.statistics.snapshot()
    assert (counted.pending, counted.running) == (3, 1)
    assert model.cancel(requests[2])
    counted = model.statistics.snapshot()
    assert (counted.pending, counted.running) == (2, 1)
    assert counted.cancelled == {"queued": 1, "running": 0}
    assert counted.fail.count == 1
    go.set()
    assert model.close(WAIT_S)
    counted = model.statistics.snapshot()
    assert (counted.pending, counted.running, counted.success.count) == (0, 0, 3)


def test_decoupled_models_are_not_led() -> None:
    """Their sends may wait for a client that only the polling threads can send to."""
    threads: list[str] = []

    def note(batch: Batch) -> None:
        threads.append(threading.current_thread().name)
        for request in batch.requests:
            request.respond(None, True)

    model = make_model(make_spec(decoupled=True), note)
    answers = Answers()
    assert model.submit(make_request(answers), may_claim=True) is None
    assert answers.wait(1)
    assert threads == ["conch-m-0"]
    assert model.close(WAIT_S)
