"""`conch` as people and supervisors see it: flags, output, exit codes."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from datetime import datetime
from importlib.metadata import version
from pathlib import Path

import pytest
from tests.support.metrics import get as rest_get
from tests.support.servers import (
    CONCH,
    ROOT,
    WAIT_S,
    check_simple,
    client_of,
    free_port,
    serving_process,
    simple_inputs,
    started,
    without_models,
    write_model,
    write_probe,
)
from tritonclient.utils import InferenceServerException

from conch import cli
from conch.cli import serve_command
from conch.core.compiled import build
from conch.observability.logging.log_handler import ANNOUNCEMENTS
from conch.settings.option import Settings


def fails(*arguments: str, environment: dict[str, str] | None = None) -> str:
    """Runs `conch serve`, which must exit with 1; gives what it said."""
    with started(*arguments, environment=environment) as server:
        assert server.wait() == 1
        assert "Traceback" not in without_models(server.errors)
        assert server.standard_output == ""
        return server.errors


Refuses = Callable[..., str]


@pytest.fixture
def refuses(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Refuses:
    """Runs `conch serve` in this process, which must not get as far as serving; gives what it said."""
    for name in os.environ:
        if name.startswith("CONCH_"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(serve_command, "serve", lambda *_: pytest.fail("it would serve"))

    def run(*arguments: str) -> str:
        assert cli.main(["serve", *arguments]) == 1
        output, errors = capsys.readouterr()
        assert output == ""
        return errors

    return run


def conch(*arguments: str) -> tuple[int, str, str]:
    """Runs `conch`; gives exit code, output and errors."""
    result = subprocess.run([CONCH, *arguments], capture_output=True, text=True, timeout=WAIT_S, check=False)
    return result.returncode, result.stdout, result.stderr


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert conch("--version") == (0, f"conch {version('conch')} ({build()})\n", "")
    assert cli.main([]) == 0
    output, errors = capsys.readouterr()
    assert "conch serve" in output and errors == ""
    assert cli.main(["serve", "--help"]) == 0
    output, errors = capsys.readouterr()
    assert "--model-repository" in output and "--grpc-port" in output and errors == ""
    code, output, errors = conch("sevre")
    assert (code, output) == (2, "")
    assert errors == "conch: unknown command 'sevre'; did you mean 'serve'?\n"
    assert cli.main(["xyz"]) == 2
    assert capsys.readouterr().err == "conch: unknown command 'xyz'; try conch --help\n"


@pytest.mark.parametrize(
    "arguments", [["--help"], ["config", "--model-repository=/"], ["completion", "bash"]]
)
def test_a_reader_may_close_the_output(arguments: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    with closing(open(write, "wb", buffering=0)) as output:
        done = subprocess.run(
            [CONCH, *arguments], stdout=output, stderr=subprocess.PIPE, timeout=WAIT_S, check=False
        )
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ("models lst", "did you mean 'list'?"),
        ("models list --jsn", "did you mean '--json'?"),
        ("check --strct x", "did you mean '--strict'?"),
        ("control --model-repositry=x --model-repository=y", "did you mean '--model-repository'?"),
        ("completion bsh", "did you mean 'bash'?"),
    ],
)
def test_commands_name_the_nearest(capsys: pytest.CaptureFixture[str], arguments: str, hint: str) -> None:
    try:
        code: object = cli.main(arguments.split(" "))
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert capsys.readouterr().err.endswith(f"; {hint}\n")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--nonsense=1"], "unrecognized arguments: --nonsense=1"),
        (["--grpc-prt=1"], "unrecognized arguments: --grpc-prt=1; did you mean '--grpc-port'?"),
        (["--grpc-port=x"], "argument --grpc-port: 'x' is not a whole number"),
        (["--grpc-port=65536"], "--grpc-port: must be from 0 to 65535, got 65536"),
        (["--exit-on-error=maybe"], "argument --exit-on-error: invalid value for bool option: maybe"),
        (
            ["--model-control-mode=poll", "--repository-poll-secs=0"],
            "argument --repository-poll-secs: must be more than 0 seconds, got 0",
        ),
        (
            ["--load-model=simple"],
            "Use of '--load-model' requires setting '--model-control-mode=explicit' as well.",
        ),
        (
            ["--model-control-mode=explicit", "--load-model=*", "--load-model=a"],
            "Wildcard model name '*' must be the ONLY startup model if specified at all.",
        ),
        (["--grpc-use-ssl"], "--grpc-server-key must be specified to serve gRPC over TLS"),
        (
            ["--grpc-use-ssl", "--grpc-server-key=/nope.pem"],
            "--grpc-server-key: /nope.pem can't be read: No such file or directory",
        ),
        (["--grpc-restricted-protocol=x"], "--grpc-restricted-protocol: 'x' is not of the form"),
        (["--grpc-restricted-protocol=x:k=v"], "--grpc-restricted-protocol: unknown restricted protocol 'x'"),
        (
            ["--grpc-header-forward-pattern=("],
            "--grpc-header-forward-pattern: '(' is not a regular expression",
        ),
        (["--config-file=/nope.toml"], "config file /nope.toml can't be read: No such file or directory"),
        (["--backend-config=python"], "--backend-config: 'python' is not of the form"),
        (["--log-file=/nope/log"], "--log-file can't be opened:"),
        (
            ["--trace-config=mode=nope"],
            "invalid value for trace mode option: nope. Available options are",
        ),
    ],
)
def test_wrong_flags(repository: Path, refuses: Refuses, arguments: list[str], text: str) -> None:
    errors = refuses(f"--model-repository={repository}", "--grpc-port=0", *arguments)
    assert errors.startswith(f"conch serve: {text}"), errors


def test_no_repository(tmp_path: Path) -> None:
    assert fails().startswith("conch serve: --model-repository must be specified")
    assert str(tmp_path / "nope") in fails("--grpc-port=0", f"--model-repository={tmp_path / 'nope'}")


def test_port_taken(repository: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        errors = fails(f"--model-repository={repository}", "--grpc-address=127.0.0.1", f"--grpc-port={port}")
    *logged, printed = errors.splitlines()
    text = f"error: creating server: Unavailable - Socket '127.0.0.1:{port}' already in use "
    assert printed == text, "and nothing of it comes before what was logged"
    _, first, owner = (json.loads(line)["message"] for line in logged)  # behind what started
    assert first == text
    assert owner.startswith(f"pid {os.getpid()} (") and owner.endswith("end it, or choose another port")
    assert "loading" not in errors, "models were loaded for nothing"


IMPORTS = """
import pandaz

