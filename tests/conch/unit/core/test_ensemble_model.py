"""Ensembles over models of the core: threads, leading, errors, cancellation, closing."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from tests.support.async_instance import Kept, make_beginning
from tests.support.core import WAIT_S, Answers, echo, make_model, make_request, make_spec

from conch.core.admission import Admission
from conch.core.clock import Clock, monotonic_ns
from conch.core.ensembles.ensemble_model import EnsembleModel
from conch.core.ensembles.plan import EnsemblePlan, ModelStep
from conch.core.errors import (
    CancelledError,
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from conch.core.model_statistics import QUEUED, RUNNING, ModelStatistics
from conch.core.model_version import Model
from conch.core.registry import Entry, Registry
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.scheduling.scheduler import Batch
from conch.core.servable import ClosedError, InlineClaim, Servable
from conch.core.spec import DynamicBatching, ModelSpec, SequenceBatching, TensorSpec
from conch.core.tensor import Tensor


class Direct:
    """A model that answers a request while it is being submitted."""

    def __init__(self, spec: ModelSpec, answer: Callable[[InferenceRequest], None]) -> None:
        self.spec = spec
        self.statistics = ModelStatistics()
        self.version_text = "1"
        self.pending = 0
        self.live_sequences = 0
        self.readiness = ()
        self.workers = ()
        self.notes = ()
        self.requests: list[InferenceRequest] = []
        self.cancelled: list[InferenceRequest] = []
        self._answer = answer

    def submit(self, request: InferenceRequest, may_claim: bool = False) -> InlineClaim | None:
        request.model = self
        self.requests.append(request)
        self._answer(request)
        return None

    def cancel(self, request: InferenceRequest) -> bool:
        request.cancelled = True
        self.cancelled.append(request)
        return False

    def continues(self, request: InferenceRequest) -> bool:
        return False

    def end_sequence(self, correlation_id: int | str) -> None:
        pass

    def close(self, timeout_s: float | None = None) -> bool:
        return True

    def fail_queued(self, error: Exception) -> int:
        return 0


def add_one(request: InferenceRequest) -> None:
    request.respond(InferenceResponse([Tensor.from_array("OUT", request.inputs["IN"].numpy() + 1)]))


def keep(request: InferenceRequest) -> None:
    pass


class House:
    """A registry, the models in it, and a way to make ensembles of them."""

    def __init__(self) -> None:
        self.registry = Registry()
        self.admission = Admission(self.registry)
        self.models: dict[str, Servable] = {}

    def put(self, model: Any) -> Any:
        name = model.spec.name
        self.models[name] = model
        self.registry.publish(name, Entry({1: model}))
        return model

    def direct(self, name: str, answer: Callable[[InferenceRequest], None] = add_one, **spec: Any) -> Direct:
        direct: Direct = self.put(Direct(make_spec(name=name, **spec), answer))
        return direct

    def model(
        self,
        name: str,
        execute: Any = echo,
        allows_inline: bool = True,
        clock: Clock = monotonic_ns,
        **spec: Any,
    ) -> Model:
        model: Model = self.put(make_model(make_spec(name=name, **spec), execute, allows_inline, clock))
        return model

    def fast(self, name: str, execute: Any = echo) -> None:
        """A model that has run, in nanoseconds, so that a thread with a claim also runs its later steps."""
        self.model(name, execute, clock=itertools.count().__next__)
        self.send(Answers(), name, may_claim=True)

    def ensemble(
        self,
        steps: list[tuple[str, str, str]],
        name: str = "e",
        clock: Any = None,
        max_inflight: int = 0,
        **spec: Any,
    ) -> EnsembleModel:
        """Steps are (model, tensor for IN, tensor for OUT); the first gets IN, OUT is the ensemble's."""
        made = [
            ModelStep(
                number,
                model,
                "",
                (("IN", source),),
                (("OUT", target),),
                self.models[model].spec.decoupled,
            )
            for number, (model, source, target) in enumerate(steps)
        ]
        plan = EnsemblePlan(name, ["IN"], ["OUT"], made, max_inflight)
        model_spec = make_spec(name=name, decoupled=plan.decoupled, **spec)
        more = {} if clock is None else {"clock": clock}
        ensemble: EnsembleModel = self.put(EnsembleModel(model_spec, plan, self.registry, **more))
        return ensemble

    def send(
        self, answers: Answers, name: str = "e", may_claim: bool = False, **more: Any
    ) -> InferenceRequest:
        request = make_request(answers, name=name, **more)
        claim = self.admission.admit(request, may_claim)
        assert may_claim or claim is None
        if claim is not None:
            assert not claim.run_inline(10**12)
        return request

    def close(self) -> None:
        for model in reversed(list(self.models.values())):
            assert model.close(WAIT_S)


