"""The sequence batcher under random interleavings, beside a plain model of its rules."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.conch.unit.core.sequences import (
    CONTROLS,
    IDLE_NS,
    MS,
    STATE,
    US,
    Expected,
    Seq,
    sequence_request,
    sequence_spec,
    told,
)
from tests.support.profiles import scaled

from conch.core.errors import ConchError, InvalidArgumentError, ResourceExhaustedError
from conch.core.request import InferenceRequest, RequestState
from conch.core.scheduling.scheduler import IDLE, Batch, WaitUntil
from conch.core.scheduling.sequence.batcher import SequenceBatcher
from conch.core.scheduling.sequence.table import LiveSequence
from conch.core.spec import ModelSpec
from conch.core.tensor import Tensor


class Driver:
    """Does the same to a batcher and to the model, and compares."""

    def __init__(self, spec: ModelSpec, instances: int) -> None:
        assert spec.sequence is not None
        self.spec = spec
        self.settings = spec.sequence
        self.batcher = SequenceBatcher(spec, instances)
        self.expected = Expected(spec, instances)
        self.now = 1_000 * MS
        self.running: list[Batch] = []
        self.submitted: list[InferenceRequest] = []
        self.outcomes: list[InferenceRequest] = []

    def submit(self, correlation_id: int, flags: str, key: object, wait_us: int, limit_ms: int) -> None:
        request = sequence_request(
            correlation_id,
            flags,
            batch_key=key,
            timeout_us=wait_us,
            deadline_ns=self.now + limit_ms * MS if limit_ms else None,
        )
        own = self.settings.iterative and not correlation_id
        error: type[ConchError] | None = None
        if not own and not (correlation_id and ("S" in flags or self.expected.taking(correlation_id))):
            error = InvalidArgumentError
        elif self.spec.max_queue_size and self.expected.pending >= self.spec.max_queue_size:
            error = ResourceExhaustedError
        assert self.batcher.continues(request) == (
            "S" not in flags and self.expected.taking(correlation_id) is not None
        )
        if error is not None:
            with pytest.raises(error):
                self.batcher.submit(request, self.now)
            assert request.state is RequestState.NEW
            return
        self.batcher.submit(request, self.now)
        assert request.queued_ns == self.now
        if own:
            assert request.correlation_id and request.sequence_start
            assert request.correlation_id not in self.expected.lanes
        self.expected.submit(request, own, self.now)
        self.submitted.append(request)

    def advance(self, ns: int) -> None:
        self.now += ns
        late = self.expected.late(self.now)
        idle = self.expected.idle(self.now)
        if self.batcher.expiries.next_ns > self.now:
            assert not late and not idle, "the timers come too late"
            return
        gone = {request for first in late for request in self.expected.of[first].queue}
        taken = self.batcher.expired(self.now)
        self.expected.touched = self.now
        assert len(taken) == len(gone) and set(taken) == gone
        self._left(taken)
        for request in taken:
            self.expected.cancel(request)
        self.expected.release_idle(self.now)
        if self.batcher.expiries.next_ns <= self.now:  # may be too early, but not for ever
            assert not self.batcher.expired(self.now)
        assert self.batcher.expiries.next_ns > self.now

    def take(self) -> None:
        due = self.batcher.due_ns(self.now)
        decision = self.batcher.next_batch(self.now)
        assert (due is not None and due <= self.now) == isinstance(decision, Batch)
        if isinstance(decision, WaitUntil):
            assert due == decision.time_ns > self.now
        if decision is IDLE:
            assert due is None
        if self.expected.direct:
            self._check_direct(decision)
        else:
            self._check_oldest(decision)
        if isinstance(decision, Batch):
            self._check_batch(decision)

    def complete(self, index: int, again: int) -> None:
        if not self.running:
            return
        batch = self.running.pop(index % len(self.running))
        assert batch.instance is not None
        ended: list[tuple[InferenceRequest, bool]] = []
        for number, request in enumerate(batch.requests):
            if request.filler:
                continue
            sequence = self.expected.of[request]
            assert isinstance(request.sequence, LiveSequence)
            sequence.state += 1
            request.sequence.states["STATE_IN"] = Tensor(
                "STATE_IN", "INT64", (1, 1), sequence.state.to_bytes(8, "little")
            )
            request.rescheduled = self.settings.iterative and bool(again >> number & 1)
            if not request.rescheduled:
                self.outcomes.append(request)
                request.state = RequestState.DONE
            ended.append((request, request.rescheduled))
        self.batcher.complete(batch, self.now)
        for request, repeats in ended:
            assert not request.rescheduled
            if repeats:
                assert request.state is RequestState.QUEUED
                assert request.inputs.keys() == {"IN"}, "not the client's inputs"
        self.expected.complete(batch.instance, ended, self.now)

    def cancel(self, index: int) -> None:
        """Cancels any request ever submitted; only what is queued is given back."""
        if not self.submitted:
            return
        request = self.submitted[index % len(self.submitted)]
        queue = list(self.expected.of[request].queue)
        gone = self.expected.cancel(request)
        taken = self.batcher.cancel(request)
        if gone:
            assert taken[0] is request
            assert list(taken[1:]) == [other for other in queue if other is not request]
        assert len(taken) == len(gone) and set(taken) == gone
        self._left(taken)
        assert not self.batcher.cancel(request)

    def end(self, correlation_id: int) -> None:
        self.batcher.end_sequence(correlation_id)
        self.expected.end(correlation_id)

    def look(self) -> None:
        assert self.batcher.pending == self.expected.pending
        assert self.batcher.live_sequences == len(self.expected.sequences)
        assert self.batcher.free_seats == [len(free) for free in self.expected.free]
        assert not any(self.expected.busy[number] for number in self.batcher.instance_dues(self.now))

    def finish(self, drain: bool) -> None:
        """Everything has one outcome, and nothing is held in the end."""
        if drain:
            taken = self.batcher.drain()
            assert len(taken) == self.expected.pending
            self._left(taken)
            self.expected.drain()
            self.look()
        for _ in range(3 * len(self.submitted) + 3):
            self.take()
            while self.running:
                self.complete(0, 0)
            self.advance(IDLE_NS)
            self.look()
        assert (self.batcher.pending, self.batcher.live_sequences) == (0, 0)
        assert len(self.outcomes) == len(self.submitted)
        assert set(self.outcomes) == set(self.submitted)
        assert all(len(free) == self._places() for free in self.expected.free)

    def _places(self) -> int:
        return self.expected.most if self.expected.direct else self.settings.max_candidates

    def _left(self, taken: Any) -> None:
        assert all(request.state is RequestState.NEW for request in taken)
        self.outcomes += taken

    def _check_direct(self, decision: object) -> None:
        expected = self.expected
        due = {n: at for n in range(len(expected.busy)) if (at := expected.due(n)) is not None}
        if isinstance(decision, Batch):
            assert decision.instance is not None
            assert due[decision.instance] == min(due.values()) <= self.now
            real = [request for request in decision.requests if not request.filler]
            heads = {each.row: each.queue[0] for each in expected.order[decision.instance]}
            oldest = min(head.queued_ns for head in heads.values())
            keys = {head.batch_key for head in heads.values() if head.queued_ns == oldest}
            key = real[0].batch_key
            assert key in keys
            assert real == [head for _, head in sorted(heads.items()) if head.batch_key == key]
        elif isinstance(decision, WaitUntil):
            assert decision.time_ns == min(due.values())
        else:
            assert not due

    def _check_oldest(self, decision: object) -> None:
        expected = self.expected
        ready = {n: each for n, each in enumerate(expected.order) if each and not expected.busy[n]}
        delay = self.settings.max_queue_delay_ns
        if isinstance(decision, Batch):
            assert decision.instance is not None
            first = ready[decision.instance][: len(decision.requests)]
            assert decision.requests == [each.queue[0] for each in first]
            assert len({request.batch_key for request in decision.requests}) == 1
            assert decision.fillers == 0
        elif isinstance(decision, WaitUntil):
            ends = [each[0].queue[0].queued_ns + delay for each in ready.values()]
            assert delay and decision.time_ns == min(ends)
        else:
            assert not ready

    def _check_batch(self, batch: Batch) -> None:
        assert batch.instance is not None
        assert batch.requests and not batch.requests[-1].filler
        assert batch.size == len(batch.requests) <= self.expected.most
        assert batch.fillers == sum(request.filler for request in batch.requests)
        real = [request for request in batch.requests if not request.filler]
        self.expected.start(batch.instance, real)
        for row, request in enumerate(batch.requests):
            if request.filler:
                self._check_filler(request, batch.requests[-1])
                continue
            sequence = self.expected.of[request]
            assert request.state is RequestState.RUNNING
            assert not self.expected.direct or row == sequence.row
            self._check_told(request, sequence)
        self.running.append(batch)

    def _check_told(self, request: InferenceRequest, sequence: Seq) -> None:
        assert told(request, "READY") == 2.0
        assert told(request, "START") == request.sequence_start == (sequence.state == 0)
        assert told(request, "END") == request.sequence_end
        assert told(request, "CORRID") == sequence.id
        assert told(request, "STATE_IN") == sequence.state

    def _check_filler(self, request: InferenceRequest, like: InferenceRequest) -> None:
        assert (told(request, "READY"), told(request, "START"), told(request, "END")) == (-1.0, 0, False)
        assert told(request, "CORRID") == 0
        assert request.inputs.keys() == like.inputs.keys()
        for name, tensor in request.inputs.items():
            assert tensor.shape == like.inputs[name].shape
            assert name == "READY" or not tensor.numpy().any()
        request.respond(None)


def _spec(**settings: Any) -> ModelSpec:
    most = settings.pop("most")
    return sequence_spec(most, controls=CONTROLS, states=(STATE,), max_idle_ns=IDLE_NS, **settings)


def _specs(iterative: bool) -> st.SearchStrategy[ModelSpec]:
    common: dict[str, Any] = {
        "max_queue_delay_ns": st.sampled_from([0, 0, 7 * MS]),
        "max_queue_size": st.sampled_from([0, 0, 5]),
        "iterative": st.just(iterative),
    }
    direct = st.builds(
        _spec,
        most=st.integers(1, 4),
        strategy=st.just("DIRECT"),
        min_slot_utilization=st.sampled_from([0.0, 0.34, 0.5, 1.0]),
        **common,
    )
    oldest = st.integers(1, 4).flatmap(
        lambda most: st.builds(
            _spec,
            most=st.just(most),
            strategy=st.just("OLDEST"),
            max_candidates=st.integers(1, 4),
            preferred_sizes=st.lists(st.integers(1, most), max_size=2, unique=True).map(
                lambda sizes: tuple(sorted(sizes))
            ),
            **common,
        )
    )
    return st.one_of(direct, oldest)


class SequenceMachine(RuleBasedStateMachine):
    """Random interleavings, shrunk by hypothesis to the shortest failing one."""

    iterative = False

    def __init__(self) -> None:
        super().__init__()
        self.driver = Driver(_spec(most=1), 1)
        self.drain = False

    @initialize(data=st.data(), instances=st.integers(1, 3), drain=st.booleans())
    def choose(self, data: st.DataObject, instances: int, drain: bool) -> None:
        self.driver = Driver(data.draw(_specs(self.iterative)), instances)
        self.drain = drain

    @rule(
        correlation_id=st.integers(0, 6),
        flags=st.sampled_from(["", "", "", "S", "S", "S", "E", "SE"]),
        key=st.sampled_from(["a", "a", "a", "b"]),
        wait_us=st.sampled_from([0, 0, 0, 9 * MS // US]),
        limit_ms=st.sampled_from([0, 0, 0, 15]),
    )
    def submit(self, correlation_id: int, flags: str, key: str, wait_us: int, limit_ms: int) -> None:
        self.driver.submit(correlation_id, flags, key, wait_us, limit_ms)

    @rule(ms=st.sampled_from([0, 1, 3, 8, 20, 41]))
    def advance(self, ms: int) -> None:
        self.driver.advance(ms * MS)

    @rule()
    def take(self) -> None:
        self.driver.take()

    @rule(index=st.integers(0, 5), again=st.integers(0, 15))
    def complete(self, index: int, again: int) -> None:
        self.driver.complete(index, again)

    @rule(index=st.integers(0, 100))
    def cancel(self, index: int) -> None:
        self.driver.cancel(index)

    @rule(correlation_id=st.integers(0, 6))
    def end(self, correlation_id: int) -> None:
        self.driver.end(correlation_id)

    @invariant()
    def agrees(self) -> None:
        self.driver.look()

    def teardown(self) -> None:
        self.driver.finish(self.drain)


class IterativeMachine(SequenceMachine):
    """The same where requests without a sequence get one of their own, and may run again."""

    iterative = True


FEW = settings(max_examples=scaled(60), stateful_step_count=50)
TestSequences = SequenceMachine.TestCase
TestSequences.settings = FEW
TestIterative = IterativeMachine.TestCase
TestIterative.settings = FEW


def walk(seed: int, steps: int) -> None:
    """Goes one long way through everything, faster than hypothesis does."""
    choose = random.Random(seed)
    common: dict[str, Any] = {
        "most": choose.randint(1, 4),
        "max_queue_delay_ns": choose.choice([0, 7 * MS]),
        "max_queue_size": choose.choice([0, 20]),
        "iterative": choose.random() < 0.4,
    }
    if choose.random() < 0.5:
        spec = _spec(min_slot_utilization=choose.choice([0.0, 0.5, 1.0]), **common)
    else:
        spec = _spec(strategy="OLDEST", max_candidates=choose.randint(1, 5), **common)
    driver = Driver(spec, choose.randint(1, 3))
    for step in range(steps):
        match choose.randrange(10):
            case 0 | 1 | 2 | 3:
                driver.submit(
                    choose.randint(0, 9),
                    choose.choice(["", "", "", "S", "S", "E", "SE"]),
                    choose.choice("aaab"),
                    choose.choice([0, 0, 0, 9 * MS // US]),
                    choose.choice([0, 0, 0, 15]),
                )
            case 4 | 5:
                driver.take()
            case 6 | 7:
                driver.complete(choose.randrange(5), choose.randrange(16) & choose.randrange(16))
            case 8:
                driver.advance(choose.choice([0, 0, 1, 1, 3, 8, 20, 41]) * MS)
            case _:
                if choose.random() < 0.3:
                    driver.cancel(len(driver.submitted) - 1 - choose.randrange(8))
                elif choose.random() < 0.3:
                    driver.end(choose.randint(1, 9))
        if step % 7 == 0:
            driver.look()
    driver.finish(choose.random() < 0.3)


@pytest.mark.parametrize("seed", range(60))
def test_long_walks(seed: int) -> None:
    walk(seed, 2_000)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1_000, 1_100))
def test_longer_walks(seed: int) -> None:
    walk(seed, 10_000)
