"""`conch models` as operators and scripts see it: output, JSON, exit codes."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from tests.support.agents import FakeAgent
from tests.support.certificates import Authority
from tests.support.control_ports import served
from tests.support.servers import CONCH, WAIT_S, free_port

from conch.cli.models_command import run
from conch.core.errors import InvalidArgumentError
from conch_control.agent_api import Index
from conch_control.remote_api.connection_options import ControlPortOptions, ServerTls
from conch_control.version_phase import Phase

SINCE = "2023-11-14 22:13:20Z"


@pytest.fixture
def agent() -> FakeAgent:
    agent = FakeAgent()
    agent.set("m", Phase.READY)
    return agent


@pytest.fixture
def target(agent: FakeAgent) -> Iterator[str]:
    with served(agent) as (_, target):
        yield target


def environment(**more: str) -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith("CONCH_")} | more


def models(*arguments: str, **variables: str) -> tuple[int, str, str]:
    """Runs `conch models` in this process; gives exit code, output and errors."""
    output, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(output), redirect_stderr(errors):
        try:
            code = run(arguments, variables)
        except SystemExit as ended:
            assert isinstance(ended.code, int)
            code = ended.code
    return code, output.getvalue(), errors.getvalue()


def parsed(*arguments: str) -> Any:
    """Output of `conch models --json` if all is well."""
    code, output, errors = models(*arguments, "--json")
    assert (code, errors) == (0, "")
    return json.loads(output)


@contextmanager
def process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`conch models` that goes on."""
    # In the background of a shell SIGINT may be ignored, which would be inherited. It is not
    # set between fork and exec: gRPC's handlers of forks would leave descriptors behind in this process.
    interruptible = (
        "import os, signal, sys; signal.signal(2, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    )
    with subprocess.Popen(
        [sys.executable, "-Sc", interruptible, CONCH, "models", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    ) as running:
        try:
            yield running
        finally:
            running.kill()


def model(name: str, phase: str, reason: str = "", memory: int | None = None) -> dict[str, Any]:
    version = {
        "version": 1,
        "phase": phase,
        "reason": reason,
        "seconds": 1_700_000_000.5,
        "host_bytes": memory,
        "staged_bytes": 0,
        "staging_bytes": 0,
    }
    return {"name": name, "location": f"/models/{name}", "reason": "", "versions": [version], "labels": {}}


READY = model("m", "READY", memory=3 << 20)
RESTING = model("resting", "UNLOADED", "unloaded")


def test_list(agent: FakeAgent, target: str) -> None:
    code, output, errors = models("list", f"--target={target}")
    assert (code, errors) == (0, "")
    assert output.splitlines()[3:-1] == [
        f"| m       | 1       | READY    | {SINCE} | 3.0 MiB |          |",
        f"| resting | 1       | UNLOADED | {SINCE} |         | unloaded |",
    ]
    expected = {"epoch": agent.events.epoch, "revision": 1, "models": [READY, RESTING], "draining": False}
    assert parsed("list", f"--target={target}") == expected
    assert parsed("list", "--ready", f"--target={target}")["models"] == [READY]
    assert models("list", CONCH_CONTROL_TARGET=target)[0] == 0


def test_it_is_a_command(target: str) -> None:
    with process("list", "--json", f"--target={target}") as running:
        output, errors = running.communicate(timeout=WAIT_S)
    assert (running.returncode, errors) == (0, "")
    assert json.loads(output)["models"] == [READY, RESTING]


def test_describe(target: str) -> None:
    code, output, errors = models("describe", "m", f"--target={target}")
    assert (code, errors) == (0, "")
    lines = output.splitlines()
    assert lines[0] == "m from /models/m"
    assert "| m_0            | KIND_CPU | -      | 2     |" in lines
    assert "| max_batch_size | 8     | config.pbtxt |" in lines
    assert "| input[0].dims  | [-1]  | model        |" in lines
    assert '| input[0].name  | "IN"  |              |' in lines
    assert parsed("describe", "m", f"--target={target}") == {
        "model": READY,
        "config": {"name": "m", "max_batch_size": 8, "input": [{"name": "IN", "dims": [-1]}]},
        "origins": {"max_batch_size": "config.pbtxt", "input[0].dims": "model"},
        "instances": [{"group": "m_0", "kind": "KIND_CPU", "device": -1, "count": 2}],
    }
    code, output, errors = models("describe", "x", f"--target={target}")
    assert (code, output) == (1, "")
    assert errors == "conch models: Not found - Request for unknown model: 'x' is not found\n"


def test_load(agent: FakeAgent, target: str, tmp_path: Path) -> None:
    code, output, errors = models("load", "new", f"--target={target}")
    assert code == 0
    assert f"| new   | 1       | READY | {SINCE} | 3.0 MiB |        |" in output.splitlines()
    # It may be over before the progress has been seen.
    assert set(errors.splitlines()) <= {"new 1 LOADING", "new 1 READY"}
    (tmp_path / "config.json").write_text('{"max_batch_size": 4}')
    (tmp_path / "weights").write_bytes(b"\0\xff")
    found = parsed(
        "load",
        "new",
        f"--target={target}",
        f"--config={tmp_path}/config.json",
        f"--file=1/model.onnx={tmp_path}/weights",
        "--file",
        f"2/a={tmp_path}/weights",
    )
    assert found == {"model": model("new", "READY", memory=3 << 20)}
    config = {"config": '{"max_batch_size": 4}', "file:1/model.onnx": b"\0\xff", "file:2/a": b"\0\xff"}
    assert agent.loads == [("new", {}), ("new", config)]


def test_preload(agent: FakeAgent, target: str) -> None:
    code, output, errors = models("preload", "a", "b", "a", f"--target={target}")
    assert (code, errors) == (0, "")
    assert [line.split()[1] for line in output.splitlines()[3:-1]] == ["a", "b"]
    assert sorted(agent.loads) == [("a", {"conch_pin": False}), ("b", {"conch_pin": False})]
    assert parsed("preload", "b", f"--target={target}") == {"models": [model("b", "READY", memory=3 << 20)]}
    for name in ("a", "c"):
        agent.failures[name] = lambda name=name: InvalidArgumentError(f"'{name}' is broken")  # type: ignore[misc]
    code, output, errors = models("preload", "a", "b", "c", f"--target={target}")
    assert code == 1
    assert sorted(errors.splitlines()) == [
        "conch models: 'c' is broken",
        "conch models: Invalid argument - 'a' is broken",
    ]


def test_a_load_that_fails(agent: FakeAgent, target: str) -> None:
    agent.failures["m"] = lambda: InvalidArgumentError("failed to load 'm', it is broken")
    code, output, errors = models("load", "m", f"--target={target}")
    assert (code, output) == (1, "")
    assert errors.endswith("conch models: Invalid argument - failed to load 'm', it is broken\n")
    code, output, errors = models("load", "m", "--json", f"--target={target}")
    assert code == 1
    error = {"code": "INVALID_ARG", "message": "failed to load 'm', it is broken"}
    assert json.loads(output) == {"error": error}


def test_the_progress_of_a_load(agent: FakeAgent, target: str) -> None:
    agent.staging["big"] = (0, 2 << 30)
    agent.release.clear()
    with process("load", "big", f"--target={target}") as running:
        assert running.stderr is not None and running.stdout is not None
        assert running.stderr.readline() == "big 1 STAGING\n"
        assert running.stderr.readline() == "big 1 STAGING 0 % of 2.0 GiB\n"
        agent.staging["big"] = (1 << 30, 2 << 30)
        assert running.stderr.readline() == "big 1 STAGING 50 % of 2.0 GiB\n"
        agent.release.set()
        assert "| big   | 1       | READY |" in running.stdout.read()
        assert running.wait(WAIT_S) == 0


def test_the_progress_on_a_terminal(agent: FakeAgent, target: str) -> None:
    agent.staging["big"] = (1 << 30, 2 << 30)
    agent.release.clear()
    ours, theirs = pty.openpty()
    try:
        with subprocess.Popen(
            [CONCH, "models", "load", "big", f"--target={target}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=theirs,
            env=environment(COLUMNS="30"),
        ) as running:
            shown = b""
            while b"50 %" not in shown:
                shown += os.read(ours, 1024)
            agent.release.set()
            assert running.wait(WAIT_S) == 0
            os.set_blocking(ours, False)
            try:
                shown += os.read(ours, 1024)
            except BlockingIOError:
                pass
    finally:
        os.close(ours)
        os.close(theirs)
    assert b"\n" not in shown
    assert b"\r\x1b[Kbig 1 STAGING 50 % of 2.0 GiB" in shown
    assert shown.endswith(b"\r\x1b[K")


def test_an_interrupted_load(agent: FakeAgent, target: str) -> None:
    agent.release.clear()
    with process("load", "big", f"--target={target}") as running:
        assert agent.loading.wait(WAIT_S)
        running.send_signal(signal.SIGINT)
        output, errors = running.communicate(timeout=WAIT_S)
        assert (running.returncode, output) == (130, "")
        assert errors == "conch models: interrupted; the server goes on with the load\n"


def test_unload(agent: FakeAgent, target: str) -> None:
    code, output, errors = models("unload", "m", f"--target={target}")
    assert (code, errors) == (0, "")
    assert "| m     | 1       | UNLOADED |" in output
    assert parsed("unload", "m", "--unload-dependents", f"--target={target}") == {
        "model": model("m", "UNLOADED", "unloaded")
    }
    assert parsed("unload", "x", f"--target={target}") == {"model": None}
    assert models("unload", "x", f"--target={target}")[1] == "There is no model 'x'.\n"
    assert agent.unloads == [("m", False), ("m", True), ("x", False), ("x", False)]


def test_label(agent: FakeAgent, target: str) -> None:
    code, output, errors = models("label", "m", "champion=1", "stable=1", f"--target={target}")
    assert (code, errors) == (0, "")
    assert "| m     | 1 (champion, stable) | " in output
    labelled = {**READY, "labels": {"stable": 1}}
    assert parsed("label", "m", "--remove=champion", f"--target={target}") == {"model": labelled}
    assert models("label", "x", "champion=1", f"--target={target}")[0] == 1
    for wrong in ("champion", "champion=", "=1", "champion=one", f"champion={2**63}", ""):
        assert models("label", "m", *filter(None, [wrong]), f"--target={target}")[0] == 2


class DrainingAgent(FakeAgent):
    """An agent whose model finishes its requests once its state has been read."""

    def unload(self, name: str, unload_dependents: bool) -> None:
        self.set(name, Phase.DRAINING)

    def models(self) -> Index:
        found = super().models()
        if any(each.phase is Phase.DRAINING for model in found.models for each in model.versions):
            self.set("m", Phase.UNLOADED, "unloaded")
        return found


def test_an_unload_waits_for_requests_in_flight() -> None:
    agent = DrainingAgent()
    agent.set("m", Phase.READY)
    with served(agent) as (_, target):
        # All names of the flag.
        assert parsed("unload", "m", f"--server={target}") == {"model": model("m", "UNLOADED", "unloaded")}
        agent.set("m", Phase.READY)
        assert models("unload", "m", f"--address={target}")[0] == 0


def test_drain(agent: FakeAgent, target: str) -> None:
    code, output, errors = models("drain", f"--target={target}")
    assert (code, errors) == (0, "")
    assert output.startswith("The server is draining")
    assert parsed("drain", f"--target={target}") == {"drained": True}
    assert agent.drains == 2


def test_watch(agent: FakeAgent, target: str) -> None:
    with process("watch", "--state", f"--target={target}") as running:
        assert running.stdout is not None
        lines = [running.stdout.readline() for _ in range(6)]
        assert lines[3].startswith("| m       | 1       | READY    |")
        agent.set("m", Phase.FAILED, "two\nlines")
        assert running.stdout.readline() == f"{SINCE}      2 m 1 FAILED: two lines\n"
        running.send_signal(signal.SIGINT)
        _, errors = running.communicate(timeout=WAIT_S)
        assert (running.returncode, errors) == (130, "")


def test_watch_for_machines(agent: FakeAgent, target: str) -> None:
    epoch = agent.events.epoch
    event = {
        "type": "event",
        "epoch": epoch,
        "revision": 2,
        "model": "m",
        "version": 1,
        "phase": "DRAINING",
        "reason": "because",
        "seconds": 1_700_000_000.5,
    }
    with process("watch", "m", "--state", "--json", f"--target={target}") as running:
        assert running.stdout is not None
        state = {"type": "state", "epoch": epoch, "revision": 1, "models": [READY], "draining": False}
        assert json.loads(running.stdout.readline()) == state
        agent.set("m", Phase.DRAINING, "because")
        assert json.loads(running.stdout.readline()) == event
    with process("watch", "--json", f"--after={epoch}:1", f"--target={target}") as running:
        assert running.stdout is not None
        assert json.loads(running.stdout.readline()) == {"type": "start", "epoch": epoch, "revision": 1}
        assert json.loads(running.stdout.readline()) == event
    code, output, _ = models("watch", "--json", "--after=before:1", f"--target={target}")
    assert code == 1
    assert json.loads(output)["error"]["code"] == "OUT_OF_RANGE"


def test_a_watch_whose_server_stops(agent: FakeAgent) -> None:
    with served(agent) as (port, target), process("watch", "--json", f"--target={target}") as running:
        assert running.stdout is not None
        running.stdout.readline()
        assert port.stop(WAIT_S)
        _, errors = running.communicate(timeout=WAIT_S)
        assert (running.returncode, errors) == (1, "conch models: Unavailable - Server exiting\n")


def test_output_that_nobody_reads(agent: FakeAgent, target: str) -> None:
    with process("watch", f"--target={target}", "--json") as running:
        assert running.stdout is not None and running.stderr is not None
        running.stdout.readline()
        running.stdout.close()
        agent.set("m", Phase.READY)
        assert running.wait(WAIT_S) == 1
        assert running.stderr.read() == ""


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["lost"], "invalid choice: 'lost'"),
        (["load"], "the following arguments are required: model"),
        (["preload"], "the following arguments are required: model"),
        (["list", "--target=nowhere"], "--target: 'nowhere' is neither HOST:PORT nor unix:PATH"),
        (["list", "--token-file=/no/such"], "--token-file: /no/such can't be read: No such file"),
        (["list", "--root-cert=/no/such"], "--root-cert: /no/such can't be read"),
        (["list", "--client-cert=/no/such"], "--client-cert and --client-key must be given together"),
        (["load", "m", "--file=x"], "--file: 'x' is not of the form VERSION/PATH=LOCAL"),
        (["load", "m", "--file=1/x=/no/such"], "--file: /no/such can't be read"),
        (["load", "m", "--config=/no/such"], "--config: /no/such can't be read"),
        (["watch", "--after=x"], "--after: 'x' is not of the form EPOCH:REVISION"),
        (["watch", "--after=x:1", "--state"], "--state and --after exclude each other"),
    ],
)
def test_wrong_usage(arguments: list[str], text: str) -> None:
    code, output, errors = models(*arguments)
    assert (code, output) == (2, "")
    assert text in errors


