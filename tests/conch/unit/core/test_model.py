"""Models on real threads: every request is answered exactly once, and nothing is left behind."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.core import (
    WAIT_S,
    Answers,
    FollowingInstance,
    Gate,
    Instance,
    LoadedModel,
    echo,
    make_model,
    make_request,
    make_spec,
)
from tests.support.profiles import scaled

from conch.core.backend import BackendInstance
from conch.core.errors import CancelledError, InternalError, InvalidArgumentError, UnavailableError
from conch.core.execution.executor import Executor
from conch.core.execution.placement import Placement, place
from conch.core.execution.runner import Runner
from conch.core.model_statistics import ModelStatistics
from conch.core.model_version import Model
from conch.core.request import InferenceRequest, InferenceResponse, RequestState
from conch.core.scheduling.default import DefaultScheduler
from conch.core.scheduling.dynamic import DynamicBatcher
from conch.core.scheduling.scheduler import Batch
from conch.core.servable import ClosedError
from conch.core.spec import DynamicBatching, InstanceGroup, TensorSpec
from conch.core.tensor import Tensor

MS = 1_000_000


@pytest.fixture
def fast_switching() -> Iterator[None]:
    """Makes threads interleave far more often than they do by themselves."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def busy_for(ns: int) -> None:
    until = time.perf_counter_ns() + ns
    while time.perf_counter_ns() < until:
        pass


def submit(model: Model, request: InferenceRequest, may_claim: bool) -> None:
    runner = model.submit(request, may_claim)
    if runner is not None:
        assert may_claim, "a claim from a caller that may not lead"
        assert not runner.run_inline(), "claimed again although the time was not limited"


def storm(model: Model, answers: Answers, threads: int, each: int) -> list[InferenceRequest]:
    """Submits from many threads at once, some leading, some cancelling what they submitted."""
    start = threading.Barrier(threads)

    def client(number: int) -> list[InferenceRequest]:
        start.wait(WAIT_S)
        requests = []
        for index in range(each):
            rows = 1 + (index + number) % 3 if model.spec.max_batch_size else None
            request = make_request(answers, rows, value=number * each + index)
            submit(model, request, may_claim=(index + number) % 2 == 0)
            if index % 5 == 4:
                model.cancel(request)
            requests.append(request)
        return requests

    with ThreadPoolExecutor(threads) as pool:
        return [request for requests in pool.map(client, range(threads)) for request in requests]


def check_answers(answers: Answers, requests: list[InferenceRequest]) -> None:
    finals: dict[int, int] = {}
    for request, _, final in answers.calls:
        assert final
        finals[id(request)] = finals.get(id(request), 0) + 1
    assert finals == {id(request): 1 for request in requests}
    for request, response, _ in answers.calls:
        assert response is not None
        assert request.state is RequestState.DONE
        if response.error is not None:
            assert isinstance(response.error, CancelledError)
            assert request.cancelled
        else:
            (output,) = response.outputs
            np.testing.assert_array_equal(output.numpy(), request.inputs["IN"].numpy())