@pytest.fixture
def house() -> Iterator[House]:
    house = House()
    yield house
    house.close()


def chain(*models: str) -> list[tuple[str, str, str]]:
    names = ["IN", *(f"t{number}" for number in range(len(models) - 1)), "OUT"]
    return [(model, names[number], names[number + 1]) for number, model in enumerate(models)]


def values(answers: Answers, request: InferenceRequest) -> list[float]:
    response = answers.response(request)
    assert response.error is None, response.error
    (output,) = response.outputs
    assert output.name == "OUT"
    result: list[float] = output.numpy().ravel().tolist()
    return result


def error_of(answers: Answers, request: InferenceRequest) -> Exception:
    error = answers.response(request).error
    assert error is not None
    return error


def test_a_thousand_steps_that_answer_at_once_need_no_stack(house: House) -> None:
    house.direct("m")
    house.ensemble(chain(*["m"] * 1000))
    answers = Answers()
    request = house.send(answers, value=2.0)
    assert values(answers, request) == [1002.0] * 16


def test_the_claiming_thread_runs_all_short_steps(house: House) -> None:
    seen: list[threading.Thread] = []

    def execute(batch: Batch) -> list[InferenceResponse | None]:
        seen.append(threading.current_thread())
        return echo(batch)

    names = ["a", "b", "c"]
    for name in names:
        house.fast(name, execute)
    house.ensemble(chain(*names))
    del seen[:]
    answers = Answers()
    request = house.send(answers, may_claim=True, value=3.0)
    assert values(answers, request) == [3.0] * 16
    assert seen == [threading.current_thread()] * 3


def test_what_was_claimed_is_handed_over_when_the_turn_is_lost(house: House) -> None:
    """Like the pollers' tick, in the middle of the first step."""
    claim: list[InlineClaim] = []
    seen: list[threading.Thread] = []

    def first(batch: Batch) -> list[InferenceResponse | None]:
        for lead in claim:
            lead.release()
        return echo(batch)

    def second(batch: Batch) -> list[InferenceResponse | None]:
        seen.append(threading.current_thread())
        return echo(batch)

    house.fast("a", first)
    house.fast("b", second)
    house.ensemble(chain("a", "b"))
    answers = Answers()
    request = make_request(answers, name="e")
    lead = house.admission.admit(request, True)
    assert lead is not None
    assert lead.fast
    claim.append(lead)
    lead.run_inline(10**12)
    assert answers.wait(1)
    assert seen[1] is not threading.current_thread()


def test_a_claim_out_of_time_goes_on_later(house: House) -> None:
    for name in ("a", "b"):
        house.fast(name)
    house.ensemble(chain("a", "b"))
    answers = Answers()
    request = make_request(answers, name="e")
    lead = house.admission.admit(request, True)
    assert lead is not None
    assert lead.run_inline(1), "the first step has used the time up"
    assert not answers.calls
    assert not lead.run_inline(10**12)
    assert answers.finals == 1


def test_a_claim_without_a_limit_is_for_the_first_step_only(house: House) -> None:
    seen: list[threading.Thread] = []

    def execute(batch: Batch) -> list[InferenceResponse | None]:
        seen.append(threading.current_thread())
        return echo(batch)

    house.model("a", execute)
    house.model("b", execute)
    house.ensemble(chain("a", "b"))
    answers = Answers()
    lead = house.admission.admit(make_request(answers, name="e"), True)
    assert lead is not None
    assert not lead.run_inline(None)
    assert answers.wait(1)
    assert seen[0] is threading.current_thread()
    assert seen[1] is not threading.current_thread()


