"""The core as a whole over random orders of events: whatever happens, each request has one answer, its own.

A single-threaded stand-in for the runner drives the real schedulers and the real executor: several instances,
executions that fail, requests cancelled or too late, versions replaced under traffic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.support.clocks import Clock
from tests.support.core import make_spec
from tests.support.machines import run_machine

from conch.core.backend import BackendInstance
from conch.core.errors import CancelledError, ConchError, InternalError, UnavailableError
from conch.core.execution.executor import Executor
from conch.core.model_statistics import ModelStatistics
from conch.core.model_version import scheduler_for
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.scheduling.scheduler import Batch
from conch.core.spec import DynamicBatching, ModelSpec, QueuePolicy, SequenceBatching
from conch.core.tensor import Tensor

HOUR = 3_600_000_000_000
MOST = 4

POLICIES = (QueuePolicy(False, 30, True, 6), QueuePolicy(True, 20), QueuePolicy())

SPECS = {
    "default": make_spec(),
    "dynamic": make_spec(MOST, batching=DynamicBatching()),
    "delay": make_spec(MOST, batching=DynamicBatching((2,), 20)),
    "unbatched": make_spec(0, batching=DynamicBatching((), 20, POLICIES, 2)),
    "priorities": make_spec(MOST, batching=DynamicBatching((2,), 20, POLICIES, 2)),
    "direct": make_spec(MOST, sequence=SequenceBatching("DIRECT", 50)),
    "direct waits": make_spec(
        MOST, sequence=SequenceBatching("DIRECT", HOUR, max_queue_delay_ns=20, min_slot_utilization=0.6)
    ),
    "oldest": make_spec(MOST, sequence=SequenceBatching("OLDEST", 50, max_candidates=2)),
    "oldest waits": make_spec(
        MOST,
        sequence=SequenceBatching(
            "OLDEST", HOUR, max_candidates=5, preferred_sizes=(2,), max_queue_delay_ns=20
        ),
    ),
    "iterative": make_spec(MOST, sequence=SequenceBatching("OLDEST", 50, max_candidates=3, iterative=True)),
}


@dataclass
class Books:
    """Record of one request in the machine."""

    request: InferenceRequest
    version: Version
    mark: float
    finals: int = 0
    refused: bool = False
    runs: int = 0


class Echo(BackendInstance):
    """Answers with the input, or as the test has it do next."""

    def __init__(self) -> None:
        self.outcome = "answers"

    def execute(self, batch: Batch) -> Sequence[InferenceResponse | None]:
        if self.outcome == "raises":
            raise UnavailableError("no luck")
        if self.outcome == "miscounts":
            return [InferenceResponse([])] * (len(batch.requests) + 1)
        responses: list[InferenceResponse | None] = []
        for number, request in enumerate(batch.requests):
            if self.outcome == "reschedules" and number % 2 == 0:
                request.rescheduled = True
                responses.append(None)
            elif self.outcome == "fails one" and number == 0:
                responses.append(InferenceResponse([], InternalError("not this one")))
            else:
                responses.append(InferenceResponse([Tensor.from_array("OUT", request.inputs["IN"].numpy())]))
        return responses


@dataclass
class Version:
    """One version under test, driven as the runner would drive it."""

    spec: ModelSpec
    instances: int
    clock: Clock
    closing: bool = False
    running: list[tuple[int, Batch]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.statistics = ModelStatistics()
        self.scheduler = scheduler_for(self.spec, self.instances)
        self.executor = Executor(self.spec, self.statistics, self.clock)
        self.idle = set(range(self.instances))


class CoreMachine(RuleBasedStateMachine):
    """Any kind of model, all kinds of events."""

    @initialize(kind=st.sampled_from(sorted(SPECS)), instances=st.integers(1, 3))
    def start(self, kind: str, instances: int) -> None:
        self.clock = Clock(1000)
        self.spec = SPECS[kind]
        self.instances = instances
        self.instance = Echo()
        self.versions = [Version(self.spec, instances, self.clock)]
        self.books: dict[int, Books] = {}

    def respond(self, request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
        book = self.books[id(request)]
        assert final and not book.finals, "answered twice"
        assert not book.refused, "answered although it was refused"
        book.finals += 1
        assert response is not None
        if response.error is None:
            (output,) = response.outputs
            assert (output.numpy() == book.mark).all(), "somebody else's answer"

    @rule(
        rows=st.integers(1, 3),
        sequence=st.integers(0, 6),
        start=st.booleans(),
        end=st.booleans(),
        priority=st.integers(0, 4),
        timeout_us=st.sampled_from((0, 0, 1)),
        deadline=st.sampled_from((None, None, 5, 40)),
    )
    def submit(
        self,
        rows: int,
        sequence: int,
        start: bool,
        end: bool,
        priority: int,
        timeout_us: int,
        deadline: int | None,
    ) -> None:
        settings = self.spec.sequence
        mark = float(len(self.books))
        shape = (16,) if not self.spec.max_batch_size else (1 if settings else rows, 16)
        tensor = Tensor.from_array("IN", np.full(shape, mark, np.float32))
        request = InferenceRequest("m", "", {"IN": tensor}, self.respond, self.clock.now, str(mark))
        request.batch_size = shape[0] if self.spec.max_batch_size else 1
        request.priority = priority
        request.timeout_us = timeout_us
        request.deadline_ns = None if deadline is None else self.clock.now + deadline
        if settings is not None and not settings.iterative:
            request.correlation_id = sequence
            request.sequence_start = start
            request.sequence_end = end
        version = next((v for v in self.versions if v.scheduler.continues(request)), self.versions[-1])
        self.books[id(request)] = book = Books(request, version, mark)
        try:
            version.scheduler.submit(request, self.clock.now)
        except ConchError:
            book.refused = True

    @rule(which=st.integers(0, 2))
    def start_batch(self, which: int) -> None:
        self.take(self.versions[which % len(self.versions)])

    def take(self, version: Version) -> bool:
        """Starts a batch on an idle instance, if there is one."""
        if not version.idle:
            return False
        self.expire(version)
        due = version.scheduler.due_ns(self.clock.now)
        decision = version.scheduler.next_batch(self.clock.now)
        if type(decision) is not Batch:
            assert due is None or due > self.clock.now, "due, but nothing came"
            return False
        assert due is not None and due <= self.clock.now, "came before it was due"
        number = min(version.idle) if decision.instance is None else decision.instance
        version.idle.remove(number)
        self.check(version, number, decision)
        version.running.append((number, decision))
        return True

    def check(self, version: Version, number: int, batch: Batch) -> None:
        """Looks at what was taken out."""
        real = [request for request in batch.requests if id(request) in self.books]
        assert real, "an empty batch"
        assert len(real) + batch.fillers == len(batch.requests)
        rows = sum(request.batch_size for request in batch.requests)
        assert rows == batch.size
        if version.spec.batching or version.spec.sequence:
            assert rows <= max(version.spec.max_batch_size, 1) or len(real) == 1
        for request in real:
            book = self.books[id(request)]
            assert not book.finals and not book.refused
            book.runs += 1
            deadline = request.deadline_ns
            assert deadline is None or deadline > self.clock.now or book.runs > 1, "nobody waits for it"
        if version.spec.sequence is not None:
            live = [
                request.correlation_id
                for _, other in [*version.running, (number, batch)]
                for request in other.requests
                if id(request) in self.books
            ]
            sequences = [id(self.books[id(r)].request.sequence) for r in real]
            assert len(set(sequences)) == len(sequences), "two requests of one sequence in a batch"
            assert all(live), "a request without a sequence"

    @precondition(lambda self: any(version.running for version in self.versions))
    @rule(
        which=st.integers(0, 5),
        outcome=st.sampled_from(("answers", "answers", "reschedules", "raises", "fails one", "miscounts")),
    )
    def finish(self, which: int, outcome: str) -> None:
        running = [(version, *work) for version in self.versions for work in version.running]
        version, number, batch = running[which % len(running)]
        self.instance.outcome = outcome
        version.executor.run(self.instance, batch)
        version.scheduler.complete(batch, self.clock.now)
        version.running.remove((number, batch))
        version.idle.add(number)

    @precondition(lambda self: self.books)
    @rule(which=st.integers(0, 1000))
    def cancel(self, which: int) -> None:
        book = list(self.books.values())[which % len(self.books)]
        if book.refused:
            return
        scheduler = book.version.scheduler
        before = scheduler.pending
        taken = scheduler.cancel(book.request)
        assert scheduler.pending == before - len(taken)
        assert not taken or taken[0] is book.request
        for one in taken:
            one.fail(CancelledError(""))

    @rule(ns=st.integers(1, 30))
    def advance(self, ns: int) -> None:
        self.clock.now += ns
        for version in self.versions:
            self.expire(version)

    def expire(self, version: Version) -> None:
        scheduler = version.scheduler
        for _ in range(3):  # the next time may be too early, but not for ever
            if scheduler.expiries.next_ns <= self.clock.now:
                for request in scheduler.expired(self.clock.now):
                    version.executor.tracker.expire(request, scheduler.expiry_text(request))
        assert scheduler.expiries.next_ns > self.clock.now

    @precondition(lambda self: len(self.versions) < 3)
    @rule()
    def reload(self) -> None:
        self.versions[-1].scheduler.begin_closing(self.clock.now)
        self.versions[-1].closing = True
        self.versions.append(Version(self.spec, self.instances, self.clock))

    @invariant()
    def counts(self) -> None:
        queued = sum(book.request.state == 1 for book in getattr(self, "books", {}).values())
        assert sum(version.scheduler.pending for version in getattr(self, "versions", ())) == queued

    def teardown(self) -> None:
        if not hasattr(self, "versions"):
            return
        self.instance.outcome = "answers"
        step = 10
        while True:
            assert step < 100 * HOUR, "requests wait that nobody takes"
            for version in self.versions:
                for number, batch in version.running:
                    version.executor.run(self.instance, batch)
                    version.scheduler.complete(batch, self.clock.now)
                    version.idle.add(number)
                version.running.clear()
            if any([self.take(version) for version in self.versions]):
                step = 10
            elif not any(version.scheduler.pending for version in self.versions):
                break
            else:  # they may wait until the sequences of others have been idle for an hour
                self.clock.now += step
                step *= 2
        for book in self.books.values():
            assert book.finals + book.refused == 1, "not exactly one outcome"
        # The sequences are not ended; after their idle time nothing may be left of them.
        self.clock.now += 3 * HOUR
        for version in self.versions:
            self.expire(version)
            assert version.scheduler.live_sequences == 0
            assert version.scheduler.drain() == []
            assert version.idle == set(range(self.instances))


TestCoreMachine, TestSlowCoreMachine = run_machine(CoreMachine, 400, slow_factor=8)


@pytest.mark.parametrize("kind", ["direct waits", "oldest waits"])
def test_sequences_that_wait_for_others_to_be_given_up(kind: str) -> None:
    """The machine ends too when more sequences are open than there is room for, and they are not ended."""
    machine = CoreMachine()
    machine.start(kind, 1)
    for sequence in range(1, 7):
        machine.submit(1, sequence, True, False, 0, 0, None)
    assert machine.versions[0].scheduler.pending == 6
    machine.teardown()