@pytest.mark.usefixtures("fast_switching")
@pytest.mark.parametrize("allows_inline", [True, False])
@pytest.mark.parametrize("instances", [1, 3])
@pytest.mark.parametrize(
    ("most", "batching"),
    [
        (0, None),
        (4, None),
        (4, DynamicBatching()),
        (4, DynamicBatching((2,), MS // 5)),
    ],
)
def test_every_request_is_answered_exactly_once(
    most: int, batching: DynamicBatching | None, instances: int, allows_inline: bool
) -> None:
    spec = make_spec(most, batching=batching, instances=instances)
    loaded = LoadedModel(echo, Instance if allows_inline else FollowingInstance)
    model = Model.create(spec, loaded)
    answers = Answers()
    requests = storm(model, answers, threads=6, each=40)
    assert answers.wait(len(requests)), f"{len(requests) - answers.finals} requests were never answered"
    assert model.pending == 0
    assert model.close()
    check_answers(answers, requests)
    counted = model.statistics.snapshot()
    cancelled = sum(response is not None and response.error is not None for _, response, _ in answers.calls)
    # One that was cancelled while it ran counts as such, though its model has answered it well.
    late = counted.cancelled["running"]
    assert counted.fail.count == cancelled + late
    assert counted.success.count == len(requests) - cancelled - late
    assert loaded.closed == 1
    assert [instance.closed for instance in loaded.instances] == [1] * instances


@pytest.mark.usefixtures("fast_switching")
@given(
    clients=st.integers(2, 5),
    each=st.integers(1, 12),
    close_after=st.integers(0, 20),
    delay_us=st.sampled_from([0, 0, 100]),
    instances=st.integers(1, 2),
)
@settings(max_examples=scaled(40))
def test_a_submit_that_races_with_close_is_answered_or_refused(
    clients: int, each: int, close_after: int, delay_us: int, instances: int
) -> None:
    spec = make_spec(4, batching=DynamicBatching((), delay_us * 1000), instances=instances)
    model = make_model(spec)
    answers = Answers()
    refused: list[InferenceRequest] = []
    accepted: list[InferenceRequest] = []
    submitted = threading.Semaphore(0)

    def client(number: int) -> None:
        for index in range(each):
            request = make_request(answers, 1)
            try:
                submit(model, request, may_claim=(number + index) % 2 == 0)
            except ClosedError:
                refused.append(request)
            else:
                accepted.append(request)
            submitted.release()

    with ThreadPoolExecutor(clients) as pool:
        done = [pool.submit(client, number) for number in range(clients)]
        for _ in range(min(close_after, clients * each)):
            assert submitted.acquire(timeout=WAIT_S)
        assert model.close(WAIT_S)
        for future in done:
            future.result(WAIT_S)
    assert len(accepted) + len(refused) == clients * each
    check_answers(answers, accepted)
    assert all(request.state is RequestState.NEW for request in refused)


def test_a_closed_model_takes_nothing() -> None:
    model = make_model(make_spec())
    assert model.close()
    request = make_request()
    for may_claim in (True, False):
        with pytest.raises(ClosedError):
            model.submit(request, may_claim)
    assert request.state is RequestState.NEW
    assert model.close(), "closing twice does no harm"


def test_close_finishes_what_was_accepted_and_ends_the_threads() -> None:
    gate = Gate()
    model = make_model(make_spec(instances=2), gate, allows_inline=False)
    before = set(threading.enumerate())
    answers = Answers()
    requests = [make_request(answers) for _ in range(6)]
    for request in requests:
        model.submit(request)
    gate.wait_entered()
    gate.wait_entered()
    assert not model.close(0.01), "closed with batches running"
    assert not answers.calls
    gate.open()
    assert model.close()
    check_answers(answers, requests)
    assert set(threading.enumerate()) <= before


def test_threads_end_by_themselves_after_a_close_that_could_not_wait() -> None:
    """Also one that slept while another thread, a claimant, held the only instance."""
    gate = Gate()
    answers = Answers()
    before = set(threading.enumerate())
    first, second, third = (make_request(answers) for _ in range(3))
    model = make_model(make_spec(), lambda batch: echo(batch) if batch.requests == [first] else gate(batch))
    model.submit(first, may_claim=False)  # starts the model's own thread
    assert answers.wait(1)
    claimant = threading.Thread(target=lambda: submit(model, second, may_claim=True))
    claimant.start()
    gate.wait_entered()
    model.submit(third)
    assert not model.close(0.01)
    gate.open()
    claimant.join(WAIT_S)
    assert answers.wait(3)
    for thread in set(threading.enumerate()) - before:
        thread.join(WAIT_S)
    assert set(threading.enumerate()) <= before, "the model's thread never ended"
    assert model.close()


@pytest.mark.usefixtures("fast_switching")
@pytest.mark.parametrize("delay_us", [20, 200])
def test_no_wakeup_is_lost_when_a_delay_ends_as_a_request_comes(delay_us: int) -> None:
    """A thread that is woken in the moment its wait times out must not be counted as still to wake."""
    model = make_model(make_spec(8, batching=DynamicBatching((), delay_us * 1000)), allows_inline=False)
    answers = Answers()
    sent = 0
    for step in range(1500):
        model.submit(make_request(answers, 1))
        sent += 1
        # Busy until the delay is about over, a little longer or shorter each time.
        busy_for(delay_us * 1000 + (step % 40 - 20) * 1000)
    assert answers.wait(sent), f"{sent - answers.finals} requests wait for ever"
    assert model.close()


def test_a_woken_thread_whose_wait_timed_out_can_be_woken_again() -> None:
    """The same moment, forced: the condition reports a time-out to the thread that was notified."""
    late = threading.Event()

    class Condition(threading.Condition):
        def wait(self, timeout: float | None = None) -> bool:
            woken = super().wait(WAIT_S if timeout is not None else None)
            if timeout is not None:
                late.set()
                return False
            return woken

    answers = Answers()
    spec = make_spec(8)
    scheduler = DynamicBatcher(8, (2,), 3600 * 1_000 * MS)
    executor = Executor(spec, ModelStatistics(), time.monotonic_ns)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("conch.core.execution.runner.threading.Condition", Condition)
        runner = Runner("m", scheduler, [FollowingInstance()], executor, time.monotonic_ns)
        for _ in range(3):
            runner.submit(make_request(answers, 1))
            runner.submit(make_request(answers, 1))
        assert answers.wait(6), f"{6 - answers.finals} requests wait for ever"
        assert runner.closing.close()


def test_instances_run_in_parallel() -> None:
    together = threading.Barrier(3)

    def meet(batch: Batch) -> list[InferenceResponse | None]:
        together.wait(WAIT_S)
        return echo(batch)

    for allows_inline in (True, False):
        model = make_model(make_spec(instances=3), meet, allows_inline=allows_inline)
        answers = Answers()
        for _ in range(3):
            model.submit(make_request(answers), may_claim=False)
        assert answers.wait(3)
        assert all(response is not None and response.error is None for _, response, _ in answers.calls)
        assert model.close()


@pytest.mark.parametrize("allows_inline", [True, False])
def test_what_a_batch_leaves_in_the_queue_runs_beside_it(allows_inline: bool) -> None:
    """A request that closes the batch before it must not wait for that batch to finish."""
    together = threading.Barrier(2)

    def meet(batch: Batch) -> list[InferenceResponse | None]:
        together.wait(WAIT_S)
        return echo(batch)

    inputs = (TensorSpec("IN", "FP32", (-1,)),)
    spec = make_spec(4, inputs=inputs, batching=DynamicBatching((), 4 * MS), instances=2)
    wide = Tensor.from_array("IN", np.zeros((1, 3), np.float32))
    model = make_model(spec, meet, allows_inline)
    for _ in range(10):
        answers = Answers()
        first, second = make_request(answers, 1), make_request(answers, 1, inputs={"IN": wide})
        model.submit(first)
        busy_for(MS)  # so that mostly a thread waits for the first one's delay when the second comes
        submit(model, second, may_claim=True)
        assert answers.wait(2)
        assert [answers.response(request).error for request in (first, second)] == [None, None]
    assert model.close()


def test_a_claimant_runs_the_batch_itself() -> None:
    ran_on: list[threading.Thread] = []

    def note(batch: Batch) -> list[InferenceResponse | None]:
        ran_on.append(threading.current_thread())
        return echo(batch)

    model = make_model(make_spec(), note)
    answers = Answers()
    submit(model, make_request(answers), may_claim=True)
    assert ran_on == [threading.current_thread()]
    assert answers.finals == 1
    assert model.close()


def test_nobody_runs_inline_for_an_instance_that_does_not_allow_it() -> None:
    ran_on: list[threading.Thread] = []

    def note(batch: Batch) -> list[InferenceResponse | None]:
        ran_on.append(threading.current_thread())
        return echo(batch)

    model = make_model(make_spec(), note, allows_inline=False)
    answers = Answers()
    assert model.submit(make_request(answers), may_claim=True) is None
    assert answers.wait(1)
    assert ran_on and ran_on[0] is not threading.current_thread()
    assert model.close()


def test_what_comes_while_the_instance_is_busy_makes_one_batch() -> None:
    gate = Gate()
    loaded = LoadedModel(gate)
    model = Model.create(make_spec(8, batching=DynamicBatching()), loaded)
    answers = Answers()
    requests = [make_request(answers, 1) for _ in range(6)]
    model.submit(requests[0])
    gate.wait_entered()
    for request in requests[1:]:
        model.submit(request)
    assert model.pending == 5
    gate.open()
    assert answers.wait(6)
    assert loaded.instances[0].batches == [requests[:1], requests[1:]]
    assert model.close()


def test_a_delay_collects_a_batch_and_a_full_batch_does_not_wait() -> None:
    loaded = LoadedModel()
    hour = 3600 * 1_000 * MS
    model = Model.create(make_spec(3, batching=DynamicBatching((), hour)), loaded)
    answers = Answers()
    requests = [make_request(answers, 1) for _ in range(3)]
    for request in requests:
        model.submit(request)
    assert answers.wait(3)
    assert loaded.instances[0].batches == [requests]
    assert model.close()


@pytest.mark.parametrize("order", [(False, True), (True, False), (True, True)])
@pytest.mark.parametrize("budget_ns", [None, 0, MS])
def test_a_delay_ends_although_nothing_else_comes(order: tuple[bool, ...], budget_ns: int | None) -> None:
    """A thread that runs inline does not wait for it: a thread of the model's own does."""
    ran_on: set[threading.Thread] = set()

    def note(batch: Batch) -> list[InferenceResponse | None]:
        ran_on.add(threading.current_thread())
        return echo(batch)

    model = make_model(make_spec(8, batching=DynamicBatching((), 20 * MS)), note)
    answers = Answers()
    begin = time.monotonic_ns()
    for may_claim in order:
        runner = model.submit(make_request(answers, 1), may_claim)
        assert (runner is not None) == may_claim
        if runner is not None:
            assert runner.run_inline(budget_ns) is False
    late = time.monotonic_ns() - begin >= 20 * MS  # a machine so busy that the delay was over meanwhile
    assert answers.wait(2)
    assert model.close()
    assert late or threading.current_thread() not in ran_on


class TestCancel:
    def test_a_queued_request_is_answered_at_once(self) -> None:
        gate = Gate()
        model = make_model(make_spec(), gate)
        answers = Answers()
        running, queued = make_request(answers), make_request(answers)
        model.submit(running)
        gate.wait_entered()
        model.submit(queued)
        assert model.cancel(queued)
        error = answers.response(queued).error
        assert isinstance(error, CancelledError) and error.message == ""
        assert model.pending == 0
        assert model.statistics.snapshot().fail.count == 1
        assert not model.cancel(queued), "cancelled twice"
        gate.open()
        assert answers.wait(2)
        assert model.close()
        assert [answers.finals_of(request) for request in (running, queued)] == [1, 1]

    def test_a_running_request_is_marked_and_answered_by_the_model(self) -> None:
        gate = Gate()
        model = make_model(make_spec(), gate)
        answers = Answers()
        request = make_request(answers)
        model.submit(request)
        gate.wait_entered()
        assert not model.cancel(request)
        assert request.cancelled
        assert not answers.calls
        gate.open()
        assert answers.wait(1)
        assert answers.response(request).error is None
        assert model.close()

    def test_of_the_last_queued_request_lets_close_return(self) -> None:
        hour = 3600 * 1_000 * MS
        model = make_model(make_spec(8, batching=DynamicBatching((), hour)))
        answers = Answers()
        request = make_request(answers, 1)
        model.submit(request)
        assert not model.close(0.01)
        with ThreadPoolExecutor(1) as pool:
            closed = pool.submit(model.close)
            assert model.cancel(request)
            assert closed.result(WAIT_S)


class TestFailures:
    @pytest.mark.parametrize(
        ("error", "kind", "text"),
        [
            (ValueError("no luck"), InternalError, "no luck"),
            (KeyError(), InternalError, "KeyError"),
            (UnavailableError("later"), UnavailableError, "later"),
            (SystemExit(3), InternalError, "3"),
        ],
    )
    @pytest.mark.parametrize("may_claim", [True, False])
    def test_an_error_answers_the_whole_batch_and_the_next_one_runs(
        self, error: BaseException, kind: type[Exception], text: str, may_claim: bool
    ) -> None:
        failing = True

        def fail(batch: Batch) -> list[InferenceResponse | None]:
            if failing:
                raise error
            return echo(batch)

        model = make_model(make_spec(2, batching=DynamicBatching((), 3600 * 1_000 * MS)), fail)
        answers = Answers()
        requests = [make_request(answers, 1) for _ in range(4)]
        for request in requests[:2]:
            submit(model, request, may_claim)
        assert answers.wait(2)
        for request in requests[:2]:
            shown = answers.response(request).error
            assert type(shown) is kind and shown.message == text
        failing = False
        for request in requests[2:]:
            submit(model, request, may_claim)
        assert answers.wait(4)
        assert all(answers.response(request).error is None for request in requests[2:])
        counted = model.statistics.snapshot()
        assert (counted.fail.count, counted.success.count) == (2, 2)
        assert model.close()

    def test_only_errors_that_are_not_ours_are_logged_with_their_traceback(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        errors: list[Exception] = [UnavailableError("ours"), ValueError("theirs")]

        def fail(batch: Batch) -> list[InferenceResponse | None]:
            raise errors.pop(0)

        model = make_model(make_spec(), fail)
        with caplog.at_level(logging.ERROR, "conch.core"):
            submit(model, make_request(), may_claim=True)
            assert not caplog.records
            submit(model, make_request(), may_claim=True)
        (record,) = caplog.records
        assert record.getMessage() == "model 'm' failed to execute"
        assert record.exc_info
        assert model.close()

    def test_an_error_in_one_response_does_not_touch_the_others(self) -> None:
        def second_fails(batch: Batch) -> list[InferenceResponse | None]:
            responses = echo(batch)
            responses[1] = InferenceResponse([], UnavailableError("not this one"))
            return responses

        model = make_model(make_spec(8, batching=DynamicBatching((3,), 3600 * 1_000 * MS)), second_fails)
        answers = Answers()
        requests = [make_request(answers, 1) for _ in range(3)]
        for request in requests:
            submit(model, request, may_claim=True)
        errors = [answers.response(request).error for request in requests]
        assert [error and error.message for error in errors] == [None, "not this one", None]
        assert model.close()

    @pytest.mark.parametrize("count", [0, 2])
    def test_a_wrong_number_of_responses_fails_the_batch(self, count: int) -> None:
        model = make_model(make_spec(), lambda batch: count * echo(batch))
        answers = Answers()
        request = make_request(answers)
        submit(model, request, may_claim=True)
        error = answers.response(request).error
        assert error is not None
        assert error.message == f"backend of model 'm' returned {count} responses for 1 requests"
        assert model.close()

    @pytest.mark.parametrize(
        ("outputs", "array"),
        [
            pytest.param((TensorSpec("OUT", "FP32", (2, 2), (4,)),), np.zeros((1, 5), np.float32), id="size"),
            pytest.param((TensorSpec("OUT", "FP32", (2, 2), (4,)),), np.zeros(4, np.float32), id="rank"),
            pytest.param((TensorSpec("OUT", "FP32", (4,)),), np.float32(1) * np.ones(()), id="scalar"),
        ],
    )
    def test_outputs_that_do_not_fit_fail_their_request_alone(
        self, outputs: tuple[TensorSpec, ...], array: np.ndarray[tuple[int, ...], np.dtype[np.float32]]
    ) -> None:
        def wrong(batch: Batch) -> list[InferenceResponse | None]:
            return [InferenceResponse([Tensor.from_array("OUT", array, "FP32")]) for _ in batch.requests]

        model = make_model(make_spec(4, outputs=outputs), wrong)
        answers = Answers()
        for _ in range(2):  # the second shows that the instance is still there
            request = make_request(answers, 1, requested=("OUT",), classes={"OUT": 1})
            submit(model, request, may_claim=True)
            response = answers.response(request)
            assert isinstance(response.error, InternalError)
            assert response.outputs == [] or response.error is not None
        counted = model.statistics.snapshot()
        assert (counted.fail.count, counted.success.count) == (2, 0)
        assert model.close()

    def test_fail_queued_answers_everything_that_waits(self) -> None:
        gate = Gate()
        model = make_model(make_spec(8, batching=DynamicBatching((), 3600 * 1_000 * MS)), gate)
        answers = Answers()
        requests = [make_request(answers, 1) for _ in range(3)]
        for request in requests:
            model.submit(request)
        assert model.fail_queued(UnavailableError("going down")) == 3
        check = [answers.response(request).error for request in requests]
        assert [error and error.message for error in check] == ["going down"] * 3
        assert model.fail_queued(UnavailableError("again")) == 0
        gate.open()
        assert model.close()


class TestResponses:
    def test_only_requested_outputs_are_given(self) -> None:
        def two(batch: Batch) -> list[InferenceResponse | None]:
            array = np.zeros(16, np.float32)
            tensors = [Tensor.from_array(name, array) for name in ("OUT", "MORE")]
            return [InferenceResponse(list(tensors)) for _ in batch.requests]

        outputs = (TensorSpec("OUT", "FP32", (16,)), TensorSpec("MORE", "FP32", (16,)))
        model = make_model(make_spec(outputs=outputs), two)
        answers = Answers()
        every, one = make_request(answers), make_request(answers, requested=("MORE",))
        for request in (every, one):
            submit(model, request, may_claim=True)
        assert [tensor.name for tensor in answers.response(every).outputs] == ["OUT", "MORE"]
        assert [tensor.name for tensor in answers.response(one).outputs] == ["MORE"]
        assert model.close()

    @pytest.mark.parametrize("most", [0, 4])
    def test_backends_see_the_reshape_and_clients_the_dims(self, most: int) -> None:
        seen: list[tuple[int, ...]] = []

        def note(batch: Batch) -> list[InferenceResponse | None]:
            tensors = [request.inputs["IN"] for request in batch.requests]
            seen.extend(tensor.shape for tensor in tensors)
            return [
                InferenceResponse([Tensor.from_array("OUT", tensor.numpy().reshape(tensor.shape))])
                for tensor in tensors
            ]

        spec = make_spec(
            most,
            inputs=(TensorSpec("IN", "FP32", (16,), (4, 4)),),
            outputs=(TensorSpec("OUT", "FP32", (2, 8), (4, 4)),),
        )
        model = make_model(spec, note)
        answers = Answers()
        request = make_request(answers, 3 if most else None)
        submit(model, request, may_claim=True)
        lead = (3,) if most else ()
        assert seen == [(*lead, 4, 4)]
        assert answers.response(request).outputs[0].shape == (*lead, 2, 8)
        assert model.close()

    def test_a_request_the_model_answers_itself_is_left_to_it(self) -> None:
        kept: list[InferenceRequest] = []

        def keep_first(batch: Batch) -> list[InferenceResponse | None]:
            kept.append(batch.requests[0])
            return [None, *echo(batch)[1:]]

        model = make_model(make_spec(8, batching=DynamicBatching((2,), 3600 * 1_000 * MS)), keep_first)
        answers = Answers()
        requests = [make_request(answers, 1) for _ in range(2)]
        for request in requests:
            submit(model, request, may_claim=True)
        assert [answers.finals_of(request) for request in requests] == [0, 1]
        kept[0].respond(InferenceResponse([]))
        assert [answers.finals_of(request) for request in requests] == [1, 1]
        assert model.close()

    def test_a_decoupled_model_responds_any_number_of_times(self) -> None:
        def three(batch: Batch) -> None:
            for request in batch.requests:
                for _ in range(3):
                    request.respond(InferenceResponse([]), final=False)
                request.respond(None, final=True)
                request.respond(InferenceResponse([]), final=True)  # too late: goes nowhere

        model = make_model(make_spec(decoupled=True), three)
        answers = Answers()
        submit(model, make_request(answers), may_claim=False)
        assert answers.wait(1)
        model.close()
        assert [(response is None, final) for _, response, final in answers.calls] == [
            (False, False),
            (False, False),
            (False, False),
            (True, True),
        ]
        assert model.close()


class TestCreate:
    def test_what_was_made_is_closed_if_one_instance_fails(self) -> None:
        class Failing(LoadedModel):
            def create_instance(self, placement: Placement) -> BackendInstance:
                if len(self.instances) == 2:
                    raise InternalError("no more")
                return super().create_instance(placement)

        loaded = Failing()
        with pytest.raises(InternalError, match="no more"):
            Model.create(make_spec(instances=3), loaded)
        assert [instance.closed for instance in loaded.instances] == [1, 1]
        assert loaded.closed == 1

    def test_one_instance_that_does_not_close_keeps_no_other_from_it(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        class Stubborn(Instance):
            def close(self) -> None:
                super().close()
                raise RuntimeError("will not")

        loaded = LoadedModel(echo, Stubborn)
        model = Model.create(make_spec(instances=2), loaded)
        with caplog.at_level(logging.ERROR, "conch.core"):
            assert model.close()
        assert [instance.closed for instance in loaded.instances] == [1, 1]
        assert loaded.closed == 1
        assert len(caplog.records) == 2

    @pytest.mark.parametrize(
        ("groups", "expected"),
        [
            ([InstanceGroup("g")], [Placement("g_0", "CPU")]),
            ([InstanceGroup("g", count=2)], [Placement("g_0", "CPU"), Placement("g_1", "CPU")]),
            (
                [InstanceGroup("g", "GPU", 2, (0, 3)), InstanceGroup("h", "MODEL")],
                [
                    Placement("g_0", "GPU", 0),
                    Placement("g_0", "GPU", 3),
                    Placement("g_1", "GPU", 0),
                    Placement("g_1", "GPU", 3),
                    Placement("h_0", "MODEL"),
                ],
            ),
        ],
    )
    def test_placement(self, groups: list[InstanceGroup], expected: list[Placement]) -> None:
        assert place(groups) == expected


def test_a_request_that_does_not_fit_is_refused_and_not_counted() -> None:
    model = make_model(make_spec(4))
    answers = Answers()
    with pytest.raises(InvalidArgumentError):
        model.submit(make_request(answers, rows=5))
    assert not answers.calls
    assert model.pending == 0
    assert model.statistics.snapshot().fail.count == 0
    assert model.close()


def test_threads_are_started_only_when_they_are_needed_and_never_more_than_instances() -> None:
    gate = Gate()
    before = len(threading.enumerate())
    spec = make_spec()
    runner = Runner(
        "m",
        DefaultScheduler(),
        [FollowingInstance(gate) for _ in range(2)],
        Executor(spec, ModelStatistics(), time.monotonic_ns),
        time.monotonic_ns,
    )
    assert len(threading.enumerate()) == before
    answers = Answers()
    for _ in range(6):
        runner.submit(make_request(answers))
    gate.wait_entered()
    gate.wait_entered()
    assert len(threading.enumerate()) == before + 2
    gate.open()
    assert answers.wait(6)
    assert runner.closing.close()
    assert len(threading.enumerate()) == before
