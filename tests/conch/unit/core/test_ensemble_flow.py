"""The flow of a request through random ensembles, against a plain evaluation of the same steps."""

from __future__ import annotations

import weakref
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.profiles import scaled

from conch.core.ensembles.flow import Correlation, EnsembleAnswer, Flow, Run
from conch.core.ensembles.plan import EnsemblePlan, ModelStep, Selection
from conch.core.ensembles.step_places import Places
from conch.core.errors import CancelledError, InvalidArgumentError, UnavailableError
from conch.core.request import Parameter
from conch.core.tensor import Tensor

Values = dict[str, str]
Call = tuple[int, tuple[tuple[str, str], ...]]
NO_SEQUENCE = Correlation()


def tensor(value: str, name: str = "") -> Tensor:
    return Tensor(name, "BYTES", (1,), value.encode())


def text(value: Tensor) -> str:
    return bytes(value.data).decode()


def chance(*of: object) -> int:
    """A number that looks random, but is always the same for the same things."""
    return zlib.crc32(repr(of).encode())


def answers_of(step: ModelStep, inputs: Values, wanted: tuple[tuple[str, str], ...]) -> list[Values]:
    """Answers of a step's model to some inputs: any number if decoupled, some outputs left out."""
    known = sorted(inputs.items())
    count = chance(step.number, known) % 4 if step.decoupled else 1
    return [
        {
            output: f"{output}({','.join(f'{name}={value}' for name, value in known)})#{number}"
            for output, _ in wanted
            if chance(step.number, known, number, output) % 8
        }
        for number in range(count)
    ]


@dataclass
class Expected:
    """Calls and answers of a plain evaluation."""

    calls: Counter[Call] = field(default_factory=Counter)
    answers: Counter[tuple[tuple[str, str], ...]] = field(default_factory=Counter)


def evaluate(plan: EnsemblePlan, selection: Selection, inputs: Values) -> Expected:
    """Runs each step in each set of tensors that has what it needs, one after the other."""
    expected = Expected()
    needed = [step for step in plan.steps if step.number in selection.awaited]

    def go_on(known: Mapping[str, str | None], done: frozenset[int]) -> None:
        for step in needed:
            if step.number in done or not all(name in known for _, name in step.inputs):
                continue
            given = {end: value for end, name in step.inputs if (value := known[name]) is not None}
            expected.calls[step.number, tuple(sorted(given.items()))] += 1
            wanted = selection.wanted[step.number]
            answers = answers_of(step, given, wanted)
            if not step.decoupled:
                made = {name: answers[0].get(output) for output, name in wanted}
                go_on({**known, **made}, done | {step.number})
                return
            done |= {step.number}
            for answer in answers:
                # Only what it made: the tensors of other scopes do not meet these.
                go_on({name: answer.get(output) for output, name in wanted}, frozenset())
        if all(name in known for name in selection.outputs):
            values = ((name, known[name]) for name in selection.outputs)
            expected.answers[tuple((name, value) for name, value in values if value is not None)] += 1

    go_on({name: inputs.get(name) for name in plan.inputs}, frozenset())
    return expected


@st.composite
def plans(draw: st.DrawFn) -> EnsemblePlan:
    """Ensembles of up to six steps, each with inputs of one scope."""
    inputs = [f"in{number}" for number in range(draw(st.integers(1, 2)))]
    scopes: dict[int, list[str]] = {0: list(inputs)}
    steps = []
    for number in range(draw(st.integers(1, 6))):
        scope = draw(st.sampled_from(sorted(scopes)))
        sources = draw(st.lists(st.sampled_from(scopes[scope]), min_size=1, max_size=3))
        made = [f"t{number}_{output}" for output in range(draw(st.integers(1, 2)))]
        decoupled = draw(st.integers(0, 2)) == 0
        steps.append(
            ModelStep(
                number,
                f"m{number}",
                "",
                tuple((f"I{place}", source) for place, source in enumerate(sources)),
                tuple((f"O{place}", name) for place, name in enumerate(made)),
                decoupled,
            )
        )
        scopes.setdefault(number + 1 if decoupled else scope, []).extend(made)
    last = draw(st.sampled_from(sorted(scopes)))
    outputs = draw(st.lists(st.sampled_from(scopes[last]), min_size=1, max_size=3, unique=True))
    return EnsemblePlan("e", inputs, outputs, steps, draw(st.sampled_from([0, 0, 1, 2])))


