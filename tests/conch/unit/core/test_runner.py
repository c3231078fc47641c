"""Claims: run late, on another thread or not at all, they lose nothing."""

from __future__ import annotations

import gc
import itertools
import logging
import random
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.core import (
    WAIT_S,
    Answers,
    Execute,
    FollowingInstance,
    Gate,
    Instance,
    echo,
    make_request,
    make_spec,
)
from tests.support.profiles import scaled
from tests.support.servers import eventually

from conch.core.clock import Clock
from conch.core.errors import ConchError, UnavailableError
from conch.core.execution.executor import Executor
from conch.core.execution.runner import Runner
from conch.core.model_statistics import ModelStatistics
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.scheduling.default import DefaultScheduler
from conch.core.scheduling.dynamic import DynamicBatcher
from conch.core.scheduling.scheduler import Batch, Scheduler
from conch.core.servable import ClosedError

MS = 1_000_000
HOUR = 3600 * 1000 * MS


def make_runner(
    execute: Execute = echo,
    instances: int = 1,
    scheduler: Scheduler | None = None,
    kind: type[Instance] = Instance,
    clock: Clock = time.monotonic_ns,
) -> Runner:
    return Runner(
        "m",
        scheduler or DefaultScheduler(),
        [kind(execute) for _ in range(instances)],
        Executor(make_spec(8), ModelStatistics(), clock),
        clock,
    )


class Forgetful(Instance):
    """An instance that does not keep its batches."""

    def execute(self, batch: Batch) -> Sequence[InferenceResponse | None] | None:
        return self._execute(batch)


def model_threads() -> int:
    return sum(thread.name.startswith("conch-m-") for thread in threading.enumerate())


class Ticking:
    """A clock that moves on by a fixed step whenever it is looked at."""

    def __init__(self, step_ns: int) -> None:
        self._now = itertools.count(1, step_ns)

    def __call__(self) -> int:
        return next(self._now)


