"""The roll as a pure function: turns, failures, servers that are lost and return, what always holds."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.support.profiles import scaled

from conch.core.errors import ConchError, InternalError, InvalidArgumentError, UnavailableError
from conch_control.planner.plan import FIRST_RETRY_NS, LAST_RETRY_NS
from conch_control.remote_api.messages import UnreachableError
from conch_fleet.fleet_state import Change, RollStep, Sight
from conch_fleet.placement_file import FleetServer, PlacementRules, Rule
from conch_fleet.roll import Roll

GRACE = 100 * LAST_RETRY_NS
SERVERS = ("a", "b", "c")


@dataclass
class FakeServer:
    """A server: models with the number of the files that it has loaded."""

    life: int = 0
    up: bool = True
    draining: bool = False
    serving: dict[str, int] = field(default_factory=dict)
    running: list[RollStep] = field(default_factory=list)


class FakeFleet:
    """Servers that do what the roll says when the test lets them; files have a number each."""

    def __init__(self, *rules: Rule, servers: tuple[FleetServer, ...] = ()) -> None:
        specs = servers or tuple(map(FleetServer, SERVERS))
        self.now = 1
        self.roll = Roll(PlacementRules(specs, rules), GRACE, self.now)
        self.servers = {each.address: FakeServer() for each in specs}
        self.files: dict[str, int] = {}
        self.sizes: dict[str, int] = {}
        self.notes: list[str] = []
        for address in self.servers:
            self.look(address)

    def take(self, steps: list[RollStep]) -> list[RollStep]:
        for step in steps:
            self.servers[step.server].running.append(step)
        self.notes += [note.text for note in self.roll.notes if note.level >= logging.WARNING]
        self.roll.notes.clear()
        return steps

    def look(self, address: str, *ended: tuple[RollStep, ConchError | None]) -> list[RollStep]:
        server = self.servers[address]
        if not server.up:
            return self.take(self.roll.lost(address, "gone", ended, self.now))
        serving = {name: self.sizes.get(name) for name in server.serving}
        sight = Sight(f"{address}{server.life}", serving, server.draining)
        return self.take(self.roll.seen(address, sight, ended, self.now))

    def change(self, name: str, parts: tuple[str, ...] = ()) -> list[RollStep]:
        self.files[name] = self.files.get(name, 0) + 1
        return self.take(self.roll.want(name, parts, self.now))

    def remove(self, name: str) -> list[RollStep]:
        self.files.pop(name, None)
        return self.take(self.roll.drop(name, self.now))

    def end(self, step: RollStep, error: ConchError | None = None) -> list[RollStep]:
        server = self.servers[step.server]
        server.running.remove(step)
        if error is None and server.up:
            if step.kind == "unload":
                server.serving.pop(step.model, None)
            elif step.model in self.files:
                server.serving[step.model] = self.files[step.model]
        return self.look(step.server, (step, error))

    def wait(self, time: int) -> list[RollStep]:
        self.now += time
        return self.take(self.roll.tick(self.now))

    def kill(self, address: str) -> list[RollStep]:
        server = self.servers[address]
        server.up, server.serving = False, {}
        ended, server.running = server.running, []
        return self.look(address, *((step, UnreachableError("broken")) for step in ended))

    def restart(self, address: str, **serving: int) -> list[RollStep]:
        server = self.servers[address]
        server.up, server.draining, server.serving = True, False, dict(serving)
        server.life += 1
        return self.look(address)

    def finish(self) -> None:
        """Lets everything end well."""
        for _ in range(1000):
            steps = [step for server in self.servers.values() for step in server.running]
            if not steps:
                return
            self.end(steps[0])
        raise AssertionError("there is no end")

    def serving(self, name: str) -> dict[str, int]:
        return {a: s.serving[name] for a, s in self.servers.items() if s.up and name in s.serving}


def where(steps: list[RollStep]) -> list[tuple[str, str, str]]:
    return [(step.kind, step.server, step.model) for step in steps]


def rolled_out(
    *rules: Rule, models: tuple[str, ...] = ("m",), servers: tuple[FleetServer, ...] = ()
) -> FakeFleet:
    fleet = FakeFleet(*rules, servers=servers)
    for name in models:
        fleet.change(name)
        fleet.finish()
        assert fleet.roll.load_result(name) is True
    return fleet


def test_one_server_after_the_other() -> None:
    fleet = FakeFleet()
    for number in (1, 2):
        steps = fleet.change("m")
        for address in SERVERS:
            assert where(steps) == [("load", address, "m")]
            assert steps[0].replaces == (number == 2)
            assert fleet.roll.load_result("m") is False
            steps = fleet.end(steps[0])
        assert (steps, fleet.roll.load_result("m")) == ([], True)
        assert fleet.serving("m") == dict.fromkeys(SERVERS, number)


def test_only_one_server_replaces_copies() -> None:
    fleet = rolled_out(models=("m", "n"))
    (m,), (n,) = fleet.change("m"), fleet.change("n")
    assert (m.server, n.server) == ("a", "a")
    assert fleet.end(m) == [], "the server also replaces n"
    assert where(fleet.end(n)) == [("load", "b", "m"), ("load", "b", "n")]


def test_a_failure_holds_the_model_until_its_files_change() -> None:
    fleet = rolled_out()
    (step,) = fleet.change("m")
    assert fleet.end(step, InternalError("boom")) == []
    result = fleet.roll.load_result("m")
    assert isinstance(result, InternalError) and result.message == "server a: boom"
    assert fleet.notes[-1] == "model 'm' is held, as a could not load it; what they have serves on: a, b, c"
    assert fleet.wait(GRACE) == []
    assert fleet.serving("m") == dict.fromkeys(SERVERS, 1)
    fleet.change("m")
    fleet.finish()
    assert fleet.serving("m") == dict.fromkeys(SERVERS, 3)


def test_a_failure_that_may_pass_is_tried_again() -> None:
    fleet = rolled_out()
    (step,) = fleet.change("m")
    wait = FIRST_RETRY_NS
    for _ in range(3):
        assert fleet.end(step, UnavailableError("busy")) == []
        assert isinstance(fleet.roll.load_result("m"), UnavailableError)
        assert fleet.roll.wake_at(fleet.now) == fleet.now + wait
        assert fleet.wait(wait - 1) == []
        (step,) = fleet.wait(1)
        assert step.server == "a", "the others wait"
        wait *= 2
    fleet.end(step)
    fleet.finish()
    assert fleet.serving("m") == dict.fromkeys(SERVERS, 2)


def test_a_server_that_dies_and_returns_gets_its_models_before_the_roll_goes_on() -> None:
    fleet = rolled_out(models=("m", "n"))
    (step,) = fleet.change("m")
    (step,) = fleet.end(step)
    assert step.server == "b"
    (step,) = fleet.kill("b")
    assert step.server == "c", "the roll goes on without it"
    assert fleet.roll.load_result("m") is False
    assert fleet.end(step) == []
    assert fleet.roll.load_result("m") is True
    (on_a,) = fleet.change("n")
    (m_again,) = fleet.restart("b")
    assert where([on_a, m_again]) == [("load", "a", "n"), ("load", "b", "m")]
    (n_again,) = fleet.end(on_a)
    assert where([n_again]) == [("load", "b", "n")], "first where it is missing"
    assert fleet.end(n_again) == [], "c waits until b has all of its models"
    assert where(fleet.end(m_again)) == [("load", "c", "n")]
    fleet.finish()
    assert fleet.serving("m") == fleet.serving("n") == dict.fromkeys(SERVERS, 2)


def test_servers_that_return_with_old_copies_do_not_wait_for_each_other() -> None:
    fleet = rolled_out()
    for address in SERVERS[:2]:
        fleet.kill(address)
    (step,) = fleet.change("m")
    assert step.server == "c"
    for address in SERVERS[:2]:
        assert fleet.restart(address, m=7) == []
    fleet.finish()
    assert fleet.serving("m") == dict.fromkeys(SERVERS, 2)


def test_a_server_that_returns_tries_a_held_model_once() -> None:
    fleet = rolled_out()
    fleet.end(fleet.change("m")[0], InternalError("boom"))
    fleet.kill("b")
    (step,) = fleet.restart("b")
    assert where([step]) == [("load", "b", "m")]
    assert fleet.end(step, InternalError("boom")) == []
    assert fleet.look("b") == []


def test_replicas_of_a_lost_server_go_elsewhere_and_the_surplus_goes() -> None:
    fleet = rolled_out(Rule("m", 2))
    assert fleet.serving("m") == {"a": 1, "b": 1}
    server = fleet.servers["a"]
    server.up = False  # out of reach, but it serves on
    assert fleet.look("a") == []
    assert fleet.roll.wake_at(fleet.now) == fleet.now + GRACE
    assert fleet.wait(GRACE - 1) == []
    (step,) = fleet.wait(1)
    assert where([step]) == [("load", "c", "m")]
    server.up = True
    assert fleet.look("a") == [], "no copy goes before the others are ready"
    assert where(fleet.end(step)) == [("unload", "c", "m")], "it has it still: nothing has to move"
    fleet.finish()
    assert fleet.serving("m") == {"a": 1, "b": 1}


def test_a_copy_that_was_replaced_goes_when_its_server_returns() -> None:
    fleet = rolled_out(Rule("m", 1))
    fleet.servers["a"].up = False
    fleet.look("a")
    (step,) = fleet.wait(GRACE)
    fleet.end(step)
    fleet.servers["a"].up = True
    assert where(fleet.look("a")) == [("unload", "a", "m")]


def test_a_draining_server_gets_no_more_models_and_keeps_what_it_has() -> None:
    fleet = rolled_out(Rule("[no]", 1), models=("m", "n"))
    fleet.servers["a"].draining = True
    assert fleet.look("a") == []
    (step,) = fleet.change("m")
    (new,) = fleet.change("o")
    assert (step.server, new.server) == ("b", "b")
    fleet.finish()
    assert (fleet.serving("m"), fleet.serving("o")) == ({"a": 1, "b": 2, "c": 2}, {"b": 1})
    (step,) = fleet.wait(GRACE)
    assert where([step]) == [("load", "c", "n")]
    fleet.finish()
    assert fleet.serving("n") == {"a": 1, "c": 1}


def test_a_load_that_a_server_breaks_off_as_it_stops_holds_nothing() -> None:
    fleet = rolled_out()
    (step,) = fleet.change("m")
    fleet.servers["a"].draining = True
    (step,) = fleet.end(step, InternalError("cancelled"))
    assert step.server == "b"
    fleet.finish()
    assert fleet.roll.load_result("m") is True


def test_what_others_do() -> None:
    fleet = rolled_out()
    fleet.roll.changes.clear()
    fleet.servers["a"].serving.clear()
    assert fleet.look("a") == [], "an unload by others holds until the files change"
    fleet.servers["b"].serving["x"] = 1
    assert fleet.look("b") == []
    assert fleet.roll.changes == [Change("m", True), Change("x", True)]
    fleet.change("m")
    fleet.finish()
    assert fleet.serving("m") == dict.fromkeys(SERVERS, 2)
    assert fleet.serving("x") == {"b": 1}


def test_a_model_that_is_dropped() -> None:
    fleet = rolled_out()
    fleet.servers["c"].up = False
    fleet.look("c")
    steps = fleet.remove("m")
    assert where(steps) == [("unload", "a", "m"), ("unload", "b", "m")]
    assert fleet.roll.unload_result("m") is False
    fleet.end(steps[0], InternalError("no"))
    assert isinstance(fleet.roll.unload_result("m"), InternalError)
    fleet.end(steps[1])
    assert where(fleet.wait(FIRST_RETRY_NS)) == [("unload", "a", "m")]
    fleet.servers["c"].up = True
    assert where(fleet.look("c")) == [("unload", "c", "m")]


def test_composing_models_go_where_their_ensemble_is() -> None:
    fleet = rolled_out(Rule("e", 2), Rule("p", 1), models=("p",))
    assert fleet.serving("p") == {"a": 1}
    fleet.change("e", ("p",))
    fleet.finish()
    assert fleet.serving("p").keys() >= fleet.serving("e").keys()
    assert len(fleet.serving("e")) == 2


def test_measured_memory_counts() -> None:
    servers = (FleetServer("a", memory=10), FleetServer("b", memory=10))
    fleet = FakeFleet(Rule("*", 1), servers=servers)
    fleet.sizes = {"m": 8, "n": 8}
    for name in ("m", "n"):
        fleet.change(name)
        fleet.finish()
    assert (fleet.serving("m"), fleet.serving("n")) == ({"a": 1}, {"b": 1})
    steps = fleet.change("o")
    fleet.sizes["o"] = 5
    fleet.end(steps[0])
    fleet.finish()
    assert fleet.serving("o") == {"a": 1}, "no other server has room, so that it stays"
    assert "model 'o': 0 of 1 copies placed" in fleet.notes[-1]


def test_no_server_can_have_it() -> None:
    fleet = FakeFleet(Rule("m", labels={"gpu": "true"}))
    assert fleet.change("m") == []
    result = fleet.roll.load_result("m")
    assert isinstance(result, InvalidArgumentError)
    assert result.message.startswith(
        "no server can have model 'm': 0 of all copies placed: a has not the label"
    )


def test_no_server_can_be_reached() -> None:
    fleet = rolled_out()
    for address in SERVERS:
        fleet.kill(address)
    assert fleet.change("m") == []
    assert isinstance(fleet.roll.load_result("m"), UnreachableError)
    assert not fleet.roll.reached


ADDRESS = st.sampled_from(SERVERS)
MODEL = st.sampled_from(["m", "n"])


class Fleets(RuleBasedStateMachine):
    """Any order of changes, losses, failures and returns."""

    @initialize(replicas=st.sampled_from([None, 1, 2]))
    def start(self, replicas: int | None) -> None:
        self.fleet = FakeFleet(Rule("n", replicas))

    @rule(name=MODEL)
    def changes(self, name: str) -> None:
        self.fleet.change(name)

    @rule(name=MODEL)
    def is_removed(self, name: str) -> None:
        self.fleet.remove(name)

    @precondition(lambda self: any(server.running for server in self.fleet.servers.values()))
    @rule(data=st.data(), error=st.sampled_from([None, None, InternalError("x"), UnavailableError("y")]))
    def ends(self, data: st.DataObject, error: ConchError | None) -> None:
        steps = [step for server in self.fleet.servers.values() for step in server.running]
        self.fleet.end(data.draw(st.sampled_from(steps)), error)

    @rule(address=ADDRESS)
    def dies(self, address: str) -> None:
        self.fleet.kill(address)

    @rule(address=ADDRESS)
    def is_started(self, address: str) -> None:
        if not self.fleet.servers[address].up:
            self.fleet.restart(address)

    @rule(address=ADDRESS)
    def drains(self, address: str) -> None:
        server = self.fleet.servers[address]
        if server.up:
            server.draining = True
            self.fleet.look(address)

    @rule(time=st.sampled_from([FIRST_RETRY_NS, LAST_RETRY_NS, GRACE]))
    def time_passes(self, time: int) -> None:
        self.fleet.wait(time)

    @invariant()
    def one_at_a_time(self) -> None:
        running = [step for server in self.fleet.servers.values() if server.up for step in server.running]
        for name in ("m", "n"):
            assert len([step for step in running if step.kind == "load" and step.model == name]) <= 1
        assert len({step.server for step in running if step.replaces}) <= 1, "one server replaces copies"

    def teardown(self) -> None:
        """Once all is well again, every server has what it should have."""
        if not hasattr(self, "fleet"):
            return
        fleet = self.fleet
        for address, server in fleet.servers.items():
            if not server.up or server.draining:
                if server.up:
                    fleet.kill(address)
                fleet.restart(address)
        for name in fleet.files:
            fleet.change(name)
        for _ in range(4):
            fleet.finish()
            fleet.wait(LAST_RETRY_NS)
        for name in ("m", "n"):
            number = fleet.files.get(name)
            found = fleet.serving(name)
            assert set(found.values()) <= {number}, (name, found, number)
            rule = fleet.roll.placement().servers.get(name, ())
            assert sorted(found) == sorted(rule if number else ())


Fleets.TestCase.settings = settings(max_examples=scaled(150), stateful_step_count=30, deadline=None)
TestFleets = Fleets.TestCase