def test_running_inline_without_a_limit_loses_no_other_claim(house: House) -> None:
    """Two steps have claimed themselves to a thread whose time was up, and which is now to lead one."""
    now = 0

    def pass_time(batch: Batch) -> list[InferenceResponse | None]:
        nonlocal now
        now += 100
        return echo(batch)

    for name in ("a", "b", "c"):
        house.fast(name, pass_time)
    steps = [
        ModelStep(0, "a", "", (("IN", "IN"),), (("OUT", "t"),), False),
        ModelStep(1, "b", "", (("IN", "t"),), (("OUT", "OUT"),), False),
        ModelStep(2, "c", "", (("IN", "t"),), (("OUT", "MORE"),), False),
    ]
    spec = make_spec(name="e", outputs=(TensorSpec("OUT", "FP32", (16,)), TensorSpec("MORE", "FP32", (16,))))
    plan = EnsemblePlan("e", ["IN"], ["OUT", "MORE"], steps)
    house.put(EnsembleModel(spec, plan, house.registry, lambda: now))
    answers = Answers()
    lead = house.admission.admit(make_request(answers, name="e"), True)
    assert lead is not None
    assert lead.run_inline(50), "the first step has used the time up"
    assert not lead.run_inline(None)
    assert answers.wait(1, 5)
    assert not lead.run_inline(None)


def test_releasing_before_running(house: House) -> None:
    house.model("a")
    house.ensemble(chain("a", "a"))
    answers = Answers()
    lead = house.admission.admit(make_request(answers, name="e"), True)
    assert lead is not None
    lead.release()
    assert answers.wait(1)
    assert not lead.run_inline(10**9)


