"""`conch control` and several `conch serve`: rolls under load, servers that die and return, placement."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tests.support.agents import FakeAgent
from tests.support.control_ports import served
from tests.support.servers import (
    CONCH,
    IN_PROCESS,
    NUMBER_CONFIG,
    WAIT_S,
    ServerProcess,
    client_of,
    eventually,
    serving_process,
    tensor,
    write_model,
)
from tritonclient.utils import InferenceServerException

from conch.cli.rollout_command import run as run_rollout
from conch.core.errors import ConchError
from conch.core.rollouts import RolloutReport
from conch_control.events import Event
from conch_control.remote_api.client import ModelControlClient
from conch_control.remote_api.connection_options import ConnectionOptions, ControlPortOptions
from conch_control.version_phase import Phase
from conch_fleet.control_command import run

MODEL = """
import os, time
from pathlib import Path
import numpy as np
import triton_python_backend_utils as pb_utils

NUMBER, AT = {number}, Path("{at}")


class TritonPythonModel:
    def initialize(self, args):
        own = f"{{args['model_name']}}-{{os.environ['FLEET_NAME']}}"
        (AT / f"loading-{{own}}-{{NUMBER}}").touch()
        while (AT / f"hold-{{own}}").exists():
            time.sleep(0.005)
        if not NUMBER:
            raise ValueError("number 0 is broken")

    def execute(self, requests):
        out = [pb_utils.Tensor("OUT", np.array([NUMBER], np.float32)) for _ in requests]
        return [pb_utils.InferenceResponse([each]) for each in out]
"""


@dataclass
class Site:
    """A repository and the control ports of servers."""

    root: Path

    @property
    def repository(self) -> Path:
        path = self.root / "models"
        path.mkdir(exist_ok=True)
        return path

    def target(self, name: str) -> str:
        return f"unix:{self.root}/{name}.sock"

    def model(self, name: str, number: int) -> None:
        """Writes a model's next version, which answers a number; 0 can't be loaded."""
        files = {"model.py": MODEL.format(number=number, at=self.root)}
        version = 1 + len(list(self.repository.glob(f"{name}/*/model.py")))
        write_model(self.repository, name, NUMBER_CONFIG, files, (version,))

    @contextmanager
    def server(self, name: str, mode: str = "explicit") -> Iterator[ServerProcess]:
        flags = [f"--model-control-mode={mode}", f"--control-address={self.target(name)}", IN_PROCESS]
        with serving_process(self.repository, flags=flags, environment={"FLEET_NAME": name}) as server:
            yield server

    @contextmanager
    def control(self, names: str, *flags: str, code: int = 0) -> Iterator[Callable[[], str]]:
        """`conch control` for some servers; gives its log."""
        errors = self.root / "control.log"
        environment = {key: value for key, value in os.environ.items() if not key.startswith("CONCH_")}
        command = [
            str(CONCH),
            "control",
            *(f"--server={self.target(name)}" for name in names),
            f"--model-repository={self.repository}",
            "--repository-poll-secs=0.2",
            "--repository-settle-secs=0.2",
            *flags,
        ]
        with (
            errors.open("w") as file,
            subprocess.Popen(command, stdout=file, stderr=file, env=environment) as running,
        ):
            try:
                yield errors.read_text
                running.send_signal(signal.SIGTERM)
                assert running.wait(WAIT_S) == code, errors.read_text()
            finally:
                running.kill()
        assert "Traceback" not in errors.read_text(), errors.read_text()

    def serving(self, model: str, names: Sequence[str] = "abc") -> str:
        """The servers with a ready version of a model."""
        return "".join(name for name in names if self._is_ready(name, model))

    def _is_ready(self, name: str, model: str) -> bool:
        with closing(ModelControlClient(ConnectionOptions(self.target(name)), timeout_s=WAIT_S)) as client:
            try:
                found = client.models().models
            except ConchError:
                return False
        phases = [version.phase for each in found if each.name == model for version in each.versions]
        return Phase.READY in phases


@dataclass
class Clients:
    """A client of a server that sends one request after the other to its model `m`."""

    server: ServerProcess
    answers: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def sending(self) -> Iterator[Clients]:
        thread = threading.Thread(target=self._send)
        thread.start()
        try:
            yield self
        finally:
            self.stop.set()
            thread.join(WAIT_S)

    def _send(self) -> None:
        inputs = [tensor("IN", np.ones(1, np.float32), "FP32")]
        with client_of(self.server) as client:
            while not self.stop.is_set() and not self.failures:
                try:
                    self.answers.append(float(client.infer("m", inputs).as_numpy("OUT")[0]))
                except InferenceServerException as error:
                    self.failures.append(str(error))
                self.stop.wait(0.005)

    def answer(self, number: int) -> bool:
        assert not self.failures, self.failures
        return bool(self.answers) and self.answers[-1] == number


@contextmanager
def watched(target: str) -> Iterator[list[Event]]:
    """The events of a server's model `m` from now on."""
    events: list[Event] = []
    begun = threading.Event()
    with closing(ModelControlClient(ConnectionOptions(target))) as client:
        call = client.watch(models=["m"])

        def follow() -> None:
            try:
                for update in call:
                    begun.set()
                    events.extend(update.events)
            except ConchError:
                pass  # the server was killed

        thread = threading.Thread(target=follow)
        thread.start()
        try:
            assert begun.wait(WAIT_S)
            yield events
        finally:
            call.cancel()
            thread.join(WAIT_S)


