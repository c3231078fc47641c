"""The rate limiter's state machine: rules by example, and invariants over random orders of events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.support.profiles import scaled

from conch.core.errors import InvalidArgumentError
from conch.core.scheduling.resource_scheduler import (
    GrantState,
    Pool,
    ResourceGrant,
    ResourceLimit,
    ResourceScheduler,
)
from conch.core.spec import Resource

HELD, RESTING, WAITING = GrantState.HELD, GrantState.RESTING, GrantState.WAITING


def grant(needs: str = "R1", priority: int = 1, device: int = 0, owner: str = "") -> ResourceGrant:
    """A claim such as ``"R2 S1"``; a lower-case name is a shared resource."""
    resources = [Resource(part[0], int(part[1:]), part[0].islower()) for part in needs.split()]
    made = ResourceGrant(owner, resources, device, priority)
    made.owner = owner or str(id(made))
    return made


def scheduler(*grants: ResourceGrant, limits: Sequence[ResourceLimit] = ()) -> ResourceScheduler:
    made = ResourceScheduler(limits)
    assert made.add(grants) == []
    return made


def refused(made: ResourceScheduler, *grants: ResourceGrant) -> str:
    before = dict(made.capacity)
    with pytest.raises(InvalidArgumentError) as raised:
        made.add(grants)
    assert made.capacity == before
    return raised.value.message


def test_one_runs_and_the_others_wait_in_turn() -> None:
    a, b, c = grant(), grant(), grant()
    made = scheduler(a, b, c)
    assert made.ask([a]) is a
    assert made.ask([b]) is None
    assert made.ask([c]) is None
    assert (a.state, b.state, c.state) == (HELD, WAITING, WAITING)
    assert made.release_grant(a) == [b]
    assert made.ask([a]) is None
    assert made.release_grant(b) == [c]
    assert made.release_grant(c) == [a]
    assert made.release_grant(a) == []
    assert made.used == {}


@pytest.mark.parametrize(("slots", "priorities"), [(1, (1, 2)), (1, (0, 3, 6)), (2, (1, 1, 2, 4))])
def test_weights_hold_over_a_long_run(slots: int, priorities: tuple[int, ...]) -> None:
    grants = [grant(priority=priority) for priority in priorities]
    made = scheduler(*grants, limits=[ResourceLimit("R", slots)])
    running = [each for each in grants if made.ask([each])]
    runs: Counter[ResourceGrant] = Counter()
    for _ in range(5000):
        done = running.pop(0)
        runs[done] += 1
        running += made.release_grant(done, again=True)
    per_weight = [runs[each] * max(each.priority, 1) for each in grants]
    if slots == 1:
        assert max(per_weight) - min(per_weight) <= 2 * max(priorities)
    else:  # the one of weight 1 can't run twice at a time, so the others share what it leaves
        assert runs[grants[0]] >= runs[grants[2]] >= runs[grants[3]] > 0


def test_who_was_away_does_not_keep_the_others_waiting() -> None:
    a, late, b = grant(), grant(), grant()
    made = scheduler(a, b)
    for _ in range(1000):
        assert made.ask([a]) is a
        made.release_grant(a)
    made.add([late])
    assert made.ask([a]) is a
    assert made.ask([late]) is None
    assert made.ask([b]) is None
    order = []
    running = a
    for _ in range(9):
        (running,) = made.release_grant(running, again=True)
        order.append(running)
    assert Counter(order) == {a: 3, late: 3, b: 3}


def test_one_that_needs_much_is_not_passed_for_ever() -> None:
    small = [grant("R1") for _ in range(4)]
    big = grant("R3")
    made = scheduler(*small, big)
    for each in small[:3]:
        assert made.ask([each]) is each
    assert made.ask([big]) is None
    assert made.release_grant(small[0]) == []
    assert made.ask([small[3]]) is None, "what has come free is set aside"
    assert made.release_grant(small[1]) == []
    assert made.release_grant(small[2]) == [big]
    assert made.release_grant(big) == [small[3]]


def test_nobody_waits_for_what_is_left_over() -> None:
    big, small, other, blocker = grant("R3"), grant("R1"), grant("S1"), grant("R2")
    made = scheduler(big, small, other, blocker, limits=[ResourceLimit("R", 4), ResourceLimit("S", 1)])
    assert made.ask([blocker]) is blocker
    assert made.ask([big]) is None
    assert made.ask([other]) is other
    assert made.ask([small]) is None, "two are free, and both set aside"
    assert made.return_grants([big]) == [small]
    assert big.state is RESTING


def test_the_first_of_several_that_fits_is_taken() -> None:
    taken, near, far = grant(device=0), grant(device=0), grant(device=1)
    made = scheduler(taken, near, far)
    assert made.ask([taken]) is taken
    assert made.ask([near, far]) is far
    assert near.state is WAITING
    a, b = grant(priority=4), grant(priority=1)
    made = scheduler(a, b)
    for expected in (a, b, b, b, b):
        chosen = made.ask([a, b])
        assert chosen is expected
        made.return_grants([a] if chosen is b else [b])
        made.release_grant(chosen)


def test_what_was_granted_and_not_used_does_not_count() -> None:
    a, b = grant(), grant()
    made = scheduler(a, b)
    for _ in range(5):
        assert made.ask([a]) is a
        assert made.return_grants([a]) == []
    assert made.ask([b]) is b
    assert made.ask([a]) is None
    assert a.score == 0


def test_shared_resources_and_those_of_a_device() -> None:
    a, b, c, d = grant("r1"), grant("r1", device=1), grant("S1"), grant("S1", device=1)
    made = scheduler(a, b, c, d)
    assert made.capacity == {("r", None): 1, ("S", 0): 1, ("S", 1): 1}
    assert made.ask([a]) is a
    assert made.ask([b]) is None
    assert made.ask([c]) is c
    assert made.ask([d]) is d


def test_there_is_as_much_as_the_largest_needs() -> None:
    small, big, second = grant("R1"), grant("R4"), grant("R1")
    made = scheduler(small, second)
    assert made.ask([small]) is small
    assert made.ask([second]) is None
    assert made.add([big]) == [second]
    assert made.capacity == {("R", 0): 4}
    made.remove([big])
    assert made.capacity == {("R", 0): 1}
    assert made.used == {("R", 0): 2}, "what runs, runs on"
    third = grant("R1")
    made.add([third])
    assert made.ask([third]) is None
    assert made.release_grant(small) == []
    assert made.release_grant(second) == [third]
    made.release_grant(third)
    made.remove([small, second, third, third])
    assert made.capacity == made.used == {}


def test_a_model_that_goes_lets_the_others_run() -> None:
    a, b, c = grant("R2"), grant("R2"), grant("R1")
    made = scheduler(a, b, c, limits=[ResourceLimit("R", 2)])
    assert made.ask([c]) is c
    assert made.ask([b]) is None
    assert made.ask([a]) is None
    assert made.remove([b]) == []
    assert made.release_grant(c) == [a]
    assert made.remove([a]) == []
    assert made.used == {}


def test_needs_of_one_name_add_up_and_none_is_nothing() -> None:
    assert grant("R2 R3 S0").needs == {("R", 0): 5}


LIMITS = [ResourceLimit("R", 1), ResourceLimit("R", 4, 2), ResourceLimit("g", 2), ResourceLimit("g", 3, 7)]


@pytest.mark.parametrize(
    ("needs", "device", "name", "limit", "needed"),
    [
        ("R4", 0, "R", 1, 4),
        ("R5", 2, "R", 4, 5),
        ("g4", 0, "g", 3, 4),
        ("T2", 0, "T", 0, 2),
    ],
)
def test_limits_that_are_too_low(needs: str, device: int, name: str, limit: int, needed: int) -> None:
    made = scheduler(grant("R1"), limits=LIMITS)
    assert refused(made, grant("R1"), grant(needs, device=device)) == (
        f'Resource count for "{name}" is limited to {limit} which will prevent scheduling of one or more '
        f"model instances, the minimum required count is {needed}"
    )


def test_limits_are_what_there_is() -> None:
    made = scheduler(grant("R1"), grant("R4", device=2), grant("g3"), grant("T0"), limits=LIMITS)
    assert made.capacity == {("R", 0): 1, ("R", 2): 4, ("g", None): 3}


def test_a_resource_is_either_shared_or_not() -> None:
    text = 'Resource "r" is present as both global and device-specific resource in the model configuration.'
    own = ResourceGrant("a", [Resource("r", 1)], 0)
    assert refused(scheduler(grant("r1", owner="b")), own) == text
    assert refused(ResourceScheduler(), own, ResourceGrant("a", [Resource("r", 1, shared=True)], 0)) == text
    # A new version of the same model may change it: the old one is on its way out.
    assert scheduler(grant("r1", owner="a")).add([own]) == []
    made = scheduler(grant("r1", owner="a"))
    made.add([own])
    assert refused(made, grant("r1", owner="b")) == text


def fits(made: ResourceScheduler, waiting: Sequence[ResourceGrant]) -> list[ResourceGrant]:
    """Requests that can run, by the rules and from the grants alone: the naive model."""
    left: dict[Pool, int] = {pool: count - made.used.get(pool, 0) for pool, count in made.capacity.items()}
    able = []
    for each in sorted(waiting, key=lambda c: (c.score, c.order)):
        if all(left[pool] >= count for pool, count in each.needs.items()):
            able.append(each)
        for pool, count in each.needs.items():
            left[pool] -= count
    return able


claims_strategy = st.builds(
    lambda needs, device, priority: (needs, device, priority),
    st.sampled_from(["A1", "A2", "A3", "A1 B1", "A2 B2", "B2", "c1", "c2", "A1 c1", "B1 c2"]),
    st.sampled_from([0, 0, 1]),
    st.sampled_from([0, 1, 1, 2, 5]),
)


class RateMachine(RuleBasedStateMachine):
    """Instances come, ask, run, change their minds and go, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.grants: list[ResourceGrant] = []
        self.running: list[ResourceGrant] = []
        self.shrunk = False

    @initialize(limited=st.booleans())
    def begin(self, limited: bool) -> None:
        limits = [ResourceLimit("A", 3), ResourceLimit("B", 2), ResourceLimit("c", 2)] if limited else []
        self.limited = limited
        self.made = ResourceScheduler(limits)

    def granted(self, grants: Collection[ResourceGrant]) -> None:
        for each in grants:
            assert each.state is HELD
            assert each not in self.running
            self.running.append(each)

    def resting(self) -> list[ResourceGrant]:
        return [each for each in self.grants if each.state is RESTING]

    def waiting(self) -> list[ResourceGrant]:
        return [each for each in self.grants if each.state is WAITING]

    @rule(settings=st.lists(claims_strategy, min_size=1, max_size=3))
    def load(self, settings: list[tuple[str, int, int]]) -> None:
        if len(self.grants) < 12:
            new = [grant(needs, priority, device) for needs, device, priority in settings]
            self.grants += new
            self.granted(self.made.add(new))

    @precondition(lambda self: self.resting())
    @rule(data=st.data())
    def ask(self, data: Any) -> None:
        resting = self.resting()
        chosen = data.draw(st.lists(st.sampled_from(resting), min_size=1, max_size=3, unique_by=id))
        granted = self.made.ask(chosen)
        if granted is not None:
            assert granted in chosen
            self.granted([granted])
        else:
            assert all(each.state is WAITING for each in chosen)

    @precondition(lambda self: self.running)
    @rule(index=st.integers(0, 11), again=st.booleans())
    def finish(self, index: int, again: bool) -> None:
        done = self.running.pop(index % len(self.running))
        self.granted(self.made.release_grant(done, again))
        assert again or done.state is RESTING

    @precondition(lambda self: self.grants)
    @rule(index=st.integers(0, 11))
    def return_grants(self, index: int) -> None:
        """A queue has become empty: nothing that waits, or was granted, is needed."""
        each = self.grants[index % len(self.grants)]
        if each in self.running:
            self.running.remove(each)
        before = each.score
        held = each.state is HELD
        self.granted(self.made.return_grants([each]))
        assert each.state is RESTING
        assert each.score == (before - each.priority if held else before)

    @precondition(lambda self: self.grants)
    @rule(index=st.integers(0, 11))
    def unload(self, index: int) -> None:
        each = self.grants[index % len(self.grants)]
        if each in self.running:
            self.granted(self.made.release_grant(each))
            self.running.remove(each)
        self.grants.remove(each)
        self.shrunk = True
        self.granted(self.made.remove([each]))

    @precondition(lambda self: self.waiting())
    @rule(index=st.integers(0, 11))
    def nobody_starves(self, index: int) -> None:
        """With all models asking for ever, each of the others goes first for its share only."""
        # Others may have to catch up with its score, and run that often. Meanwhile the scores of those who
        # share nothing with it grow with each round: the next to be chosen might take ever so much longer.
        waiting = [each for each in self.waiting() if each.score <= 100]
        if not waiting:
            return
        chosen = waiting[index % len(waiting)]
        runs: Counter[ResourceGrant] = Counter()
        score = chosen.score
        for each in self.resting():
            if (granted := self.made.ask([each])) is not None:
                self.granted([granted])
        rounds = 0
        while chosen.state is WAITING:
            assert self.running, "everything is free and nobody runs"
            assert (rounds := rounds + 1) < 100_000, "others run for ever"
            granted_now = self.made.release_grant(self.running.pop(0), again=True)
            self.granted(granted_now)
            for each in granted_now:
                runs[each] += each.started < score
                # Its share: what it was behind, and one for each of its turns.
                assert runs[each] <= score // each.priority + 1, "goes first more often than its share"
            assert sum(runs.values()) <= sum(score // each.priority + 1 for each in self.grants)

    @invariant()
    def books_are_right(self) -> None:
        if not hasattr(self, "made"):
            return
        used: Counter[Pool] = Counter()
        for each in self.running:
            used.update(each.needs)
        assert self.made.used == used
        assert {id(each) for each in self.grants if each.state is HELD} == {id(e) for e in self.running}
        if self.limited or not self.shrunk:
            for pool, count in used.items():
                assert count <= self.made.capacity[pool], "over capacity"

    @invariant()
    def nobody_waits_who_could_run(self) -> None:
        if hasattr(self, "made"):
            assert fits(self.made, self.waiting()) == []

    def teardown(self) -> None:
        if not hasattr(self, "made"):
            return
        while self.running:
            self.granted(self.made.release_grant(self.running.pop(0)))
        assert not self.waiting(), "everything is free"
        assert self.made.used == {}
        self.made.remove(self.grants)
        assert self.made.capacity == {}


RateMachine.TestCase.settings = settings(max_examples=scaled(100), stateful_step_count=80, deadline=None)
test_random_orders = RateMachine.TestCase


class LongRateMachine(RateMachine):
    """The same, for longer."""


LongRateMachine.TestCase.settings = settings(max_examples=scaled(300), stateful_step_count=200, deadline=None)
test_random_orders_for_long = pytest.mark.slow(LongRateMachine.TestCase)
