"""Models with sequences on real threads: they close, give idle sequences up, and answer everything once."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from tests.conch.unit.core.sequences import MS, US, sequence_request, sequence_spec
from tests.support.core import WAIT_S, Answers, FollowingInstance, Gate, Instance, LoadedModel, Shifted, echo

from conch.core.clock import Clock
from conch.core.errors import (
    CancelledError,
    ConchError,
    DeadlineExceededError,
    InvalidArgumentError,
    UnavailableError,
)
from conch.core.model_version import Model
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.scheduling.scheduler import Batch
from conch.core.servable import ClosedError
from conch.core.spec import InstanceGroup

HOUR_NS = 3_600_000 * MS


def model_of(
    execute: Any = echo,
    most: int = 2,
    instances: int = 1,
    allows_inline: bool = False,
    clock: Clock = time.monotonic_ns,
    **settings: Any,
) -> Model:
    settings.setdefault("max_idle_ns", HOUR_NS)
    spec = replace(sequence_spec(most, **settings), instance_groups=(InstanceGroup("m", count=instances),))
    return Model.create(spec, LoadedModel(execute, Instance if allows_inline else FollowingInstance), clock)


def send(
    model: Model, answers: Answers, correlation_id: int, flags: str = "", **changes: Any
) -> InferenceRequest:
    request = sequence_request(correlation_id, flags, answers, received_ns=time.monotonic_ns(), **changes)
    runner = model.submit(request, may_claim=False)
    assert runner is None
    return request


def error_of(answers: Answers, request: InferenceRequest) -> ConchError | None:
    return answers.response(request).error


def test_a_close_waits_for_the_end_of_live_sequences() -> None:
    model, answers = model_of(), Answers()
    send(model, answers, 1, "S")
    assert answers.wait(1)
    assert not model.close(0.01), "one sequence lives"
    with pytest.raises(ClosedError):
        send(model, answers, 2, "S")
    with pytest.raises(ClosedError):
        send(model, answers, 1, "S")
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(model.close, WAIT_S)
        assert model.continues(sequence_request(1))
        send(model, answers, 1)
        send(model, answers, 1, "E")
        assert closing.result(WAIT_S)
    assert answers.finals == 3
    assert all(response is not None and response.error is None for _, response, _ in answers.calls)


@pytest.mark.parametrize("allows_inline", [True, False])
def test_a_close_ends_when_the_last_sequence_has_been_idle_for_too_long(allows_inline: bool) -> None:
    model, answers = model_of(max_idle_ns=30 * MS, allows_inline=allows_inline), Answers()
    request = sequence_request(1, "S", answers)
    runner = model.submit(request, may_claim=allows_inline)
    if runner is not None:
        runner.run_inline()
    assert answers.wait(1)
    assert model.close(WAIT_S)


def test_a_close_that_is_under_way_ends_then_too() -> None:
    gate = Gate()
    model, answers = model_of(gate, max_idle_ns=20 * MS), Answers()
    send(model, answers, 1, "S")
    gate.wait_entered()
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(model.close, None)
        gate.open()
        assert closing.result(WAIT_S)
    assert answers.finals == 1


def test_a_claimant_that_gives_the_last_sequence_up_ends_a_close() -> None:
    """The time comes while a thread asks for work, not while the one for timeouts sleeps."""
    clock = Shifted()
    model, answers = model_of(clock=clock, allows_inline=True), Answers()
    claim = model.submit(sequence_request(1, "S", answers, received_ns=clock()), may_claim=True)
    assert claim is not None
    assert claim.run_inline() is False
    send(model, answers, 1)  # from now on a thread waits until the sequence is idle for too long
    assert answers.wait(2)
    clock.readers.clear()
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(model.close, None)
        # Both read the clock under the lock that they give up when they sleep.
        while "conch-m-timeouts" not in clock.readers or len(set(clock.readers)) < 2:
            assert not closing.done()
        clock.ahead_ns += 2 * HOUR_NS
        assert claim.run_inline() is False
        assert closing.result(WAIT_S), "it was told"


def test_draining_forgets_live_sequences() -> None:
    model, answers = model_of(), Answers()
    send(model, answers, 1, "S")
    assert answers.wait(1)
    assert not model.close(0.01)
    assert model.fail_queued(UnavailableError("Server exiting")) == 0
    assert model.close(WAIT_S)


def test_an_idle_sequence_gives_its_slot_to_one_that_waits() -> None:
    model, answers = model_of(most=1, max_idle_ns=20 * MS), Answers()
    send(model, answers, 1, "S")
    waiting = send(model, answers, 2, "SE")
    assert answers.wait(2)
    assert error_of(answers, waiting) is None
    with pytest.raises(InvalidArgumentError, match="must specify the START flag"):
        send(model, answers, 1)
    assert model.close(WAIT_S)


def test_timeouts_in_the_backlog_and_deadlines_are_answered() -> None:
    gate = Gate()
    model, answers = model_of(gate, most=1), Answers()
    running = send(model, answers, 1, "S")
    gate.wait_entered()
    backlog = [send(model, answers, 2, "S"), send(model, answers, 2, "E", timeout_us=20 * MS // US)]
    now = time.monotonic_ns()
    late = [send(model, answers, 1), send(model, answers, 1, deadline_ns=now + 20 * MS)]
    assert answers.wait(4)
    for request in (*backlog, late[0]):
        error = error_of(answers, request)
        assert isinstance(error, UnavailableError)
        assert error.message == "timeout of the corresponding sequence has been expired"
    assert isinstance(error_of(answers, late[1]), DeadlineExceededError)
    gate.open()
    last = send(model, answers, 1, "E")
    assert model.close(WAIT_S)
    assert error_of(answers, running) is None and error_of(answers, last) is None
    assert model.statistics.snapshot().fail.count == 4


def test_a_cancelled_request_takes_its_sequence_with_it() -> None:
    gate = Gate()
    model, answers = model_of(gate, most=1), Answers()
    send(model, answers, 1, "SE")
    gate.wait_entered()
    queued = [send(model, answers, 2, flags) for flags in ("S", "", "E")]
    assert model.cancel(queued[1])
    assert answers.finals == 3
    assert all(isinstance(error_of(answers, request), CancelledError) for request in queued)
    gate.open()
    assert model.close(WAIT_S)
    assert model.statistics.snapshot().fail.count == 3


def test_a_batch_that_fails_does_not_end_its_sequences() -> None:
    calls = iter((True, False))

    def execute(batch: Batch) -> list[InferenceResponse | None]:
        if next(calls):
            raise ValueError("no luck")
        return echo(batch)

    model, answers = model_of(execute), Answers()
    first = send(model, answers, 1, "S")
    assert answers.wait(1)
    last = send(model, answers, 1, "E")
    assert model.close(WAIT_S)
    failed = error_of(answers, first)
    assert failed is not None and failed.message == "no luck"
    assert error_of(answers, last) is None


def test_a_delay_that_ends_before_the_one_somebody_sleeps_for() -> None:
    """One instance's batch is due in an hour, then that of another one soon."""
    gate, clock = Gate(), Shifted()

    def execute(batch: Batch) -> list[InferenceResponse | None]:
        return gate(batch) if batch.instance else echo(batch)

    settings: dict[str, Any] = {
        "min_slot_utilization": 1.0,
        "max_queue_delay_ns": HOUR_NS,
        "allows_inline": True,
    }
    model = model_of(execute, instances=2, clock=clock, **settings)
    answers = Answers()
    first = sequence_request(1, "S", answers, received_ns=clock())
    claim = model.submit(first, may_claim=True)  # so that no thread waits for a batch that is not full
    assert claim is not None
    for number in (2, 3, 4):
        send(model, answers, number, "S")
    if claim.run_batch_inline():
        claim.release()
    gate.wait_entered()
    assert answers.wait(2), "all rows are ready, so nobody waits"
    soon = send(model, answers, 2)
    clock.ahead_ns += HOUR_NS - 50 * MS
    clock.readers.clear()
    late = send(model, answers, 1)
    deadline = time.monotonic() + WAIT_S
    # A thread reads the clock under the lock that it gives up when it sleeps until the late one is due.
    while not {"conch-m-0", "conch-m-1"}.intersection(clock.readers):
        assert time.monotonic() < deadline, "no thread waits for the late one"
    gate.open()
    assert answers.wait(5)
    assert (answers.finals_of(soon), answers.finals_of(late)) == (1, 0)
    assert model.fail_queued(UnavailableError("Server exiting")) == 1
    assert model.close(WAIT_S)