def changing(events: Sequence[Event], killed_at: float) -> list[tuple[float, float]]:
    """When a server was loading, until it was ready or killed."""
    begun = [event.seconds for event in events if event.phase is Phase.LOADING]
    ready = [event.seconds for event in events if event.phase is Phase.READY]
    return list(zip(begun, [*ready, killed_at], strict=False))


def test_a_server_dies_in_the_middle_of_a_roll_and_returns(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.model("m", 1)
    site.model("r", 1)
    rules = tmp_path / "placement.toml"
    site.model("tenant", 1)
    rules.write_text('[[model]]\nname = "r"\nreplicas = 2\n[[model]]\nname = "tenant"\nresidency = true\n')
    modes = {"a": "explicit", "b": "explicit", "c": "on-demand"}
    with ExitStack() as stack:
        servers = {name: stack.enter_context(site.server(name, mode)) for name, mode in modes.items()}
        flags = [f"--placement={rules}", "--server-lost-secs=0.5"]
        log = stack.enter_context(site.control("abc", *flags))
        eventually(lambda: site.serving("m") == "abc", "the model is everywhere")
        eventually(lambda: len(site.serving("r")) == 2, "the other has its two replicas")
        assert "b" in site.serving("r"), log()
        clients = {name: stack.enter_context(Clients(server).sending()) for name, server in servers.items()}
        with client_of(servers["c"]) as client:
            client.infer("tenant", [tensor("IN", np.ones(1, np.float32), "FP32")])
        events = {name: stack.enter_context(watched(site.target(name))) for name in "abc"}
        eventually(lambda: all(each.answer(1) for each in clients.values()), "all answer")

        (tmp_path / "hold-m-b").touch()
        site.model("m", 2)
        eventually((tmp_path / "loading-m-b-2").exists, "the second server loads it")
        assert clients["a"].answer(2) or eventually(lambda: clients["a"].answer(2), "the first has it")
        assert clients["b"].answer(1) and clients["c"].answer(1), "the old one serves meanwhile"
        killed_at = time.time()
        servers["b"].kill()
        clients["b"].stop.set()
        eventually(lambda: clients["c"].answer(2), "the roll goes on without it")
        spans = sorted(span for each in events.values() for span in changing(each, killed_at))
        assert len(spans) == 3
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans)), spans
        eventually(lambda: site.serving("r") == "ac", "its replica is placed elsewhere")

        (tmp_path / "hold-m-b").unlink()
        returned = stack.enter_context(Clients(stack.enter_context(site.server("b"))).sending())
        eventually(lambda: site.serving("m") == "abc", "it has the model again")
        returned.failures.clear()
        again = stack.enter_context(Clients(returned.server).sending())
        eventually(lambda: again.answer(2), "in the new version")
        assert site.serving("r") == "ac", "nothing had to move back"
        assert site.serving("tenant") == "c", "its request has loaded it, and nothing else"
        assert "tenant" not in log()
        assert all(not clients[name].failures for name in "ac")
        assert set(clients["a"].answers) == set(clients["c"].answers) == {1.0, 2.0}