class Driver:
    """Answers a flow's runs in any order, and keeps what it says."""

    def __init__(
        self, plan: EnsemblePlan, requested: tuple[str, ...] | None = None, places: Places | None = None
    ) -> None:
        self.plan = plan
        self.places = places or Places(plan.max_inflight)
        self.flow = Flow(plan, requested, NO_SEQUENCE, self.places, self)
        self.open: list[tuple[Run, Iterator[tuple[Values | None, bool]]]] = []
        self.runs: list[Run] = []
        self.answers: list[EnsembleAnswer] = []

    def take(self, together: bool = True) -> None:
        """Takes what is to be done, and checks what always holds."""
        runs, answers = self.flow.take()
        self.runs += runs
        self.answers += answers
        for run in runs:
            inputs = {name: text(value) for name, value in run.inputs.items()}
            made = answers_of(run.step, inputs, run.wanted)
            self.open.append((run, says(made, together)))
        finals = [answer.final for answer in self.answers]
        assert sum(finals) <= 1
        assert not any(finals[:-1]), "something after the last answer"
        assert self.flow.over is (True in finals)
        limit = self.plan.max_inflight
        assert not limit or all(count <= limit for count in self.flow.in_flight.values())

    def advance(self, place: int, together: bool = True) -> None:
        """Has one of the open runs say what it says next."""
        run, said = self.open[place]
        outputs, final = next(said)
        if final:
            del self.open[place]
        made = None if outputs is None else [tensor(value, name) for name, value in outputs.items()]
        self.flow.respond(run, made, None, final)
        self.take(together)
        self.places.wake()

    def open_next(self, step: int) -> None:
        self.flow.open_next(step)
        self.take()

    def check_nothing_left(self) -> None:
        assert not self.open
        assert self.flow.drained
        assert not self.flow.held_count


def says(made: list[Values], together: bool) -> Iterator[tuple[Values | None, bool]]:
    """Answers with the final flag on the last one, or by itself."""
    for number, values in enumerate(made):
        yield values, together and number == len(made) - 1
    if not (together and made):
        yield None, True


@settings(max_examples=scaled(400), deadline=None)
@given(plans(), st.data())
def test_what_comes_out_is_what_the_steps_make(plan: EnsemblePlan, data: st.DataObject) -> None:
    check_what_comes_out(plan, data)


@pytest.mark.slow
@settings(max_examples=scaled(1000), deadline=None)
@given(plans(), st.data())
def test_what_comes_out_of_very_many(plan: EnsemblePlan, data: st.DataObject) -> None:
    check_what_comes_out(plan, data)


def check_what_comes_out(plan: EnsemblePlan, data: st.DataObject) -> None:
    """Runs a request to its end, and compares everything with what a plain evaluation says."""
    requested = data.draw(
        st.none() | st.lists(st.sampled_from(plan.outputs), min_size=1, max_size=3).map(tuple)
    )
    inputs = {name: name for name in plan.inputs if data.draw(st.integers(0, 4))}
    expected = evaluate(plan, plan.select(requested), inputs)
    driver = Driver(plan, requested)
    driver.flow.start({name: tensor(value) for name, value in inputs.items()})
    driver.take(data.draw(st.booleans()))
    while driver.open:
        driver.advance(data.draw(st.integers(0, len(driver.open) - 1)), data.draw(st.booleans()))
    driver.check_nothing_left()

    calls = Counter(
        (run.step.number, tuple(sorted((name, text(value)) for name, value in run.inputs.items())))
        for run in driver.runs
    )
    assert calls == expected.calls
    assert not any(answer.error for answer in driver.answers)
    got = Counter(
        tuple((name, text(value)) for name, value in answer.outputs.items())
        for answer in driver.answers
        if answer.outputs is not None
    )
    assert got == expected.answers
    if not plan.decoupled:
        assert len(driver.answers) == 1