def test_many_requests_from_many_threads(house: House) -> None:
    batching = DynamicBatching((4,), 1_000_000)
    for name in ("a", "b"):
        house.model(name, allows_inline=name == "a", max_batch_size=4, batching=batching, instances=2)
    house.ensemble(chain("a", "b", "a"), max_batch_size=4)
    house.ensemble(chain("b", "e"), name="outer", max_batch_size=4)
    answers = Answers()
    requests: list[tuple[InferenceRequest, float]] = []

    def send(number: int) -> None:
        for count in range(40):
            value = float(100 * number + count)
            request = make_request(answers, 1 + count % 3, value, name="outer" if count % 2 else "e")
            requests.append((request, value))
            lead = house.admission.admit(request, count % 4 == 0)
            if lead is not None:
                while lead.run_inline(1_000_000):
                    pass

    threads = [threading.Thread(target=send, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers.wait(160)
    for request, value in requests:
        assert set(values(answers, request)) == {value}
        assert answers.finals_of(request) == 1
    assert house.models["outer"].statistics.snapshot().success.count == 80
    assert house.models["e"].statistics.snapshot().success.count == 160


def test_cancelling_at_any_moment(house: House) -> None:
    """Other threads cancel while steps are submitted, run and answered: one answer each, nothing left."""
    for name in ("a", "b"):
        house.model(name, max_batch_size=4, batching=DynamicBatching((4,), 0), instances=2)
    ensemble = house.ensemble(chain("a", "b", "a", "b"), max_batch_size=4)
    answers = Answers()
    sent: queue.SimpleQueue[InferenceRequest | None] = queue.SimpleQueue()

    def send() -> None:
        for number in range(150):
            request = make_request(answers, 1, float(number), name="e")
            sent.put(request)
            lead = house.admission.admit(request, number % 3 == 0)
            if lead is not None and (number % 2 or lead.run_inline(1_000_000)):
                lead.release()
        sent.put(None)

    def cancel() -> None:
        while (request := sent.get()) is not None:
            house.admission.cancel(request)

    threads = [threading.Thread(target=target) for target in (send, send, cancel, cancel)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers.wait(300)
    assert ensemble.close(WAIT_S)
    assert answers.finals == len(answers.calls) == 300
    for request, response, _ in answers.calls:
        assert response is not None
        if response.error is None:
            assert values(answers, request)[0] == request.inputs["IN"].numpy()[0, 0]
        else:
            assert isinstance(response.error, CancelledError)
    snapshot = ensemble.statistics.snapshot()
    assert snapshot.success.count + snapshot.fail.count == 300


def test_tensors_are_passed_on_without_a_copy_and_can_not_be_written_to(house: House) -> None:
    made = np.arange(16, dtype=np.float32)
    taken: list[Any] = []

    def give(request: InferenceRequest) -> None:
        request.respond(InferenceResponse([Tensor.from_array("OUT", made)]))

    def take(request: InferenceRequest) -> None:
        taken.append(request.inputs["IN"].numpy())
        add_one(request)

    house.direct("a", give)
    house.direct("b", take)
    house.ensemble(chain("a", "b"))
    house.send(Answers())
    assert np.shares_memory(taken[0], made)
    with pytest.raises(ValueError, match="read-only"):
        taken[0][0] = 1
    made[0] = 1  # whose it is may


def test_steps_inherit_what_the_request_says(house: House) -> None:
    model = house.direct("m")
    house.ensemble(chain("m", "m"))
    request = make_request(
        name="e",
        id="x",
        priority=2,
        timeout_us=5,
        correlation_id=7,
        sequence_start=True,
        deadline_ns=10**18 * 9,
        parameters={"a": 1},
    )
    house.admission.admit(request)
    for child in model.requests:
        assert (child.id, child.priority, child.timeout_us, child.deadline_ns) == ("x", 2, 5, 10**18 * 9)
        assert (child.correlation_id, child.sequence_start, child.sequence_end) == (7, True, False)
        assert child.parameters == {"a": 1}
        assert child.requested is None, "all there is"


def test_answers_say_what_sequence_they_belong_to(house: House) -> None:
    def answer(request: InferenceRequest) -> None:
        outputs = [Tensor.from_array("OUT", request.inputs["IN"].numpy())]
        request.respond(InferenceResponse(outputs, None, {"sequence_id": -1, "other": "x"}))

    house.direct("m", answer)
    house.ensemble(chain("m"))
    answers = Answers()
    request = house.send(answers)
    assert answers.response(request).parameters == {
        "sequence_id": -1,
        "sequence_start": False,
        "sequence_end": False,
    }


def refuse(request: InferenceRequest) -> None:
    raise ResourceExhaustedError("no room")


def fail(request: InferenceRequest) -> None:
    request.fail(UnavailableError("no"))


def test_a_full_step_says_when_to_come_back(house: House) -> None:
    def refuse_for_now(request: InferenceRequest) -> None:
        error = ResourceExhaustedError("no room")
        error.retry_after_ms = 70
        raise error

    house.direct("m", refuse_for_now)
    house.ensemble(chain("m"))
    house.ensemble(chain("e"), name="outer")
    answers = Answers()
    error = error_of(answers, house.send(answers, "outer"))
    assert str(error) == "in ensemble 'outer', in ensemble 'e', no room"
    assert isinstance(error, ResourceExhaustedError)
    assert error.retry_after_ms == 70


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (refuse, ResourceExhaustedError, "in ensemble 'e', no room"),
        (fail, UnavailableError, "in ensemble 'e', no"),
        (lambda request: 1 / 0, InternalError, "in ensemble 'e', the request could not be handled"),
    ],
)
def test_a_step_that_fails_fails_the_request_at_once(
    house: House, answer: Any, kind: type[Exception], message: str
) -> None:
    waiting = house.direct("waiting", keep)
    house.direct("m", answer)
    house.direct("after")
    steps = [
        ModelStep(0, "waiting", "", (("IN", "IN"),), (("OUT", "a"),), False),
        ModelStep(1, "m", "", (("IN", "IN"),), (("OUT", "b"),), False),
        ModelStep(2, "after", "", (("IN", "a"), ("X", "b")), (("OUT", "OUT"),), False),
    ]
    ensemble = house.put(
        EnsembleModel(make_spec(name="e"), EnsemblePlan("e", ["IN"], ["OUT"], steps), house.registry)
    )
    answers = Answers()
    request = house.send(answers)
    error = error_of(answers, request)
    assert isinstance(error, kind)
    assert str(error) == message
    assert waiting.cancelled == waiting.requests, "nobody waits for it any more"
    assert not ensemble.close(0), "but it runs"
    waiting.requests[0].respond(InferenceResponse([]))
    assert answers.finals == 1
    assert ensemble.statistics.snapshot().fail.count == 1


def test_a_failed_step_leaves_others_of_a_sequence_alone(house: House) -> None:
    waiting = house.direct("waiting", keep)
    house.direct("m", fail)
    steps = [
        ModelStep(0, "waiting", "", (("IN", "IN"),), (("OUT", "a"),), False),
        ModelStep(1, "m", "", (("IN", "IN"),), (("OUT", "OUT"),), False),
    ]
    house.put(
        EnsembleModel(make_spec(name="e"), EnsemblePlan("e", ["IN"], ["OUT", "a"], steps), house.registry)
    )
    answers = Answers()
    request = house.send(answers, correlation_id=4)
    assert isinstance(error_of(answers, request), UnavailableError)
    assert not waiting.cancelled
    waiting.requests[0].respond(InferenceResponse([]))


def test_a_sequence_goes_on_in_the_version_that_has_begun_it(house: House) -> None:
    """As after a reload of the model: its successor has another rank, so tensors must fit the old one."""
    settings = SequenceBatching(max_idle_ns=10**12, strategy="OLDEST", max_candidates=4)
    old = house.model("s", max_batch_size=8, sequence=settings)
    house.ensemble(chain("s"), max_batch_size=8)
    answers = Answers()

    def send(sequence: int, **more: Any) -> list[float]:
        request = make_request(answers, 1, float(sequence), name="e", correlation_id=sequence, **more)
        house.admission.admit(request)
        assert answers.wait(len(answers.calls) + (not answers.finals_of(request)))
        return values(answers, request)

    assert send(7, sequence_start=True) == [7.0] * 16
    house.registry.begin_draining("s", old)
    new = house.model("s", max_batch_size=0, sequence=settings)
    assert not old.close(0)
    closing = threading.Thread(target=old.close)
    closing.start()
    assert send(8, sequence_start=True, sequence_end=True) == [8.0] * 16
    assert send(7, sequence_end=True) == [7.0] * 16
    closing.join(WAIT_S)
    assert not closing.is_alive(), "the sequence has ended there"
    house.registry.end_draining("s", old)
    assert [model.statistics.snapshot().success.count for model in (old, new)] == [2, 1]


def test_a_model_that_is_gone_and_one_that_has_changed(house: House) -> None:
    house.direct("m")
    house.ensemble(chain("m"))
    house.direct("m", decoupled=True)
    answers = Answers()
    request = house.send(answers)
    assert str(error_of(answers, request)) == (
        "in ensemble 'e', model 'm' has become decoupled since the ensemble was loaded; load ensemble 'e' "
        "again"
    )
    house.registry.remove("m")
    request = house.send(answers)
    error = error_of(answers, request)
    assert isinstance(error, NotFoundError)
    assert str(error) == "in ensemble 'e', Request for unknown model: 'm' is not found"


def test_cancelling(house: House) -> None:
    model = house.direct("m", keep)
    ensemble = house.ensemble(chain("m", "m"))
    answers = Answers()
    request = house.send(answers)
    house.admission.cancel(request)
    assert isinstance(error_of(answers, request), CancelledError)
    assert request.cancelled
    assert model.cancelled == model.requests
    assert not ensemble.close(0)
    model.requests[0].respond(InferenceResponse([Tensor.from_array("OUT", np.zeros(16, np.float32))]))
    assert len(model.requests) == 1, "no further step"
    snapshot = ensemble.statistics.snapshot()
    assert (snapshot.fail.count, snapshot.cancelled[RUNNING]) == (1, 1)
    house.admission.cancel(request)
    assert answers.finals == 1


def test_cancelling_takes_a_step_out_of_its_queue(house: House) -> None:
    running, go_on = threading.Event(), threading.Event()

    def execute(batch: Batch) -> list[InferenceResponse | None]:
        running.set()
        assert go_on.wait(WAIT_S)
        return echo(batch)

    model = house.model("m", execute)
    ensemble = house.ensemble(chain("m", "m"))
    answers = Answers()
    house.send(answers)
    assert running.wait(WAIT_S)
    request = house.send(answers)
    assert model.pending == 1
    assert ensemble.pending == 0
    house.admission.cancel(request)
    assert model.pending == 0
    assert isinstance(error_of(answers, request), CancelledError)
    go_on.set()
    assert answers.wait(2)


def test_time_is_up_between_steps(house: House) -> None:
    now = 0

    def answer(request: InferenceRequest) -> None:
        nonlocal now
        now = 100
        add_one(request)

    model = house.direct("m", answer)
    house.ensemble(chain("m", "m"), clock=lambda: now)
    answers = Answers()
    request = house.send(answers, deadline_ns=50)
    error = error_of(answers, request)
    assert isinstance(error, DeadlineExceededError)
    assert str(error) == "Deadline Exceeded"
    assert len(model.requests) == 1


def test_closing_waits_for_requests_and_refuses_new_ones(house: House) -> None:
    model = house.direct("m", keep)
    ensemble = house.ensemble(chain("m"))
    answers = Answers()
    request = house.send(answers)
    assert not ensemble.close(0)
    closed: list[bool] = []
    thread = threading.Thread(target=lambda: closed.append(ensemble.close()))
    thread.start()
    with pytest.raises(ClosedError):
        ensemble.submit(make_request(name="e"))
    assert not closed
    add_one(model.requests[0])
    thread.join()
    assert closed == [True]
    assert values(answers, request) == [1.0] * 16


def test_giving_up_answers_everything(house: House) -> None:
    model = house.direct("m", keep)
    ensemble = house.ensemble(chain("m"))
    answers = Answers()
    request = house.send(answers)
    assert ensemble.fail_queued(UnavailableError("Server exiting")) == 1
    assert str(error_of(answers, request)) == "Server exiting"
    assert ensemble.fail_queued(UnavailableError("Server exiting")) == 0
    fail(model.requests[0])


def test_a_request_that_does_not_fit_is_refused(house: House) -> None:
    house.direct("m")
    ensemble = house.ensemble(chain("m"))
    with pytest.raises(InvalidArgumentError, match="unexpected inference output 'NO' for model 'e'"):
        ensemble.submit(make_request(name="e", requested=("NO",)))


def say_twice(request: InferenceRequest) -> None:
    for number in range(2):
        output = Tensor.from_array("OUT", request.inputs["IN"].numpy() + number)
        request.respond(InferenceResponse([output]), final=bool(number))


def test_requests_share_the_limit_of_responses_in_flight(house: House) -> None:
    house.direct("p", say_twice, decoupled=True)
    consumer = house.direct("c", keep)
    house.ensemble(chain("p", "c"), max_inflight=2)
    answers = Answers()
    requests = [house.send(answers, value=float(number)) for number in range(4)]
    house.admission.cancel(requests[1])  # its responses leave the line
    for done in range(6):
        assert len(consumer.requests) == min(done + 2, 6)
        add_one(consumer.requests[done])
    assert answers.wait(4)
    assert [answers.finals_of(request) for request in requests] == [1] * 4
    seen = [each.inputs["IN"].numpy().ravel()[0] for each in consumer.requests]
    assert seen == [0, 1, 2, 3, 3, 4]


def test_places_that_requests_pass_to_each_other_need_no_stack(house: House) -> None:
    house.direct("p", say_twice, decoupled=True)
    answering = False
    consumer = house.direct("c", lambda request: add_one(request) if answering else None)
    house.ensemble(chain("p", "c"), max_inflight=1)
    answers = Answers()
    for _ in range(1000):
        house.send(answers)
    answering = True
    add_one(consumer.requests[0])
    assert answers.finals == 1000
    assert len(consumer.requests) == 2000


def test_decoupled_steps_answer_through_the_ensemble(house: House) -> None:
    producer = house.direct("p", keep, decoupled=True)
    house.direct("m")
    ensemble = house.ensemble(chain("p", "m"))
    answers = Answers()
    house.send(answers)
    (child,) = producer.requests
    for value in (1, 2):
        child.respond(InferenceResponse([Tensor.from_array("OUT", np.full(16, value, np.float32))]), False)
    child.respond(None, True)
    got = [
        (None if response is None else response.outputs[0].numpy()[0], final)
        for _, response, final in answers.calls
    ]
    assert got == [(2.0, False), (3.0, False), (None, True)]
    snapshot = ensemble.statistics.snapshot()
    assert (snapshot.success.count, snapshot.execution_count) == (1, 1)


@pytest.mark.parametrize(
    ("outer", "inner", "shape", "seen", "answered"),
    [
        (8, 0, (1, 16), (16,), (1, 16)),  # a batch of one loses its dimension, and gets it back
        (0, 8, (16,), (1, 16), (16,)),
        (8, 8, (3, 16), (3, 16), (3, 16)),
        (0, 0, (16,), (16,), (16,)),
    ],
)
def test_batch_dimensions_come_and_go(
    house: House,
    outer: int,
    inner: int,
    shape: tuple[int, ...],
    seen: tuple[int, ...],
    answered: tuple[int, ...],
) -> None:
    model = house.direct("m", max_batch_size=inner)
    house.ensemble(chain("m"), max_batch_size=outer)
    answers = Answers()
    inputs: Mapping[str, Tensor] = {"IN": Tensor.from_array("IN", np.zeros(shape, np.float32))}
    request = house.send(answers, inputs=dict(inputs))
    assert model.requests[0].inputs["IN"].shape == seen
    assert answers.response(request).outputs[0].shape == answered


def test_reshape_and_classification_are_the_ensembles_own(house: House) -> None:
    house.direct("m")
    house.ensemble(
        chain("m"),
        inputs=(TensorSpec("IN", "FP32", (4, 4), (16,)),),
        outputs=(TensorSpec("OUT", "FP32", (4, 4), (16,), labels=("zero", "one")),),
    )
    answers = Answers()
    array = np.arange(16, dtype=np.float32)[::-1].reshape(4, 4)
    inputs = {"IN": Tensor.from_array("IN", np.ascontiguousarray(array))}
    request = house.send(answers, inputs=dict(inputs))
    assert answers.response(request).outputs[0].shape == (4, 4)
    request = house.send(answers, inputs=dict(inputs), requested=("OUT",), classes={"OUT": 2})
    (output,) = answers.response(request).outputs
    assert output.numpy().tolist() == [b"16.000000:0:zero", b"15.000000:1:one"]


def test_statistics_show_what_runs_and_whose_client_has_gone(house: House) -> None:
    model = house.direct("m", keep)
    ensemble = house.ensemble(chain("m"))
    answers = Answers()
    first, second, third = (house.send(answers) for _ in range(3))
    snapshot = ensemble.statistics.snapshot()
    assert (snapshot.running, snapshot.pending) == (3, 0)
    house.admission.cancel(first)
    add_one(model.requests[0])
    model.requests[1].fail(CancelledError("its own idea"))
    assert isinstance(error_of(answers, second), CancelledError)
    snapshot = ensemble.statistics.snapshot()
    assert (snapshot.running, snapshot.fail.count) == (1, 2)
    assert snapshot.cancelled == {QUEUED: 0, RUNNING: 1}, "only one has a client that is gone"
    add_one(model.requests[2])
    assert values(answers, third) == [1.0] * 16
    assert ensemble.statistics.snapshot().running == 0


def test_statistics_count_the_way_through(house: House) -> None:
    house.direct("m", max_batch_size=8)
    ensemble = house.ensemble(chain("m", "m"), max_batch_size=8)
    house.send(Answers(), rows=3)
    snapshot = ensemble.statistics.snapshot()
    assert (snapshot.inference_count, snapshot.execution_count) == (3, 1)
    assert list(snapshot.batches) == [3]
    assert snapshot.queue.ns == 0
    assert snapshot.compute_infer.ns > 0


@pytest.mark.parametrize("may_claim", [False, True])
def test_steps_whose_instances_begin_need_no_threads(house: House, may_claim: bool) -> None:
    """The thread that finishes a step begins the next one."""
    kept = Kept()
    for name in "abc":
        house.put(make_beginning(make_spec(name=name), kept)[0])
    house.ensemble([("a", "IN", "x"), ("b", "x", "y"), ("c", "y", "OUT")])
    answers, before = Answers(), set(threading.enumerate())
    house.send(answers, may_claim=may_claim, value=3.0)
    for _ in range(3):
        assert (len(kept.batches), answers.finals) == (1, 0)
        kept.finish()
    (_, response, _) = answers.calls[0]
    assert response is not None
    assert response.outputs[0].numpy().max() == 3.0
    assert answers.finals == 1
    assert set(threading.enumerate()) <= before
