"""Rollouts as a pure function: what follows from declarations, versions, verdicts, calls and time."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.support.machines import run_machine

from conch.core.errors import FailedPreconditionError, InvalidArgumentError
from conch.core.registry import Entry
from conch.core.route import Route
from conch.protocol.model_config_pb2 import ModelConfig
from conch_control.repository.layout import select_versions
from conch_rollout.guards import Result, Verdict
from conch_rollout.rollout_file import WHOLE, Declaration, parse_toml
from conch_rollout.rollout_plan import EXTENSION, RolloutPlan
from conch_rollout.rollout_state import (
    LIVE,
    RESTING,
    Action,
    Progress,
    Publish,
    PublishLabels,
    Refusal,
    RolloutCommand,
    Save,
    Select,
    State,
    Traffic,
    VersionSight,
)
from conch_rollout.split_places import Places, first_places, moved_places
from conch_rollout.state_file import SavedRollout, decoded, encoded

MINUTE = 60_000_000_000
PASS = Verdict(Result.PASS, "errors 0.0 %: pass")
FAIL = Verdict(Result.FAIL, "errors 4.1 %: fail", 1e-3)
SURE = Verdict(Result.FAIL, "errors 41 %: fail", 1e-9)
INCONCLUSIVE = Verdict(Result.INCONCLUSIVE, "3 requests, 200 needed: inconclusive")
STEPS = """
[labels]
stable = 7
[rollout]
steps = ["5% 10m", "50% 10m"]
keep = "15m"
[rollout.guard]
errors = 0.01
"""


@cache
def declared(text: str = STEPS) -> Declaration:
    return parse_toml(text, "rollout.toml")


class Driven:
    """A plan, a clock, and versions; what the plan has published, saved and selected."""

    def __init__(self, text: str = STEPS, progress: Progress | None = None, **versions: str) -> None:
        self.now = 1_000
        self.plan = RolloutPlan("m", declared(text), progress or Progress())
        self.traffic: Traffic | None = None
        self.labels: dict[str, int] = {}
        self.saved = self.plan.progress
        self.selection = Select()
        self.actions: list[Action] = []
        self.versions: dict[int, VersionSight] = {}
        self.do(self.plan.start(self.now))
        for version, state in versions.items():
            self.versions[int(version[1:])] = sight(state)
        if versions:
            self.look()

    def do(self, actions: list[Action]) -> list[Action]:
        for action in actions:
            if isinstance(action, Publish):
                self.traffic = action.traffic
            elif isinstance(action, PublishLabels):
                self.labels = dict(action.labels)
            elif isinstance(action, Save):
                self.saved = action.progress
            else:
                self.selection = action
        self.actions = actions
        return actions

    def look(self, **versions: str) -> list[Action]:
        for version, state in versions.items():
            if state:
                self.versions[int(version[1:])] = sight(state)
            else:
                del self.versions[int(version[1:])]
        return self.do(self.plan.take_states(self.versions, self.now))

    def wait(self, minutes: float) -> list[Action]:
        self.now += round(minutes * MINUTE)
        return self.do(self.plan.tick(self.now))

    def judge(self, verdict: Verdict) -> list[Action]:
        return self.do(self.plan.take_verdict(verdict, self.plan.window, self.now))

    def call(self, call: RolloutCommand, weight: int | None = None, again: bool = False) -> list[Action]:
        return self.do(self.plan.call(call, self.now, weight, again))

    def pass_step(self) -> None:
        self.judge(PASS)
        self.wait(10)

    @property
    def state(self) -> Any:
        return self.plan.progress.state

    @property
    def shares(self) -> Any:
        """Stable, candidate and weight."""
        assert self.traffic is not None
        return self.traffic.stable, self.traffic.candidate, self.traffic.weight

    @property
    def hold(self) -> Any:
        return self.selection.hold

    @property
    def out(self) -> Any:
        return self.selection.out


def sight(state: str) -> VersionSight:
    """A version: ``a`` has files a, ``a ready`` serves them; ``a failed``, ``a other``, ``a backs off``."""
    files, _, what = state.partition(" ")
    return VersionSight(
        files,
        serves=files if what in ("ready", "other", "backs off") else "",
        failure="no memory" if what == "failed" else "",
        since=hash(state) % 1000,
        backs_off=what == "backs off",
        differences=("input X is FP32",) if what == "other" else (),
    )


def stepping() -> Driven:
    driven = Driven(v7="a ready")
    driven.look(v8="b")
    driven.look(v8="b ready")
    assert (driven.state, driven.shares) == (State.STEP, (7, 8, 500))
    return driven


def baking() -> Driven:
    driven = stepping()
    driven.pass_step()
    driven.pass_step()
    assert (driven.state, driven.shares) == (State.BAKING, (8, None, 0))
    return driven


def kinds(actions: list[Action]) -> list[str]:
    return [type(action).__name__ for action in actions]


def test_a_rollout_from_a_new_directory_to_the_end() -> None:
    driven = Driven(v7="a ready")
    assert (driven.state, driven.traffic, driven.labels) == (State.IDLE, Traffic(7), {"stable": 7})
    driven.look(v8="b")
    assert (driven.state, driven.traffic) == (State.LOADING, Traffic(7))
    assert driven.selection == Select(frozenset({7, 8}), frozenset())
    driven.look(v8="b ready")
    assert (driven.state, driven.shares) == (State.STEP, (7, 8, 500))
    first = driven.traffic
    driven.pass_step()
    assert driven.shares == (7, 8, 5000)
    assert first is not None and driven.traffic is not None and driven.traffic.salt == first.salt
    driven.judge(PASS)
    # A promotion is saved before it is published; the old version stays for a while.
    assert kinds(driven.wait(10)) == ["Save", "Publish", "PublishLabels"]
    assert (driven.state, driven.shares, driven.labels) == (State.BAKING, (8, None, 0), {"stable": 8})
    assert driven.selection == Select(frozenset({7, 8}), frozenset())
    driven.judge(PASS)
    assert kinds(driven.wait(15)) == ["Save", "Select"]
    assert (driven.state, driven.hold) == (State.DONE, {8})


def test_steps_need_both_their_duration_and_a_passing_verdict() -> None:
    driven = stepping()
    assert driven.plan.wake_at(driven.now) == driven.now + 10 * MINUTE
    driven.wait(11)
    assert driven.shares == (7, 8, 500)
    driven.judge(PASS)
    assert driven.shares == (7, 8, 5000)
    driven.judge(PASS)
    assert driven.shares == (7, 8, 5000)
    driven.plan.take_verdict(FAIL, driven.plan.window - 1, driven.now)
    driven.wait(10)
    assert driven.state is State.BAKING  # a verdict on the former window does not count


@pytest.mark.parametrize(
    ("choice", "state"), [("pause", State.PAUSED), ("abort", State.ABORTING), ("advance", State.STEP)]
)
def test_a_step_without_a_verdict_is_extended_and_then_ends_as_declared(choice: str, state: State) -> None:
    driven = Driven(STEPS.replace("keep", f'on_inconclusive = "{choice}"\nkeep'), v7="a ready", v8="b ready")
    driven.judge(INCONCLUSIVE)
    driven.wait(10 * EXTENSION - 1)
    assert driven.shares == (7, 8, 500)
    driven.wait(1)
    assert driven.state is state
    assert driven.plan.progress.reason == INCONCLUSIVE.sentence
    assert driven.shares == {"pause": (7, 8, 500), "abort": (7, None, 0), "advance": (7, 8, 5000)}[choice]


def test_a_failing_candidate_leaves_at_once_and_stays_out() -> None:
    driven = stepping()
    driven.judge(FAIL)
    driven.judge(PASS)
    driven.judge(FAIL)
    assert driven.state is State.STEP  # not in a row
    assert kinds(driven.judge(FAIL)) == ["Publish", "Save", "Select"]
    assert (driven.state, driven.traffic) == (State.ABORTING, Traffic(7))
    assert driven.selection == Select(frozenset({7}), frozenset({8}))
    driven.look(v8="b")
    assert (driven.state, driven.plan.progress.reason) == (State.ABORTED, FAIL.sentence)
    driven.look(v8="b ready")  # whatever loads it
    assert (driven.state, driven.traffic) == (State.ABORTED, Traffic(7))
    with pytest.raises(
        FailedPreconditionError, match=r"holds version 8 out: errors 4\.1 %: fail; change its"
    ):
        driven.call(RolloutCommand.START)
    driven.look(v8="c")
    assert (driven.state, driven.plan.progress.number) == (State.LOADING, 2)


def test_one_sure_verdict_aborts() -> None:
    driven = stepping()
    driven.judge(SURE)
    assert driven.state is State.ABORTING


def test_of_many_refusals_the_newest_stay() -> None:
    refused = tuple(Refusal(version, "a") for version in range(100, 200))
    driven = Driven(progress=Progress(refused=refused), v7="a ready", v200="b")
    driven.look(v200="b ready", **{f"v{each.version}": "a" for each in refused})
    assert driven.state is State.STEP
    driven.judge(SURE)
    assert [each.version for each in driven.plan.progress.refused] == [*range(101, 201)]


def test_start_again_retries_a_refused_candidate() -> None:
    driven = stepping()
    first = driven.traffic
    driven.call(RolloutCommand.ABORT)
    driven.look(v8="b")
    driven.call(RolloutCommand.START, again=True)
    driven.look(v8="b ready")
    assert driven.shares == (7, 8, 500)
    assert driven.traffic is not None and first is not None and driven.traffic.salt != first.salt


@pytest.mark.parametrize("bad", ["b", "b failed", "b other", "b backs off", ""])
def test_a_candidate_in_trouble_leaves(bad: str) -> None:
    driven = stepping()
    driven.call(RolloutCommand.PAUSE)
    assert kinds(driven.look(v8=bad))[0] == "Publish"
    assert driven.traffic == Traffic(7)
    assert driven.state in (State.ABORTING, State.ABORTED)
    assert driven.plan.progress.refusal(8) is not None


def test_a_candidate_that_does_not_fit_gets_nothing() -> None:
    for bad, reason in (("b failed", "no memory"), ("b other", "its interface differs: input X is FP32")):
        driven = Driven(v7="a ready", v8="b")
        driven.look(v8=bad)
        assert (driven.state, driven.plan.progress.reason) == (State.FAILED, reason)
        assert (driven.traffic, driven.out) == (Traffic(7), {8})
        driven.look(v8="c ready")
        assert driven.shares == (7, 8, 500)


def test_changed_files_and_newer_candidates_begin_again() -> None:
    driven = stepping()
    driven.pass_step()
    driven.look(v8="c")
    assert (driven.state, driven.traffic) == (State.LOADING, Traffic(7))
    driven.look(v8="c ready")
    assert (driven.shares, driven.plan.progress.number) == ((7, 8, 500), 2)
    driven.look(v9="d")
    assert (driven.state, driven.traffic, driven.selection) == (
        State.LOADING,
        Traffic(7),
        Select(frozenset({7, 9}), frozenset({8})),
    )
    driven.look(v9="")
    driven.look(v8="c ready")
    assert driven.shares == (7, 8, 500)


def test_another_copy_of_stable_begins_a_window() -> None:
    driven = stepping()
    driven.judge(PASS)
    window = driven.plan.window
    driven.look(v7="z ready")
    assert (driven.plan.window, driven.plan.verdict) == (window + 1, None)
    driven.wait(10)
    assert driven.shares == (7, 8, 500)


def test_what_calls_do() -> None:
    driven = stepping()
    driven.call(RolloutCommand.PAUSE)
    driven.judge(PASS)
    driven.wait(60)
    assert (driven.state, driven.shares) == (State.PAUSED, (7, 8, 500))
    driven.call(RolloutCommand.RESUME)
    driven.wait(10)
    assert driven.shares == (7, 8, 500)  # its window is a new one
    driven.call(RolloutCommand.SET_WEIGHT, 3000)
    assert (driven.state, driven.shares) == (State.PAUSED, (7, 8, 3000))
    driven.call(RolloutCommand.ADVANCE)
    assert (driven.state, driven.shares) == (State.STEP, (7, 8, 5000))
    driven.call(RolloutCommand.PROMOTE)
    assert (driven.state, driven.shares) == (State.BAKING, (8, None, 0))
    for weight in (-1, WHOLE + 1, None):
        with pytest.raises(InvalidArgumentError, match="weight: must be from 0 to 10000"):
            stepping().call(RolloutCommand.SET_WEIGHT, weight)


def test_calls_that_the_state_does_not_allow_say_why() -> None:
    driven = Driven(v7="a ready")
    for call, text in {
        RolloutCommand.START: "the rollout of 'm' has no candidate: no version is above version 7",
        RolloutCommand.ABORT: "the rollout of 'm' is IDLE; there is nothing to abort",
        RolloutCommand.PAUSE: "the rollout of 'm' is IDLE; pause needs one at a step",
        RolloutCommand.ROLLBACK: "the rollout of 'm' has no previous version to go back to",
    }.items():
        with pytest.raises(FailedPreconditionError) as raised:
            driven.call(call)
        assert raised.value.message == text
    with pytest.raises(FailedPreconditionError, match="is STEP; abort it instead"):
        stepping().call(RolloutCommand.ROLLBACK)
    with pytest.raises(FailedPreconditionError, match=r"is declared in rollout\.toml; change it there"):
        driven.plan.declare(Declaration(), driven.now, by_call=True)


@pytest.mark.parametrize("call", [RolloutCommand.ABORT, RolloutCommand.ROLLBACK])
def test_while_the_old_version_is_kept_going_back_is_instant(call: RolloutCommand) -> None:
    driven = baking()
    assert kinds(driven.call(call))[:2] == ["Publish", "PublishLabels"]
    assert (driven.state, driven.traffic, driven.labels) == (State.ABORTING, Traffic(7), {"stable": 7})
    assert driven.selection == Select(frozenset({7}), frozenset({8}))
    driven.look(v8="b")
    assert driven.state is State.ABORTED


def test_later_it_is_loaded_beside_first() -> None:
    driven = baking()
    driven.wait(15)
    driven.look(v7="a")
    assert driven.state is State.DONE
    driven.call(RolloutCommand.ROLLBACK)
    assert (driven.state, driven.traffic) == (State.ROLLING_BACK, Traffic(8))
    assert driven.hold == {7, 8}
    driven.look(v7="a ready")
    assert (driven.state, driven.traffic, driven.out) == (State.ABORTING, Traffic(7), {8})
    restored = Driven(progress=driven.saved, v7="a ready", v8="b ready")
    assert (restored.traffic, restored.out) == (Traffic(7), {8})  # or the next look took it again


@pytest.mark.parametrize("trouble", ["b", "b backs off", ""])
def test_trouble_while_baking_leads_back(trouble: str) -> None:
    driven = baking()
    driven.look(v8=trouble)
    assert (driven.traffic, driven.plan.progress.stable) == (Traffic(7), 7)
    again = baking()
    again.judge(FAIL)
    again.judge(FAIL)
    assert (again.state, again.traffic) == (State.ABORTING, Traffic(7))


def test_without_a_declaration_nothing_is_published() -> None:
    driven = Driven("", v7="a ready", v8="b ready")
    assert (driven.traffic, driven.labels, driven.selection, driven.saved) == (None, {}, Select(), Progress())


@pytest.mark.parametrize(
    ("policy", "hold", "out", "chosen"),
    [
        ("latest { num_versions: 1 }", (), (), [9]),
        ("latest { num_versions: 1 }", (7,), (9,), [7, 8]),
        ("all {}", (3,), (9,), [7, 8]),
        ("specific { versions: 9 }", (7,), (9,), [7]),
    ],
)
def test_held_versions_are_loaded_beside_those_of_the_policy(
    policy: str, hold: tuple[int, ...], out: tuple[int, ...], chosen: list[int]
) -> None:
    config = text_format.Parse(f"version_policy {{ {policy} }}", ModelConfig())
    select = Select(frozenset(hold), frozenset(out))
    assert select.versions((7, 8, 9), lambda versions: select_versions(config, versions)) == chosen


def test_without_a_held_version_the_policys_error_stays() -> None:
    config = text_format.Parse("version_policy { specific { versions: 9 } }", ModelConfig())
    with pytest.raises(InvalidArgumentError, match="at least one version must be available"):
        Select(out=frozenset({9})).versions((7, 9), lambda versions: select_versions(config, versions))


def test_labels_alone_route_and_move_when_their_version_is_ready() -> None:
    driven = Driven("[labels]\nstable = 7\nbest = 8", v7="a ready", v8="b")
    assert (driven.traffic, driven.hold) == (Traffic(7), {7, 8})
    assert driven.labels == {"stable": 7, "best": 8}  # requests for the latter fail until it is ready
    driven.do(driven.plan.declare(declared("[labels]\nstable = 8\nbest = 7"), driven.now))
    assert (driven.traffic, driven.labels) == (Traffic(7), {"stable": 7, "best": 7})
    driven.look(v8="b ready")
    assert (driven.traffic, driven.labels) == (Traffic(8), {"stable": 8, "best": 7})
    driven.do(driven.plan.declare(Declaration(), driven.now))
    assert (driven.traffic, driven.labels, driven.selection) == (None, {}, Select())


def test_without_a_label_the_version_that_serves_first_is_stable() -> None:
    driven = Driven("[rollout]", v7="a ready", v6="a ready")
    assert driven.traffic == Traffic(7)
    driven.look(v8="b")
    assert driven.state is State.LOADING


def test_a_split_stays_until_it_is_changed() -> None:
    text = "[rollout]\nsplit = {7 = 90, 8 = 10}"
    driven = Driven(text, v7="a ready", v8="b")
    assert (driven.traffic, driven.hold) == (Traffic(7), {7, 8})
    driven.look(v8="b ready")
    before = driven.traffic
    assert before is not None and before.places == ((8, 1000), (7, 9000))
    driven.do(driven.plan.declare(declared(text.replace("90", "75").replace("10", "25")), driven.now))
    assert driven.traffic == replace(before, places=((8, 2500), (7, 7500)))  # the same users, and more
    with pytest.raises(
        FailedPreconditionError, match=r"has a fixed split; change rollout\.split in rollout\.toml"
    ):
        driven.call(RolloutCommand.PAUSE)
    assert driven.look(v7="a") == [Publish(None), PublishLabels({})]
    driven.do(driven.plan.declare(declared("[rollout]\nsplit = {8 = 90, 9 = 10}"), driven.now))
    assert (driven.traffic, driven.labels) == (Traffic(8), {"stable": 8})


def test_a_split_of_three_keeps_all_users_that_it_can() -> None:
    text = "[rollout]\nsplit = {{7 = {}, 8 = {}, 9 = {}}}"
    driven = Driven(text.format(50, 30, 20), v7="a ready", v8="b", v9="c ready")
    first = driven.traffic
    assert first is not None and driven.hold == {7, 8, 9}
    assert first.places == ((7, 3000), (9, 2000), (7, 5000)), (
        "stable has the places of those that don't serve"
    )
    assert driven.plan.waiting == [8]
    driven.look(v8="b ready")
    assert driven.traffic == replace(first, candidate=8, places=((8, 3000), (9, 2000), (7, 5000)))
    driven.do(driven.plan.declare(declared(text.format(40, 35, 25)), driven.now))
    moved = ((8, 3000), (9, 2000), (8, 500), (9, 500), (7, 4000))
    assert driven.traffic == replace(first, candidate=8, places=moved)
    assert Driven(
        text.format(40, 35, 25), driven.saved, v7="a ready", v8="b ready", v9="c ready"
    ).traffic == (driven.traffic)


def test_a_call_changes_a_split_of_versions_that_exist() -> None:
    def split(text: str) -> list[Action]:
        return driven.do(driven.plan.start_by_call(declared(f"[rollout]\nsplit = {text}"), driven.now))

    driven = Driven("", v7="a ready", v8="b ready")
    driven.plan.from_file = False
    with pytest.raises(FailedPreconditionError, match="can't split: version 9 is not in the repository"):
        split("{7 = 50, 9 = 50}")
    split("{7 = 90, 8 = 10}")
    first = driven.plan.progress
    split("{7 = 70, 8 = 30}")
    assert driven.plan.progress == replace(
        first, weight=3000, places=((8, 3000), (7, 7000)), declared=driven.plan.progress.declared
    )
    with pytest.raises(FailedPreconditionError, match="is SPLIT already; delete it first"):
        driven.plan.start_by_call(declared("[rollout]\ncandidate = 8"), driven.now)


weights = st.lists(st.integers(0, WHOLE), min_size=1, max_size=3)


@given(st.integers(1, 3), st.lists(weights, min_size=2, max_size=4))
def test_a_growing_share_of_a_split_keeps_its_places(further: int, cuts: list[list[int]]) -> None:
    """Any number of changes, each from the places before: growing versions keep theirs, others only lose."""
    places: Places = ()
    for each in cuts:
        bounds = sorted([0, *(each * further)[:further], WHOLE])
        split = tuple((7 + i, high - low) for i, (low, high) in enumerate(pairwise(bounds)))
        before, places = places, moved_places(places, split) if places else first_places(split)
        assert {version: sum(n for v, n in places if v == version) for version, _ in places} == dict(split)
        for version, _ in split if before else ():
            old, new = (owned(found, version) for found in (before, places))
            assert old <= new or new <= old


def owned(places: Places, version: int) -> set[int]:
    """The places of a version."""
    owners = [each for each, count in places for _ in range(count)]
    return {place for place, owner in enumerate(owners) if owner == version}


def test_a_version_stays_held_out_when_its_rollout_is_deleted() -> None:
    driven = baking()
    driven.call(RolloutCommand.ROLLBACK)
    driven.look(v8="b")
    assert (driven.state, driven.out) == (State.ABORTED, {8})
    driven.do(driven.plan.declare(Declaration(), driven.now))
    assert (driven.state, driven.out, driven.hold, driven.traffic) == (State.IDLE, {8}, set(), None)
    driven.look(v8="c")
    assert (driven.plan.progress, driven.selection) == (Progress(number=1), Select())


def test_models_of_a_group_give_one_key_one_side() -> None:
    text = '[labels]\nstable = 7\n[rollout]\ngroup = "ocr"'
    numbers = iter((4, 4))
    salts = set()
    for model in ("detect", "read"):
        plan = RolloutPlan(model, declared(text), next_number=lambda group, last: next(numbers))
        plan.start(0)
        actions = plan.take_states({7: sight("a ready"), 8: sight("b ready")}, 0)
        salts |= {action.traffic.salt for action in actions if isinstance(action, Publish) and action.traffic}
    assert len(salts) == 1


OTHERS = {
    "steps": STEPS.replace('"5% 10m"', '"6% 10m"'),
    "candidate": STEPS.replace("[rollout]", "[rollout]\ncandidate = 8"),
    "split": "[labels]\nstable = 7\n[rollout]\nsplit = {7 = 90, 8 = 10}",
    "stable of a split": "[rollout]\nsplit = {8 = 90, 9 = 10}",
    "label": STEPS.replace("stable = 7", "stable = 8"),
    "labels alone": "[labels]\nstable = 8",
}


@pytest.mark.parametrize("how", ["abort", "rollback", "verdict"])
@pytest.mark.parametrize("text", OTHERS.values(), ids=OTHERS)
def test_what_is_held_out_stays_out_whatever_is_declared(how: str, text: str) -> None:
    driven = baking() if how == "rollback" else stepping()
    if how == "verdict":
        driven.judge(SURE)
    else:
        driven.call(RolloutCommand(how))
    driven.look(v8="b")
    reason = driven.plan.progress.reason
    assert driven.state is State.ABORTED and reason
    driven.do(driven.plan.declare(declared(text), driven.now))
    driven.plan.notes.clear()
    for again in (driven, Driven(text, driven.saved, v7="a ready", v8="b")):
        again.look(v8="b ready")  # whatever loads it
        assert (again.traffic, again.out) == (Traffic(7), {8})
        with pytest.raises(FailedPreconditionError) as raised:
            again.call(RolloutCommand.START)
        why = f": {reason}" if "[rollout]" in text else ""
        assert raised.value.message == (
            f"the rollout of 'm' holds version 8 out{why}; change its files, or start it with 'again'"
        )
        assert again.plan.held_out == raised.value.message.removeprefix("the rollout of 'm' ")
    driven.call(RolloutCommand.START, again=True)
    assert (driven.plan.held_out, 8 in driven.hold) == ("", True)
    for _ in range(2):
        driven.look(v8="b ready")
    traffic = driven.traffic
    assert traffic is not None
    assert 8 in (traffic.stable, traffic.candidate, *(version for version, _ in traffic.places))


def test_the_log_tells_that_a_declaration_waits_for_a_version_that_is_held_out() -> None:
    driven = stepping()
    driven.call(RolloutCommand.ABORT)
    driven.look(v8="b")
    for text, told in ((OTHERS["steps"], True), (OTHERS["steps"], False), (OTHERS["label"], True)):
        driven.plan.notes.clear()
        driven.do(driven.plan.declare(declared(text), driven.now))
        warnings = [note.text for note in driven.plan.notes if note.level == logging.WARNING]
        assert warnings == told * [
            "the rollout of 'm' holds version 8 out: aborted by a call; change its files, or start it with "
            "'again'"
        ]


def test_a_rollback_after_a_split_leads_to_the_version_that_was_stable_before() -> None:
    driven = baking()
    driven.do(driven.plan.declare(declared("[rollout]\nsplit = {7 = 90, 8 = 10}"), driven.now))
    driven.do(driven.plan.declare(declared("[labels]\nstable = 7"), driven.now))
    driven.call(RolloutCommand.ROLLBACK)
    assert driven.traffic == Traffic(8)
    assert driven.labels == {"stable": 8}


def test_calls_bring_nothing_back_that_is_held_out() -> None:
    driven, back = baking(), '[rollout]\ncandidate = 7\nsteps = ["5% 10m"]'
    driven.do(driven.plan.declare(declared(back), driven.now))
    driven.wait(15)
    assert driven.shares == (8, 7, 500)
    driven.call(RolloutCommand.ABORT)
    driven.look(v7="a")
    with pytest.raises(FailedPreconditionError, match="holds version 7 out: aborted by a call; change its"):
        driven.call(RolloutCommand.ROLLBACK)
    driven.plan.from_file = False
    with pytest.raises(FailedPreconditionError, match="holds version 7 out: aborted by a call; change its"):
        driven.plan.declare(Declaration({"stable": 7}), driven.now, by_call=True)
    for text in ("split = {8 = 90, 7 = 10}", "candidate = 7"):
        declaration = declared(f"[rollout]\n{text}")
        with pytest.raises(FailedPreconditionError, match="holds version 7 out"):
            driven.plan.start_by_call(declaration, driven.now)
        again = Driven(back, driven.saved, v7="a ready", v8="b ready")
        again.plan.from_file = False
        again.do(again.plan.start_by_call(declaration, again.now, again=True))
        assert again.state in (State.SPLIT, State.STEP)


def test_a_changed_declaration_begins_again() -> None:
    other = declared(STEPS.replace("15m", "16m"))
    driven = stepping()
    driven.call(RolloutCommand.PAUSE)
    number = driven.plan.progress.number
    driven.do(driven.plan.declare(declared(STEPS + "\n# a comment"), driven.now))
    assert driven.state is State.PAUSED
    driven.do(driven.plan.declare(other, driven.now))
    assert (driven.state, driven.plan.progress.number) == (State.STEP, number + 1)


def test_a_restart_begins_the_step_again_at_its_weight() -> None:
    driven = stepping()
    driven.pass_step()
    driven.wait(9)
    restored = Driven(progress=driven.saved)
    assert restored.selection == Select(
        frozenset({7}), frozenset({8})
    )  # stable first, so that it has the route
    restored.look(v7="a", v8="b")
    assert (restored.state, restored.traffic) == (State.STEP, None)
    restored.look(v7="a ready")
    assert restored.traffic == Traffic(7)
    with pytest.raises(FailedPreconditionError, match="waits for version 8 and stable to be ready"):
        restored.call(RolloutCommand.PROMOTE)
    restored.look(v8="b ready")
    assert restored.traffic == driven.traffic
    restored.judge(PASS)
    states = []
    for minutes in (9, 1):
        restored.wait(minutes)
        states.append(restored.state)
    assert states == [State.STEP, State.BAKING]


def test_progress_of_versions_that_are_gone_is_dropped_with_a_warning() -> None:
    driven = stepping()
    no_label = STEPS.replace("[labels]\nstable = 7", "")
    saved = replace(driven.saved, declared_stable=None)
    restored = Driven(no_label, progress=saved, v8="b ready", v6="y ready")
    warnings = [note.text for note in restored.plan.notes if note.level >= logging.WARNING]
    assert warnings == [
        "version 7 of 'm', its stable version, no longer exists: the progress of its rollout is dropped"
    ]
    assert restored.traffic == Traffic(8)


def test_a_load_by_others_ends_the_rollout() -> None:
    driven = stepping()
    driven.do(driven.plan.end_rollout("version 8 was loaded with another config", driven.now))
    assert (driven.state, driven.traffic) == (State.ABORTING, Traffic(7))
    assert driven.plan.progress.reason == "version 8 was loaded with another config"


def test_shadow_steps_mirror_without_weight() -> None:
    text = STEPS.replace('"5% 10m"', '"shadow 12.5% 10m"')
    driven = Driven(text, v7="a ready", v8="b ready")
    assert driven.traffic is not None
    assert (driven.shares, driven.traffic.shadow_percent) == ((7, 8, 0), 12.5)
    driven.pass_step()
    assert driven.traffic is not None
    assert (driven.shares, driven.traffic.shadow_percent) == ((7, 8, 5000), 0)


DECLARATIONS = (
    STEPS,
    STEPS.replace("15m", "0s"),
    STEPS.replace("keep", 'on_inconclusive = "abort"\nkeep'),
    STEPS.replace("stable = 7", "stable = 8"),
    STEPS.replace("stable = 7", ""),
    STEPS.replace("[rollout]", "[rollout]\ncandidate = 9"),
    "[rollout]\nsplit = {7 = 90, 8 = 10}",
    "[rollout]\nsplit = {7 = 50, 8 = 30, 9 = 20}",
    "[labels]\nstable = 8\nbest = 9",
    "",
)
STATES = (*["a ready"] * 5, "a", "b", "b ready", "a failed", "b other", "a backs off")


@dataclass
class Earned:
    """Passing verdicts on the windows of one rollout, and the weight that an operator asked for."""

    number: int = 0
    windows: frozenset[int] = frozenset()
    called: int = 0


class AnyOrder(RuleBasedStateMachine):
    """Any events in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.text = STEPS
        self.driven = Driven(STEPS, v7="a ready", v8="a ready")
        self.earned = Earned(number=1)
        self.before: Progress = self.driven.plan.progress
        self.held_out: dict[int, str] = {}

    def check(self) -> None:
        """Invariants of the actions of one event."""
        driven, progress = self.driven, self.driven.plan.progress
        if progress.number != self.earned.number:
            self.earned = Earned(progress.number)
        steps = self.driven.plan.declaration.rollout.steps if self.driven.plan.declaration.rollout else ()
        aborted = progress.state in (State.ABORTING, State.ABORTED) and self.before.state in (
            *LIVE,
            State.BAKING,
        )
        if (
            aborted and progress.number == self.before.number
        ):  # else it is a further one, which has also begun
            back = self.before.previous if self.before.state is State.BAKING else self.before.stable
            assert progress.stable == back
            assert self.driven.traffic in (None, Traffic(back or 0))
            published = [number for number, each in enumerate(driven.actions) if isinstance(each, Publish)]
            assert published in ([], [0])
        traffic = driven.traffic
        if traffic is not None and traffic.weight and progress.state is not State.SPLIT:
            passed = len(self.earned.windows)
            allowed = steps[min(passed, len(steps) - 1)].weight
            assert traffic.weight <= max(allowed, self.earned.called), "more than it has earned"
        if progress.state is State.BAKING and self.before.state in LIVE:
            assert len(self.earned.windows) >= len(steps) or self.earned.called == WHOLE
        self.held_out |= {each.version: each.digest for each in progress.refused}
        for version, digest in list(self.held_out.items()):
            if version in driven.versions and driven.versions[version].files not in ("", digest):
                del self.held_out[version]
        self.before = progress

    @rule(version=st.sampled_from(["v7", "v8", "v9"]), state=st.sampled_from(STATES))
    def look(self, version: str, state: str) -> None:
        self.driven.look(**{version: state})
        self.check()

    @rule(version=st.sampled_from([7, 8, 9]), really=st.integers(0, 3))
    def remove(self, version: int, really: int) -> None:
        if version in self.driven.versions and not really:
            self.driven.look(**{f"v{version}": ""})
        self.check()

    @rule(steps=st.integers(0, 3))
    def load_what_is_selected(self, steps: int) -> None:
        """The server does what the plan says, and some steps pass."""
        for _ in range(steps + 1):
            selection = self.driven.selection
            for version, each in list(self.driven.versions.items()):
                if version in selection.hold:
                    self.driven.versions[version] = sight(f"{each.files} ready")
                elif version in selection.out:
                    self.driven.versions[version] = sight(each.files)
            self.driven.look()
            self.check()
        for _ in range(steps):
            self.judge(PASS, False, 10)

    @rule(text=st.sampled_from(DECLARATIONS), same=st.integers(0, 3))
    def declare(self, text: str, same: int) -> None:
        self.text = self.text if same else text
        self.driven.do(self.driven.plan.declare(declared(self.text), self.driven.now))
        self.check()

    @rule(
        verdict=st.sampled_from([PASS, FAIL, SURE, INCONCLUSIVE, INCONCLUSIVE, None]),
        stale=st.booleans(),
        minutes=st.sampled_from([0, 10, 31]),
    )
    def judge(self, verdict: Verdict | None, stale: bool, minutes: int) -> None:
        plan = self.driven.plan
        if verdict is not None:
            if verdict is PASS and not stale and plan.progress.state is State.STEP:
                self.earned.windows |= {plan.progress.step}
            self.driven.do(plan.take_verdict(verdict, plan.window - stale, self.driven.now))
            self.check()
        self.driven.wait(minutes)
        self.check()

    @rule(call=st.sampled_from(list(RolloutCommand)), weight=st.integers(0, WHOLE), again=st.booleans())
    def call(self, call: RolloutCommand, weight: int, again: bool) -> None:
        try:
            self.driven.call(call, weight, again)
        except FailedPreconditionError:
            return
        if call is RolloutCommand.SET_WEIGHT:
            self.earned.called = weight
        elif call in (RolloutCommand.ADVANCE, RolloutCommand.PROMOTE):
            self.earned.called = WHOLE
        elif call is RolloutCommand.START and again:
            self.held_out.clear()
        self.check()

    @rule()
    def end(self) -> None:
        self.driven.do(self.driven.plan.end_rollout("loaded with another config", self.driven.now))
        self.check()

    @rule()
    def restart(self) -> None:
        """A server that stops here goes on as it was, from what it has saved."""
        before = self.driven
        _, saved = decoded(json.loads(json.dumps(encoded("m", SavedRollout(before.saved)))))
        self.driven = Driven(self.text, saved.progress)
        assert self.driven.plan.progress == before.plan.progress
        assert self.driven.hold | self.driven.out >= before.selection.hold
        self.driven.versions = before.versions
        self.driven.now = before.now
        self.driven.look()
        assert self.driven.traffic == before.traffic or before.plan.progress != self.driven.plan.progress
        self.check()

    @invariant()
    def saved(self) -> None:
        assert self.driven.saved == self.driven.plan.progress

    @invariant()
    def published_versions_are_ready(self) -> None:
        versions, traffic = self.driven.versions, self.driven.traffic
        named = []
        if traffic is not None:
            named = [traffic.stable] + ([traffic.candidate] if traffic.candidate else [])
            named += [version for version, _ in traffic.places]
            assert traffic.candidate or traffic.places or (traffic.weight, traffic.salt) == (0, b"")
        assert all(versions[version].serves for version in named)

    @invariant()
    def what_is_held_out_gets_no_requests(self) -> None:
        traffic = self.driven.traffic
        if traffic is not None:
            named = {traffic.stable, traffic.candidate, *(version for version, _ in traffic.places)}
            assert not named & self.held_out.keys()

    @invariant()
    def an_empty_version_is_ready_while_any_is(self) -> None:
        traffic = self.driven.traffic
        ready: Any = {version: each for version, each in self.driven.versions.items() if each.serves}
        route = None if traffic is None else Route(traffic.stable)
        assert Entry(ready, labels=self.driven.labels, route=route).default is not None or not ready

    @invariant()
    def what_gets_traffic_is_held(self) -> None:
        traffic, selection = self.driven.traffic, self.driven.selection
        if traffic is not None:
            assert {traffic.stable, traffic.candidate} - {None} <= selection.hold
        assert not selection.hold & selection.out

    @precondition(lambda self: self.driven.plan.progress.state in RESTING)
    @invariant()
    def rest_is_stable_alone(self) -> None:
        assert self.driven.traffic is None or self.driven.traffic.candidate is None


TestAnyOrder, TestAnyOrderLong = run_machine(AnyOrder, examples=150)
