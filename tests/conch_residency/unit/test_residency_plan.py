"""The residency plan: its invariant under random events, and its hit rates on traces with fixed seeds."""

from __future__ import annotations

import itertools
import random
import sys
from bisect import bisect
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from conch_residency.residency_plan import HoldingState, ResidencyLimits, ResidencyPlan, RoomOutcome
from conch_residency.segments import Room, Segments

if TYPE_CHECKING:
    from collections.abc import Callable

    from conch_residency.residency_plan import Holding

S = 1_000_000_000
BUDGET = Room(100, 6, (40,))
PARTS = {"x": ("a", "b"), "y": ("b", "x")}
NAMES = ("a", "b", "c", "d", "e", "f", "g", "x", "y")


def room(size: int) -> Room:
    """The room of one model."""
    return Room(size, 1)


def sized(name: str, size: int) -> Room:
    """The room of a model of the state machine; some of them are on the GPU too."""
    return Room(size, 1, (size // 2 if name in "abx" else 0,))


def closure(name: str) -> frozenset[str]:
    found = set(PARTS.get(name, ()))
    for part in PARTS.get(name, ()):
        found |= closure(part)
    return frozenset(found)


class Residency(RuleBasedStateMachine):
    """Random requests, ends of loads, growth, uses and evictions against a plan."""

    @initialize(idle=st.sampled_from([0, 30 * S]), least=st.sampled_from([0, 10 * S]))
    def begin(self, idle: int, least: int) -> None:
        self.plan = ResidencyPlan(ResidencyLimits(BUDGET, least, idle))
        self.now = 0
        self.wanted: dict[str, dict[str, int]] = {}
        self.loading: dict[str, dict[str, Room]] = {}
        self.leaving: list[Holding] = []
        self.busy: set[str] = set()
        self.stuck: set[Holding] = set()
        self.grown = False

    def fits(self, name: str, room: Room) -> bool:
        """True if a model fits the budget together with its dependencies."""
        held = [each for part in closure(name) if (each := self.plan.holding(part)) is not None]
        return sum((each.room for each in held), room).within(BUDGET)

    def is_busy(self, holding: Holding) -> bool:
        return holding in self.stuck or (holding.state is HoldingState.RESIDENT and holding.name in self.busy)

    def unload(self, holdings: list[Holding], forced: bool = False) -> None:
        names = {each.name for each in holdings}
        for each in holdings:
            assert each.state is HoldingState.UNLOADING
            if not forced:
                assert each.name not in self.plan.pinned | self.busy
                assert each.since_ns <= self.now - self.plan.limits.min_resident_ns
                assert not any(each.name in {job, *closure(job)} for job in self.loading)
            left = [other for other in self.plan.resident() if each.name in other.parts]
            assert not left, "an ensemble stays without a part"
        assert len(names) == len(holdings)
        self.leaving += holdings

    @rule(name=st.sampled_from(NAMES), sizes=st.lists(st.integers(1, 60), min_size=9, max_size=9))
    def want(self, name: str, sizes: list[int]) -> None:
        self.wanted.setdefault(name, dict(zip(NAMES, sizes, strict=True)))
        self.plan.note_request(name, self.now)
        self.schedule()

    @rule()
    def schedule(self) -> None:
        """Requests all that is wanted, in order; no load gets room that an earlier one waits for."""
        self.plan.drop_claims()
        waiting = Room()
        for name, size in list(self.wanted.items()):
            if self.plan.holding(name) is not None:
                continue
            needs = {
                each: room(size[each]) for each in (name, *closure(name)) if self.plan.holding(each) is None
            }
            wanted = sum(needs.values(), Room())
            fits = self.fits(name, wanted)
            decision = self.plan.request(name, needs, closure(name), self.now, self.is_busy)
            assert (decision.outcome is not RoomOutcome.TOO_LARGE) == fits
            self.unload(list(decision.victims))
            if decision.outcome is RoomOutcome.TOO_LARGE:
                del self.wanted[name]
            elif decision.outcome is RoomOutcome.GRANTED:
                assert self.plan.total.within(BUDGET)
                self.loading[name] = needs
                del self.wanted[name]
            elif decision.outcome is RoomOutcome.WAITING:
                waiting += wanted
            if not self.grown:
                leaving = sum((each.room for each in self.leaving if each not in self.stuck), Room())
                assert (self.plan.total - leaving + waiting).within(BUDGET)

    @precondition(lambda self: self.loading)
    @rule(choice=st.integers(0), growth=st.sampled_from([0, 0, 0, 1, 20]), kept=st.integers(0, 511))
    def end(self, choice: int, growth: int, kept: int) -> None:
        name = sorted(self.loading)[choice % len(self.loading)]
        needs = self.loading.pop(name)
        good = {
            each: size + Room(growth) for place, (each, size) in enumerate(needs.items()) if kept >> place & 1
        }
        for each in [*good]:  # what an ensemble needs is there
            if not all(part in good or self.plan.holding(part) is not None for part in closure(each)):
                del good[each]
        self.grown |= bool(growth and good)
        self.plan.ended(name, good, {each: closure(each) for each in good}, self.now)

    @precondition(lambda self: self.leaving)
    @rule(choice=st.integers(0))
    def note_unloaded(self, choice: int) -> None:
        holding = self.leaving.pop(choice % len(self.leaving))
        self.stuck.discard(holding)
        self.plan.note_unloaded(holding)

    @precondition(lambda self: self.leaving)
    @rule(choice=st.integers(0))
    def begin_sequence(self, choice: int) -> None:
        """A sequence begins in a model that is being unloaded; `gone` ends it."""
        self.stuck.add(self.leaving[choice % len(self.leaving)])

    @rule(name=st.sampled_from(NAMES))
    def use(self, name: str) -> None:
        self.plan.used(name, self.now)

    @rule(name=st.sampled_from(NAMES), size=st.integers(1, 60))
    def grow(self, name: str, size: int) -> None:
        holding = self.plan.holding(name)
        self.grown |= holding is not None and not sized(name, size).within(holding.room)
        self.plan.resized(name, sized(name, size))

    @rule(names=st.sets(st.sampled_from(NAMES), max_size=2))
    def run(self, names: set[str]) -> None:
        self.busy = names

    @rule(names=st.sets(st.sampled_from(NAMES), max_size=2))
    def pin(self, names: set[str]) -> None:
        self.plan.pinned = set(names)

    @rule(name=st.sampled_from(NAMES))
    def evict(self, name: str) -> None:
        self.unload(self.plan.evict(name), forced=True)

    @rule(seconds=st.sampled_from([1, 10, 60, 4000]))
    def wait(self, seconds: int) -> None:
        self.now += seconds * S
        self.unload(self.plan.expired(self.now, self.is_busy))
        self.unload(self.plan.shrink(self.now, self.is_busy))

    @rule(name=st.sampled_from(("a", "c", "y")))
    def serves_when_all_is_idle(self, name: str) -> None:
        """A model that fits beside the unloaded models that keep sequences gets its room.

        Nothing else is busy, pinned, loading or young.
        """
        self.busy, self.plan.pinned = set(), set()
        self.wanted.clear()
        for job in list(self.loading):
            self.plan.ended(job, {}, {}, self.now)
            del self.loading[job]
        self.now += 60 * S
        for _ in range(3):
            self.plan.drop_claims()
            needs = {
                each: sized(each, 5) for each in (name, *closure(name)) if self.plan.holding(each) is None
            }
            if name not in needs:
                return
            stuck = sum((each.room for each in self.stuck), Room())
            if not self.fits(name, sum(needs.values(), stuck)):
                return
            decision = self.plan.request(name, needs, closure(name), self.now, self.is_busy)
            self.unload(list(decision.victims))
            if decision.outcome is RoomOutcome.GRANTED:
                self.loading[name] = needs
                return
            assert decision.outcome is RoomOutcome.WAITING
            for each in [each for each in self.leaving if each not in self.stuck]:
                self.leaving.remove(each)
                self.plan.note_unloaded(each)
            self.unload(self.plan.shrink(self.now, self.is_busy))
        pytest.fail("it waits for ever")

    @invariant()
    def counts_everything(self) -> None:
        held = self.plan.holdings
        assert self.plan.total - sum((each.room for each in held), Room()) == Room(
            gpus=self.plan.total.gpus and (0,)
        )
        if not self.grown:
            assert self.plan.total.within(BUDGET)
        elif self.plan.total.within(BUDGET):
            self.grown = False
        assert sorted(each.name for each in self.plan.resident()) == sorted(
            each.name for each in held if each.state is HoldingState.RESIDENT
        )


Residency.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestResidency = Residency.TestCase


MODELS, ROOM = 10_000, 50


def popular(count: int, seed: int) -> list[int]:
    """Requests for models by Zipf's law with exponent 1.1."""
    sums = list(itertools.accumulate(rank**-1.1 for rank in range(1, MODELS + 1)))
    chance = random.Random(seed)
    return [bisect(sums, chance.random() * sums[-1]) for _ in range(count)]


def drifting(count: int, seed: int) -> list[int]:
    """Every 2,500 requests a tenth of the models swap their popularity."""
    chance, places = random.Random(seed), list(range(MODELS))
    found = []
    for number, rank in enumerate(popular(count, seed)):
        if number and number % 2_500 == 0:
            some = chance.sample(range(MODELS), MODELS // 10)
            for place, model in zip(
                some, chance.sample([places[each] for each in some], len(some)), strict=True
            ):
                places[place] = model
        found.append(places[rank])
    return found


def scanned(count: int, seed: int) -> list[int]:
    """A scan of all models in the middle."""
    found = popular(count, seed)
    found[count // 2 : count // 2] = range(MODELS)
    return found


def hit_rate(trace: list[int], size_of: Callable[[int], int], budget: int) -> float:
    plan = ResidencyPlan(ResidencyLimits(Room(budget, sys.maxsize)))
    hits = 0
    for now, model in enumerate(trace):
        name = str(model)
        if plan.holding(name) is not None:
            hits += 1
            plan.used(name, now)
            continue
        while (
            plan.request(name, {name: room(size_of(model))}, (), now, lambda _: False).outcome
            is RoomOutcome.WAITING
        ):
            for each in [each for each in plan.holdings if each.state is HoldingState.UNLOADING]:
                plan.note_unloaded(each)
            plan.drop_claims()
        plan.ended(name, {name: room(size_of(model))}, {}, now)
    return hits / len(trace)


_sizes = random.Random(2)
SIZES = [max(round(1000 * _sizes.lognormvariate(0, 1)), 1) for _ in range(MODELS)]


@pytest.mark.parametrize(
    ("trace", "sizes", "expected"),
    [
        pytest.param(popular(20_000, 1), None, 0.54, id="zipf"),
        pytest.param(drifting(20_000, 2), None, 0.54, id="drift"),
        pytest.param(scanned(50_000, 3), None, 0.47, id="scan"),
        pytest.param(popular(20_000, 1), SIZES, 0.51, id="lognormal"),
    ],
)
def test_hit_rates_of_simulated_traces(trace: list[int], sizes: list[int] | None, expected: float) -> None:
    if sizes is None:
        rate = hit_rate(trace, lambda _: 1, ROOM)
    else:
        rate = hit_rate(trace, sizes.__getitem__, ROOM * sum(sizes) // MODELS)
    assert rate == pytest.approx(expected, abs=0.02)


def test_models_that_evict_each_other_are_reported_once() -> None:
    plan = ResidencyPlan(ResidencyLimits(Room(10, 1)))
    for turn in range(12):
        name, now = "ab"[turn % 2], turn * S
        decision = plan.request(name, {name: room(10)}, (), now, lambda _: False)
        for victim in decision.victims:
            plan.note_unloaded(victim)
        plan.drop_claims()
        if decision.outcome is not RoomOutcome.GRANTED:
            plan.request(name, {name: room(10)}, (), now, lambda _: False)
        plan.ended(name, {name: room(10)}, {}, now)
        assert len(plan.thrashing) == (turn > 7)
    assert plan.thrashing == [frozenset("ab")]


def test_a_rare_model_does_not_evict_one_in_use() -> None:
    plan = ResidencyPlan(ResidencyLimits(Room(10, 1), 10 * S))
    now = 7200 * S
    plan.note_request("busy", now)
    assert plan.request("busy", {"busy": room(10)}, (), now, lambda _: False).outcome is RoomOutcome.GRANTED
    plan.ended("busy", {"busy": room(10)}, {}, now)
    now += 60 * S
    plan.used("busy", now)
    plan.note_request("rare", now)
    assert plan.request("rare", {"rare": room(1)}, (), now, lambda _: False).outcome is RoomOutcome.BLOCKED
    plan.note_request("rare", now + S)  # the second request within an hour
    assert (
        plan.request("rare", {"rare": room(1)}, (), now + S, lambda _: False).outcome is RoomOutcome.WAITING
    )


def test_no_load_gets_the_room_that_another_waits_for() -> None:
    plan = ResidencyPlan(ResidencyLimits(Room(10, 9)))
    plan.request("a", {"a": room(6)}, (), 0, lambda _: False)
    plan.ended("a", {"a": room(6)}, {}, 0)
    decision = plan.request("large", {"large": room(10)}, (), S, lambda _: False)
    assert [each.name for each in decision.victims] == ["a"]
    assert plan.request("small", {"small": room(3)}, (), S, lambda _: False).outcome is RoomOutcome.BLOCKED
    plan.drop_claims()
    decision = plan.request("other", {"other": room(5)}, (), S, lambda _: True)
    assert decision.outcome is RoomOutcome.BLOCKED, "a sequence may keep a for long"


def test_the_share_of_models_that_left_is_free_for_others() -> None:
    segments = Segments(Room(100, 100))
    for name, size in (("a", 60), ("b", 30), ("c", 30)):
        segments.add(name, room(size))
        segments.use(name)
        if name == "a":
            segments.remove(name)
    segments.add("d", room(1))
    assert list(segments) == ["d", "b", "c"]


def test_parts_of_an_ensemble_stay_for_its_load() -> None:
    plan = ResidencyPlan(ResidencyLimits(Room(10, 3)))
    for name in "acd":
        plan.request(name, {name: room(1)}, (), 0, lambda _: False)
        plan.ended(name, {name: room(1)}, {}, 0)
    needs = {"x": room(1), "b": room(1)}
    decision = plan.request("x", needs, closure("x"), S, lambda _: False)
    assert [each.name for each in decision.victims] == ["c", "d"], "not a, which is older"
    for each in decision.victims:
        plan.note_unloaded(each)
    plan.drop_claims()
    assert plan.request("x", needs, closure("x"), S, lambda _: False).outcome is RoomOutcome.GRANTED
    assert plan.request("c", {"c": room(1)}, (), 2 * S, lambda _: False).outcome is RoomOutcome.BLOCKED