def test_a_broken_version_is_held_and_a_draining_server_gets_nothing(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.model("m", 1)
    with ExitStack() as stack:
        servers = {name: stack.enter_context(site.server(name)) for name in "ab"}
        log = stack.enter_context(site.control("ab"))
        eventually(lambda: site.serving("m", "ab") == "ab", "the model is everywhere")
        clients = [stack.enter_context(Clients(server).sending()) for server in servers.values()]
        site.model("m", 0)
        eventually(lambda: "model 'm' is held" in log(), "the roll is held")
        assert (tmp_path / "loading-m-a-0").exists() and not (tmp_path / "loading-m-b-0").exists()
        assert "number 0 is broken" in log()
        assert all(each.answer(1) for each in clients)

        with closing(ModelControlClient(ConnectionOptions(site.target("a")))) as client:
            client.drain()
        eventually(lambda: f"server {site.target('a')} drains" in log(), "it is seen")
        site.model("n", 1)
        eventually(lambda: site.serving("n", "ab") == "b", "the other gets what is new")
        site.model("m", 3)
        eventually(lambda: clients[1].answer(3), "and what has changed")
        assert clients[0].answer(1)
        assert not (tmp_path / "loading-n-a-1").exists()


def test_a_plan_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = tmp_path / "models"
    for name in ("m", "gpu_only", "large", "tenant"):
        write_model(models, name, NUMBER_CONFIG, {"model.py": ""})
    agents = {name: FakeAgent() for name in "ab"}
    agents["a"].set("m", Phase.READY)
    agents["a"].set("gone", Phase.READY)
    agents["a"].set("tenant", Phase.READY)
    options = {name: ControlPortOptions(f"unix:{tmp_path}/{name}.sock", 0) for name in "abc"}
    path = tmp_path / "placement.toml"
    path.write_text(
        f"""
        [[server]]
        address = "{options["a"].target}"
        [[server]]
        address = "{options["b"].target}"
        labels = {{ gpu = "true" }}
        memory = "1GB"
        [[server]]
        address = "{options["c"].target}"
        [[model]]
        name = "gpu_*"
        labels = {{ gpu = "true" }}
        [[model]]
        name = "large"
        replicas = 2
        memory = "2GB"
        [[model]]
        name = "tenant"
        residency = true
        """
    )
    with served(agents["a"], options["a"]), served(agents["b"], options["b"]):
        assert run([f"--model-repository={models}", f"--placement={path}", "--plan"], {}) == 0
    output = capsys.readouterr().out.replace(f"unix:{tmp_path}/", "").replace(".sock", "")
    first, *lines = output.splitlines()
    assert first == "c can't be reached"
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    problem = "1 of 2 copies placed: b has 996.9 MB free and 2 GB are needed; c is lost or drains"
    assert rows == [
        ["Model", "Servers", "To load on", "To unload from", "Problem"],
        ["gone", "-", "-", "a", ""],
        ["gpu_only", "b", "b", "-", ""],
        ["large", "a", "a", "-", problem],
        ["m", "a", "b", "-", ""],
        ["", "b", "", "", ""],
        ["tenant", "a", "-", "-", "not in the catalogue of b"],
    ]
    assert not any(agent.loads or agent.unloads for agent in agents.values())


def test_wrong_placement_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "placement.toml"
    flags = [f"--model-repository={tmp_path}", f"--placement={path}"]

    def refusal(text: str, *more: str) -> str:
        path.write_text(text)
        assert run([*flags, *more], {}) == 2
        return capsys.readouterr().err

    server = "[[server]]\naddress = '{}'\n"
    assert refusal("[[model]]\nnane = 'm'") == (
        f"conch control: --placement: {path}: model[0].nane: unknown field; known are name, replicas, "
        "labels, memory, residency\n"
    )
    assert "--server: " in refusal(server.format("a:1"), "--server=b:1")
    assert f"--placement: {path}: server x: --target: 'x' is neither" in refusal(server.format("x"))
    token = server.format("a:1") + "token_file = 'none'\n"
    assert f"server a:1: --token-file: {tmp_path}/none can't be read" in refusal(token)
    assert "'a:1' is given twice" in refusal("", "--server=a:1", "--target=a:1")
    assert "--access-policy needs --control-port" in refusal("", "--server=a:1", "--access-policy=none")
    assert "it needs --access-policy" in refusal("", "--server=a:1", "--audit-log=-")


ROLLOUT = """
[rollout]
candidate = "newest"
steps = ["20% 1h", "60% 1h"]
sticky = ["header:x-user"]
"""
USERS = tuple(f"user-{number}" for number in range(40))


def sides(server: ServerProcess) -> dict[str, float]:
    """The version that answers each user."""
    inputs = [tensor("IN", np.ones(1, np.float32), "FP32")]
    with client_of(server) as client:
        return {
            user: float(client.infer("m", inputs, headers={"x-user": user}).as_numpy("OUT")[0])
            for user in USERS
        }


def test_a_rollout_over_all_servers(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.model("m", 1)
    (site.repository / "m" / "rollout.toml").write_text(ROLLOUT)
    port = site.target("fleet")
    flags = ["--rollout-lease=600", f"--control-address={port}"]

    def report(target: str) -> RolloutReport | None:
        with closing(ModelControlClient(ConnectionOptions(target), timeout_s=WAIT_S)) as client:
            try:
                return client.rollout("m")
            except ConchError:
                return None

    def weights(names: str = "abc") -> list[float]:
        found = [report(site.target(name)) for name in names]
        return [
            side.traffic
            for each in found
            for side in (() if each is None else each.sides)
            if side.role == "candidate"
        ]

    def everywhere(weight: float) -> None:
        eventually(lambda: weights() == [weight] * 3, f"all servers have {weight} %")

    def conch_rollout(*arguments: str, target: str = port) -> int:
        return run_rollout([*arguments, f"--server={target}"], {})

    with ExitStack() as stack:
        servers = {name: stack.enter_context(site.server(name)) for name in "abc"}
        with site.control("abc", *flags):
            eventually(lambda: site.serving("m") == "abc", "the model is everywhere")
            events = {name: stack.enter_context(watched(site.target(name))) for name in "abc"}
            version = site.repository / "m" / "2"
            version.mkdir()
            (tmp_path / "hold-m-b").touch()
            (version / "model.py").write_text(MODEL.format(number=2, at=tmp_path))
            eventually((tmp_path / "loading-m-b-2").exists, "the second server loads the candidate")
            assert not (tmp_path / "loading-m-c-2").exists(), "one after the other"
            assert {*sides(servers["a"]).values()} == {1.0}, "no step begins before all have it"
            (tmp_path / "hold-m-b").unlink()
            everywhere(20.0)
            loaded = {
                name: next(each.seconds for each in found if (each.version, each.phase) == (2, Phase.READY))
                for name, found in events.items()
            }
            assert sorted(loaded, key=loaded.__getitem__) == ["a", "b", "c"]
            first = sides(servers["a"])
            assert {*first.values()} == {1.0, 2.0}
            assert sides(servers["b"]) == sides(servers["c"]) == first

            servers["b"].kill()
            servers["b"] = stack.enter_context(site.server("b"))
            everywhere(20.0)
            assert sides(servers["b"]) == first, "the server that returned has the same sides"

            assert conch_rollout("advance", "m") == 0
            everywhere(60.0)
            second = sides(servers["a"])
            assert sides(servers["b"]) == sides(servers["c"]) == second
            assert all(second[user] == 2.0 for user, side in first.items() if side == 2.0)
            before = report(port)
            assert before is not None and (before.id, before.step) == (1, 1)
            assert conch_rollout("promote", "m", target=site.target("a")) == 1, "conch control manages it"

        state = tmp_path / "state"
        with site.control("abc", *flags, f"--state-directory={state}"):
            resumed = eventually(lambda: report(port), "the rollout goes on")
            assert (resumed.id, resumed.state, resumed.step) == (1, "STEP", 1)
            everywhere(60.0)
            assert sides(servers["c"]) == second

            assert conch_rollout("abort", "m", target=site.target("b")) == 0
            eventually(lambda: (found := report(port)) and found.state == "ABORTED", "the fleet follows")
            ended = report(port)
            assert ended is not None
            assert ended.reason == f"server {site.target('b')}: aborted by a call"
            assert ended.refused == (2,)
            everywhere(0.0)
            assert all({*sides(server).values()} == {1.0} for server in servers.values())
            assert '"ABORTED"' in (state / "rollouts" / "m.json").read_text()

        assert conch_rollout("delete", "m", target=site.target("c")) == 0
        freed = eventually(lambda: report(site.target("c")), "the server has its own rollout again")
        assert (freed.source, freed.managed_by) == ("file", "")