@settings(max_examples=scaled(200), deadline=None)
@given(plans(), st.data())
def test_requests_share_the_limit_of_answers_under_way(plan: EnsemblePlan, data: st.DataObject) -> None:
    """Some are cancelled; the others make what they make alone."""
    places = Places(plan.max_inflight)
    drivers = [Driver(plan, None, places) for _ in range(3)]
    for driver in drivers:
        driver.flow.start({name: tensor(name) for name in plan.inputs})
        driver.take()
    expected = evaluate(plan, plan.select(None), {name: name for name in plan.inputs})
    cancelled: set[int] = set()
    while busy := [number for number, driver in enumerate(drivers) if driver.open]:
        number = data.draw(st.sampled_from(busy))
        driver = drivers[number]
        if not driver.flow.over and data.draw(st.integers(0, 7)) == 0:
            cancelled.add(number)
            driver.flow.fail(CancelledError(""))
            driver.take()
            places.wake()
        else:
            driver.advance(data.draw(st.integers(0, len(driver.open) - 1)))
        total: Counter[int] = Counter()
        for driver in drivers:
            total.update(driver.flow.in_flight)
        assert not plan.max_inflight or all(count <= plan.max_inflight for count in total.values())
    for number, driver in enumerate(drivers):
        driver.check_nothing_left()
        made = sum(answer.outputs is not None for answer in driver.answers)
        assert number in cancelled or made == expected.answers.total()


def test_a_request_that_fails_in_its_place_stops_no_other() -> None:
    places, opened = Places(1), list[int]()

    class Request:
        def __init__(self, fails: bool = False) -> None:
            self.fails = fails

        def open_next(self, step: int) -> None:
            assert not self.fails
            opened.append(step)

    first, bad, good = Request(), Request(fails=True), Request()
    assert places.take(1, first) and places.take(2, first)
    assert not (places.take(1, bad) or places.take(2, good))
    places.free(1, first)
    places.free(2, first)
    places.wake()
    assert opened == [2]


@settings(max_examples=scaled(300), deadline=None)
@given(plans(), st.data())
def test_errors_end_it_once_and_runs_are_drained(plan: EnsemblePlan, data: st.DataObject) -> None:
    driver = Driver(plan)
    driver.flow.start({name: tensor(name) for name in plan.inputs})
    driver.take()
    failed: list[Exception] = []
    while driver.open:
        place = data.draw(st.integers(0, len(driver.open) - 1))
        match data.draw(st.integers(0, 7)):
            case 0:
                # A step's error, possibly before its last answer.
                error = UnavailableError(f"error {len(failed)}")
                if data.draw(st.booleans()):
                    driver.flow.drop(driver.open.pop(place)[0])
                begun = len(driver.runs)
                over = driver.flow.over
                driver.flow.fail(error)
                driver.take()
                assert len(driver.runs) == begun
                failed += [] if over else [error]
            case 1:
                over = driver.flow.over
                driver.flow.fail(CancelledError(""))
                driver.take()
                failed += [] if over else [driver.answers[-1].error or ValueError("no error")]
            case _:
                over, begun = driver.flow.over, len(driver.runs)
                driver.advance(place)
                assert not over or len(driver.runs) == begun, "a step begun after the last answer"
    driver.check_nothing_left()
    assert [answer.error for answer in driver.answers if answer.error is not None] == failed
    assert len(failed) <= 1
    assert driver.answers[-1].final


def chain(*decoupled: bool, max_inflight: int = 0) -> EnsemblePlan:
    """Steps one after the other: X, t0, t1, ..."""
    names = ["X", *(f"t{number}" for number in range(len(decoupled)))]
    steps = [
        ModelStep(number, f"m{number}", "", (("I", names[number]),), (("O", names[number + 1]),), flag)
        for number, flag in enumerate(decoupled)
    ]
    return EnsemblePlan("e", ["X"], [names[-1]], steps, max_inflight)


class NoWaiter:
    """The only request of its ensemble, which never waits for another."""

    def open_next(self, step: int) -> None:
        raise AssertionError(step)


def start(
    plan: EnsemblePlan, requested: tuple[str, ...] | None = None
) -> tuple[Flow, list[Run], list[EnsembleAnswer]]:
    flow = Flow(plan, requested, Correlation(3, True, False), Places(plan.max_inflight), NoWaiter())
    flow.start({name: tensor(name) for name in plan.inputs})
    return flow, *flow.take()


def respond(
    flow: Flow,
    run: Run,
    value: str | None,
    final: bool = True,
    parameters: Mapping[str, Parameter] | None = None,
) -> tuple[list[Run], list[EnsembleAnswer]]:
    outputs = None if value is None else [tensor(value, run.step.outputs[0][0])]
    flow.respond(run, outputs, parameters, final)
    return flow.take()


