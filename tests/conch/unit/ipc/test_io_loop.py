"""The I/O loop: rounds, timers, claims and their takeover, stops; alone and in random interleavings."""

from __future__ import annotations

import gc
import os
import queue
import random
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.support.clocks import Clock
from tests.support.core import WAIT_S
from tests.support.servers import eventually

from conch.ipc.loop import IoLoop, SharedLoop, Timer, yield_loop

MS = 1_000_000


class FakePoll:
    """An epoll set whose events the test makes; its waits are seen."""

    def __init__(self) -> None:
        self.rounds: queue.Queue[list[tuple[int, int]]] = queue.Queue()
        self.waits: queue.Queue[float] = queue.Queue()
        self.files: dict[int, int] = {}

    def register(self, fd: int, eventmask: int) -> None:
        self.files[fd] = eventmask

    def modify(self, fd: int, eventmask: int) -> None:
        assert fd in self.files
        self.files[fd] = eventmask

    def unregister(self, fd: int) -> None:
        del self.files[fd]

    def poll(self, timeout: float, maxevents: int) -> list[tuple[int, int]]:
        self.waits.put(timeout)
        if timeout == 0:
            try:
                return self.rounds.get_nowait()
            except queue.Empty:
                return []
        return self.rounds.get(timeout=WAIT_S)

    def close(self) -> None:
        self.files.clear()

    @property
    def wake_file(self) -> int:
        """The loop's own descriptor."""
        return min(file for file, events in self.files.items() if events & select.EPOLLET)


class Source:
    """Runs what a test gives it on each event."""

    def __init__(self, handle: Callable[[int], object]) -> None:
        self._handle = handle

    def on_ready(self, events: int) -> None:
        self._handle(events)


class Claim:
    """A claim; `during` may wait for the test, and says whether there is more to run."""

    def __init__(self, during: Callable[[], object] = lambda: None, fast: bool = True) -> None:
        self.fast = fast
        self.during = during
        self.runs: queue.Queue[tuple[int, int | None]] = queue.Queue()
        self.releases: queue.Queue[int] = queue.Queue()

    def run_inline(self, budget_ns: int | None = None) -> bool:
        self.runs.put((threading.get_ident(), budget_ns))
        return bool(self.during())

    def run_batch_inline(self) -> bool:
        return self.run_inline(0)

    def release(self) -> None:
        self.releases.put(threading.get_ident())


class Ticked(Clock):
    """A clock that knows how often it has been read, as it is at each tick while a claim runs."""

    def __init__(self) -> None:
        super().__init__()
        self._reads = 0

    def __call__(self) -> int:
        self._reads += 1
        return super().__call__()

    def wait_ticks(self, count: int) -> None:
        """Waits until it has been read so many times more."""
        enough = self._reads + count
        eventually(lambda: self._reads >= enough, "the loop ticks")


class Held:
    """Lasts until the test lets it go."""

    def __init__(self, result: bool = False) -> None:
        self.go = threading.Event()
        self._result = result

    def __call__(self) -> bool:
        assert self.go.wait(WAIT_S), "the test never let it go"
        return self._result


@contextmanager
def running(loop: IoLoop) -> Iterator[IoLoop]:
    """A loop that runs, and whose threads end."""
    loop.start()
    try:
        yield loop
    finally:
        assert loop.stop(WAIT_S)


def on_loop(loop: IoLoop, work: Callable[[], Any]) -> Any:
    """Result of work that is run on the loop's thread."""
    results: queue.Queue[Any] = queue.Queue()
    loop.call_soon(lambda: results.put(work()))
    return results.get(timeout=WAIT_S)


def owner_of(loop: IoLoop) -> int:
    return on_loop(loop, threading.get_ident)  # type: ignore[no-any-return]


# --- events, work, sinks, timers ---------------------------------------------------------------------------


def test_events_reach_their_source_until_it_is_unregistered() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, running(IoLoop()) as loop:
        received: queue.Queue[bytes] = queue.Queue()
        loop.register(ours.fileno(), Source(lambda events: received.put(ours.recv(100))))
        theirs.send(b"first")
        assert received.get(timeout=WAIT_S) == b"first"
        loop.modify(ours.fileno(), 0)
        theirs.send(b"second")
        owner_of(loop)
        assert received.empty()
        loop.modify(ours.fileno(), select.EPOLLIN)
        assert received.get(timeout=WAIT_S) == b"second"
        loop.unregister(ours.fileno())
        theirs.send(b"third")
        owner_of(loop)
        assert received.empty()


