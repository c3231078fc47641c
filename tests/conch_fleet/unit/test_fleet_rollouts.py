"""Rollouts of a fleet as pure functions: what servers publish in any order of events, leases, restarts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.support.machines import run_machine

from conch.core.errors import FailedPreconditionError
from conch.core.rollouts import RolloutReport
from conch_control.managed_rollouts import Counts, ManagedReport, ManagedVersion
from conch_fleet.fleet_view import FleetView, ServerAnswer, resumed
from conch_rollout.guards import Result, Verdict
from conch_rollout.managed_plan import ManagedPlan
from conch_rollout.rollout_file import parse_toml
from conch_rollout.rollout_plan import RolloutPlan
from conch_rollout.rollout_state import (
    Action,
    Progress,
    Publish,
    RolloutCommand,
    Save,
    Select,
    State,
    Traffic,
    VersionSight,
)
from conch_rollout.state_file import SavedRollout

MINUTE = 60_000_000_000
LEASE = MINUTE
SERVERS = ("a", "b", "c")
DECLARED = parse_toml(
    """
    [rollout]
    steps = ["10% 1m", "50% 1m"]
    keep = "1m"
    [rollout.guard]
    errors = 0.01
    """,
    "rollout.toml",
)
PASS = Verdict(Result.PASS, "as good: pass")
FAIL = Verdict(Result.FAIL, "all fail: fail", 1e-9)
TESTED = (State.STEP, State.PAUSED)


@dataclass
class Server:
    """A server that loads what is selected when the test says so; `loaded` has the files of each version."""

    plan: ManagedPlan = field(default_factory=lambda: ManagedPlan("m", parse_toml("", "none")))
    up: bool = True
    loaded: dict[int, str] = field(default_factory=dict)
    failed: dict[int, int] = field(default_factory=dict)
    selection: Select = field(default_factory=Select)
    traffic: Traffic | None = None
    heard: int = 0

    def do(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Publish):
                self.traffic = action.traffic
            elif isinstance(action, Select):
                self.selection = action

    def sights(self, files: dict[int, str]) -> dict[int, VersionSight]:
        compared = self.plan.progress.stable in self.loaded
        return {
            version: VersionSight(
                f"local {name}",
                f"local {self.loaded[version]}" if version in self.loaded else "",
                "no memory" if version in self.failed and version not in self.loaded else "",
                float(self.failed.get(version, 0)),
                differences=() if version in self.loaded and compared else None,
            )
            for version, name in files.items()
        }

    def look(self, files: dict[int, str], now: int) -> None:
        self.do(self.plan.take_states(self.sights(files), now))

    def load(self, files: dict[int, str], now: int, broken: bool) -> None:
        """Loads and unloads what is selected; a broken one can't load the newest version."""
        chosen = self.selection.versions(list(files), lambda available: [max(available)] if available else [])
        for version in [each for each in self.loaded if each not in chosen]:
            del self.loaded[version]
        for version in chosen:
            if (
                broken
                and version == max(files)
                and version > 1
                and self.loaded.get(version) != files[version]
            ):
                self.failed[version] = now
                self.loaded.pop(version, None)
            else:
                self.loaded[version] = files[version]
                self.failed.pop(version, None)
        self.look(files, now)


