"""Polling threads on a queue of their own: one polls or runs inline; no promise and no turn is lost."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import pytest
from tests.support.clocks import Clock
from tests.support.core import WAIT_S, Answers, Instance, echo, make_request, make_spec

from conch.core.execution.executor import Executor
from conch.core.execution.runner import Runner
from conch.core.model_statistics import ModelStatistics
from conch.core.request import InferenceResponse
from conch.core.scheduling.dynamic import DynamicBatcher
from conch.core.scheduling.scheduler import Batch
from conch.frontends.grpc.adapter.pollers import Pollers

MS = 1_000_000
LEAD, HAND_OVER = "run_inline", "hand over"


@dataclass(frozen=True, slots=True)
class Event:
    tag: Callable[[Any], object] | None
    completion_type: int = 0


TIMEOUT = 1
SHUT_DOWN = Event(None)


class Rig:
    """Pollers, and a completion queue that holds what the test puts into it."""

    def __init__(self, count: int) -> None:
        self._queue: queue.Queue[Event] = queue.Queue()
        self._happened: queue.Queue[tuple[str, str, threading.Thread, int | None]] = queue.Queue()
        self._count = count
        self._polling = threading.Lock()
        self.clock = Clock(1)
        self.pollers = Pollers(self, TIMEOUT, count, self.clock)

    def poll(self, deadline: float | None) -> Event:
        """As the completion queue has it."""
        assert deadline in (0, None)
        assert self._polling.acquire(blocking=False), "two threads poll at once"
        try:
            event = self._queue.get(block=deadline is None)
        except queue.Empty:
            return Event(None, TIMEOUT)
        finally:
            self._polling.release()
        if event is SHUT_DOWN:
            self._queue.put(SHUT_DOWN)
        return event

    def put(self, tag: Callable[[], object]) -> None:
        """Has an event arrive."""
        self._queue.put(Event(lambda event: tag()))

    def shut_down(self) -> None:
        self._queue.put(SHUT_DOWN)

    def arrive(self, *models: Model, then: Callable[[], object] = lambda: None) -> None:
        """Has requests for models arrive, all of them before the first can be answered."""
        together = threading.Event()

        def first() -> None:
            assert together.wait(WAIT_S)

        self.put(first)
        for model in models:
            self.put(partial(self.pollers.queue_inline, model))
        self.put(then)
        together.set()

    def note(self, what: str, model: str, budget_ns: int | None = None) -> None:
        self._happened.put((what, model, threading.current_thread(), budget_ns))

    def next(self, what: str, model: str) -> tuple[threading.Thread, int | None]:
        """The thread on which the next thing has happened, which must be this, and the budget it had."""
        done, name, thread, budget_ns = self._happened.get(timeout=WAIT_S)
        assert (done, name) == (what, model)
        return thread, budget_ns

    def nothing_more(self) -> None:
        assert self._happened.empty(), self._happened.get()

    def handled_by(self) -> threading.Thread:
        """Has an event arrive; the thread that takes it in."""
        thread: queue.Queue[threading.Thread] = queue.Queue()
        self.put(lambda: thread.put(threading.current_thread()))
        return thread.get(timeout=WAIT_S)

    def until_waiting(self, count: int, while_led: bool = False) -> None:
        """Waits until so many threads wait for their turn, and another polls unless that one leads."""
        deadline = time.monotonic() + WAIT_S
        # In this order: a thread that has just got its turn counts as waiting until shortly before it polls.
        while not (while_led or self._polling.locked()) or self.pollers.waiting != count:
            assert time.monotonic() < deadline, f"{self.pollers.waiting} threads wait, not {count}"
            time.sleep(0)

    def works(self, among: int) -> None:
        """Checks that all threads are back, that events are taken in, and that a model is led again."""
        self.until_waiting(among - 1)
        for _ in range(3):
            self.handled_by()
        model = Model(self, "probe", True)
        self.arrive(model)
        thread, budget = self.next(LEAD if among > 1 else HAND_OVER, "probe")
        assert (budget is not None) == (among > 1)
        assert self.handled_by().is_alive()
        assert thread.is_alive()


class Model:
    """Something to lead; in `during` it may wait for the test, and it says whether the time was up."""

    def __init__(self, rig: Rig, name: str, fast: bool, during: Callable[[], object] = lambda: None) -> None:
        self._rig = rig
        self._name = name
        self._during = during
        self.fast = fast

    def run_inline(self, budget_ns: int | None = None) -> bool:
        self._rig.note(LEAD, self._name, budget_ns)
        return bool(self._during())

    def run_batch_inline(self) -> bool:
        return self.run_inline(0)

    def release(self) -> None:
        self._rig.note(HAND_OVER, self._name)


class Held:
    """Lasts until it is let go."""

    def __init__(self, result: bool = False) -> None:
        self.go = threading.Event()
        self._result = result

    def __call__(self) -> bool:
        assert self.go.wait(WAIT_S), "the test never let it go"
        return self._result


@contextmanager
def polling(count: int) -> Iterator[Rig]:
    """Pollers that have taken their places; they must end when the queue is shut down."""
    rig = Rig(count)
    rig.pollers.start()
    try:
        rig.until_waiting(count - 1)
        yield rig
    finally:
        rig.shut_down()
        assert rig.pollers.join(WAIT_S), "a thread lives on"


def test_promises_are_kept_after_all_that_has_arrived_was_taken_in() -> None:
    with polling(2) as rig:
        order: list[str] = []
        models = [
            Model(rig, name, fast, partial(order.append, f"lead {name}"))
            for name, fast in (("a", True), ("b", True), ("c", False))
        ]
        rig.arrive(*models, then=lambda: order.append("last"))
        for name in "abc":
            rig.next(LEAD, name)
        rig.until_waiting(1)
        assert order == ["last", "lead a", "lead b", "lead c"]
        rig.nothing_more()


def test_a_fast_model_is_led_by_the_thread_that_polls_and_nobody_polls_meanwhile() -> None:
    with polling(2) as rig:
        held = Held()
        taken_in: list[threading.Thread] = []
        rig.arrive(Model(rig, "a", True, held), then=lambda: taken_in.append(threading.current_thread()))
        thread, budget = rig.next(LEAD, "a")
        assert budget is not None and 0 < budget <= 5 * MS
        assert taken_in == [thread]
        assert rig.pollers.poll_lock.locked() and not rig._polling.locked()
        rig.until_waiting(1, while_led=True)
        held.go.set()
        assert rig.handled_by() is thread, "it has kept the turn"


def test_a_slow_model_is_led_while_another_thread_polls() -> None:
    with polling(2) as rig:
        held = Held()
        rig.arrive(Model(rig, "a", False, held))
        thread, budget = rig.next(LEAD, "a")
        assert budget is None
        for _ in range(3):
            assert rig.handled_by() is not thread
        held.go.set()
        rig.works(2)


def test_of_several_slow_models_one_is_led_and_the_others_are_handed_over_before() -> None:
    with polling(2) as rig:
        held = Held()
        rig.arrive(*(Model(rig, name, False, held) for name in "abc"))
        rig.next(HAND_OVER, "b")
        rig.next(HAND_OVER, "c")
        leader, _ = rig.next(LEAD, "a")
        assert rig.handled_by() is not leader
        held.go.set()
        rig.works(2)
        rig.nothing_more()


def test_fast_models_are_led_before_a_slow_one() -> None:
    with polling(2) as rig:
        held = Held()
        rig.arrive(Model(rig, "a", False, held), Model(rig, "b", True), Model(rig, "c", True))
        first, _ = rig.next(LEAD, "b")
        assert rig.next(LEAD, "c")[0] is first
        assert rig.next(LEAD, "a") == (first, None)
        assert rig.handled_by() is not first
        held.go.set()
        rig.works(2)


@pytest.mark.parametrize("fast", [True, False])
def test_a_thread_that_is_alone_hands_everything_over(fast: bool) -> None:
    with polling(1) as rig:
        for _ in range(2):
            rig.arrive(Model(rig, "a", fast), Model(rig, "b", True), Model(rig, "c", False))
            for name in "abc":
                rig.next(HAND_OVER, name)
        rig.works(1)
        rig.nothing_more()


def test_a_thread_that_is_left_alone_hands_everything_over() -> None:
    with polling(2) as rig:
        held = Held()
        rig.arrive(Model(rig, "slow", False, held))
        leader, _ = rig.next(LEAD, "slow")
        rig.arrive(Model(rig, "a", True), Model(rig, "b", False))
        assert rig.next(HAND_OVER, "a")[0] is not leader
        rig.next(HAND_OVER, "b")
        held.go.set()
        rig.works(2)


def test_a_model_that_has_more_to_do_is_led_again_after_what_has_arrived_since() -> None:
    with polling(2) as rig:
        left = [True, True, False]
        order: list[str] = []

        def during() -> bool:
            order.append("run_inline")
            rig.put(lambda: order.append("event"))
            return left.pop(0)

        rig.arrive(Model(rig, "a", True, during))
        leaders = {rig.next(LEAD, "a")[0] for _ in range(3)}
        assert leaders == {rig.handled_by()}
        assert order == ["run_inline", "event"] * 3
        rig.works(2)
        rig.nothing_more()


class TestLongEvents:
    """An event takes long: `tick` gives the turn of the thread that handles it away."""

    @contextmanager
    def handling(self, rig: Rig, then: Callable[[], object] = lambda: None) -> Iterator[threading.Thread]:
        """Has an event be handled while the block runs, and something be done before that ends."""
        begun: queue.Queue[threading.Thread] = queue.Queue()
        held = Held()

        def event() -> None:
            begun.put(threading.current_thread())
            held()
            then()

        rig.put(event)
        try:
            yield begun.get(timeout=WAIT_S)
        finally:
            held.go.set()

    def test_another_thread_takes_over_at_the_second_tick(self) -> None:
        with polling(2) as rig:
            with self.handling(rig) as thread:
                rig.pollers.tick()
                rig.until_waiting(1, while_led=True)
                assert rig.pollers.poll_lock.locked() and not rig._polling.locked()
                for _ in range(3):
                    rig.pollers.tick()
                for _ in range(3):
                    assert rig.handled_by() is not thread
            rig.works(2)

    def test_what_was_promised_before_and_after_the_turn_was_lost(self) -> None:
        with polling(2) as rig:
            late = Model(rig, "late", True)
            with self.handling(rig, partial(rig.pollers.queue_inline, late)) as thread:
                rig.put(partial(rig.pollers.queue_inline, Model(rig, "early", True)))
                for _ in range(2):
                    rig.pollers.tick()
                other, _ = rig.next(HAND_OVER, "early")  # else no thread would poll
                assert other is not thread
            assert rig.next(HAND_OVER, "late")[0] is thread
            rig.works(2)
            rig.nothing_more()

    def test_a_thread_that_is_alone_keeps_its_turn(self) -> None:
        with polling(1) as rig:
            with self.handling(rig) as thread:
                for _ in range(3):
                    rig.pollers.tick()
            assert rig.handled_by() is thread
            rig.works(1)


class TestSpikes:
    """A model whose batches have been short takes long: `tick` gives the turn away."""

    def test_a_tick_that_comes_soon_does_nothing(self) -> None:
        with polling(2) as rig:
            rig.pollers.tick()
            held = Held()
            rig.arrive(Model(rig, "a", True, held), Model(rig, "b", True))
            leader, _ = rig.next(LEAD, "a")
            rig.clock.now += 5 * MS - 1
            rig.pollers.tick()
            rig.nothing_more()
            held.go.set()
            assert rig.next(LEAD, "b")[0] is leader
            rig.clock.now += 1000 * MS
            rig.pollers.tick()
            assert rig.handled_by() is leader
            rig.works(2)
            rig.clock.now += 1000 * MS
            rig.pollers.tick()  # no thread runs inline: a turn that is not a leader's must not be given away
            rig.works(2)

    @pytest.mark.parametrize("more_to_do", [False, True])
    def test_the_turn_is_given_away_and_what_was_left_handed_over(self, more_to_do: bool) -> None:
        with polling(2) as rig:
            held = Held(more_to_do)
            rig.arrive(Model(rig, "a", True, held), Model(rig, "b", True), Model(rig, "c", False))
            leader, _ = rig.next(LEAD, "a")
            rig.clock.now += 5 * MS
            for _ in range(3):  # only the first one finds something to do
                rig.pollers.tick()
            me = threading.current_thread()
            # Also the one that is being led: another of its instances may run what waits behind the spike.
            assert [rig.next(HAND_OVER, name)[0] for name in "abc"] == [me, me, me]
            for _ in range(3):
                assert rig.handled_by() is not leader
            rig.arrive(Model(rig, "d", True))
            rig.next(HAND_OVER, "d")  # no thread waits
            held.go.set()
            if more_to_do:
                assert rig.next(HAND_OVER, "a")[0] is leader
            rig.works(2)
            rig.nothing_more()

    def test_a_spike_of_the_second_model(self) -> None:
        with polling(2) as rig:
            held = Held()
            models = (Model(rig, "a", True), Model(rig, "b", True, held), Model(rig, "c", True))
            rig.arrive(*models)
            leader, _ = rig.next(LEAD, "a")
            assert rig.next(LEAD, "b")[0] is leader
            rig.clock.now += 5 * MS
            rig.pollers.tick()
            rig.next(HAND_OVER, "b")
            rig.next(HAND_OVER, "c")
            assert rig.handled_by() is not leader
            held.go.set()
            rig.works(2)
            rig.nothing_more()

    @pytest.mark.parametrize("count", [3, 4])
    @pytest.mark.parametrize("first_ends_first", [True, False])
    @pytest.mark.parametrize("more_to_do", [True, False])
    def test_two_leaders_and_their_spikes(self, count: int, first_ends_first: bool, more_to_do: bool) -> None:
        with polling(count) as rig:
            spikes = [Held(more_to_do), Held(more_to_do)]
            leaders = []
            for number, held in enumerate(spikes):
                rig.arrive(Model(rig, f"spike {number}", True, held))
                leaders.append(rig.next(LEAD, f"spike {number}")[0])
                rig.clock.now += 5 * MS
                rig.pollers.tick()
                rig.next(HAND_OVER, f"spike {number}")
                assert rig.handled_by() not in leaders
            assert len(set(leaders)) == 2
            order = (0, 1) if first_ends_first else (1, 0)
            for back, number in enumerate(order, count - 2):
                spikes[number].go.set()
                if more_to_do:
                    assert rig.next(HAND_OVER, f"spike {number}")[0] is leaders[number]
                rig.until_waiting(back)
                assert rig.handled_by() not in leaders
                rig.pollers.tick()
            rig.works(count)
            rig.nothing_more()

    @pytest.mark.parametrize("spike_ends_first", [True, False])
    def test_a_leader_that_lost_its_turn_leaves_the_pause_of_the_next_one_alone(
        self, spike_ends_first: bool
    ) -> None:
        """Two leaders, one of them with the turn: it must still be possible to take that from it."""
        with polling(3) as rig:
            first, second = Held(), Held()
            rig.arrive(Model(rig, "a", True, first))
            one, _ = rig.next(LEAD, "a")
            rig.clock.now += 5 * MS
            rig.pollers.tick()
            rig.next(HAND_OVER, "a")
            rig.arrive(Model(rig, "b", True, second), Model(rig, "c", True))
            two, _ = rig.next(LEAD, "b")
            if spike_ends_first:
                first.go.set()
                rig.until_waiting(2, while_led=True)
            rig.clock.now += 5 * MS
            rig.pollers.tick()
            rig.next(HAND_OVER, "b")
            rig.next(HAND_OVER, "c")
            assert rig.handled_by() is not two
            second.go.set()
            first.go.set()
            assert one is not two
            rig.works(3)
            rig.nothing_more()

    def test_a_slow_leader_and_a_spike(self) -> None:
        with polling(3) as rig:
            slow, spike = Held(), Held()
            rig.arrive(Model(rig, "slow", False, slow))
            one, _ = rig.next(LEAD, "slow")
            rig.arrive(Model(rig, "spike", True, spike))
            two, _ = rig.next(LEAD, "spike")
            rig.clock.now += 5 * MS
            rig.pollers.tick()
            rig.next(HAND_OVER, "spike")
            assert rig.handled_by() not in (one, two)
            slow.go.set()
            rig.until_waiting(1)
            spike.go.set()
            rig.works(3)

    def test_a_tick_in_the_moment_a_leader_ends_loses_no_promise(self) -> None:
        """It comes when the leader has first let the lock go after its model was led."""
        with polling(2) as rig:
            led: list[bool] = []

            def during() -> bool:
                led.append(not led)
                return led[-1]

            def late_tick() -> None:
                if len(led) != 1 or rig.pollers.pause is None:
                    return
                rig.clock.now += 5 * MS
                rig.pollers.tick()
                # The leader goes on once the other thread polls; if that has better to do, all is well.
                end = time.monotonic() + 0.1
                while not rig._polling.locked() and time.monotonic() < end:
                    time.sleep(0)

            rig.pollers.state_lock = Eager(rig.pollers.state_lock, late_tick)  # type: ignore[assignment]
            rig.arrive(Model(rig, "a", True, during))
            rig.next(LEAD, "a")
            # Run inline or released: a thread runs the rest of it, without another event.
            assert rig._happened.get(timeout=WAIT_S)[1] == "a"
            led.append(False)  # no more late ticks
            rig.works(2)


class Eager:
    """A lock that does something each time it has been let go, though not while it does that already."""

    def __init__(self, lock: Any, then: Callable[[], None]) -> None:
        self._lock = lock
        self._then = then
        self._busy = threading.local()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()
        if not getattr(self._busy, "now", False):
            self._busy.now = True
            self._then()
            self._busy.now = False


class TestFailures:
    def test_a_tag_that_raises_does_not_end_its_thread(self, caplog: pytest.LogCaptureFixture) -> None:
        with polling(2) as rig:
            thread = rig.handled_by()
            for _ in range(5):
                rig.put(lambda: 1 / 0)
            assert rig.handled_by() is thread
            rig.works(2)
        assert caplog.messages == ["a gRPC event was not handled"] * 5

    @pytest.mark.parametrize("fast", [True, False])
    def test_a_lead_that_raises_does_not_end_its_thread(
        self, caplog: pytest.LogCaptureFixture, fast: bool
    ) -> None:
        with polling(2) as rig:
            for _ in range(3):
                rig.arrive(Model(rig, "a", fast, lambda: 1 / 0), Model(rig, "b", True))
                happened = {rig._happened.get(timeout=WAIT_S)[:2] for _ in range(3)}
                # What it has begun and not received must not be forgotten.
                assert happened == {(LEAD, "a"), (HAND_OVER, "a"), (LEAD, "b")}
                rig.works(2)
        assert caplog.messages == ["a batch could not be run inline"] * 3

    def test_a_spike_that_ends_in_an_error(self) -> None:
        with polling(2) as rig:
            held = Held()

            def fail() -> None:
                held()
                raise ValueError("after all that time")

            rig.arrive(Model(rig, "a", True, fail))
            rig.next(LEAD, "a")
            rig.clock.now += 5 * MS
            rig.pollers.tick()
            rig.next(HAND_OVER, "a")
            rig.handled_by()
            held.go.set()
            rig.next(HAND_OVER, "a")
            rig.works(2)


class TestShutdown:
    @pytest.mark.parametrize("count", [1, 2, 5])
    def test_it_ends_all_threads(self, count: int) -> None:
        with polling(count) as rig:
            rig.works(count)

    @pytest.mark.parametrize("fast", [True, False])
    def test_it_waits_for_a_leader(self, fast: bool) -> None:
        with polling(2) as rig:
            held = Held()
            rig.arrive(Model(rig, "a", fast, held))
            rig.next(LEAD, "a")
            rig.shut_down()
            assert not rig.pollers.join(0.01)
            held.go.set()

    @pytest.mark.parametrize("count", [1, 2])
    def test_promises_given_before_it_are_kept(self, count: int) -> None:
        with polling(count) as rig:
            rig.arrive(Model(rig, "a", True), Model(rig, "b", False), then=rig.shut_down)
            assert rig.pollers.join(WAIT_S)
            for name in "ab":
                rig.next(LEAD if count > 1 else HAND_OVER, name)
            rig.nothing_more()


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_with_real_models_and_spikes_at_random_everything_is_answered(count: int, seed: int) -> None:
    choose = random.Random(seed)
    naps = threading.Event()

    def execute(batch: Batch) -> Sequence[InferenceResponse | None]:
        if random.random() < 0.05:
            naps.wait(0.01)
        return echo(batch)

    runners = [
        Runner(
            f"m{number}",
            DynamicBatcher(4, (), choose.choice((0, 0, MS // 5))),
            [Instance(execute) for _ in range(1 + number % 2)],
            Executor(make_spec(4), ModelStatistics(), time.monotonic_ns),
            time.monotonic_ns,
        )
        for number in range(3)
    ]
    answers = Answers()
    total = 600
    stop = threading.Event()
    with polling(count) as rig:

        def tick() -> None:
            while not stop.is_set():
                rig.clock.now += choose.randrange(3 * MS)
                rig.pollers.tick()
                naps.wait(0.0002)

        def submit(runner: Runner) -> None:
            if runner.submit(make_request(answers, 1), True):
                rig.pollers.queue_inline(runner)

        ticker = threading.Thread(target=tick)
        ticker.start()
        for number in range(total):
            runner = choose.choice(runners)
            rig.put(partial(submit, runner))
            if number % 50 == 0:
                naps.wait(0.002)
        try:
            assert answers.wait(total), f"{total - answers.finals} requests wait for ever"
        finally:
            stop.set()
            ticker.join(WAIT_S)
        rig.until_waiting(count - 1)
    for runner in runners:
        assert runner.closing.close(WAIT_S)
    assert len(answers.calls) == total