def test_a_handler_that_raises_is_logged_and_the_others_are_called(caplog: pytest.LogCaptureFixture) -> None:
    poll, seen = FakePoll(), list[int]()
    with running(IoLoop(make_poll=lambda: poll)) as loop:

        def fail(events: int) -> None:
            seen.append(events)
            raise ValueError("a mistake")

        for file in (1001, 1002):
            loop.register(file, Source(fail))
        poll.rounds.put([(1001, 1), (1002, 4)])
        poll.rounds.put([])
        loop.call_soon(partial(fail, 5))
        eventually(lambda: len(seen) == 3, "all are called")
        poll.rounds.put([])
        assert loop.stop(WAIT_S)
    assert sorted(seen) == [1, 4, 5]
    assert caplog.text.count("ValueError: a mistake") == 3


def test_an_event_of_a_closed_descriptor_does_not_reach_the_next_one_with_its_number() -> None:
    poll, seen = FakePoll(), list[str]()
    with running(IoLoop(make_poll=lambda: poll)) as loop:

        def replace(events: int) -> None:
            seen.append("first")
            loop.unregister(1002)
            loop.register(1002, Source(lambda events: seen.append("new")))

        loop.register(1001, Source(replace))
        loop.register(1002, Source(lambda events: seen.append("old")))
        poll.rounds.put([(1001, 1), (1002, 1)])
        poll.rounds.put([(1002, 1)])
        eventually(lambda: len(seen) == 2, "the new one is called")
        loop.stop(0)
        poll.rounds.put([])
    assert seen == ["first", "new"]


def test_only_a_sleeping_loop_is_woken_and_only_once() -> None:
    poll, done = FakePoll(), list[int]()
    with running(IoLoop(make_poll=lambda: poll)) as loop:
        assert poll.waits.get(timeout=WAIT_S) == -1
        for number in range(10):
            loop.call_soon(partial(done.append, number))
        assert os.eventfd_read(poll.wake_file) == 1
        held = Held()
        loop.register(1001, Source(lambda events: held()))
        poll.rounds.put([(1001, 1)])
        for number in range(10, 20):
            loop.call_soon(partial(done.append, number))
        # The loop was woken once, so it is awake or will be: no further writes.
        with pytest.raises(BlockingIOError):
            os.eventfd_read(poll.wake_file)
        held.go.set()
        eventually(lambda: len(done) == 20, "all is done")
        loop.stop(0)
        poll.rounds.put([])
    assert done == list(range(20))


def test_work_that_comes_while_the_loop_falls_asleep_is_not_slept_over() -> None:
    poll = FakePoll()
    done, pushes = list[int](), list[int]()

    def clock() -> int:  # the loop looks at it between its two looks at the queue
        if pushes:
            loop.call_soon(partial(done.append, pushes.pop()))
        return 0

    loop = IoLoop(clock, lambda: poll)
    with running(loop):
        loop.call_soon(lambda: loop.call_at(MS, lambda: None))
        loop.call_soon(lambda: pushes.append(7))
        poll.rounds.put([])
        eventually(lambda: done == [7], "it is done")
        loop.stop(0)
        poll.rounds.put([])


def test_work_that_work_queues_waits_for_the_next_events() -> None:
    poll, order = FakePoll(), list[str]()
    with running(IoLoop(make_poll=lambda: poll)) as loop:
        loop.register(1001, Source(lambda events: order.append("event")))

        def first() -> None:
            order.append("first")
            loop.call_soon(lambda: order.append("second"))
            poll.rounds.put([(1001, 1)])

        loop.call_soon(first)
        poll.rounds.put([])
        eventually(lambda: "second" in order, "both are done")
        loop.stop(0)
        poll.rounds.put([])
    assert order in (["first", "event", "second"], ["first", "second", "event"])


