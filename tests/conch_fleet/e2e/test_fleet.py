"""`conch control` and several `conch serve`: rolls under load, servers that die and return, placement."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
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
    put_in_place,
    serving_process,
    tensor,
    write_model,
)
from tritonclient.utils import InferenceServerException

from conch.core.errors import ConchError
from conch.core.rollouts import RolloutReport
from conch_control.events import Event
from conch_control.remote_api.client import ModelControlClient
from conch_control.remote_api.connection_options import ConnectionOptions, ControlPortOptions
from conch_control.version_phase import Phase
from conch_fleet.control_command import run
from conch_rollout.cli.rollout_command import run as run_rollout

MODEL = """
import itertools, os, time
from pathlib import Path
import numpy as np
import triton_python_backend_utils as pb_utils

NUMBER, AT, FAILS = {number}, Path("{at}"), {fails}
CALLS = itertools.count(1)


class TritonPythonModel:
    def initialize(self, args):
        own = f"{{args['model_name']}}-{{os.environ['FLEET_NAME']}}"
        (AT / f"loading-{{own}}-{{NUMBER}}").touch()
        while (AT / f"hold-{{own}}").exists():
            time.sleep(0.005)
        if not NUMBER:
            raise ValueError("number 0 is broken")

    def execute(self, requests):
        if FAILS and next(CALLS) % FAILS == 0:
            raise RuntimeError("this one fails")
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
        version = 1 + len(list(self.repository.glob(f"{name}/*/model.py")))
        with tempfile.TemporaryDirectory(dir=self.root) as aside:
            files = {"model.py": self.code(number)}
            put_in_place(
                write_model(Path(aside), name, NUMBER_CONFIG, files, (version,)), self.repository / name
            )

    def code(self, number: int, fails: int = 0) -> str:
        """A model that answers a number, and fails at each request of a number that `fails` divides."""
        return MODEL.format(number=number, at=self.root, fails=fails)

    def candidate(self, fails: int = 0) -> None:
        """Writes version 2 of model `m`, beside the first."""
        aside = self.root / "candidate"
        aside.mkdir()
        (aside / "model.py").write_text(self.code(2, fails))
        aside.rename(self.repository / "m" / "2")

    @contextmanager
    def server(self, name: str, mode: str = "explicit") -> Iterator[ServerProcess]:
        flags = [f"--model-control-mode={mode}", f"--control-address={self.target(name)}", IN_PROCESS]
        with serving_process(self.repository, flags=flags, environment={"FLEET_NAME": name}) as server:
            yield server

    @contextmanager
    def control(self, names: Sequence[str], *flags: str, code: int = 0) -> Iterator[Callable[[], str]]:
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
    """Intervals in which a server was loading, until it was ready or killed."""
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
[labels]
champion = 1
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


def report_of(target: str, token: str | None = None) -> RolloutReport | None:
    """The rollout of model `m`, as a server or `conch control` has it; None for none."""
    with closing(ModelControlClient(ConnectionOptions(target, token=token), timeout_s=WAIT_S)) as client:
        try:
            return client.rollout("m")
        except ConchError:
            return None


def weights(site: Site, names: str) -> list[float]:
    """Percent of the candidate on each server."""
    found = [report_of(site.target(name)) for name in names]
    return [
        side.traffic
        for each in found
        for side in (() if each is None else each.sides)
        if side.role == "candidate"
    ]