class TritonPythonModel:
    def execute(self, requests):
        return []
"""


def test_a_failed_start_says_each_cause_once_with_what_helps(tmp_path: Path) -> None:
    tensors = " ".join(
        f'{kind} {{ name: "T" data_type: TYPE_FP32 dims: [ 1 ] }}' for kind in ("input", "output")
    )
    model = write_model(tmp_path, "frames", f'backend: "python" {tensors}', {"model.py": IMPORTS})
    with started(f"--model-repository={tmp_path}", "--grpc-port=0", "--log-json=false") as server:
        assert server.wait() == 1
        lines = server.errors.splitlines()
    first = lines.index("error: creating server: Internal - failed to load all models")
    (cause,) = lines[first + 1 :]
    assert cause.startswith(
        "  failed to load 'frames': version 1: Internal: ModuleNotFoundError: No module named 'pandaz'"
    )
    assert "name the package of 'pandaz' in a requirements.txt" in cause
    assert sum(line.startswith("| frames ") for line in lines) == 1, "one table"
    assert any(
        re.match(r"\| frames \| 1 +\| UNAVAILABLE \| Internal: ModuleNotFoundError", line) for line in lines
    )
    errors = fails(f"--model-repository={model}", "--grpc-port=0", "--log-json=false")
    hint = f"  '{model}' is a model, not a repository: name its parent, --model-repository={tmp_path}"
    assert hint in errors.splitlines()


def test_tables_and_logs_are_one_stream(repository: Path) -> None:
    with started(
        f"--model-repository={repository}", "--grpc-port=0", "--log-json=false", "--log-info=false"
    ) as server:
        server.wait_ready()
        assert server.errors.startswith("+--"), "the tables, and no log before them"
        assert server.standard_output == ""
        assert server.stop() == 0


def test_unknown_address(repository: Path) -> None:
    errors = fails(f"--model-repository={repository}", "--grpc-address=no.such.host.invalid")
    assert "error: creating server: Unavailable - address 'no.such.host.invalid' is not known" in errors


def test_a_model_that_fails_ends_the_start(repository: Path) -> None:
    write_probe(repository, "broken", 'parameters { key: "fail" value { string_value: "no weights" } }')
    errors = fails(f"--model-repository={repository}", "--grpc-port=0")
    # Models that are given up may end after that.
    assert "error: creating server: Internal - failed to load all models" in errors.splitlines()
    assert "no weights" in errors
    announced = [json.loads(line) for line in errors.splitlines() if f'"{ANNOUNCEMENTS}"' in line]
    levels = {each["model"]: each["level"] for each in announced if "model" in each}
    assert (levels["simple"], levels["broken"]) == ("info", "error")


def test_a_model_that_fails_can_be_tolerated(repository: Path) -> None:
    write_probe(repository, "broken", 'parameters { key: "fail" value { string_value: "no weights" } }')
    with serving_process(repository, flags=["--exit-on-error=false"]) as server, client_of(server) as client:
        assert re.search(
            r"\| broken +\| 1 +\| UNAVAILABLE \| Internal: ValueError: no weights", server.output
        )
        assert client.is_server_live() and not client.is_server_ready()
        check_simple(client.infer("simple", simple_inputs()))
    with (
        serving_process(repository, flags=["--exit-on-error=false", "--strict-readiness=false"]) as server,
        client_of(server) as client,
    ):
        assert client.is_server_ready()


def test_a_model_with_a_broken_config_does_not_make_the_server_unready(repository: Path) -> None:
    write_model(repository, "broken", "max_batch: 1", {"model.py": ""})
    with serving_process(repository, flags=["--exit-on-error=false"]) as server, client_of(server) as client:
        assert client.is_server_ready() and not client.is_model_ready("broken")


def test_without_a_repository_the_server_can_stay_up_and_say_so(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    with serving_process(nowhere, flags=["--exit-on-error=false", "--model-control-mode=explicit"]) as server:
        assert any(str(nowhere) in line["message"] for line in server.logs() if line["level"] == "error")
        for path, code in (("health/live", 400), ("health/ready", 400), ("", 200), ("models/m", 503)):
            assert rest_get(f"http://{server.http_address}/v2/{path}".rstrip("/"))[0] == code, path
        with client_of(server) as client:
            assert not client.is_server_live() and not client.is_server_ready()
            for ask in (
                client.get_model_repository_index,
                client.get_inference_statistics,
                lambda: client.load_model("m"),
                lambda: client.is_model_ready("m"),
                lambda: client.infer("m", simple_inputs()),
            ):
                with pytest.raises(InferenceServerException) as raised:
                    ask()
                assert (raised.value.status(), raised.value.message()) == (
                    "StatusCode.UNAVAILABLE",
                    "Server not ready",
                )
    # For development a wrong path is nothing to wait with.
    assert str(nowhere) in fails(f"--model-repository={nowhere}", "--reload", "--grpc-port=0")


def test_startup_model_that_does_not_exist(repository: Path) -> None:
    flags = ["--model-control-mode=explicit", "--load-model=nope"]
    errors = fails(f"--model-repository={repository}", "--grpc-port=0", *flags)
    assert "failed to load 'nope'" in errors


def test_startup_models(repository: Path) -> None:
    with serving_process(
        repository, flags=["--model-control-mode=explicit", "--load-model=simple"]
    ) as server:
        assert re.search(r"\| simple +\| 1 +\| READY +\|", server.output)
        assert re.search(r"\| probe +\| - +\| not loaded \|", server.output)
    with serving_process(repository, flags=["--model-control-mode=explicit", "--load-model=*"]) as server:
        assert server.output.count("| READY") == 2


def test_table(repository: Path) -> None:
    with serving_process(repository) as server:
        lines = server.output.splitlines()
        assert len({len(line) for line in lines[:6]}) == 1
        assert lines[1].split("|")[1:-1] == [" Model  ", " Version ", " Status ", " Reason "]
        assert re.fullmatch(
            rf"\| gRPC +\| 127\.0\.0\.1:{server.port} +\| 0\.0\.0\.0:{server.port} +\| plain text \|",
            lines[-4],
        )
        assert [line.split("|")[1].strip() for line in lines[-4:-1]] == ["gRPC", "HTTP", "Metrics"]


def test_each_port_is_logged_in_tritons_words_and_each_model_on_a_line(repository: Path) -> None:
    with serving_process(repository) as server:
        lines = server.logs()
        ports = [each.rpartition(":")[2] for each in (server.address, server.http_address)]
        ports.append(server.metrics_url.rpartition(":")[2].removesuffix("/metrics"))
    names = ["GRPCInferenceService", "HTTPService", "Metrics Service"]
    expected = [f"Started {name} at 0.0.0.0:{port}" for name, port in zip(names, ports, strict=True)]
    assert [line["message"] for line in lines if line["message"].startswith("Started ")] == expected
    models = [line for line in lines if line["logger"] == ANNOUNCEMENTS and "model" in line]
    assert [(each["model"], each["version"], each["state"]) for each in models] == [
        ("probe", "1", "READY"),
        ("simple", "1", "READY"),
    ]
    assert models[0]["message"] == "model 'probe' version 1 is READY"


def test_tritonserver_serves_with_flags_that_have_no_effect(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served: list[Settings] = []

    def serve(settings: Settings, *_: object) -> int:
        served.append(settings)
        return 0

    monkeypatch.setattr(serve_command, "serve", serve)
    words = ["tritonserver", f"--model-repository={repository}", "--http-thread-count=16"]
    monkeypatch.setattr(sys, "argv", words)
    assert cli.tritonserver() == 0
    assert served[0].warnings == ("--http-thread-count=16 has no effect: one thread serves all connections",)
    monkeypatch.setattr(sys, "argv", [*words, "--grpc-prt=1"])
    assert cli.tritonserver() == 1
    assert capsys.readouterr().err.startswith("tritonserver: unrecognized arguments: --grpc-prt=1")


def test_environment_file_and_flag(repository: Path, tmp_path: Path) -> None:
    file = tmp_path / "conch.toml"
    file.write_text(
        'id = "from file"\ngrpc_port = 0\nmodel-control-mode = "explicit"\nload-model = ["simple"]\n'
    )
    environment = {
        "CONCH_CONFIG_FILE": str(file),
        "CONCH_MODEL_REPOSITORY": str(repository),
        "CONCH_ID": "from environment",
    }

    def identity(*arguments: str, without: str = "") -> str:
        used = {key: value for key, value in environment.items() if key != without}
        with started(*arguments, environment=used) as server:
            server.wait_ready()
            with client_of(server) as client:
                assert client.is_model_ready("simple") and not client.is_model_ready("probe")
                name = str(client.get_server_metadata().name)
            assert server.stop() == 0
            return name

    assert identity(without="CONCH_ID") == "from file"
    assert identity() == "from environment"
    assert identity("--id=from flag") == "from flag"


def test_wrong_environment_and_file(
    repository: Path, tmp_path: Path, refuses: Refuses, monkeypatch: pytest.MonkeyPatch
) -> None:
    repositories = f"--model-repository={repository}"
    monkeypatch.setenv("CONCH_GRPC_PORT", "x")
    errors = refuses(repositories)
    assert errors.startswith("conch serve: environment variable CONCH_GRPC_PORT: 'x' is not a whole number")
    monkeypatch.delenv("CONCH_GRPC_PORT")
    file = tmp_path / "conch.toml"
    for text, expected in (
        ("nonsense = 1", f"config file {file}: unknown option 'nonsense'"),
        ('grpc-port = "x"', f"config file {file}: grpc-port: 'x' is not a whole number"),
        ("=", f"config file {file} is not TOML:"),
    ):
        file.write_text(text)
        assert refuses(repositories, f"--config-file={file}").startswith(f"conch serve: {expected}")


def test_logs_are_json_unless_on_a_terminal(repository: Path) -> None:
    with started(f"--model-repository={repository}", "--grpc-port=0") as server:
        server.wait_ready()
        assert server.stop() == 0
        lines = server.logs()
    messages = [line["message"] for line in lines]
    assert "successfully loaded 'simple'" in messages
    assert "Waiting for in-flight requests to complete." in messages
    assert "successfully unloaded 'simple' version 1" in messages
    for line in lines:
        if line["logger"] != ANNOUNCEMENTS:
            assert set(line) == {"ts", "level", "logger", "message"}
        assert line["level"] == "info" and "\n" not in line["message"]
        assert datetime.fromisoformat(line["ts"]).tzinfo is not None


def test_a_variable_that_looks_misspelt_is_warned_of(repository: Path) -> None:
    with serving_process(repository, environment={"CONCH_GRPC_PROT": "1"}) as server:
        warnings = [line["message"] for line in server.logs() if line["level"] == "warning"]
    assert warnings == [
        "environment variable CONCH_GRPC_PROT is unknown and has no effect; did you mean 'CONCH_GRPC_PORT'?"
    ]


def test_log_flags(repository: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with serving_process(repository, flags=[f"--log-file={log}", "--log-format=ISO8601"]) as server:
        assert server.errors == server.output, "people see the tables, and nothing else"
    pattern = re.compile(r'\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ I \d+ \w+\.py:\d+\] ".*"')
    lines = log.read_text().splitlines()
    tables = [line for line in lines if line.startswith(("+", "|", "open: "))]
    lines = [line for line in lines if line not in tables]
    assert tables and lines and all(pattern.fullmatch(line) for line in lines), lines
    with serving_process(repository, flags=["--log-info=false"]) as server:
        assert {line["logger"] for line in server.logs()} == {ANNOUNCEMENTS}


def test_a_terminal_gets_text(repository: Path) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [
            CONCH,
            "serve",
            f"--model-repository={repository}",
            "--grpc-port=0",
            "--http-port=0",
            "--metrics-port=0",
        ],
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    seen = ""
    try:
        while seen.count("plain text") < 3:
            seen += os.read(ours, 4096).decode()
        process.terminate()
        assert process.wait(WAIT_S) == 0
    finally:
        process.kill()
        process.wait(WAIT_S)
        os.close(ours)
    lines = [line for line in seen.splitlines() if "successfully loaded" in line]
    assert lines
    assert all(
        re.match(r'I\d{4} \d\d:\d\d:\d\d\.\d{6} \d+ model_lifecycle\.py:\d+\] "', line) for line in lines
    )


def test_a_free_port_that_was_asked_for(repository: Path) -> None:
    port = free_port()
    with started(f"--model-repository={repository}", f"--grpc-port={port}") as server:
        server.wait_ready()
        assert server.port == port
        with client_of(server) as client:
            check_simple(client.infer("simple", simple_inputs()))
        assert server.stop() == 0


def test_two_repositories(repository: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    write_probe(other, "second")
    with serving_process(repository, other) as server, client_of(server) as client:
        assert client.is_model_ready("second") and client.is_model_ready("probe")
    write_probe(other, "probe")
    errors = fails(f"--model-repository={repository}", f"--model-repository={other}", "--grpc-port=0")
    assert "not unique across all model repositories" in errors


def test_backend_that_is_not_there(tmp_path: Path) -> None:
    write_model(tmp_path, "m", 'backend: "tensorrt"', {"model.plan": ""})
    errors = fails(f"--model-repository={tmp_path}", "--grpc-port=0")
    assert "tensorrt" in errors


def test_nothing_is_written_to_the_home_directory(repository: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    with serving_process(repository, environment={"HOME": str(home)}) as server, client_of(server) as client:
        check_simple(client.infer("simple", simple_inputs()))
    assert list(home.rglob("*")) == []


def test_the_systemd_unit_is_one(tmp_path: Path) -> None:
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("systemd-analyze is not installed")
    unit = (ROOT / "deploy" / "systemd" / "conch.service").read_text()
    (tmp_path / "conch.service").write_text(unit.replace("/opt/conch/bin/conch", str(CONCH)))
    done = subprocess.run(
        [tool, "verify", tmp_path / "conch.service"],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("placement", ["in_process", "worker"])
def test_models_do_not_see_the_arguments_of_the_server(tmp_path: Path, placement: str) -> None:
    """In Triton `sys.argv` is `['']`, so that a model may use argparse."""
    source = "import argparse, sys\nassert not vars(argparse.ArgumentParser().parse_args())\n"
    source += "assert sys.argv == ['']\n"
    source += "class TritonPythonModel:\n    def execute(self, requests):\n        return []\n"
    config = 'backend: "python"\ninput { name: "A" data_type: TYPE_FP32 dims: [ 1 ] }\n'
    config += 'output { name: "B" data_type: TYPE_FP32 dims: [ 1 ] }\n'
    write_model(tmp_path, "parses", config, {"model.py": source})
    flags = [f"--backend-config=python,placement={placement}"]
    with serving_process(tmp_path, flags=flags) as server, client_of(server) as client:
        assert client.is_model_ready("parses")