def test_a_config_that_is_no_json(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text('{\n  "a": ,\n}')
    code, _, errors = models("load", "m", f"--config={path}")
    assert code == 2
    assert errors == f"conch models: --config: {path}:2:8: not JSON: Expecting value\n"


def test_help() -> None:
    code, output, _ = models("--help")
    assert code == 0
    text = "Exit codes: 0 done, 1 refused or failed, 2 wrong usage, 3 the server can't be reached."
    assert text in " ".join(output.split())


# --- failures of the connection


def test_nobody_there(tmp_path: Path) -> None:
    for target in (f"127.0.0.1:{free_port()}", f"unix:{tmp_path}/none"):
        code, output, errors = models("list", "--json", f"--target={target}")
        assert code == 3
        assert json.loads(output)["error"]["code"] == "UNAVAILABLE"
        assert errors.startswith(f"conch models: {target} can't be reached: ")
        assert errors.endswith("\nIs the server running, with --control-port?\n")


def test_the_wrong_token(agent: FakeAgent, tmp_path: Path) -> None:
    right, wrong, empty = (tmp_path / name for name in ("right", "wrong", "empty"))
    right.write_text("pearl\n")
    wrong.write_text("shell")
    empty.write_text(" \n")
    with served(agent, ControlPortOptions(port=0, token="pearl")) as (_, target):
        assert models("list", f"--target={target}", f"--token-file={right}")[0] == 0
        assert models("list", f"--target={target}", CONCH_CONTROL_TOKEN_FILE=str(right))[0] == 0
        code, _, errors = models("list", f"--target={target}", f"--token-file={wrong}")
        assert (code, errors.startswith("conch models: Unauthenticated - wrong token")) == (1, True)
        code, _, errors = models("list", f"--target={target}")
        assert (code, errors.startswith("conch models: Unauthenticated - no token")) == (1, True)
    code, _, errors = models("list", f"--token-file={empty}")
    assert (code, errors) == (2, f"conch models: --token-file: {empty}: the token is empty\n")


def test_tls_that_does_not_fit(agent: FakeAgent, tmp_path: Path) -> None:
    ours, theirs = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    key, certificate = (file.read_bytes() for file in ours.issue("server"))
    with served(agent, ControlPortOptions(port=0, tls=ServerTls(key, certificate))) as (_, target):
        flag = f"--target={target}"
        assert models("list", flag, f"--root-cert={ours.root}")[0] == 0
        for flags, hint in (
            ([], "may want TLS: --use-ssl, --root-cert"),
            ([f"--root-cert={theirs.root}"], "is not signed by any in --root-cert"),
            ([f"--root-cert={ours.root}", "--server-name=else.where"], "is for another name: --server-name"),
        ):
            code, _, errors = models("list", flag, *flags)
            assert (code, errors.splitlines()[-1][-len(hint) :]) == (3, hint), errors
    with served(agent) as (_, target):
        code, _, errors = models("list", f"--target={target}", "--use-ssl")
        assert (code, "leave --use-ssl and the certificates out" in errors) == (3, True), errors


def test_mutual_tls(agent: FakeAgent, tmp_path: Path) -> None:
    ours, theirs = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    key, certificate = (file.read_bytes() for file in ours.issue("server"))
    tls = ServerTls(key, certificate, ours.root.read_bytes())
    with served(agent, ControlPortOptions(port=0, tls=tls)) as (_, target):
        flags = [f"--target={target}", f"--root-cert={ours.root}"]
        for authority, code in ((ours, 0), (theirs, 3)):
            own, chain = authority.issue("client")
            found = models("list", *flags, f"--client-key={own}", f"--client-cert={chain}")
            assert found[0] == code
            assert ("may not accept the certificate in --client-cert" in found[2]) == (code == 3), found
        code, _, errors = models("list", *flags)
        assert (code, "The server may ask for a certificate" in errors) == (3, True), errors
