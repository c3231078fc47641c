"""Requests that run again, rows without a request, and states: what an executed batch does with them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.support.core import Answers, Execute, Instance, make_request, make_spec

from conch.core.errors import CancelledError, InvalidArgumentError
from conch.core.execution.executor import Executor
from conch.core.model_statistics import Duration, ModelStatistics
from conch.core.request import InferenceRequest, InferenceResponse, RequestState
from conch.core.scheduling.scheduler import Batch
from conch.core.scheduling.sequence.controls import FillerRequest
from conch.core.spec import ControlTensor, ModelSpec, SequenceBatching, StateSpec, TensorSpec
from conch.core.tensor import Tensor
from conch.core.validation import RequestValidator

STATE = StateSpec("BEFORE", "AFTER", "FP32", (16,), (16,))


def sequences(**settings: Any) -> ModelSpec:
    return dataclasses.replace(make_spec(8), sequence=SequenceBatching(**settings))


ITERATIVE = sequences(iterative=True)


class Run:
    """One batch of one row for each name; ``f`` is a filler, the others are requests."""

    def __init__(self, spec: ModelSpec, names: str, execute: Execute, **attributes: Any) -> None:
        self.answers = Answers()
        self.statistics = ModelStatistics()
        self.requests: list[InferenceRequest] = []
        like = make_request(rows=1)
        for number, name in enumerate(names, 1):
            if name == "f":
                request: InferenceRequest = FillerRequest(like, dict(like.inputs))
            else:
                times: dict[str, Any] = {"received_ns": 100 * number, "queued_ns": 100 * number + 50}
                request = make_request(self.answers, rows=1, **times, **attributes)
            request.state = RequestState.RUNNING
            self.requests.append(request)
        self.batch = Batch(self.requests, len(names))
        self.batch.fillers = names.count("f")
        clock = itertools.chain((1_000, 1_500), itertools.repeat(1_500)).__next__
        Executor(spec, self.statistics, clock).run(Instance(execute), self.batch)

    @property
    def counted(self) -> tuple[int, int, int, int]:
        """Inferences, executions, successes, failures."""
        counted = self.statistics.snapshot()
        return counted.inference_count, counted.execution_count, counted.success.count, counted.fail.count


def again(*which: int) -> Callable[[Batch], list[InferenceResponse | None]]:
    """Answers all requests but these, which are to run again."""

    def execute(batch: Batch) -> list[InferenceResponse | None]:
        for number in which:
            batch.requests[number].rescheduled = True
        return [None if number in which else InferenceResponse([]) for number in range(len(batch.requests))]

    return execute


def test_a_request_that_runs_again_is_not_answered_and_not_counted() -> None:
    run = Run(ITERATIVE, "abc", again(1))
    assert run.answers.finals_of(run.requests[1]) == 0
    assert run.requests[1].rescheduled
    assert run.answers.finals == 2
    assert run.counted == (2, 1, 2, 0)
    counted = run.statistics.snapshot()
    assert counted.success == Duration(2, (1_500 - 100) + (1_500 - 300))
    assert counted.queue == Duration(2, 850 + 750 + 650), "its time in the queue counts"
    assert counted.compute_infer == Duration(2, 3 * 500)
    assert list(counted.batches) == [3]


def test_a_batch_all_of_which_runs_again_is_an_execution() -> None:
    run = Run(ITERATIVE, "ab", again(0, 1))
    assert run.answers.finals == 0
    assert run.counted == (0, 1, 0, 0)


def test_where_no_request_can_run_again_it_is_told_so() -> None:
    for spec in (make_spec(8), sequences()):
        run = Run(spec, "ab", again(0))
        error = run.answers.response(run.requests[0]).error
        assert isinstance(error, InvalidArgumentError)
        assert error.message == (
            "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model is not "
            "configured to handle such a flag."
        )
        assert not run.requests[0].rescheduled
        assert run.counted == (1, 1, 1, 1)


@pytest.mark.parametrize(("idle_ns", "over"), [(499, True), (500, False)])
@pytest.mark.parametrize("decoupled", [False, True])
def test_a_run_that_takes_longer_than_a_sequence_may_be_idle_is_the_last(
    idle_ns: int, over: bool, decoupled: bool
) -> None:
    spec = dataclasses.replace(sequences(iterative=True, max_idle_ns=idle_ns), decoupled=decoupled)
    run = Run(spec, "a", again(0), correlation_id=7)  # for 500 ns
    assert run.requests[0].rescheduled is not over
    assert run.answers.finals == over
    if over:
        ((_, response, _),) = run.answers.calls
        assert response is not None and isinstance(response.error, InvalidArgumentError)
        assert response.error.message == (
            "inference request for sequence 7 to model 'm' must specify the START flag on the first request "
            "of the sequence: the sequence ended while its request ran for longer than "
            "max_sequence_idle_microseconds, 0"
        )


def test_nobody_runs_a_cancelled_request_again() -> None:
    run = Run(ITERATIVE, "a", again(0), cancelled=True)
    assert isinstance(run.answers.response(run.requests[0]).error, CancelledError)
    assert not run.requests[0].rescheduled
    assert run.counted == (0, 0, 0, 1)


def test_an_answered_request_does_not_run_again() -> None:
    def execute(batch: Batch) -> list[InferenceResponse | None]:
        batch.requests[0].respond(InferenceResponse([]))
        return again(0)(batch)

    run = Run(ITERATIVE, "a", execute)
    assert not run.requests[0].rescheduled
    assert run.answers.finals == 1
    assert run.counted == (1, 1, 1, 0)


def test_a_failed_batch_does_not_run_again() -> None:
    def execute(batch: Batch) -> list[InferenceResponse | None]:
        again(0, 1)(batch)
        raise ValueError("no")

    run = Run(ITERATIVE, "ab", execute)
    assert not any(request.rescheduled for request in run.requests)
    assert run.answers.finals == 2
    assert run.counted == (0, 0, 0, 2)


def test_a_decoupled_request_is_counted_once_with_the_time_of_all_its_runs() -> None:
    now = 1_000

    def run_again(batch: Batch) -> None:
        nonlocal now
        now += 500
        batch.requests[0].rescheduled = True

    def end(batch: Batch) -> None:
        nonlocal now
        now += 500
        batch.requests[0].respond(InferenceResponse([]))

    statistics = ModelStatistics()
    executor = Executor(dataclasses.replace(ITERATIVE, decoupled=True), statistics, lambda: now)
    request = make_request(rows=1, received_ns=100, queued_ns=150, state=RequestState.RUNNING)
    executor.run(Instance(run_again), Batch([request], 1))
    assert statistics.snapshot().success == Duration(0, 0)
    request.rescheduled, request.queued_ns, request.state = False, 1_600, RequestState.RUNNING
    now = 2_000
    executor.run(Instance(end), Batch([request], 1))
    counted = statistics.snapshot()
    assert (counted.inference_count, counted.execution_count) == (1, 2)
    assert counted.success == Duration(1, 2_500 - 100)
    assert counted.queue == Duration(1, (1_000 - 150) + (2_000 - 1_600))
    assert executor.tracker.count == 0


@pytest.mark.parametrize(("spec", "finals"), [(ITERATIVE, 0), (make_spec(8), 1)])
def test_decoupled_requests_run_again_too(spec: ModelSpec, finals: int) -> None:
    def execute(batch: Batch) -> None:
        batch.requests[0].rescheduled = True
        batch.requests[1].respond(InferenceResponse([]))

    run = Run(dataclasses.replace(spec, decoupled=True), "ab", execute)
    assert run.answers.finals == 1 + finals
    assert run.requests[0].rescheduled is (finals == 0)
    assert run.counted == (1, 1, 1, finals)


def test_inputs_have_their_own_shape_again_for_the_next_run() -> None:
    spec = dataclasses.replace(ITERATIVE, inputs=(TensorSpec("IN", "FP32", (16,), reshape=(4, 4)),))
    shapes = []

    def execute(batch: Batch) -> list[InferenceResponse | None]:
        shapes.append(batch.requests[0].inputs["IN"].shape)
        return again(0)(batch)

    run = Run(spec, "a", execute)
    assert run.requests[0].inputs["IN"].shape == (1, 16)
    Executor(spec, run.statistics, lambda: 2_000).run(Instance(execute), Batch(run.batch.requests, 1))
    assert shapes == [(1, 4, 4)] * 2


@pytest.mark.parametrize("names", ["fa", "ffab", "faffb"])
def test_fillers_are_part_of_the_batch_and_of_nothing_else(names: str) -> None:
    def execute(batch: Batch) -> list[InferenceResponse | None]:
        return [InferenceResponse([]) for _ in batch.requests]

    run = Run(sequences(), names, execute)
    made = len(names) - names.count("f")
    assert run.answers.finals == made
    assert run.counted == (made, 1, made, 0)
    assert list(run.statistics.snapshot().batches) == [len(names)]
    queued = sum(1_000 - 100 * number - 50 for number, name in enumerate(names, 1) if name != "f")
    assert run.statistics.snapshot().queue == Duration(made, queued)


def test_fillers_do_not_fail() -> None:
    def execute(batch: Batch) -> list[InferenceResponse | None]:
        raise ValueError("no")

    run = Run(sequences(), "ffa", execute)
    assert run.answers.finals == 1
    assert run.counted == (0, 0, 0, 1)


def test_a_filler_does_not_run_again() -> None:
    run = Run(ITERATIVE, "fa", again(0, 1))
    assert [request.rescheduled for request in run.requests[1:]] == [True]

    def execute(batch: Batch) -> None:
        batch.requests[0].rescheduled = True
        batch.requests[1].respond(InferenceResponse([]))

    decoupled = Run(dataclasses.replace(ITERATIVE, decoupled=True), "fa", execute)
    assert not decoupled.requests[0].rescheduled
    assert decoupled.counted == (1, 1, 1, 0)


def test_states_are_taken_out_of_responses() -> None:
    def execute(batch: Batch) -> list[InferenceResponse | None]:
        row = np.zeros((1, 16), np.float32)
        return [
            InferenceResponse([Tensor.from_array("OUT", row), Tensor.from_array("AFTER", row)])
            for _ in batch.requests
        ]

    run = Run(sequences(states=(STATE,)), "fa", execute)
    response = run.answers.response(run.requests[1])
    assert [tensor.name for tensor in response.outputs] == ["OUT"]


def test_a_state_that_does_not_fit_fails_its_own_request() -> None:
    def execute(batch: Batch) -> list[InferenceResponse | None]:
        return [
            InferenceResponse([Tensor.from_array("AFTER", np.zeros((1, width), np.float32))])
            for width in (16, 15)
        ]

    run = Run(sequences(states=(STATE,)), "ab", execute)
    assert run.answers.response(run.requests[0]).error is None
    assert run.answers.response(run.requests[1]).error is not None
    assert run.counted == (1, 1, 1, 1)


@pytest.mark.parametrize(
    ("datatype", "iterative", "given", "fits"),
    [
        ("UINT64", False, 5, True),
        ("INT32", False, 2**40, True),
        ("UINT64", False, 0, True),  # that there is none is the scheduler's to say
        ("UINT64", False, "a", False),
        ("BYTES", False, "a", True),
        ("BYTES", False, "", True),
        ("BYTES", False, 5, False),
        ("BYTES", False, 0, False),
        ("BYTES", True, 0, True),  # it is given one
        ("BYTES", True, 5, False),
        (None, False, "a", True),
    ],
)
def test_correlation_ids(datatype: str | None, iterative: bool, given: int | str, fits: bool) -> None:
    controls: tuple[ControlTensor, ...] = (ControlTensor("S", "START", "INT32"),)
    if datatype is not None:
        controls = (*controls, ControlTensor("ID", "CORRID", datatype))
    validate = RequestValidator(sequences(controls=controls, iterative=iterative))
    request = make_request(rows=1, correlation_id=given)
    if fits:
        validate(request)
        return
    with pytest.raises(InvalidArgumentError) as raised:
        validate(request)
    assert raised.value.message == (
        f"sequence batching control 'ID' data-type is "
        f"'{'BYTES' if isinstance(given, str) else 'UINT64'}', but model 'm' expects '{datatype}'"
    )


def test_tensors_of_the_server_are_not_for_clients() -> None:
    spec = sequences(controls=(ControlTensor("S", "START", "INT32"),), states=(STATE,))
    validate = RequestValidator(spec)
    for name in ("S", "BEFORE"):
        request = make_request(rows=1)
        request.inputs[name] = Tensor.from_array(name, np.zeros((1, 1), np.int32))
        with pytest.raises(InvalidArgumentError, match=f"unexpected inference input '{name}'"):
            validate(request)
    with pytest.raises(InvalidArgumentError, match="unexpected inference output 'AFTER'"):
        validate(make_request(rows=1, requested=("AFTER",)))


def test_a_model_has_inputs_and_outputs_that_clients_do_not_see() -> None:
    plain = make_spec(8)
    assert (plain.model_inputs, plain.model_outputs) == (plain.inputs, plain.outputs)
    seen = StateSpec("B2", "OUT", "FP32", (-1,), (1,))
    spec = sequences(controls=(ControlTensor("S", "START", "INT32"),), states=(STATE, seen))
    assert spec.model_inputs == (
        *plain.inputs,
        TensorSpec("S", "INT32", (1,)),
        TensorSpec("BEFORE", "FP32", (16,)),
        TensorSpec("B2", "FP32", (-1,)),
    )
    assert spec.model_outputs == (*plain.outputs, TensorSpec("AFTER", "FP32", (16,)))