def test_a_sink_is_flushed_once_in_a_round_behind_claims_and_their_answers() -> None:
    order: list[str] = []

    class Output:
        def flush(self) -> None:
            order.append("flush")

    poll, sink = FakePoll(), Output()
    with running(IoLoop(make_poll=lambda: poll)) as loop:

        def answer() -> None:
            order.append("answer")
            loop.flush_later(sink)

        def run() -> None:
            order.append("run")
            loop.call_soon(answer)

        def handle(events: int) -> None:
            order.append("event")
            loop.flush_later(sink)
            loop.queue_inline(Claim(run))

        for file in (1001, 1002):
            loop.register(file, Source(handle))
        poll.rounds.put([(1001, 1), (1002, 1)])
        eventually(lambda: "flush" in order, "it is flushed")
        loop.stop(0)
        poll.rounds.put([])
    assert order == ["event", "event", "run", "run", "answer", "answer", "flush"]


def test_timers_run_in_their_order_when_they_are_due_unless_they_were_cancelled() -> None:
    poll, clock, order = FakePoll(), Clock(), list[str]()
    with running(IoLoop(clock, lambda: poll)) as loop:
        timers: dict[str, Timer] = {}

        def schedule() -> None:
            for at_ms, name in ((30, "c"), (10, "a"), (20, "b"), (20, "cancelled"), (20, "d")):
                timers[name] = loop.call_at(at_ms * MS, partial(order.append, name))
            timers["cancelled"].cancel()
            loop.call_at(20 * MS, timers["c"].cancel)

        loop.call_soon(schedule)
        poll.rounds.put([])
        eventually(lambda: len(timers) == 5, "they are scheduled")
        while poll.waits.get(timeout=WAIT_S) != 0.01:
            pass
        clock.now = 10 * MS - 1
        poll.rounds.put([])
        poll.waits.get(timeout=WAIT_S)
        assert order == []
        clock.now = 40 * MS
        poll.rounds.put([])
        assert poll.waits.get(timeout=WAIT_S) == -1
        loop.stop(0)
        poll.rounds.put([])
    assert order == ["a", "b", "d"]


def test_cancelled_timers_are_not_kept() -> None:
    def kept() -> int:
        return sum(type(each) is Timer for each in gc.get_objects())

    with running(IoLoop()) as loop:

        def churn() -> int:
            later = time.monotonic_ns() + 3600_000 * MS
            for _ in range(10):
                loop.call_at(later, lambda: None)
            for _ in range(10_000):
                loop.call_at(later, lambda: None).cancel()
            return kept()

        assert 10 <= on_loop(loop, churn) < 200


# --- claims ------------------------------------------------------------------------------------------------


def queue_claims(loop: IoLoop, claims: Sequence[Claim]) -> None:
    """Queues claims in one round."""

    def work() -> None:
        for claim in claims:
            loop.queue_inline(claim)

    loop.call_soon(work)


def test_fast_models_run_on_the_loop_and_slow_ones_on_their_own_threads() -> None:
    with running(IoLoop()) as loop:
        owner = owner_of(loop)
        fast, slow = Claim(), Claim(fast=False)
        queue_claims(loop, [fast, slow])
        assert fast.runs.get(timeout=WAIT_S) == (owner, MS)
        assert slow.releases.get(timeout=WAIT_S) == owner
        owner_of(loop)
        assert fast.releases.empty() and slow.runs.empty()


def test_a_claim_of_another_thread_is_released_there() -> None:
    with running(IoLoop()) as loop:
        claim = Claim()
        loop.queue_inline(claim)
        assert claim.releases.get_nowait() == threading.get_ident()
        assert not loop.on_thread
        assert on_loop(loop, lambda: loop.on_thread)


def test_a_model_with_more_to_run_runs_again_after_the_next_events() -> None:
    with running(IoLoop()) as loop:
        order: list[str] = []
        left = [True, True, False]

        def during() -> bool:
            order.append("run")
            loop.call_soon(lambda: order.append("work"))
            return left.pop(0)

        claim = Claim(during)
        queue_claims(loop, [claim])
        eventually(lambda: len(order) == 6, "all has run")
        assert order == ["run", "work"] * 3
        assert claim.releases.empty()


