"""The control port of a real server: index, load, unload; flags; and the planner's process against it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from tests.support.certificates import Authority
from tests.support.control_ports import connected
from tests.support.servers import (
    WAIT_S,
    check_simple,
    client_of,
    copy_example,
    eventually,
    free_port,
    serving_process,
    simple_inputs,
    started,
)

from conch.core.errors import ConchError, InvalidArgumentError
from conch_control.remote_api.client import ModelControlClient
from conch_control.remote_api.connection_options import ClientTls
from conch_control.version_phase import Phase
from conch_fleet.control_command import run


def phases(client: ModelControlClient, name: str) -> list[Phase]:
    return [
        version.phase for model in client.models().models if model.name == name for version in model.versions
    ]


def test_index_load_and_unload(tmp_path: Path) -> None:
    repository = tmp_path / "models"
    copy_example(repository, "simple")
    target = f"unix:{tmp_path}/control.sock"
    flags = ["--model-control-mode=explicit", f"--control-address={target}"]
    with serving_process(repository, flags=flags) as server, connected(target) as client:
        assert re.search(r"\| Control +\| unix:\S+ +\| unix:\S+ +\| plain text +\|", server.output)
        (model,) = client.models().models
        assert (model.name, model.location, model.versions) == ("simple", str(repository / "simple"), ())
        client.load("simple", {})
        assert phases(client, "simple") == [Phase.READY]
        with client_of(server) as data:
            check_simple(data.infer("simple", simple_inputs()))
        with pytest.raises(ConchError, match="failed to poll from model repository"):
            client.load("nothing", {})
        with pytest.raises(InvalidArgumentError, match="path traversal"):
            client.load("../simple", {})
        client.unload("simple", False)
        eventually(lambda: phases(client, "simple") == [Phase.UNLOADED], "it is unloaded")


def test_the_control_mode_is_for_the_data_port(tmp_path: Path) -> None:
    """Users of the control port may load, whatever clients may do."""
    repository = tmp_path / "models"
    copy_example(repository, "simple")
    target = f"unix:{tmp_path}/control.sock"
    with serving_process(repository, flags=[f"--control-address={target}"]), connected(target) as client:
        client.unload("simple", False)
        eventually(lambda: phases(client, "simple") == [Phase.UNLOADED], "it is unloaded")
        client.load("simple", {})
        assert phases(client, "simple") == [Phase.READY]


def test_a_watch_does_not_hold_up_the_end(tmp_path: Path) -> None:
    repository = tmp_path / "models"
    copy_example(repository, "simple")
    port = free_port()
    with serving_process(repository, flags=[f"--control-port={port}"]) as server:
        with connected(f"127.0.0.1:{port}") as client:
            updates = iter(client.watch(whole_state=True))
            state = next(updates).state
            assert state is not None and [model.name for model in state.models] == ["simple"]
            server.signal(signal.SIGTERM)
            with pytest.raises(ConchError, match="Server exiting"):
                for _ in updates:
                    pass
        assert server.wait() == 0


def test_token_and_tls(tmp_path: Path) -> None:
    repository = tmp_path / "models"
    copy_example(repository, "simple")
    authority = Authority(tmp_path / "authority")
    key, certificate = authority.issue("server")
    (tmp_path / "token").write_text("pearl\n")
    port = free_port()
    flags = [
        f"--control-port={port}",
        "--control-address=0.0.0.0",
        "--control-use-ssl",
        f"--control-server-key={key}",
        f"--control-server-cert={certificate}",
        f"--control-token-file={tmp_path}/token",
    ]
    with serving_process(repository, flags=flags) as server:
        assert f"| Control | 127.0.0.1:{port} | 0.0.0.0:{port} | TLS, token |" in re.sub(
            " +", " ", server.output
        )
        tls = ClientTls(authority.root.read_bytes())
        with connected(f"127.0.0.1:{port}", tls, "pearl") as client:
            assert phases(client, "simple") == [Phase.READY]
        assert "pearl" not in server.output + server.errors


def fails(*flags: str) -> str:
    """Runs `conch serve`, which must exit with 1; gives what it said."""
    with started("--model-repository=/tmp", "--grpc-port=0", *flags) as server:
        assert server.wait() == 1
        assert "Traceback" not in server.errors
        return server.errors


def test_a_control_port_for_everybody() -> None:
    text = "--control-address: the control port would let anyone who reaches 0.0.0.0 load models"
    assert text in fails("--control-port=8003", "--control-address=0.0.0.0")


def test_a_control_port_that_is_taken(tmp_path: Path) -> None:
    repository = tmp_path / "models"
    copy_example(repository, "simple")
    port = free_port()
    flag = f"--control-port={port}"
    with (
        closing(socket.create_server(("127.0.0.1", port))),
        started(f"--model-repository={repository}", "--grpc-port=0", flag) as server,
    ):
        assert server.wait() == 1
        text = f"error: creating server: Unavailable - control port 127.0.0.1:{port} can't be listened on"
        assert text in server.errors


@contextmanager
def planning(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`conch control`."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("CONCH_")}
    command = [str(Path(sys.executable).with_name("conch")), "control", *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as running:
        try:
            yield running
        finally:
            running.kill()


@pytest.mark.parametrize("mode", ["poll", "watch"])
def test_a_planner_in_another_process(tmp_path: Path, mode: str) -> None:
    repository = tmp_path / "models"
    copy_example(repository, "simple")
    target = f"unix:{tmp_path}/control.sock"
    flags = ["--model-control-mode=explicit", f"--control-address={target}"]
    with serving_process(repository, flags=flags) as server:
        arguments = [
            f"--target={target}",
            f"--model-repository={repository}",
            f"--model-control-mode={mode}",
            "--repository-poll-secs=0.2",
            "--repository-settle-secs=0.2",
        ]
        with planning(*arguments) as running, client_of(server) as data:
            eventually(lambda: data.is_model_ready("simple"), "what is there is loaded")
            check_simple(data.infer("simple", simple_inputs()))
            copy_example(repository, "strings")
            eventually(lambda: data.is_model_ready("strings"), "what comes is loaded")
            shutil.rmtree(repository / "strings")
            eventually(lambda: not data.is_model_ready("strings"), "what goes is unloaded")
            assert data.is_model_ready("simple")
            running.send_signal(signal.SIGTERM)
            output, errors = running.communicate(timeout=WAIT_S)
            assert (running.returncode, output) == (0, ""), errors
            assert "Traceback" not in errors
            assert data.is_model_ready("simple")


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ([], 2, "the following arguments are required: --model-repository"),
        (["--model-repository=/no/such"], 2, "conch control: --model-repository: "),
        (["--model-repository=/tmp", "--target=x"], 2, "--target: 'x' is neither HOST:PORT nor unix:PATH"),
        (["--model-repository=/tmp", "--repository-poll-secs=-1"], 2, "'-1' is not a number of seconds"),
        (["--model-repository=/tmp", "--model-control-mode=none"], 2, "invalid choice: 'none'"),
    ],
)
def test_wrong_usage_of_the_planners_command(
    arguments: list[str], code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        found: object = run(arguments, {})
    except SystemExit as ended:
        found = ended.code
    assert found == code
    output, errors = capsys.readouterr()
    assert output == ""
    assert text in errors


def test_a_planner_that_is_refused(tmp_path: Path) -> None:
    repository = tmp_path / "models"
    copy_example(repository, "simple")
    (tmp_path / "token").write_text("pearl")
    target = f"unix:{tmp_path}/control.sock"
    flags = [f"--control-address={target}", f"--control-token-file={tmp_path}/token"]
    with (
        serving_process(repository, flags=flags),
        planning(f"--target={target}", f"--model-repository={repository}") as p,
    ):
        output, errors = p.communicate(timeout=WAIT_S)
    assert (p.returncode, output) == (1, "")
    assert "conch control: Unauthenticated - no token" in errors
