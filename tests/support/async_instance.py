"""Instances that begin batches and have them done elsewhere, for tests of what drives them."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from tests.support.core import WAIT_S, echo

from conch.core import backend
from conch.core.backend import PENDING, BackendInstance, BackendModel, BatchOutcome, Pending
from conch.core.clock import Clock, monotonic_ns
from conch.core.errors import CancelledError
from conch.core.execution.placement import Placement
from conch.core.model_version import Model
from conch.core.request import InferenceResponse
from conch.core.scheduling.scheduler import Batch
from conch.core.spec import ModelSpec

Done = Callable[[BatchOutcome], None]
Begin = Callable[[Batch, Done], None]


class Begins(BackendInstance):
    """Begins batches with a function, and notes whatever breaks the rules.

    Args:
        begin: Begins a batch.
        most_batches: Number of batches that it takes at a time.

    Attributes:
        begin: Begins a batch.
        problems: Descriptions of events that should not have happened.
        begun: Number of batches that it was given.
        closed: Number of times that it was closed.
    """

    blocks = False

    def __init__(self, begin: Begin, most_batches: int = 1) -> None:
        self.begin = begin
        self.most_batches = most_batches
        self._lock = threading.Lock()
        self._running = 0
        self._beginning = 0
        self._again: Callable[[], None] | None = None
        self._out = False
        self._promised = 0  # batches for which it was available and that it does not have yet
        self.problems: list[str] = []
        self.begun = 0
        self.closed = 0

    def execute(self, batch: Batch) -> Sequence[InferenceResponse | None] | None:
        self.problems.append("executed")
        return echo(batch)

    def start(self, batch: Batch, done: backend.Done) -> Pending:
        self._start(batch, partial(done, batch))
        return PENDING

    def _start(self, batch: Batch, done: Done) -> None:
        with self._lock:
            for wrong, text in (
                (self._running >= self.most_batches, "too many batches at a time"),
                (self._beginning >= self.most_batches, "a batch before the last begin returned"),
                (self._again is not None and not self._promised, "a batch while set aside"),
                (bool(self.closed), "a batch when closed"),
                (not batch.requests, "an empty batch"),
            ):
                if wrong:
                    self.problems.append(text)
            self._promised = max(self._promised - 1, 0)
            self._running += 1
            self._beginning += 1
            self.begun += 1
        try:
            self.begin(batch, partial(self._done, done))
        except BaseException:
            with self._lock:
                self._running = max(self._running - 1, 0)
            raise
        finally:
            with self._lock:
                self._beginning -= 1

    def _done(self, done: Done, outcome: BatchOutcome) -> None:
        with self._lock:
            self._running = max(self._running - 1, 0)
        done(outcome)

    def available(self, again: Callable[[], None]) -> bool:
        with self._lock:
            if self._again is not None:
                self.problems.append("asked again while set aside")
            if self._running >= self.most_batches:
                self.problems.append("asked while it runs")
            self._again = again if self._out else None
            # While one thread is about to start a batch, another may ask for a further one.
            others = self._promised if self.most_batches > 1 else 0
            self._promised = others + (not self._out)
            return not self._out

    def free(self, free: bool) -> None:
        """Says whether it may be given a batch, for what a test tells out of turn."""
        with self._lock:
            self._running = 0 if free else 1

    def go(self) -> None:
        """Is not available from now on."""
        with self._lock:
            self._out = True

    def come_back(self) -> None:
        """Is available again."""
        with self._lock:
            self._out = False
            again, self._again = self._again, None
        if again is not None:
            again()

    def forget(self) -> None:
        """Drops the callback for its return."""
        with self._lock:
            self._again = None

    @property
    def set_aside(self) -> bool:
        """True if there is a callback for its return."""
        return self._again is not None

    def close(self) -> None:
        with self._lock:
            if self._running or self._beginning:
                self.problems.append("closed while it runs")
            self._again = None
            self.closed += 1


class BeginsModel(BackendModel):
    """Makes instances, and keeps them.

    Args:
        make: Makes one.
    """

    def __init__(self, make: Callable[[], Begins]) -> None:
        self._make = make
        self.instances: list[Begins] = []
        self.placements: list[Placement] = []
        self.closed = 0

    def create_instance(self, placement: Placement) -> BackendInstance:
        instance = self._make()
        self.instances.append(instance)
        self.placements.append(placement)
        return instance

    def close(self) -> None:
        self.closed += 1

    @property
    def problems(self) -> list[str]:
        """Those of all instances."""
        return [problem for instance in self.instances for problem in instance.problems]


def make_beginning(spec: ModelSpec, begin: Begin, clock: Clock = monotonic_ns) -> tuple[Model, BeginsModel]:
    """A model whose instances begin batches with a function."""
    loaded = BeginsModel(lambda: Begins(begin))
    return Model.create(spec, loaded, clock), loaded


def at_once(batch: Batch, done: Done) -> None:
    """Is done before it returns."""
    done(echo(batch))


class Kept:
    """Begins batches and keeps them until the test has them done."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.batches: list[tuple[Batch, Done]] = []

    def __call__(self, batch: Batch, done: Done) -> None:
        with self._changed:
            self.batches.append((batch, done))
            self._changed.notify_all()

    def wait(self, count: int) -> None:
        """Waits until it has so many."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.batches) >= count, WAIT_S), "no batch came"

    def finish(self, index: int = 0) -> None:
        """Has one done, on this thread."""
        with self._changed:
            batch, done = self.batches.pop(index)
        done(echo(batch))


class Elsewhere:
    """Threads that do what they are given in any order.

    Args:
        seed: Seed of that order.
        threads: Number of threads.
    """

    def __init__(self, seed: int, threads: int = 2) -> None:
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._work: list[Callable[[], None]] = []
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="elsewhere")

    def later(self, work: Callable[[], None]) -> None:
        """Does something later."""
        with self._lock:
            self._work.append(work)
        self._pool.submit(self._one)

    def here(self) -> None:
        """Does, on this thread, something that was to be done later, if there is anything."""
        self._one()

    def _one(self) -> None:
        with self._lock:
            if not self._work:
                return
            work = self._work.pop(self._random.randrange(len(self._work)))
        work()

    def close(self) -> None:
        """Ends the threads when everything is done."""
        self._pool.shutdown()


class Whim:
    """Begins batches in one of all the ways there are, good ones and bad ones.

    Args:
        seed: Seed of the choice.
        elsewhere: Runs the batches that are not done at once.
        decoupled: True if requests answer for themselves.
        failing: Share of batches that fail in one of the ways to do that.
    """

    def __init__(self, seed: int, elsewhere: Elsewhere, decoupled: bool, failing: float) -> None:
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._elsewhere = elsewhere
        self._decoupled = decoupled
        self._failing = failing

    def __call__(self, batch: Batch, done: Done) -> None:
        with self._lock:
            fails = self._random.random() < self._failing
            way = self._random.randrange(5)
        if fails:
            self._fail(way, batch, done)
        elif way == 0:
            done(self._outcome(batch))
        elif way == 1:
            done(self._outcome(batch))
            done(self._outcome(batch))
        elif way == 2:
            self._elsewhere.later(lambda: done(self._outcome(batch)))
            self._elsewhere.here()  # another batch, or this one, is done before this returns
        elif way == 3:
            self._until_cancelled(batch, done)
        else:
            self._elsewhere.later(lambda: done(self._outcome(batch)))

    def _fail(self, way: int, batch: Batch, done: Done) -> None:
        if way == 0:
            raise ValueError("told to")
        if way == 1:
            done(self._outcome(batch))
            raise ValueError("too late")
        if way == 2:
            done([])
        elif way == 3:
            done(SystemExit())
        else:
            self._elsewhere.later(lambda: done(ValueError("told to")))

    def _until_cancelled(self, batch: Batch, done: Done) -> None:
        """Is done at once if it is cancelled, and later if it is not cancelled."""
        once = threading.Lock()

        def end(outcome: Callable[[], BatchOutcome]) -> None:
            if once.acquire(blocking=False):
                done(outcome())

        for request in batch.requests:
            if not request.filler:
                request.on_cancel = lambda _: end(lambda: CancelledError(""))
        self._elsewhere.later(lambda: end(lambda: self._outcome(batch)))

    def _outcome(self, batch: Batch) -> BatchOutcome:
        if not self._decoupled:
            return echo(batch)
        for request, response in zip(batch.requests, echo(batch), strict=True):
            with self._lock:
                way = self._random.randrange(3)
            if way == 0:
                request.respond(response, False)
                request.respond(None, True)
            elif way == 1:
                request.respond(response, True)
            else:
                self._elsewhere.later(partial(request.respond, response, True))
        return None