class Fleet:
    """A plan, its view, and servers with which it speaks when the test says so."""

    def __init__(self) -> None:
        self.now = MINUTE
        self.files = {1: "1"}
        self.servers = {name: Server() for name in SERVERS}
        self.view = FleetView(SERVERS)
        self.plan = RolloutPlan("m", DECLARED)
        self.saved = Progress()
        self.told: dict[int, int] = {}  # the greatest weight of each rollout
        self.do(self.plan.start(self.now))
        self.read()

    def do(self, actions: list[Action]) -> None:
        self.saved = next((each.progress for each in actions if isinstance(each, Save)), self.saved)
        progress = self.plan.progress
        self.told[progress.number] = max(self.told.get(progress.number, 0), progress.weight)

    def read(self) -> None:
        self.view.files, self.view.digests = str(sorted(self.files.items())), dict(self.files)
        self.look()

    def look(self) -> None:
        sights = self.view.sights(self.plan.progress)
        if sights is not None:
            self.do(self.plan.take_states(sights, self.now))

    def tell(self, name: str) -> None:
        server = self.servers[name]
        if not server.up:
            self.view.lost(name)
        else:
            progress = self.view.told(name, self.plan.progress)
            server.heard = self.now
            server.do(server.plan.manage("control", self.plan.declaration, progress, LEASE, self.now))
            server.look(self.files, self.now)
            versions = tuple(
                ManagedVersion(
                    version,
                    bool(each.serves),
                    each.serves == each.files,
                    each.failure,
                    each.since,
                    each.differences,
                )
                for version, each in server.sights(self.files).items()
            )
            report = RolloutReport("m", "fleet", server.plan.progress.number, "")
            answer = ServerAnswer.of(ManagedReport(report, server.plan.alarm, versions), self.view.files)
            self.view.answered(name, answer)
        self.look()

    def load(self, name: str, broken: bool = False) -> None:
        if self.servers[name].up:
            self.servers[name].load(self.files, self.now, broken)

    def settle(self) -> None:
        """All servers hear and do what follows, without passing time."""
        before: object = None
        while (now := self.seen()) != before:
            before = now
            for name in SERVERS:
                self.tell(name)
                self.load(name)

    def seen(self) -> list[object]:
        """State that changes while the fleet settles."""
        servers = self.servers.values()
        plans = [(each.plan.progress, each.plan.alarm) for each in servers]
        return [
            self.plan.progress,
            plans,
            [(each.traffic, each.selection, {**each.loaded}) for each in servers],
        ]

    def pass_step(self) -> None:
        self.do(self.plan.take_verdict(PASS, self.plan.window, self.now))
        self.now += MINUTE
        self.do(self.plan.tick(self.now))

    def restart(self, keeps_state: bool) -> None:
        """The manager ends and begins anew, from its file or from the rollouts of the servers."""
        shown = [
            SavedRollout(server.plan.given)
            for server in self.servers.values()
            if server.up and server.heard  # others know of no manager
        ]
        found = resumed(SavedRollout(self.saved) if keeps_state else None, shown)
        self.saved = found.progress if found is not None else Progress()  # as `RolloutLoop.adopt` does
        self.plan = RolloutPlan("m", DECLARED, self.saved)
        self.view = FleetView(SERVERS)
        self.do(self.plan.start(self.now))
        self.read()