def test_a_rollout_over_all_servers(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.model("m", 1)
    (site.repository / "m" / "rollout.toml").write_text(ROLLOUT)
    port = site.target("fleet")
    flags = ["--rollout-lease=600", f"--control-address={port}"]

    def everywhere(weight: float) -> None:
        eventually(lambda: weights(site, "abc") == [weight] * 3, f"all servers have {weight} %")

    def reaches(state: str) -> RolloutReport:
        found = eventually(
            lambda: (each := report_of(port)) and each.state == state and each, f"the fleet is {state}"
        )
        assert isinstance(found, RolloutReport)
        return found

    def conch_rollout(*arguments: str, target: str = port) -> int:
        return run_rollout([*arguments, f"--server={target}"], {})

    with ExitStack() as stack:
        servers = {name: stack.enter_context(site.server(name)) for name in "abc"}
        with site.control("abc", *flags):
            eventually(lambda: site.serving("m") == "abc", "the model is everywhere")
            events = {name: stack.enter_context(watched(site.target(name))) for name in "abc"}
            (tmp_path / "hold-m-b").touch()
            site.candidate()
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
            before = report_of(port)
            assert before is not None and (before.id, before.step) == (1, 1)
            assert conch_rollout("promote", "m", target=site.target("a")) == 1, "conch control manages it"
            with closing(ModelControlClient(ConnectionOptions(port))) as client:
                (shown,) = client.models().models
            assert shown.labels["champion"] == 1 and shown.rollout is not None
            assert conch_rollout("pause", "m") == 0
            for name in "abc":
                eventually(
                    lambda name=name: (each := report_of(site.target(name))) and each.state == "PAUSED",  # type: ignore[misc]
                    "each server knows, for the next conch control",
                )

        state = tmp_path / "state"
        with site.control("abc", *flags, f"--state-directory={state}"):
            resumed = eventually(lambda: report_of(port), "the rollout goes on")
            assert (resumed.id, resumed.state, resumed.step) == (1, "PAUSED", 1)
            everywhere(60.0)
            assert sides(servers["c"]) == second

            assert conch_rollout("abort", "m", target=site.target("b")) == 0
            ended = reaches("ABORTED")
            assert ended.reason == f"server {site.target('b')}: aborted by a call"
            assert ended.refused == (2,)
            everywhere(0.0)
            assert all({*sides(server).values()} == {1.0} for server in servers.values())
            assert '"ABORTED"' in (state / "rollouts" / "m.json").read_text()

            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(conch_rollout, "start", "m", "--again", "--wait")
                everywhere(20.0)
                assert conch_rollout("promote", "m") == 0
                assert waiting.result(WAIT_S) == 0
            assert reaches("BAKING").stable == 2
            eventually(lambda: {*sides(servers["b"]).values()} == {2.0}, "all requests move")
            assert conch_rollout("rollback", "m") == 0
            assert reaches("ABORTED").stable == 1
            eventually(lambda: {*sides(servers["c"]).values()} == {1.0}, "and back")

        assert conch_rollout("delete", "m", target=site.target("c")) == 0
        freed = eventually(lambda: report_of(site.target("c")), "the server has its own rollout again")
        assert (freed.source, freed.managed_by, freed.state, freed.refused) == ("file", "", "IDLE", (2,))


class Line:
    """A way to a Unix socket that can be cut."""

    def __init__(self, path: Path, target: Path) -> None:
        self._path, self._target = path, target
        self._ends: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = self._listen()

    def mend(self) -> None:
        self._listener = self._listen()

    def _listen(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self._path))
        listener.listen()
        self._start(self._accept, listener)
        return listener

    def cut(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        for end in list(self._ends):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(WAIT_S)
        for end in (self._listener, *self._ends):
            end.close()
        self._ends.clear()
        self._path.unlink()

    def _start(self, target: Callable[..., None], *arguments: socket.socket) -> None:
        self._threads.append(threading.Thread(target=target, args=arguments))
        self._threads[-1].start()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.socket(socket.AF_UNIX)
                self._ends += [near, far]
                far.connect(str(self._target))
                self._start(self._pump, near, far)
                self._start(self._pump, far, near)

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


GUARDED = """
[rollout]
steps = ["20% 2s", "60% 2s"]
sticky = ["header:x-user"]
[rollout.guard]
requests = 30
errors = 0.01
"""
KEYS = {"ops": "the-key-of-the-operators", "viewer": "the-key-of-the-viewers"}


def test_a_server_out_of_reach_and_a_verdict_of_sums(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site = Site(tmp_path)
    site.model("m", 1)
    (site.repository / "m" / "rollout.toml").write_text(GUARDED)
    for name, key in KEYS.items():
        (tmp_path / name).write_text(key)
    policy = tmp_path / "access.toml"
    policy.write_text(
        '[[principal]]\nname = "ops"\nkey_file = "ops"\ncontrol = ["m"]\n'
        '[[principal]]\nname = "viewer"\nkey_file = "viewer"\nread = ["*"]\n'
    )
    port = site.target("fleet")
    flags = [
        "--rollout-lease=3",
        f"--state-directory={tmp_path}/state",
        f"--control-address={port}",
        f"--access-policy={policy}",
        f"--audit-log={tmp_path}/audit",
    ]

    def conch_rollout(*arguments: str, by: str = "ops") -> int:
        return run_rollout([*arguments, f"--server={port}", f"--token-file={tmp_path / by}"], {})

    def fleet() -> RolloutReport | None:
        return report_of(port, KEYS["viewer"])

    def have(*wanted: float) -> None:
        eventually(lambda: weights(site, "ab") == list(wanted), f"the servers have {wanted} %")

    with ExitStack() as stack:
        servers = {name: stack.enter_context(site.server(name)) for name in "ab"}
        line = Line(tmp_path / "line.sock", tmp_path / "b.sock")
        stack.callback(line.cut)
        with site.control(("a", "line"), *flags):
            eventually(lambda: site.serving("m", "ab") == "ab", "the model is everywhere")
            site.candidate(fails=3)
            have(20.0, 20.0)
            assert conch_rollout("pause", "m", by="viewer") == 1
            assert "may not" in capsys.readouterr().err
            assert conch_rollout("weight", "m", "40%") == 0
            have(40.0, 40.0)
            line.cut()
            assert conch_rollout("resume", "m") == 0
            assert conch_rollout("advance", "m") == 0
            have(60.0, 0.0)
            silent = report_of(site.target("b"))
            assert silent is not None and silent.reason.endswith("is silent for 3s"), silent
            assert {*sides(servers["b"]).values()} == {1.0}
            assert '"action": "update_rollout"' in (tmp_path / "audit").read_text()
        line.mend()
        with site.control(("a", "line"), *flags):
            have(40.0, 40.0)  # the lowest step of all
            resumed = fleet()
            assert resumed is not None and (resumed.id, resumed.step) == (1, 0)

            # Of each side 20 requests on each server, of 30 that a verdict needs.
            inputs = [tensor("IN", np.ones(1, np.float32), "FP32")]
            for server in servers.values():
                with client_of(server) as client:
                    for version in ("1", "2") * 20:
                        with suppress(InferenceServerException):
                            client.infer("m", inputs, version)
            eventually(lambda: (found := fleet()) and found.state == "ABORTED", "the fleet aborts")
            ended = fleet()
            assert ended is not None and ended.reason.startswith("errors "), ended
            have(0.0, 0.0)
            capsys.readouterr()
            assert conch_rollout("history", "m", by="viewer") == 0
            history = capsys.readouterr().out
            assert "weight set to 40% by a call" in history and "advanced by a call" in history
            assert conch_rollout("status", "m", "--json", by="viewer") == 0
            assert json.loads(capsys.readouterr().out)["refused"] == [2]