class Noting:
    """Echoes, and notes the threads it ran on and the sizes of the batches."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self.sizes: list[int] = []

    def __call__(self, batch: Batch) -> list[InferenceResponse | None]:
        self.threads.append(threading.current_thread())
        self.sizes.append(len(batch.requests))
        return echo(batch)


class Meeting:
    """Lets so many batches run only together."""

    def __init__(self, parties: int) -> None:
        self._barrier = threading.Barrier(parties)

    def __call__(self, batch: Batch) -> list[InferenceResponse | None]:
        self._barrier.wait(WAIT_S)
        return echo(batch)


def test_a_claim_kept_late_loses_nothing() -> None:
    noting = Noting()
    runner = make_runner(noting, instances=2, scheduler=DynamicBatcher(8, (), 0))
    answers = Answers()
    assert runner.submit(make_request(answers, 1), True) is True
    for may_claim in (True, False, True, False):
        assert runner.submit(make_request(answers, 1), may_claim) is False, "one claim is enough"
    assert (runner.pending, answers.finals, model_threads()) == (5, 0, 0)
    assert runner.run_inline() is False
    assert (runner.pending, answers.finals) == (0, 5)
    assert noting.sizes == [5]
    assert runner.submit(make_request(answers, 1), True) is True, "kept, so there is a new one to give"
    assert runner.run_inline() is False
    assert runner.closing.close()


def test_a_submit_while_claimed_leaves_sleeping_threads_asleep() -> None:
    noting = Noting()
    runner = make_runner(noting, instances=2)
    answers = Answers()
    runner.submit(make_request(answers))  # a thread of the model's own runs it, and then sleeps
    assert answers.wait(1)
    noting.threads.clear()
    assert runner.submit(make_request(answers), True)
    for _ in range(20):
        assert not runner.submit(make_request(answers), False)
    # A thread that had been woken would take the batch now; it gets every chance to.
    threading.Event().wait(0.05)
    assert (runner.pending, noting.threads) == (21, [])
    assert runner.run_inline(HOUR) is False
    assert set(noting.threads) == {threading.current_thread()}
    assert answers.finals == 22
    assert runner.closing.close()


@pytest.mark.parametrize("asleep", [True, False])
def test_release_wakes_or_starts_the_models_threads(asleep: bool) -> None:
    noting = Noting()
    runner = make_runner(noting)
    answers = Answers()
    if asleep:
        runner.submit(make_request(answers))
        assert answers.wait(1)
        noting.threads.clear()
    before = answers.finals
    assert runner.submit(make_request(answers), True)
    runner.submit(make_request(answers))
    runner.release()
    assert answers.wait(before + 2)
    assert threading.current_thread() not in noting.threads
    assert runner.submit(make_request(answers), True), "the claim was given back"
    assert runner.run_inline() is False
    assert noting.threads[-1] is threading.current_thread()
    assert runner.closing.close()


@pytest.mark.parametrize("keep", ["run_inline", "hand over"])
def test_all_instances_run_what_a_claim_was_given_for(keep: str) -> None:
    runner = make_runner(Meeting(3), instances=3)
    answers = Answers()
    assert [runner.submit(make_request(answers), True) for _ in range(3)] == [True, False, False]
    if keep == "run_inline":
        assert runner.run_inline() is False
    else:
        runner.release()
    assert answers.wait(3)
    assert all(response is not None and response.error is None for _, response, _ in answers.calls)
    assert runner.closing.close()


def test_another_claimant_may_take_an_instance_that_is_left() -> None:
    runner = make_runner(Meeting(2), instances=2)
    answers = Answers()
    with ThreadPoolExecutor(1) as pool:
        assert runner.submit(make_request(answers), True)
        leading = pool.submit(runner.run_inline, HOUR)
        while runner.pending:
            assert not leading.done()
        assert runner.submit(make_request(answers), True)
        assert runner.run_inline(HOUR) is False
        assert leading.result(WAIT_S) is False
    assert (answers.finals, model_threads()) == (2, 0)
    assert runner.closing.close()


def test_a_tiny_budget_claims_again_until_everything_is_answered() -> None:
    noting = Noting()
    runner = make_runner(noting, instances=2)
    answers = Answers()
    assert runner.submit(make_request(answers), True)
    for _ in range(9):
        runner.submit(make_request(answers))
    for answered in range(1, 10):
        assert runner.run_inline(0) is True
        assert answers.finals == answered
        assert runner.submit(make_request(), True) is False, "claimed again"
    while runner.run_inline(0):
        pass
    assert runner.pending == 0
    assert set(noting.threads) == {threading.current_thread()}
    assert (len(noting.sizes), answers.finals, model_threads()) == (19, 10, 0)
    assert runner.closing.close()


def test_a_budget_that_is_used_up_with_nothing_left_is_no_claim() -> None:
    runner = make_runner()
    answers = Answers()
    assert runner.submit(make_request(answers), True)
    assert runner.run_inline(0) is False
    assert runner.run_inline(0) is False
    assert runner.run_inline() is False
    runner.release()
    assert answers.finals == 1
    assert runner.closing.close()


def test_what_a_delay_keeps_back_is_not_claimed_again() -> None:
    scheduler = DynamicBatcher(8, (2,), 20 * MS)
    runner = make_runner(scheduler=scheduler)
    answers = Answers()
    assert runner.submit(make_request(answers, 2), True)
    runner.submit(make_request(answers, 1))
    assert runner.run_inline(0) is False
    assert answers.wait(2)
    assert runner.closing.close()


def test_close_during_a_claim_waits_for_it() -> None:
    """Also where there is no thread yet that could run the batch."""
    for keep in (Runner.run_inline, Runner.release):
        runner = make_runner()
        answers = Answers()
        assert runner.submit(make_request(answers), True)
        assert runner.closing.close(0.01) is False
        with pytest.raises(ClosedError):
            runner.submit(make_request(answers), True)
        with ThreadPoolExecutor(1) as pool:
            closing = pool.submit(runner.closing.close, WAIT_S)
            keep(runner)
            assert closing.result(WAIT_S)
        assert answers.finals == 1


def test_close_waits_for_a_claim_that_was_given_again() -> None:
    runner = make_runner()
    answers = Answers()
    assert runner.submit(make_request(answers), True)
    for _ in range(3):
        runner.submit(make_request(answers))
    assert runner.run_inline(0) is True
    assert not runner.closing.close(0.01)
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(runner.closing.close, WAIT_S)
        while runner.run_inline(0):
            pass
        assert closing.result(WAIT_S)
    assert answers.finals == 4


def test_a_claim_for_what_was_cancelled_or_taken_away_comes_to_nothing() -> None:
    runner = make_runner()
    cancelled, taken = make_request(), make_request()
    assert runner.submit(cancelled, True)
    runner.submit(taken)
    assert runner.cancel(cancelled)
    assert runner.take_queued() == [taken]
    assert runner.run_inline() is False
    assert runner.submit(make_request(), True)
    runner.release()
    assert runner.closing.close()


def test_cancelling_what_holds_the_others_up_while_claimed_wakes_nobody() -> None:
    runner = make_runner(scheduler=DynamicBatcher(2, (2,), HOUR))
    answers = Answers()
    first, second, third = make_request(answers, 1), make_request(answers, 2), make_request(answers, 1)
    claimed = [runner.submit(request, True) for request in (first, second, third)]
    assert claimed == [True, False, False]
    assert runner.cancel(second)
    assert model_threads() == 0
    assert runner.run_inline(0) is False
    assert (answers.finals_of(first), answers.finals_of(third)) == (1, 1)
    assert runner.closing.close()


def test_cancelling_what_holds_the_others_up_wakes_a_waiting_thread() -> None:
    looked = threading.Event()

    def clock() -> int:
        if threading.current_thread().name.startswith("conch-m-"):
            looked.set()  # it has the lock until it waits
        return time.monotonic_ns()

    runner = make_runner(scheduler=DynamicBatcher(8, (4, 8), HOUR), clock=clock)
    answers = Answers()
    first, second = make_request(answers, 1), make_request(answers, 4, batch_size=4)
    runner.submit(first)
    assert looked.wait(WAIT_S)
    runner.submit(second)
    assert list(runner.cancel(first)) == [first]
    assert answers.wait(1)
    assert answers.finals_of(second) == 1
    assert runner.closing.close()


@pytest.mark.parametrize(("each_ns", "fast"), [(0, False), (50_000, True), (10 * MS, False)])
def test_fast_says_whether_batches_have_been_short(each_ns: int, fast: bool) -> None:
    now = 1

    def clock() -> int:
        return now

    def execute(batch: Batch) -> list[InferenceResponse | None]:
        nonlocal now
        now += each_ns
        return echo(batch)

    runner = make_runner(execute, clock=clock)
    assert not runner.fast, "nothing is known yet"
    for _ in range(3):
        assert runner.submit(make_request(), True)
        runner.run_inline()
    assert runner.fast is fast
    assert runner.closing.close()


def test_a_model_that_has_become_slow_is_no_longer_fast_and_may_become_it_again() -> None:
    now, each = 1, 10_000

    def execute(batch: Batch) -> list[InferenceResponse | None]:
        nonlocal now
        now += each
        return echo(batch)

    runner = make_runner(execute, clock=lambda: now)

    def run(times: int) -> bool:
        for _ in range(times):
            assert runner.submit(make_request(), True)
            runner.run_inline()
        return runner.fast

    assert run(3)
    each = 20 * MS
    assert not run(1)
    each = 10_000
    assert run(60)
    assert runner.closing.close()


def test_nobody_may_run_inline_if_one_instance_does_not_allow_it() -> None:
    noting = Noting()
    runner = make_runner(noting, instances=2, kind=FollowingInstance)
    answers = Answers()
    assert runner.submit(make_request(answers), True) is False
    assert answers.wait(1)
    assert threading.current_thread() not in noting.threads
    assert runner.closing.close()


@pytest.fixture
def fast_switching() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("fast_switching")
@given(
    seed=st.integers(0, 2**32),
    threads=st.integers(1, 4),
    each=st.integers(1, 25),
    instances=st.integers(1, 3),
    batching=st.sampled_from([None, ((), 0), ((2,), MS // 10), ((4,), 2 * MS)]),
    close_early=st.booleans(),
)
@settings(max_examples=scaled(60))
def test_whatever_is_done_with_claims_everything_is_answered_once(
    seed: int,
    threads: int,
    each: int,
    instances: int,
    batching: tuple[tuple[int, ...], int] | None,
    close_early: bool,
) -> None:
    """Each thread collects its claims and keeps them in a random order, late, by any means."""
    scheduler = DefaultScheduler() if batching is None else DynamicBatcher(4, *batching)
    runner = make_runner(instances=instances, scheduler=scheduler)
    answers = Answers()
    accepted: list[InferenceRequest] = []

    def keep(choose: random.Random) -> bool:
        match choose.randrange(4):
            case 0:
                return runner.run_inline()
            case 1:
                return runner.run_inline(0)
            case 2:
                return runner.run_inline(choose.randrange(MS))
            case _:
                runner.release()
                return False

    def client(number: int) -> None:
        choose = random.Random(seed + number)
        claims = 0
        for _ in range(each):
            request = make_request(answers, choose.choice((1, 2)))
            try:
                claims += runner.submit(request, choose.random() < 0.8)
            except ClosedError:
                break
            accepted.append(request)
            if choose.random() < 0.3 and runner.cancel(request):
                request.fail(UnavailableError("cancelled"))
            while claims and choose.random() < 0.4:
                claims -= not keep(choose)
        while claims:
            claims -= not keep(choose)

    with ThreadPoolExecutor(threads) as pool:
        clients = [pool.submit(client, number) for number in range(threads)]
        if close_early:
            assert runner.closing.close(WAIT_S)
        for future in clients:
            future.result(WAIT_S)
    assert answers.wait(len(accepted)), f"{len(accepted) - answers.finals} requests wait for ever"
    assert runner.closing.close(WAIT_S)
    assert sorted(id(request) for request, _, _ in answers.calls) == sorted(map(id, accepted))


class TestNothingIsKept:
    """With the collector off: what is only collected by it may hold large messages for long."""

    @pytest.fixture(autouse=True)
    def no_collector(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        # pytest keeps what is logged, with its tracebacks.
        monkeypatch.setattr(logging.getLogger("conch.core.execution.executor"), "disabled", True)
        gc.collect()
        gc.disable()
        yield
        gc.enable()

    @pytest.mark.parametrize("error", [UnavailableError, ValueError, SystemExit])
    @pytest.mark.parametrize("allows_inline", [True, False])
    def test_a_failed_batch_is_not_kept_alive(self, error: type[BaseException], allows_inline: bool) -> None:
        def fail(batch: Batch) -> Sequence[InferenceResponse | None]:
            nested(batch.requests)
            raise AssertionError("not reached")

        def nested(requests: Sequence[InferenceRequest]) -> None:
            try:
                raise KeyError(requests[0].inputs["IN"].name)
            except KeyError:
                raise error("no luck")  # noqa: B904 - the context is what may keep the request

        shown: list[ConchError] = []
        self._run(make_runner(fail, kind=Forgetful), allows_inline, shown)
        assert shown

    @pytest.mark.parametrize("allows_inline", [True, False])
    def test_a_sleeping_thread_does_not_keep_its_last_batch(self, allows_inline: bool) -> None:
        self._run(make_runner(kind=Forgetful), allows_inline, [])

    @staticmethod
    def _run(runner: Runner, allows_inline: bool, errors: list[ConchError]) -> None:
        """Runs one batch, and waits until its request's data are gone."""
        done = threading.Event()

        def answer(request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
            assert response is not None
            if response.error is not None:
                errors.append(response.error)
            done.set()

        class Message:
            """Something that can be watched, and that the request keeps."""

        message = Message()
        watched = weakref.ref(message)
        request = make_request(answer, 1, context=message)
        if runner.submit(request, allows_inline):
            runner.run_inline()
        del request, message
        assert done.wait(WAIT_S)

        # The model's thread may still be on its way from the answer to its sleep.
        eventually(lambda: watched() is None, "its request's data are gone")
        assert runner.closing.close()


def test_a_spike_leaves_other_instances_to_be_handed_over() -> None:
    """A claimant with a budget leaves requests in the queue; others run them once `release` is called."""
    held = Gate()
    first = make_request()

    def execute(batch: Batch) -> list[InferenceResponse | None]:
        return held(batch) if batch.requests == [first] else echo(batch)

    runner = make_runner(execute, instances=2)
    answers = Answers()
    with ThreadPoolExecutor(1) as pool:
        assert runner.submit(first, True)
        for _ in range(3):
            runner.submit(make_request(answers))
        leading = pool.submit(runner.run_inline, HOUR)
        held.wait_entered()
        assert (runner.pending, model_threads()) == (3, 0), "not worth waking anybody for short batches"
        runner.release()
        assert answers.wait(3)
        held.open()
        assert leading.result(WAIT_S) is False
    assert runner.closing.close()


def test_claims_of_many_claimants_with_tiny_budgets() -> None:
    """Round robin, as pollers do it, while others submit."""
    runner = make_runner(instances=2, scheduler=DynamicBatcher(4, (), 0))
    answers = Answers()
    total = 400
    claimed: deque[int] = deque()
    submitting = threading.Event()

    def submit() -> None:
        for _ in range(total // 2):
            if runner.submit(make_request(answers, 1), True):
                claimed.append(1)
        submitting.set()

    with ThreadPoolExecutor(2) as pool:
        submitters = [pool.submit(submit) for _ in range(2)]
        deadline = time.monotonic() + WAIT_S
        while answers.finals < total:
            assert time.monotonic() < deadline, f"{total - answers.finals} requests wait for ever"
            try:
                claimed.popleft()
            except IndexError:
                time.sleep(0)
                continue
            if runner.run_inline(0):
                claimed.append(1)
        for future in submitters:
            future.result(WAIT_S)
    assert model_threads() == 0
    assert runner.closing.close()