def test_a_model_that_raises_is_released_and_the_next_one_runs(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise ValueError("a mistake of the model")

    with running(IoLoop()) as loop:
        wrong, right = Claim(fail), Claim()
        queue_claims(loop, [wrong, right])
        right.runs.get(timeout=WAIT_S)
        wrong.releases.get(timeout=WAIT_S)
    assert "a mistake of the model" in caplog.text


class TestTakeover:
    """A claim takes long: the standby takes the loop over."""

    @contextmanager
    def late(
        self, loop: IoLoop, clock: Clock, others: Sequence[Claim] = (), more: bool = False
    ) -> Iterator[tuple[int, Claim]]:
        """A claim that is late while the block runs, and the thread that runs it."""
        held = Held(more)
        claim = Claim(held)
        queue_claims(loop, [claim, *others])
        thread, _ = claim.runs.get(timeout=WAIT_S)
        clock.now += 5 * MS
        try:
            yield thread, claim
        finally:
            held.go.set()

    def takes_over(self, loop: IoLoop, clock: Clock) -> None:
        """Waits until the last late thread stands by: a claim runs again, and is late."""

        def again() -> bool:
            held = Held()
            claim = Claim(held)
            queue_claims(loop, [claim])
            eventually(lambda: not (claim.runs.empty() and claim.releases.empty()), "run or released")
            if claim.runs.empty():
                return False
            thread, _ = claim.runs.get()
            clock.now += 5 * MS
            assert owner_of(loop) != thread
            held.go.set()
            return True

        eventually(again, "a thread stands by")

    def test_others_go_on_and_what_is_left_is_released(self) -> None:
        clock = Clock()
        ours, theirs = socket.socketpair()
        with ours, theirs, running(IoLoop(clock)) as loop:
            received: queue.Queue[int] = queue.Queue()

            def handle(events: int) -> None:
                ours.recv(1)
                received.put(threading.get_ident())

            loop.register(ours.fileno(), Source(handle))
            others = [Claim(), Claim()]
            with self.late(loop, clock, others) as (thread, claim):
                for _ in range(3):
                    theirs.send(b"x")
                    assert received.get(timeout=WAIT_S) != thread
                # Also the late one: another instance may run what waits behind it.
                owner = owner_of(loop)
                assert [each.releases.get(timeout=WAIT_S) for each in (claim, *others)] == [owner] * 3
                ignored = Claim()
                queue_claims(loop, [ignored])  # no thread stands by
                ignored.releases.get(timeout=WAIT_S)
            self.takes_over(loop, clock)
            self.takes_over(loop, clock)
            assert all(each.runs.empty() and each.releases.empty() for each in (claim, *others, ignored))

    def test_a_claim_in_time_keeps_the_loop(self) -> None:
        clock = Ticked()
        with running(IoLoop(clock)) as loop:
            for _ in range(3):
                held = Held()
                first, second = Claim(held), Claim()
                queue_claims(loop, [first, second])
                thread, _ = first.runs.get(timeout=WAIT_S)
                clock.now += 5 * MS - 1
                clock.wait_ticks(4)
                held.go.set()
                assert second.runs.get(timeout=WAIT_S)[0] == thread
                assert owner_of(loop) == thread
                assert first.releases.empty()

    def test_a_late_claim_with_more_to_run_is_released_by_its_thread(self) -> None:
        clock = Clock()
        with running(IoLoop(clock)) as loop:
            with self.late(loop, clock, more=True) as (thread, claim):
                assert claim.releases.get(timeout=WAIT_S) == owner_of(loop) != thread
            assert claim.releases.get(timeout=WAIT_S) == thread
            self.takes_over(loop, clock)
            assert claim.runs.empty() and claim.releases.empty()

    def test_what_a_late_claim_queues_is_released_and_its_work_runs_on_the_loop(self) -> None:
        clock, held, following = Clock(), Held(), Claim()
        where: queue.Queue[tuple[int, bool]] = queue.Queue()
        with running(IoLoop(clock)) as loop:

            def during() -> None:
                held()
                loop.queue_inline(following)
                loop.call_soon(lambda: where.put((threading.get_ident(), loop.on_thread)))

            claim = Claim(during)
            queue_claims(loop, [claim])
            late, _ = claim.runs.get(timeout=WAIT_S)
            clock.now += 5 * MS
            owner = owner_of(loop)
            assert owner != late
            held.go.set()
            assert following.releases.get(timeout=WAIT_S) == late
            assert where.get(timeout=WAIT_S) == (owner, True)
            assert following.runs.empty()

    def test_a_claim_that_is_about_to_wait_gives_the_loop_away_at_once(self) -> None:
        answered = threading.Event()
        with running(IoLoop(Clock())) as loop:  # no time passes

            def during() -> bool:
                loop.call_soon(answered.set)
                yield_loop()
                return not answered.wait(WAIT_S)

            claim = Claim(during)
            queue_claims(loop, [claim])
            assert answered.wait(WAIT_S)
            late, _ = claim.runs.get()
            assert owner_of(loop) != late
            yield_loop()  # elsewhere it does nothing
            loop.call_soon(yield_loop)
            owner_of(loop)

    def test_a_stop_while_a_claim_is_late(self) -> None:
        clock, held = Clock(), Held(True)
        loop = IoLoop(clock)
        loop.start()
        claim, left = Claim(held), Claim()
        queue_claims(loop, [claim, left])
        claim.runs.get(timeout=WAIT_S)
        clock.now += 5 * MS
        assert not loop.stop(0.01), "a thread runs the claim"
        left.releases.get(timeout=WAIT_S)
        held.go.set()
        assert loop.stop(WAIT_S)
        assert claim.releases.qsize() == 2 and left.releases.empty() and left.runs.empty()


def switches() -> int:
    """Voluntary context switches of the loop's threads: how often they were woken."""
    count = 0
    for thread in threading.enumerate():
        if thread.name.startswith("conch-io") and thread.native_id:  # None while it starts
            status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
            count += int(status.split("\nvoluntary_ctxt_switches:")[1].split()[0])
    return count


def test_an_idle_loop_is_not_woken() -> None:
    with running(IoLoop()) as loop:
        queue_claims(loop, [Claim()])

        def quiet() -> bool:
            before = switches()
            time.sleep(0.1)
            return switches() == before

        eventually(quiet, "no thread is woken")
        held = Held()
        late = Claim(held)
        queue_claims(loop, [late])
        thread, _ = late.runs.get(timeout=WAIT_S)
        assert owner_of(loop) != thread, "the standby was woken by the claim"
        held.go.set()


# --- the end -----------------------------------------------------------------------------------------------


def test_a_stop_releases_pending_claims_once_runs_work_and_flushes() -> None:
    loop = IoLoop()
    loop.start()
    held, order = Held(True), list[str]()

    class Output:
        def flush(self) -> None:
            order.append("flush")

    claim = Claim(held)
    queue_claims(loop, [claim])
    claim.runs.get(timeout=WAIT_S)

    def last() -> None:
        order.append("work")
        loop.flush_later(Output())

    assert not loop.stop(0)
    loop.call_soon(last)
    held.go.set()
    assert loop.stop(WAIT_S)
    assert order == ["work", "flush"]
    assert claim.runs.empty() and claim.releases.qsize() == 1
    claim = Claim()
    loop.queue_inline(claim)
    assert claim.releases.qsize() == 1
    loop.call_soon(lambda: order.append("late"))
    loop.unregister(1001)
    assert order == ["work", "flush"]
    with pytest.raises(OSError, match="does not run"):
        loop.register(0, Source(lambda events: None))
    with pytest.raises(RuntimeError, match="stopped"):
        loop.start()


def test_a_loop_that_never_started_stops_at_once() -> None:
    loop = IoLoop()
    assert loop.stop(0)
    with pytest.raises(RuntimeError):
        loop.start()


def test_no_descriptor_is_left_behind() -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    before, threads = count(), set(threading.enumerate())
    for _ in range(20):
        with running(IoLoop()) as loop:
            loop.start()  # a second time does nothing
            claim = Claim()
            queue_claims(loop, [claim])
            claim.runs.get(timeout=WAIT_S)
    assert count() <= before
    assert set(threading.enumerate()) <= threads


def test_a_shared_loop_runs_while_it_is_held() -> None:
    def threads() -> int:
        return sum(thread.name.startswith("conch-io") for thread in threading.enumerate())

    shared = SharedLoop()
    for _ in range(2):
        first = shared.hold()
        assert shared.hold() is first
        shared.release()
        assert threads() == 1 and owner_of(first)
        first.call_soon(shared.release)  # also on its own thread
        eventually(lambda: threads() == 0, "it ends with its last holder")


# --- random interleavings ----------------------------------------------------------------------------------


class Storm:
    """Sockets, work, timers, sinks and claims of all kinds at once; notes what happens to each."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0
        self.loop = IoLoop(self.clock)
        self.inside = threading.Lock()
        self.overlaps = 0
        self.received = 0
        self.made: list[str] = []  # appended to by any thread
        self.ran: list[str] = []
        self.dirty = False
        self.claims: list[Claim] = []

    def clock(self) -> int:
        """Passes with each look: a claim that lasts for some ticks of the standby is late."""
        self.now += MS
        return self.now

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Handlers, timers, work and sinks never overlap."""
        if not self.inside.acquire(blocking=False):
            self.overlaps += 1
            yield
            return
        try:
            self.overlaps += not self.loop.on_thread
            yield
        finally:
            self.inside.release()

    def work(self, kind: str) -> Callable[[], None]:
        self.made.append(kind)

        def run() -> None:
            with self.alone():
                self.ran.append(kind)
                if self.random.random() < 0.3:
                    self.act()

        return run

    def flush(self) -> None:
        with self.alone():
            self.dirty = False

    def claim(self) -> Claim:
        kind = self.random.choice(["quick", "quick", "slow", "late", "waits", "more", "raises"])

        def during() -> bool:
            self.loop.call_soon(self.work("answer"))
            if kind == "late":
                time.sleep(0.06)
            elif kind == "waits":
                yield_loop()
                time.sleep(0.01)
            elif kind == "raises":
                raise ValueError("a mistake of the model")
            if self.random.random() < 0.2:
                self.loop.queue_inline(self.claim())
            return kind == "more" and self.random.random() < 0.5

        claim = Claim(during, fast=kind != "slow")
        self.claims.append(claim)
        return claim

    def act(self) -> None:
        """Something that a handler does, on the loop's thread."""
        loop, kind = self.loop, self.random.randrange(5)
        if kind == 0:
            loop.queue_inline(self.claim())
        elif kind == 1:
            loop.call_soon(self.work("soon"))
        elif kind == 2:
            loop.call_at(self.now + self.random.randrange(20) * MS, self.work("timer"))
        elif kind == 3:
            loop.call_at(self.now, self.work("cancelled")).cancel()
        else:
            self.dirty = True
            loop.flush_later(self)

    def source(self, sock: socket.socket) -> Source:
        def handle(events: int) -> None:
            with self.alone():
                self.received += len(sock.recv(100))
                self.act()
                if self.random.random() < 0.1:
                    self.loop.unregister(sock.fileno())
                    self.loop.register(sock.fileno(), self.source(sock))

        return Source(handle)


@pytest.mark.parametrize("seed", range(6))
def test_random_interleavings(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    storm = Storm(seed)
    loop = storm.loop
    pairs = [socket.socketpair() for _ in range(3)]
    loop.start()

    def send(number: int) -> None:
        order = random.Random(seed * 10 + number)
        for _ in range(100):
            pairs[number][1].send(b"x")
            loop.call_soon(storm.work("foreign"))
            if order.random() < 0.2:
                time.sleep(order.random() * 0.01)

    threads = [threading.Thread(target=send, args=(number,)) for number in range(3)]
    for number, (ours, _) in enumerate(pairs):
        loop.register(ours.fileno(), storm.source(ours))
        threads[number].start()
    for thread in threads:
        thread.join()
    eventually(lambda: storm.received == 300, "all is read")

    def all_done() -> bool:
        made = Counter(storm.made)
        del made["cancelled"]
        return Counter(storm.ran) == made

    eventually(all_done, "all work is done, once")
    eventually(lambda: not storm.dirty, "all is flushed")
    for ours, _ in pairs:
        loop.unregister(ours.fileno())
    assert loop.stop(WAIT_S)
    for pair in pairs:
        for end in pair:
            end.close()
    assert storm.overlaps == 0
    assert all(not (claim.runs.empty() and claim.releases.empty()) for claim in storm.claims)
    assert not [each for each in caplog.records if "mistake of the model" not in (each.exc_text or "")]