@pytest.mark.parametrize("strategy", ["DIRECT", "OLDEST"])
@pytest.mark.parametrize("seed", range(4))
def test_many_clients_with_sequences_of_their_own(strategy: str, seed: int) -> None:
    """Each sequence stays on its instance and in its row, and its requests run in order."""
    lock = threading.Lock()
    seen: dict[int | str, list[tuple[int, int]]] = {}
    steps: dict[int | str, list[float]] = {}

    def execute(batch: Batch) -> list[InferenceResponse | None]:
        assert batch.instance is not None
        with lock:
            for row, request in enumerate(batch.requests):
                if not request.filler:
                    seen.setdefault(request.correlation_id, []).append((batch.instance, row))
                    steps.setdefault(request.correlation_id, []).append(
                        float(request.inputs["IN"].numpy()[0, 0])
                    )
        return echo(batch)

    model = model_of(execute, most=3, instances=2, strategy=strategy, max_candidates=2)
    answers = Answers()
    length = 12

    def client(first: int) -> None:
        choose = random.Random(seed * 100 + first)
        ids = [first + 100 * number for number in range(6)]
        left = {each: 0 for each in ids}
        while left:
            each = choose.choice(list(left))
            step = left[each]
            flags = ("S" if not step else "") + ("E" if step == length - 1 else "")
            request = sequence_request(each, flags, answers, value=step)
            runner = model.submit(request, may_claim=choose.random() < 0.5)
            if runner is not None:
                if choose.random() < 0.5:
                    while runner.run_inline(0):
                        pass
                else:
                    runner.release()
            left[each] += 1
            if left[each] == length:
                del left[each]

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(client, first) for first in (1, 2, 3, 4)]:
            done.result(WAIT_S)
    assert answers.wait(4 * 6 * length)
    assert model.close(WAIT_S)
    assert len(answers.calls) == 4 * 6 * length
    assert all(response is not None and response.error is None for _, response, _ in answers.calls)
    for each, values in steps.items():
        assert values == list(range(length)), each
        assert len({place[: 2 if strategy == "DIRECT" else 1] for place in seen[each]}) == 1
    counted = model.statistics.snapshot()
    assert (counted.success.count, counted.inference_count) == (4 * 6 * length, 4 * 6 * length)
