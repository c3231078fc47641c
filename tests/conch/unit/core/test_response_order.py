"""Responses in the order of the requests: over random orders of completion, and from many threads."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.support.core import WAIT_S, Answers, echo, make_model, make_request, make_spec
from tests.support.profiles import scaled
from tests.support.servers import eventually

from conch.core.errors import CancelledError, ResourceExhaustedError, UnavailableError
from conch.core.execution.response_order import ResponseOrder, keeps_order
from conch.core.model_version import Model, scheduler_for
from conch.core.request import InferenceRequest, InferenceResponse, RequestState
from conch.core.scheduling.scheduler import Batch
from conch.core.spec import DynamicBatching, QueuePolicy, SequenceBatching

IN_ORDER = DynamicBatching(preserve_ordering=True)


def test_what_a_responder_answers_comes_behind_what_waits() -> None:
    out: list[tuple[str, bool]] = []

    def respond(request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
        out.append((request.id, final))
        if out[-1] == ("b", False):
            third.respond(None)

    order = ResponseOrder()
    first, second, third = requests = [make_request(respond, id=name) for name in "abc"]
    for request in requests:
        order.enter(request)
    second.respond(InferenceResponse([]), False)
    second.respond(None)
    first.respond(None)
    assert out == [("a", True), ("b", False), ("b", True), ("c", True)]


@dataclass(eq=False)
class Line:
    """Responses of a model to one request."""

    request: InferenceRequest
    said: list[InferenceResponse | None] = field(default_factory=list)
    final: bool = False


class OrderMachine(RuleBasedStateMachine):
    """Output equals all responses, cut off at the first request that is not done."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[Line] = []
        self.out: list[tuple[InferenceRequest, InferenceResponse | None, bool]] = []
        self.order = ResponseOrder()
        self.nested: list[Line] = []

    def respond(self, request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
        self.out.append((request, response, final))
        if self.nested:
            # A responder may answer other requests.
            self.say(self.nested.pop(), None, True)

    def say(self, line: Line, response: InferenceResponse | None, final: bool) -> None:
        if not line.final:
            line.said.append(response)
            line.final = final
        line.request.respond(response, final)

    @rule()
    def submit(self) -> None:
        request = make_request(self.respond)
        self.order.enter(request)
        self.lines.append(Line(request))

    @rule(index=st.integers(0, 50), final=st.booleans(), error=st.booleans(), nested=st.integers(0, 50))
    def answer(self, index: int, final: bool, error: bool, nested: int) -> None:
        if not self.lines:
            return
        other = self.lines[nested % len(self.lines)]
        if nested % 3 == 0 and not other.final:
            self.nested.append(other)
        line = self.lines[index % len(self.lines)]
        self.say(line, InferenceResponse([], CancelledError("") if error else None), final)

    @invariant()
    def in_order(self) -> None:
        expected: list[tuple[InferenceRequest, InferenceResponse | None, bool]] = []
        for line in self.lines:
            last = len(line.said) - 1
            expected += [
                (line.request, said, line.final and number == last) for number, said in enumerate(line.said)
            ]
            if not line.final:
                break
        assert self.out == expected

    def teardown(self) -> None:
        for line in reversed(self.lines):
            self.say(line, None, True)
        self.in_order()


OrderMachine.TestCase.settings = settings(max_examples=scaled(200), stateful_step_count=40, deadline=None)
TestOrderMachine = OrderMachine.TestCase


class ServedMachine(RuleBasedStateMachine):
    """A scheduler in front: batches end in any order and fail, requests expire and are cancelled."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[InferenceRequest] = []
        self.queued: list[InferenceRequest] = []
        self.running: list[Batch] = []
        self.now = 1000

    @initialize(
        policy=st.sampled_from([None, QueuePolicy(timeout_ns=20), QueuePolicy(max_size=3)]),
        decoupled=st.booleans(),
    )
    def choose(self, policy: QueuePolicy | None, decoupled: bool) -> None:
        policies = () if policy is None else (policy,)
        batching = DynamicBatching(preserve_ordering=True, policies=policies)
        self.scheduler = scheduler_for(make_spec(4, batching=batching, decoupled=decoupled))
        self.order = ResponseOrder()
        self.decoupled = decoupled

    def tell(self, request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
        if final:
            self.told.append(request)

    @rule(size=st.integers(1, 3), key=st.sampled_from("aab"), patience=st.sampled_from([None, None, 5]))
    def submit(self, size: int, key: str, patience: int | None) -> None:
        deadline = None if patience is None else self.now + patience
        request = make_request(self.tell, batch_size=size, batch_key=key, deadline_ns=deadline)
        try:
            self.scheduler.submit(request, self.now)
        except UnavailableError:
            return
        self.order.enter(request)
        self.queued.append(request)

    @rule(ns=st.integers(1, 15))
    def advance(self, ns: int) -> None:
        self.now += ns
        for request in self.scheduler.expired(self.now):
            request.fail(UnavailableError("Request timeout expired"))

    @rule()
    def take(self) -> None:
        decision = self.scheduler.next_batch(self.now)
        if isinstance(decision, Batch):
            self.running.append(decision)

    @rule(index=st.integers(0, 9), fails=st.booleans())
    def complete(self, index: int, fails: bool) -> None:
        if not self.running:
            return
        batch = self.running.pop(index % len(self.running))
        # The requests of a decoupled model may end in any order.
        requests = reversed(batch.requests) if self.decoupled else batch.requests
        for request in requests:
            if self.decoupled:
                request.respond(InferenceResponse([]), False)
            request.respond(InferenceResponse([], CancelledError("") if fails else None))
        self.scheduler.complete(batch, self.now)

    @rule(index=st.integers(0, 50))
    def cancel(self, index: int) -> None:
        if self.queued:
            for request in self.scheduler.cancel(self.queued[index % len(self.queued)]):
                request.fail(CancelledError(""))

    @invariant()
    def in_order(self) -> None:
        done = 0
        while done < len(self.queued) and self.queued[done].state is RequestState.DONE:
            done += 1
        assert self.told == self.queued[:done]

    def teardown(self) -> None:
        while isinstance(decision := self.scheduler.next_batch(self.now), Batch):
            self.running.append(decision)
        while self.running:
            self.complete(-1, False)
        assert self.told == self.queued


ServedMachine.TestCase.settings = settings(max_examples=scaled(200), stateful_step_count=50, deadline=None)
TestServedMachine = ServedMachine.TestCase


def test_a_long_line_that_becomes_free_is_no_deep_stack() -> None:
    answers = Answers()
    order = ResponseOrder()
    requests = [make_request(answers) for _ in range(5 * sys.getrecursionlimit())]
    for request in requests:
        order.enter(request)
    for request in reversed(requests):
        request.respond(None)
    assert [request for request, _, _ in answers.calls] == requests


def test_a_responder_that_fails_holds_nobody_up(caplog: pytest.LogCaptureFixture) -> None:
    def fail(request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
        raise ValueError("broken")

    answers = Answers()
    order = ResponseOrder()
    requests = [make_request(fail), make_request(answers)]
    for request in requests:
        order.enter(request)
    for request in reversed(requests):
        request.respond(None)
    assert answers.finals == 1
    assert "broken" in caplog.text


@pytest.mark.parametrize("seed", range(3))
def test_threads_that_finish_in_any_order(seed: int) -> None:
    """No thread passes on while another does, nothing is lost, and the order is that of the queue."""
    source = random.Random(seed)
    passing = threading.Lock()
    told: list[InferenceRequest] = []

    def respond(request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
        assert passing.acquire(blocking=False), "two at a time"
        told.append(request)
        passing.release()

    order = ResponseOrder()
    requests = [make_request(respond) for _ in range(3000)]
    for request in requests:
        order.enter(request)
    shuffled = [request for request in requests for _ in range(2)]
    source.shuffle(shuffled)
    last = {id(request): number for number, request in enumerate(shuffled)}
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            for start in range(4):
                mine = [
                    (request, number == last[id(request)])
                    for number, request in enumerate(shuffled)
                    if id(request) // 64 % 4 == start  # one thread for each request, as a model has it
                ]
                pool.submit(respond_all, mine)
    finally:
        sys.setswitchinterval(interval)
    assert told == [request for request in requests for _ in range(2)]


def respond_all(calls: list[tuple[InferenceRequest, bool]]) -> None:
    for request, final in calls:
        request.respond(None, final)


class Rooms:
    """Batches of one request that run until they are let go, each by its request."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.doors: dict[str, threading.Event] = {}
        self.lock = threading.Lock()

    def door(self, name: str) -> threading.Event:
        with self.lock:
            return self.doors.setdefault(name, threading.Event())

    def __call__(self, batch: Batch) -> list[InferenceResponse | None]:
        (request,) = batch.requests
        self.entered.release()
        assert self.door(request.id).wait(WAIT_S)
        if request.id == "fails":
            raise ValueError("told to")
        return [InferenceResponse([])]


@pytest.fixture
def rooms() -> Rooms:
    return Rooms()


@pytest.fixture
def model(rooms: Rooms) -> Iterator[Model]:
    """Two instances, one request at a time on each."""
    model = make_model(make_spec(instances=2, outputs=(), batching=IN_ORDER), rooms)
    yield model
    for door in list(rooms.doors.values()):
        door.set()
    assert model.close(WAIT_S)


def submit_named(model: Model, answers: Answers, name: str) -> InferenceRequest:
    request = make_request(answers, id=name)
    model.submit(request)
    return request


def test_a_quicker_instance_waits_for_a_slower_one(model: Model, rooms: Rooms) -> None:
    answers = Answers()
    slow = submit_named(model, answers, "slow")
    others = [submit_named(model, answers, name) for name in ("fails", "b", "c")]
    for name in ("fails", "b", "c"):
        rooms.door(name).set()
    for _ in range(4):
        assert rooms.entered.acquire(timeout=WAIT_S)
    assert answers.finals == 0
    rooms.door("slow").set()
    assert answers.wait(4)
    assert [request for request, _, _ in answers.calls] == [slow, *others]
    assert [response.error is None for _, response, _ in answers.calls if response] == [
        True,
        False,
        True,
        True,
    ]


def test_cancelled_and_expired_requests_take_their_place_and_hold_nobody_up(rooms: Rooms) -> None:
    model = make_model(make_spec(outputs=(), batching=IN_ORDER), rooms, allows_inline=False)
    answers = Answers()
    first = submit_named(model, answers, "first")
    assert rooms.entered.acquire(timeout=WAIT_S)
    cancelled = submit_named(model, answers, "cancelled")
    expired = make_request(answers, deadline_ns=time.monotonic_ns())
    model.submit(expired)
    assert model.cancel(cancelled)
    eventually(lambda: not model.pending, "it expires")
    assert answers.finals == 0
    rooms.door("first").set()
    assert answers.wait(3)
    rooms.door("last").set()
    last = submit_named(model, answers, "last")
    assert answers.wait(4)
    assert [request for request, _, _ in answers.calls] == [first, cancelled, expired, last]
    assert model.close(WAIT_S)


def test_responses_of_a_decoupled_request_come_before_those_of_the_next() -> None:
    held: list[InferenceRequest] = []

    def keep(batch: Batch) -> None:
        held.extend(batch.requests)

    spec = make_spec(outputs=(), batching=IN_ORDER, decoupled=True)
    model = make_model(spec, keep)
    answers = Answers()
    requests = [make_request(answers) for _ in range(3)]
    for request in requests:
        model.submit(request)
    eventually(lambda: len(held) == 3, "all have begun")
    for number in (2, 0, 1, 0):
        requests[number].respond(InferenceResponse([]), False)
    assert [request for request, _, _ in answers.calls] == [requests[0]] * 2, "the first passes at once"
    requests[1].respond(None)
    requests[0].respond(None)
    assert [request for request, _, _ in answers.calls] == [
        *[requests[0]] * 3,
        *[requests[1]] * 2,
        requests[2],
    ]
    requests[2].respond(None)
    assert answers.finals == 3
    assert model.close(WAIT_S)


def test_who_wants_order() -> None:
    assert keeps_order(make_spec(batching=IN_ORDER))
    assert not keeps_order(make_spec(batching=DynamicBatching()))
    assert not keeps_order(make_spec())
    sequence = SequenceBatching(strategy="OLDEST", preserve_ordering=True)
    spec = make_spec()
    object.__setattr__(spec, "sequence", sequence)
    assert keeps_order(spec)


def test_a_refused_request_gets_no_place() -> None:
    """Or the requests behind it would wait for ever; another model may take it."""
    entered, go = threading.Event(), threading.Event()

    def hold(batch: Batch) -> list[InferenceResponse | None]:
        entered.set()
        assert go.wait(WAIT_S)
        return echo(batch)

    model = make_model(replace(make_spec(4, batching=IN_ORDER), max_queue_size=1), hold, allows_inline=False)
    answers, refused = Answers(), Answers()
    model.submit(make_request(answers, 1))
    assert entered.wait(WAIT_S)
    model.submit(make_request(answers, 1))
    request = make_request(refused, 1)
    with pytest.raises(ResourceExhaustedError):
        model.submit(request)
    request.respond(None)
    assert refused.finals == 1
    go.set()
    assert answers.wait(2)
    assert model.close(WAIT_S)