class AnyOrder(RuleBasedStateMachine):
    """Servers come and go, loads end and fail, guards decide, operators call, the manager restarts."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet()
        self.fleet.settle()

    @rule(name=st.sampled_from(SERVERS))
    def tell(self, name: str) -> None:
        self.fleet.tell(name)

    @rule(name=st.sampled_from(SERVERS), broken=st.integers(0, 4))
    def load(self, name: str, broken: int) -> None:
        self.fleet.load(name, not broken)

    @rule(name=st.sampled_from(SERVERS))
    def end_or_begin(self, name: str) -> None:
        server = self.fleet.servers[name]
        self.fleet.servers[name] = Server(up=not server.up)

    @rule(same=st.booleans())
    def change_files(self, same: bool) -> None:
        version = max(self.fleet.files) + (0 if same else 1)
        self.fleet.files[version] = f"{version} at {self.fleet.now}"
        self.fleet.now += 1
        self.fleet.read()

    @rule()
    def settle(self) -> None:
        self.fleet.settle()

    @rule()
    def pass_step(self) -> None:
        self.fleet.pass_step()

    @rule(name=st.sampled_from(SERVERS))
    def fail(self, name: str) -> None:
        """The guards of one server abort, and the fleet hears of it."""
        fleet, server = self.fleet, self.fleet.servers[name]
        number, state = fleet.plan.progress.number, server.plan.progress.state
        server.do(server.plan.take_verdict(FAIL, server.plan.window, fleet.now))
        if state in TESTED and server.up and server.plan.progress.number == number:
            assert server.traffic is None or server.traffic.candidate is None
            tested, loaded = fleet.plan.progress.state in TESTED, bool(server.loaded)
            fleet.tell(name)
            progress = fleet.plan.progress
            if tested and loaded and progress.number == number:
                assert progress.state in (State.ABORTING, State.ABORTED)
                assert f"server {name}: all fail" in progress.reason

    @rule(minutes=st.integers(1, 3))
    def wait(self, minutes: int) -> None:
        self.fleet.now += minutes * MINUTE
        self.fleet.do(self.fleet.plan.tick(self.fleet.now))
        for server in self.fleet.servers.values():
            server.do(server.plan.tick(self.fleet.now))

    @rule(
        call=st.sampled_from(["abort", "advance", "promote", "rollback", "pause", "resume"]).map(
            RolloutCommand
        )
    )
    def call(self, call: RolloutCommand) -> None:
        try:
            self.fleet.do(self.fleet.plan.call(call, self.fleet.now))
        except FailedPreconditionError:
            return

    @rule(keeps_state=st.booleans())
    def restart(self, keeps_state: bool) -> None:
        before = self.fleet.plan.progress
        self.fleet.restart(keeps_state)
        after = self.fleet.plan.progress
        if keeps_state and after.number == before.number and after.state in TESTED:
            assert (after.step, after.weight) <= (before.step, before.weight)

    @invariant()
    def candidates_are_ready_and_heard_of(self) -> None:
        for server in self.fleet.servers.values():
            traffic = server.traffic
            if server.up and traffic is not None and traffic.candidate is not None:
                assert {traffic.stable, traffic.candidate} <= server.loaded.keys()
                assert not server.plan.alarm

    @invariant()
    def one_rollout_has_one_salt_and_no_more_than_its_weight(self) -> None:
        salts: dict[int, set[bytes]] = {}
        for server in self.fleet.servers.values():
            if server.up and server.traffic is not None and server.traffic.candidate is not None:
                number = server.plan.progress.number
                salts.setdefault(number, set()).add(server.traffic.salt)
                assert server.traffic.weight <= self.fleet.told[number]
        assert all(len(each) == 1 for each in salts.values())
        assert len(set().union(*salts.values())) == len(salts)

    @precondition(lambda self: all(each.up for each in self.fleet.servers.values()))
    @rule()
    def settled_servers_agree(self) -> None:
        self.fleet.settle()
        routes = {
            (each.traffic.stable, each.traffic.candidate, each.traffic.weight)
            for each in self.fleet.servers.values()
            if each.traffic is not None
        }
        progress = self.fleet.plan.progress
        if progress.state in TESTED:
            assert routes == {(progress.stable, progress.candidate, progress.weight)}
        elif progress.stable is not None:
            assert routes == {(progress.stable, None, 0)}


TestAnyOrder, TestAnyOrderLong = run_machine(AnyOrder, examples=30)


def stepping() -> Fleet:
    fleet = Fleet()
    fleet.settle()
    fleet.files[2] = "2"
    fleet.read()
    fleet.settle()
    assert fleet.plan.progress.state is State.STEP
    return fleet


def test_a_server_keeps_what_it_serves_until_its_manager_knows_of_it() -> None:
    """Also if it loads before the manager has heard its first answer."""
    fleet = Fleet()
    for server in fleet.servers.values():
        server.load({1: "1"}, fleet.now, broken=False)
    fleet.files[2] = "2"
    fleet.read()
    for name, server in fleet.servers.items():
        server.do(server.plan.manage("control", DECLARED, Progress(), LEASE, fleet.now))
        server.look(fleet.files, fleet.now)
        fleet.load(name)
        assert server.loaded.keys() == {1}
    fleet.settle()
    assert (fleet.plan.progress.stable, fleet.plan.progress.candidate) == (1, 2)


def test_the_candidate_comes_to_one_server_after_the_other() -> None:
    fleet = Fleet()
    fleet.settle()
    fleet.files[2] = "2"
    fleet.read()
    for number, name in enumerate(SERVERS):
        for each in SERVERS:
            fleet.tell(each)
        chosen = [each for each in SERVERS if 2 in fleet.servers[each].selection.hold]
        assert chosen == list(SERVERS[: number + 1])
        assert fleet.plan.progress.state is State.LOADING
        fleet.load(name)
    fleet.tell("c")
    assert (fleet.plan.progress.state, fleet.plan.progress.weight) == (State.STEP, 1000)


def test_a_silent_manager_leaves_stable_alone_until_it_is_heard() -> None:
    fleet = stepping()
    server = fleet.servers["a"]
    at = server.plan.wake_at(fleet.now)
    assert at == fleet.now + LEASE
    shared = server.traffic
    assert shared is not None and shared.weight == 1000
    fleet.now = at
    server.do(server.plan.tick(at))
    assert server.traffic == Traffic(1)
    assert server.plan.progress.reason == "control is silent for 1m"
    fleet.tell("a")
    assert server.traffic == shared


def test_a_server_without_the_candidate_stays_at_stable() -> None:
    fleet = stepping()
    fleet.servers["b"] = Server(loaded={1: "1"})
    fleet.tell("b")
    assert fleet.servers["b"].traffic == Traffic(1)
    assert fleet.plan.progress.state is State.STEP
    fleet.load("b", broken=True)
    fleet.tell("b")
    assert fleet.servers["b"].traffic == Traffic(1)
    assert fleet.plan.progress.state is State.STEP, "it had no candidate that could have left"


def test_servers_that_lose_the_whole_model_abort_nothing() -> None:
    fleet = stepping()
    fleet.servers["a"].loaded.clear()  # unloaded, as it is placed elsewhere
    fleet.tell("a")
    assert fleet.plan.progress.state is State.STEP
    for name in SERVERS:
        fleet.servers[name] = Server()  # all are started again
        fleet.tell(name)
    assert fleet.plan.progress.state is State.STEP
    fleet.settle()
    assert {each.traffic.weight for each in fleet.servers.values() if each.traffic} == {1000}
    del fleet.servers["b"].loaded[2]
    fleet.tell("b")
    assert fleet.plan.progress.reason == "server b: version 2 is no longer ready"


def test_counters_are_sums_over_servers_and_their_lives() -> None:
    view = FleetView(("a", "b"))

    def answer(server: str, requests: int, failures: int, *latencies: int) -> None:
        version = ManagedVersion(2, True, True, counts=Counts(requests, failures, latencies))
        view.answered(server, ServerAnswer("", 1, "", {2: version}))

    answer("a", 100, 10, 90)
    answer("b", 0, 0)
    assert view.total(2).counts.requests == 0, "what was there before is not counted"
    answer("a", 110, 12, 96, 2)
    answer("b", 5, 1, 4)
    assert view.total(2).counts == Counts(15, 3, (10, 2))
    view.lost("b")
    answer("b", 9, 1, 8)
    assert view.total(2).counts == Counts(19, 3, (14, 2))
    answer("b", 2, 0)  # started again
    answer("b", 3, 0, 3)
    assert view.total(2).counts == Counts(22, 3, (17, 2))


def test_a_restart_goes_on_at_the_lowest_step() -> None:
    third = Progress(State.STEP, 4, 1, 2, step=2, weight=5000)
    first = replace(third, step=0, weight=100)
    older = replace(third, number=3, state=State.DONE)
    assert resumed(None, ()) is None
    assert resumed(None, map(SavedRollout, (older, third, first))) == SavedRollout(first)
    kept = SavedRollout(replace(third, refused=()), DECLARED)
    assert resumed(kept, [SavedRollout(first)]) == SavedRollout(first, DECLARED)
    assert resumed(kept, [SavedRollout(older)]) == kept
    promoted = SavedRollout(replace(third, state=State.BAKING))
    assert resumed(kept, [promoted]) == kept, "what was saved is lower"
    assert resumed(SavedRollout(older), [promoted]) == promoted
    aborted = SavedRollout(replace(third, state=State.ABORTED, weight=0))
    assert resumed(None, [promoted, aborted]) == aborted
