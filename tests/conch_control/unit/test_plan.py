"""The planner as a pure function: what follows from looks, ends of operations, time and what others do."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.support.profiles import scaled

from conch_control.planner.plan import (
    BESIDE,
    FIRST_RETRY_NS,
    LAST_RETRY_NS,
    FoundModel,
    LoadOutcome,
    Operation,
    PlannerPlan,
    Snapshot,
)
from conch_control.repository.layout import Fingerprint

SETTLE = 100
DONE, FAILED, TRANSIENT = LoadOutcome.DONE, LoadOutcome.FAILED, LoadOutcome.TRANSIENT


def load(name: str) -> Operation:
    return Operation("load", name)


def unload(name: str) -> Operation:
    return Operation("unload", name)


def state(number: int, *directories: str) -> Fingerprint:
    """A fingerprint of a config, and of files in directories, that has a number."""
    files = [("config.pbtxt", 1, number, 1)] if not directories else []
    return tuple(files + [(f"{directory}/model", 1, number, 1) for directory in directories])


def marker(path: str, number: int = 0) -> Fingerprint:
    return ((path, 0, number, 7),)


def at(number: int, markers: Fingerprint = (), parts: tuple[str, ...] = ()) -> FoundModel:
    return FoundModel(state(number), markers, "r", parts)


class Told:
    """A plan, and a clock."""

    def __init__(self, adopted: dict[str, FoundModel] | None = None, most: int = 4) -> None:
        self.now = 1_000
        self.plan = PlannerPlan(SETTLE, most)
        if adopted is not None:
            self.plan.adopt(Snapshot(adopted), self.now)

    def look(self, after: int = 0, partial: bool = False, **models: FoundModel | None) -> list[Operation]:
        self.now += after
        return self.plan.snapshot_taken(Snapshot(models, partial), self.now, self.now)

    def end(self, operation: Operation, outcome: LoadOutcome = DONE) -> list[Operation]:
        return self.plan.finished(operation, outcome, self.now)

    def settle(self, **models: FoundModel | None) -> list[Operation]:
        """Two looks that find the same."""
        assert self.plan.snapshot_taken(Snapshot(models), self.now, self.now) == []
        self.now += SETTLE
        return self.plan.snapshot_taken(Snapshot(models), self.now, self.now)

    @property
    def quiet(self) -> bool:
        plan = self.plan
        return (plan.snapshot_due, plan.wake_at, plan.settling, plan.in_progress) == (
            None,
            None,
            frozenset(),
            frozenset(),
        )


def test_what_has_not_changed_is_left_alone() -> None:
    told = Told({"m": at(1)})
    assert told.settle(m=at(1)) == []
    assert told.quiet


def test_a_new_model_is_loaded_when_it_has_settled() -> None:
    told = Told({})
    assert told.look(m=at(1)) == []
    assert told.plan.snapshot_due == told.now + SETTLE
    assert told.look(SETTLE - 1, m=at(1)) == []
    assert told.look(1, m=at(1)) == [load("m")]
    assert told.look(1000, m=at(1)) == []
    assert told.end(load("m")) == []
    assert told.quiet


def test_a_slow_copy_is_loaded_once() -> None:
    told = Told({})
    for number in range(1, 20):
        assert told.look(SETTLE - 1, m=at(number)) == []
    assert told.look(SETTLE, m=at(19)) == [load("m")]
    assert told.end(load("m")) == []
    assert told.quiet


def test_the_time_that_a_look_takes_does_not_count_as_settled() -> None:
    plan = PlannerPlan(SETTLE)
    plan.snapshot_taken(Snapshot({"m": at(1)}), 0, 500)
    assert plan.snapshot_taken(Snapshot({"m": at(1)}), 599, 700) == []
    assert plan.snapshot_taken(Snapshot({"m": at(1)}), 600, 700) == [load("m")]


def test_a_label_that_moves_is_a_change_that_files_do_not_show() -> None:
    plan = PlannerPlan(SETTLE)
    before, after = (replace(at(1), beside=((("champion", number),), None)) for number in (1, 2))
    plan.adopt(Snapshot({"m": before}), 0)
    assert plan.snapshot_taken(Snapshot({"m": after}), 0, 0) == []
    (operation,) = plan.snapshot_taken(Snapshot({"m": after}), SETTLE, SETTLE)
    assert operation == load("m") and operation.changed == (BESIDE,)
    assert plan.finished(operation, DONE, SETTLE) == []
    assert plan.snapshot_taken(Snapshot({"m": after}), 9 * SETTLE, 9 * SETTLE) == []


def test_a_change_and_back_is_none() -> None:
    told = Told({"m": at(1)})
    told.look(m=at(2))
    assert told.look(SETTLE, m=at(1)) == []
    assert told.quiet


def test_a_change_during_a_load_is_asked_for_once_more() -> None:
    told = Told({"m": at(1)})
    assert told.settle(m=at(2)) == [load("m")]
    assert told.settle(m=at(3)) == []
    assert told.settle(m=at(4)) == []
    assert told.end(load("m")) == [load("m")]
    assert told.end(load("m")) == []
    assert told.quiet


def test_a_change_that_has_not_settled_when_the_load_ends_waits() -> None:
    told = Told({"m": at(1)})
    assert told.settle(m=at(2)) == [load("m")]
    assert told.look(m=at(3)) == []
    assert told.end(load("m")) == []
    assert told.look(SETTLE, m=at(3)) == [load("m")]


def test_a_model_that_is_gone_is_unloaded_when_that_has_settled() -> None:
    told = Told({"m": at(1)})
    assert told.look() == []
    assert told.look(SETTLE - 1) == []
    assert told.look(1) == [unload("m")]
    assert told.end(unload("m")) == []
    assert told.quiet
    assert "m" not in told.plan


def test_an_atomic_rename_has_a_moment_without_the_model() -> None:
    told = Told({"m": at(1)})
    told.look()
    assert told.look(SETTLE - 1, m=at(2)) == []
    assert told.look(SETTLE, m=at(2)) == [load("m")]


def test_a_model_that_is_gone_while_it_is_loaded_is_unloaded_after_that() -> None:
    told = Told({})
    assert told.settle(m=at(1)) == [load("m")]
    assert told.settle() == []
    assert told.end(load("m")) == [unload("m")]


def test_a_model_that_is_back_while_it_is_unloaded_is_loaded_after_that() -> None:
    told = Told({"m": at(1)})
    assert told.settle() == [unload("m")]
    assert told.settle(m=at(1)) == []
    assert told.end(unload("m")) == [load("m")]


def test_nothing_is_gone_while_a_repository_can_not_be_read() -> None:
    told = Told({"m": at(1)})
    for _ in range(3):
        assert told.look(SETTLE, partial=True) == []
    assert told.look() == []
    assert told.look(SETTLE, partial=True) == []
    assert told.look(1) == []  # it may have been there in between
    assert told.look(SETTLE - 1) == [unload("m")]


def test_a_model_whose_storage_does_not_answer_is_kept() -> None:
    told = Told({"m": at(1)})
    told.look(m=None)
    assert told.look(10 * SETTLE, m=None) == []
    told.look()
    assert told.look(SETTLE, m=None) == []
    assert told.look(SETTLE - 1) == []


def test_a_model_of_an_unreadable_repository_is_not_taken_from_another_one() -> None:
    told = Told({"m": at(1)})
    other = replace(at(2), location="other")
    for _ in range(3):
        assert told.look(SETTLE, partial=True, m=other) == []
    assert told.look(m=other) == []
    assert told.look(SETTLE, m=other) == [load("m")]


def test_a_load_that_failed_is_tried_again_when_the_files_change() -> None:
    told = Told({"m": at(1)})
    assert told.settle(m=at(2)) == [load("m")]
    assert told.end(load("m"), FAILED) == []
    assert told.quiet
    assert told.settle(m=at(2)) == []
    assert told.settle(m=at(3)) == [load("m")]
    assert told.end(load("m")) == []


def test_the_old_files_again_after_a_load_that_failed_are_a_change() -> None:
    told = Told({"m": at(1)})
    assert told.settle(m=at(2)) == [load("m")]
    told.end(load("m"), FAILED)
    assert told.settle(m=at(1)) == [load("m")]


def test_storage_that_fails_for_a_time_is_tried_again_later_and_later() -> None:
    told = Told({})
    assert told.settle(m=at(1)) == [load("m")]
    waited = []
    for _ in range(12):
        assert told.end(load("m"), TRANSIENT) == []
        wake = told.plan.wake_at
        assert wake is not None
        waited.append(wake - told.now)
        told.now = wake - 1
        assert told.plan.tick(told.now) == []
        told.now = wake
        assert told.plan.tick(told.now) == [load("m")]
        assert told.plan.wake_at is None
    assert waited[:3] == [FIRST_RETRY_NS, 2 * FIRST_RETRY_NS, 4 * FIRST_RETRY_NS]
    assert waited[-1] == LAST_RETRY_NS
    assert told.end(load("m")) == []
    assert told.quiet


def test_new_files_are_tried_without_waiting_for_the_retry_of_the_old_ones() -> None:
    told = Told({"m": at(1)})
    assert told.settle(m=at(2)) == [load("m")]
    told.end(load("m"), TRANSIENT)
    assert told.settle(m=at(3)) == [load("m")]


def test_an_unload_that_failed_is_tried_again() -> None:
    told = Told({"m": at(1)})
    assert told.settle() == [unload("m")]
    assert told.end(unload("m"), FAILED) == []
    told.now += FIRST_RETRY_NS
    assert told.plan.tick(told.now) == [unload("m")]


def test_no_more_operations_than_allowed() -> None:
    told = Told({}, most=2)
    names = {f"m{number}": at(1) for number in range(5)}
    assert told.settle(**names) == [load("m0"), load("m1")]
    assert told.end(load("m1")) == [load("m2")]
    assert told.end(load("m0"), TRANSIENT) == [load("m3")]


def test_what_is_marked_as_incomplete_waits() -> None:
    told = Told({"m": at(1)})
    copying = at(2, marker("2/.incomplete"))
    assert told.settle(m=copying) == []
    assert told.plan.snapshot_due is None
    assert told.look(10 * SETTLE, m=copying) == []
    assert told.look(SETTLE, m=at(2)) == [load("m")]


def test_what_was_incomplete_at_the_start_is_loaded_later() -> None:
    told = Told({"m": at(1, marker(".incomplete"))})
    assert told.settle(m=at(1, marker(".incomplete"))) == []
    assert told.look(SETTLE, m=at(1)) == [load("m")]


def test_a_marker_vouches_for_what_has_changed() -> None:
    told = Told({"m": at(1)})
    assert told.look(m=at(2, marker(".complete"))) == [load("m")]
    told.end(load("m"))
    # The marker has done its work.
    assert told.look(m=at(3, marker(".complete"))) == []
    assert told.look(1, m=at(4, marker(".complete", 2))) == [load("m")]


def test_the_marker_of_a_version_vouches_for_that_version_only() -> None:
    before = FoundModel(state(1, "1"))
    told = Told({"m": before})
    both = marker("2/.complete")
    assert told.look(m=FoundModel(state(1, "1") + state(2, "2"), both)) == [load("m")]
    told.end(load("m"))
    changed = FoundModel(state(3, "1") + state(3, "2"), marker("2/.complete", 5))
    assert told.look(m=changed) == []
    assert told.look(SETTLE, m=changed) == [load("m")]


def test_incomplete_wins() -> None:
    told = Told({})
    both = at(1, marker(".complete") + marker("1/.incomplete"))
    assert told.settle(m=both) == []


def test_a_marker_alone_is_no_change() -> None:
    told = Told({"m": at(1)})
    assert told.settle(m=at(1, marker(".complete"))) == []
    assert told.quiet


def test_what_somebody_unloads_stays_unloaded_until_its_files_change() -> None:
    told = Told({"m": at(1)})
    told.plan.external_change("m", False, told.now)
    assert told.settle(m=at(1)) == []
    assert told.settle(m=at(2)) == [load("m")]


def test_what_somebody_loads_from_nowhere_is_theirs() -> None:
    told = Told({})
    told.plan.external_change("m", True, told.now)
    assert told.settle() == []
    assert told.look(10 * SETTLE) == []
    assert told.settle(m=at(1)) == [load("m")]


def test_an_unload_by_somebody_ends_retries() -> None:
    told = Told({})
    told.settle(m=at(1))
    told.end(load("m"), TRANSIENT)
    told.plan.external_change("m", False, told.now)
    assert told.quiet


def test_an_agent_of_which_nothing_is_known_is_asked_for_everything_once() -> None:
    told = Told()
    told.plan.attach(["old", "kept"], told.now)
    assert told.look(kept=at(1), new=at(1)) == []
    begun = told.look(SETTLE, kept=at(1), new=at(1))
    assert sorted(begun, key=str) == [load("kept"), load("new"), unload("old")]
    for operation in begun:
        assert told.end(operation) == []
    assert told.settle(kept=at(1), new=at(1)) == []
    assert told.quiet


def test_an_ensemble_waits_for_its_parts() -> None:
    told = Told({})
    ensemble = at(1, parts=("part",))
    part = at(1)
    assert told.settle(e=ensemble, part=part) == [load("part")]
    assert told.end(load("part")) == [load("e")]
    assert told.end(load("e")) == []
    # Loading it would load the part too, which is being copied.
    copying = at(2, marker(".incomplete"))
    again = at(2, parts=("part",))
    assert told.settle(e=again, part=copying) == []
    assert told.look(SETTLE, e=again, part=at(2)) == [load("part")]
    assert told.end(load("part")) == [load("e")]


def test_ensembles_that_need_each_other_do_not_wait_for_ever() -> None:
    told = Told({})
    begun = told.settle(a=at(1, parts=("b",)), b=at(1, parts=("a",)))
    assert begun == [load("a"), load("b")]


def test_an_ensemble_that_failed_has_another_chance_when_a_part_is_there() -> None:
    told = Told({})
    ensemble = at(1, parts=("part",))
    assert told.settle(e=ensemble) == [load("e")]
    assert told.end(load("e"), FAILED) == []
    assert told.settle(e=ensemble, part=at(1)) == [load("part")]
    assert told.end(load("part")) == [load("e")]


def test_an_ensemble_that_needs_a_model_no_longer_is_changed_before_the_model_goes() -> None:
    told = Told({"e": at(1, parts=("old",)), "old": at(1), "new": at(1)})
    ensemble = at(2, parts=("new",))
    assert told.settle(e=ensemble, new=at(1)) == [load("e")]
    assert told.end(load("e")) == [unload("old")]


@dataclass
class Disk:
    """A model in a repository."""

    number: int
    incomplete: bool = False
    vouched: int = 0  # a marker that was written for so many times

    def found(self) -> FoundModel:
        markers = marker(".incomplete") if self.incomplete else ()
        if self.vouched:
            markers += marker(".complete", self.vouched)
        return at(self.number, markers)


@dataclass
class Served:
    """A model of the agent."""

    number: int | None = None
    loads: list[int] = field(default_factory=list)


NAMES = ("a", "b", "c")
names = st.sampled_from(NAMES)


class Machine(RuleBasedStateMachine):
    """Any order of everything; the agent is one that loads what the disk holds when the load ends."""

    @initialize(adopted=st.booleans(), there=st.sets(names), running=st.sets(names), most=st.integers(1, 3))
    def begin(self, adopted: bool, there: set[str], running: set[str], most: int) -> None:
        self.now = 0
        self.numbers = 0
        self.plan = PlannerPlan(SETTLE, most)
        self.most = most
        self.disk = {name: Disk(self.change()) for name in there}
        self.agent = {name: Served() for name in NAMES}
        self.broken: set[int] = set()
        self.in_progress: dict[str, Operation] = {}
        self.held: set[str] = set()
        # Since when a look has found the disk as it is now, and nothing has disagreed.
        self.stable: dict[str, tuple[int | None, int]] = {}
        self.seen: dict[str, Disk] = {}
        self.tries: dict[tuple[str, int], int] = {}
        self.excused: dict[tuple[str, int], int] = {}
        if adopted:
            for name, disk in self.disk.items():
                self.agent[name].number = disk.number
            self.plan.adopt(Snapshot({name: disk.found() for name, disk in self.disk.items()}), 0)
        else:
            for name in running:
                self.agent[name].number = self.disk[name].number if name in self.disk else self.change()
            self.plan.attach(running, 0)
        self.adopted = adopted

    def change(self) -> int:
        self.numbers += 1
        return self.numbers

    def carry_out(self, operations: list[Operation]) -> None:
        for operation in operations:
            name = operation.name
            assert name not in self.in_progress
            self.in_progress[name] = operation
            assert len(self.in_progress) <= self.most
            number, since = self.stable[name]
            if operation.kind == "unload":
                assert number is None
                assert self.now - since >= SETTLE
                continue
            assert number is not None
            disk = self.seen[name]
            assert not disk.incomplete
            assert self.now - since >= SETTLE or disk.vouched
            tried = self.tries[name, number] = self.tries.get((name, number), 0) + 1
            assert tried <= 1 + self.excused.get((name, number), 0), f"{name} is loaded twice"

    @rule(name=names, incomplete=st.booleans(), vouched=st.booleans())
    def write(self, name: str, incomplete: bool, vouched: bool) -> None:
        number = self.change()
        self.disk[name] = Disk(number, incomplete, number if vouched else 0)
        self.held.discard(name)

    @rule(name=names)
    def mark_complete(self, name: str) -> None:
        if name in self.disk:
            self.disk[name] = replace(self.disk[name], incomplete=False)

    @rule(name=names)
    def remove(self, name: str) -> None:
        self.disk.pop(name, None)
        self.held.discard(name)

    @rule(time=st.sampled_from([1, SETTLE // 2, SETTLE, FIRST_RETRY_NS]))
    def wait(self, time: int) -> None:
        self.now += time

    @rule(partial=st.booleans(), silent=st.sets(names, max_size=1), hidden=st.sets(names))
    def look(self, partial: bool, silent: set[str], hidden: set[str]) -> None:
        found: dict[str, FoundModel | None] = {}
        for name, disk in self.disk.items():
            if partial and name in hidden:
                continue
            if name in silent:
                found[name] = None
                continue
            found[name] = disk.found()
        for name in NAMES:
            number = self.disk[name].number if name in self.disk else None
            if name in found and found[name] is None:
                if name in self.stable and self.stable[name][0] is None:
                    self.stable[name] = (None, self.now)
            elif name in found or not partial:
                if name not in self.stable or self.stable[name][0] != number:
                    self.stable[name] = (number, self.now)
                if number is not None:
                    self.seen[name] = self.disk[name]
            elif name in self.stable and self.stable[name][0] is None:
                self.stable[name] = (None, self.now)
        self.carry_out(self.plan.snapshot_taken(Snapshot(found, partial), self.now, self.now))

    @rule(time=st.just(0))
    def passes(self, time: int) -> None:
        self.carry_out(self.plan.tick(self.now))

    @precondition(lambda self: self.in_progress)
    @rule(data=st.data(), outcome=st.sampled_from(LoadOutcome))
    def end(self, data: st.DataObject, outcome: LoadOutcome) -> None:
        name = data.draw(st.sampled_from(sorted(self.in_progress)))
        self.finish(name, outcome)

    def finish(self, name: str, outcome: LoadOutcome) -> None:
        operation = self.in_progress.pop(name)
        served = self.agent[name]
        number = self.stable[name][0]
        asked = self.seen[name].number if operation.kind == "load" else None
        if outcome is DONE:
            if operation.kind == "unload":
                served.number = None
            elif name in self.disk and self.disk[name].number not in self.broken:
                served.number = self.disk[name].number
        elif asked is not None:
            if outcome is FAILED:
                self.broken.add(asked)
            for each in {asked, *([number] if number is not None else [])}:
                self.excused[name, each] = self.excused.get((name, each), 0) + 1
        self.carry_out(self.plan.finished(operation, outcome, self.now))

    @precondition(lambda self: self.adopted)
    @rule(name=names)
    def somebody_unloads(self, name: str) -> None:
        if name not in self.in_progress and name in self.disk:
            self.agent[name].number = None
            self.held.add(name)
            self.carry_out(self.plan.external_change(name, False, self.now))

    @invariant()
    def agrees_about_what_is_being_done(self) -> None:
        if hasattr(self, "plan"):
            assert self.plan.in_progress == self.in_progress.keys()

    def teardown(self) -> None:
        """From wherever it has come to, it gets to where what runs is what is wanted."""
        if not hasattr(self, "plan"):
            return
        self.disk = {name: replace(disk, incomplete=False) for name, disk in self.disk.items()}
        for _ in range(60):
            self.look(False, set(), set())
            for name in list(self.in_progress):
                number = self.seen[name].number if self.in_progress[name].kind == "load" else None
                self.finish(name, FAILED if number in self.broken else DONE)
            self.now += max(SETTLE, FIRST_RETRY_NS)
            self.passes(0)
        assert not self.in_progress
        assert self.plan.snapshot_due is None
        assert self.plan.wake_at is None
        for name, served in self.agent.items():
            if name not in self.disk:
                assert served.number is None, f"{name} was not unloaded"
            elif self.disk[name].number not in self.broken and name not in self.held:
                assert served.number == self.disk[name].number, f"{name} was not loaded"


Machine.TestCase.settings = settings(max_examples=scaled(300), stateful_step_count=40, deadline=None)
TestAnyOrder = Machine.TestCase


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 2 * SETTLE)), min_size=1, max_size=30))
def test_a_model_that_never_goes_for_the_settle_time_is_never_unloaded(steps: list[tuple[int, int]]) -> None:
    """Whatever looks see of one that is being renamed again and again."""
    told = Told({"m": at(1)})
    gone_at: int | None = None
    for number, time in steps:
        begun = told.look(time) if number == 0 else told.look(time, m=at(number))
        gone_at = None if number else told.now if gone_at is None else gone_at
        if unload("m") in begun:
            assert gone_at is not None
            assert told.now - gone_at >= SETTLE
            return
        for operation in begun:
            told.end(operation)