def test_only_what_is_asked_for_is_run() -> None:
    steps = [
        ModelStep(0, "a", "", (("I", "X"),), (("O", "A"), ("P", "P")), False),
        ModelStep(1, "b", "", (("I", "A"),), (("O", "B"),), False),
        ModelStep(2, "c", "", (("I", "P"),), (("O", "C"),), False),
        ModelStep(3, "d", "", (("I", "X"),), (("O", "D"),), False),
    ]
    plan = EnsemblePlan("e", ["X"], ["B", "C", "D"], steps)
    flow, runs, _ = start(plan, ("C",))
    assert [(run.step.number, run.wanted) for run in runs] == [(0, (("P", "P"),))]
    flow.respond(runs[0], [tensor("p", "P"), tensor("a", "O")], None, True)
    runs, _ = flow.take()
    assert [run.step.number for run in runs] == [2]
    _, (answer,) = respond(flow, runs[0], "c")
    assert answer.final
    assert {name: text(value) for name, value in (answer.outputs or {}).items()} == {"C": "c"}


def test_tensors_are_let_go_when_their_last_consumer_has_ended() -> None:
    flow, (first,), _ = start(chain(False, False, False))
    array = np.zeros(3, np.float32)
    made = Tensor.from_array("O", array)
    gone = weakref.ref(array)
    flow.respond(first, [made], None, True)
    (second,), _ = flow.take()
    assert second.inputs["I"] is made, "the tensor itself, not a copy"
    del array, made, first
    assert gone() is not None
    (third,), _ = respond(flow, second, "b")
    del second
    assert gone() is None, "kept although the step that needed it has ended"
    respond(flow, third, "c")
    assert flow.drained


def test_answers_wait_while_enough_are_under_way() -> None:
    flow, (producer,), _ = start(chain(True, False, max_inflight=2))
    runs = [run for value in "abcd" for run in respond(flow, producer, value, False)[0]]
    assert [text(run.inputs["I"]) for run in runs] == ["a", "b"]
    (third,), (first_answer,) = respond(flow, runs[1], "B")
    assert text(third.inputs["I"]) == "c"
    assert not first_answer.final
    assert respond(flow, producer, None) == ([], [])
    (fourth,), _ = respond(flow, third, "C")
    _, (second_answer,) = respond(flow, fourth, "D")
    assert not second_answer.final, "the first run is still going on"
    _, (last,) = respond(flow, runs[0], "A")
    assert last.final
    assert flow.drained


def test_a_step_that_never_answers_is_a_deadlock() -> None:
    flow, (run,), _ = start(chain(False))
    _, (answer,) = respond(flow, run, None)
    assert isinstance(answer.error, InvalidArgumentError)
    assert answer.error.message == (
        "unexpected deadlock, at least one output is not set while no more ensemble steps can be made"
    )
    assert flow.drained


def test_response_parameters_say_which_sequence_the_next_steps_belong_to() -> None:
    flow, (first,), _ = start(chain(False, False, False))
    assert first.correlation == (3, True, False)
    (second,), _ = respond(flow, first, "a", True, {"sequence_id": -1, "sequence_end": True, "other": "x"})
    assert second.correlation == (2**64 - 1, True, True)
    (third,), _ = respond(flow, second, "b")
    assert third.correlation == (2**64 - 1, True, True)
    _, (answer,) = respond(flow, third, "c", True, {"sequence_id": "s", "sequence_start": False})
    assert answer.correlation == ("s", False, True)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (
            {"sequence_id": True},
            "expected parameter 'sequence_id' to be TRITONSERVER_PARAMETER_INT or "
            "TRITONSERVER_PARAMETER_STRING",
        ),
        ({"sequence_start": 1}, "expected parameter 'sequence_start' to be TRITONSERVER_PARAMETER_BOOL"),
        ({"sequence_end": "x"}, "expected parameter 'sequence_end' to be TRITONSERVER_PARAMETER_BOOL"),
    ],
)
def test_response_parameters_of_the_wrong_type(parameters: dict[str, Parameter], message: str) -> None:
    flow, (run,), _ = start(chain(False, False))
    runs, (answer,) = respond(flow, run, "a", True, parameters)
    assert not runs
    assert answer.error is not None
    assert answer.error.message == message


def test_tensors_of_different_scopes_may_not_meet() -> None:
    steps = [
        ModelStep(0, "d", "", (("I", "X"),), (("O", "T"),), True),
        ModelStep(1, "m", "", (("I", "T"), ("J", "X")), (("O", "Y"),), False),
    ]
    text = "step of model 'e' receives inputs originated from different decoupled models"
    with pytest.raises(InvalidArgumentError, match=text):
        EnsemblePlan("e", ["X"], ["Y"], steps)
    with pytest.raises(InvalidArgumentError, match=text):
        EnsemblePlan("e", ["X"], ["T", "X"], steps[:1])
